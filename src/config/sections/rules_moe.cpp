// Mixture of experts: routing, capacity, and the layout of the experts over the ranks.
#include <algorithm>
#include <numeric>

#include "base/checked.hpp"
#include "config/sections/conditions.hpp"
#include "config/sections/moe_layers.hpp"
#include "config/sections/rule_tools.hpp"

namespace capstan::config {

RULES_OF_FILE(moe_rules)

namespace {

RULE("R0701", expert_parallel_needs_experts, "expert parallelism needs a model with experts",
     "dist.expert_model_parallel_size", "model.num_moe_experts") {
  if (c.dist.expert_model_parallel_size == 1 || has_experts(c)) return;
  report
      .error("`dist.expert_model_parallel_size` " + to_text(c.dist.expert_model_parallel_size) +
             " needs a model with experts, but `model.num_moe_experts` is not set")
      .help("set dist.expert_model_parallel_size=1");
}

RULE("R0702", expert_parallel_divides_experts, "num_moe_experts is divisible by the expert-parallel size",
     "model.num_moe_experts", "dist.expert_model_parallel_size", "?dist.world_size",
     "?dist.expert_tensor_parallel_size", "?dist.pipeline_model_parallel_size") {
  const int64_t ep = c.dist.expert_model_parallel_size, experts = c.model.num_moe_experts.value_or(0);
  if (!has_experts(c) || experts % ep == 0) return;
  // Sizes that also divide the world, if any do.
  const auto others =
      try_mul(c.dist.expert_tensor_parallel_size.value_or(1), c.dist.pipeline_model_parallel_size);
  const bool divides = others && c.dist.world_size % *others == 0;
  report
      .error("`model.num_moe_experts` " + to_text(experts) +
             " is not divisible by the expert-parallel size " + to_text(ep))
      .help("nearest legal dist.expert_model_parallel_size: " +
            nearest_divisors(ep, divides ? std::gcd(experts, c.dist.world_size / *others) : experts))
      .at("dist.expert_model_parallel_size");
}

RULE("R0703", expert_tensor_divides_expert_width,
     "moe_ffn_hidden_size is divisible by the expert tensor-parallel size", "model.moe_ffn_hidden_size",
     "dist.expert_tensor_parallel_size") {
  if (!has_experts(c) || !c.dist.expert_tensor_parallel_size || !c.model.moe_ffn_hidden_size) return;
  const int64_t etp = *c.dist.expert_tensor_parallel_size;
  if (*c.model.moe_ffn_hidden_size % etp == 0) return;
  report
      .error("`model.moe_ffn_hidden_size` " + to_text(*c.model.moe_ffn_hidden_size) +
             " is not divisible by the expert tensor-parallel size " + to_text(etp))
      .help("nearest legal moe_ffn_hidden_size: " + nearest_multiples(*c.model.moe_ffn_hidden_size, etp));
}

RULE("R0704", tensor_divides_shared_width,
     "moe_shared_expert_intermediate_size is divisible by the tensor-parallel size",
     "model.moe_shared_expert_intermediate_size", "dist.tensor_model_parallel_size") {
  const auto width = c.model.moe_shared_expert_intermediate_size;
  if (!has_experts(c) || !width || *width % c.dist.tensor_model_parallel_size == 0) return;
  report
      .error("`model.moe_shared_expert_intermediate_size` " + to_text(*width) +
             " is not divisible by the tensor-parallel size " + to_text(c.dist.tensor_model_parallel_size))
      .help("nearest legal value: " + nearest_multiples(*width, c.dist.tensor_model_parallel_size));
}

RULE("R0721", shared_expert_has_no_biases, "a shared expert excludes MLP biases",
     "model.moe_shared_expert_intermediate_size", "model.add_bias_linear", "model.add_mlp_bias") {
  if (!has_experts(c) || !has_mlp_biases(c.model) || !c.model.moe_shared_expert_intermediate_size) return;
  report.error("`model.moe_shared_expert_intermediate_size` and `model.add_mlp_bias` exclude each other")
      .help("set model.add_mlp_bias=false");
}

RULE("R0706", experts_and_tensor_need_sequence,
     "tensor parallelism with expert parallelism, or with another expert tensor-parallel size, needs "
     "sequence parallelism",
     "dist.sequence_parallel", "dist.expert_model_parallel_size", "dist.tensor_model_parallel_size",
     "dist.expert_tensor_parallel_size") {
  const int64_t tp = c.dist.tensor_model_parallel_size, etp = c.dist.expert_tensor_parallel_size.value_or(tp);
  if (!has_experts(c) || tp == 1 || c.dist.sequence_parallel) return;
  const int64_t ep = c.dist.expert_model_parallel_size;
  if (ep == 1 && etp == tp) return;
  std::string expert_ranks = ep == 1 ? "" : counted(ep, "expert-parallel rank");
  if (etp != tp) expert_ranks += (ep == 1 ? "" : " and ") + counted(etp, "expert tensor-parallel rank");
  report
      .error("tensor parallelism (" + counted(tp, "rank") + ") with " + expert_ranks +
             " needs `dist.sequence_parallel`: without it, each tensor-parallel rank would dispatch the same "
             "tokens")
      .help("set dist.sequence_parallel=true");
}

RULE("R0719", experts_exclude_block_scales, "fp8 and fp4 with scales of blocks exclude a model with experts",
     "mixed_precision.fp8", "mixed_precision.fp4", "mixed_precision.fp8_recipe", "model.num_moe_experts") {
  const auto& precision = c.mixed_precision;
  const bool of_tensor =
      precision.fp8_recipe == Fp8Recipe::delayed || precision.fp8_recipe == Fp8Recipe::tensorwise;
  if (!has_experts(c) || (!precision.fp4 && (!precision.fp8 || of_tensor))) return;
  const std::string field = precision.fp4 ? "mixed_precision.fp4" : "mixed_precision.fp8_recipe";
  report
      .error("`" + field +
             "` is set for a model with experts, whose GEMMs this version computes in 16 bits, " +
             "or in 8 bits with one scale for a tensor")
      .help("set mixed_precision=bf16_with_fp8_current_scaling_mixed, or " +
            std::string(precision.fp4 ? "mixed_precision.fp4=null" : "mixed_precision.fp8=null"));
}

RULE("R0720", moe_act_recomputes_in_16_bits, "experts in 8 bits save codes, which moe_act does not recompute",
     "model.recompute_modules", "mixed_precision.fp8", "mixed_precision.fp8_wgrad", "model.num_moe_experts") {
  const auto& modules = c.model.recompute_modules;
  if (!has_experts(c) || !c.mixed_precision.fp8 || !c.mixed_precision.fp8_wgrad || c.peft ||
      std::find(modules.begin(), modules.end(), RecomputeModule::moe_act) == modules.end())
    return;
  report
      .error(
          "`model.recompute_modules` contains moe_act, which frees no memory: with `mixed_precision.fp8` the "
          "second GEMM of an expert saves its input in 8 bits")
      .help("leave moe_act out, or set mixed_precision.fp8_wgrad=false");
}

RULE("R0707", topk_of_the_experts, "moe_router_topk is at most num_moe_experts", "model.moe_router_topk",
     "model.num_moe_experts") {
  if (!has_experts(c) || c.model.moe_router_topk <= *c.model.num_moe_experts) return;
  report
      .error("`model.moe_router_topk` " + to_text(c.model.moe_router_topk) + " is more than the " +
             counted(*c.model.num_moe_experts, "expert"))
      .help("set it to at most " + to_text(*c.model.num_moe_experts));
}

RULE("R0708", one_expert_needs_pre_softmax, "top-1 routing with softmax scores needs moe_router_pre_softmax",
     "model.moe_router_pre_softmax", "model.moe_router_topk", "model.moe_router_score_function") {
  const auto& m = c.model;
  if (!has_experts(c) || m.moe_router_topk != 1 || m.moe_router_score_function != RouterScore::softmax ||
      m.moe_router_pre_softmax)
    return;
  // A warning: the weights of such a model can be evaluated, converted and fine-tuned as they are.
  report
      .warning(
          "with `model.moe_router_topk` 1, the softmax over the one selected expert is always 1 and the "
          "router gets no gradient")
      .help(
          "for a new model set model.moe_router_pre_softmax=true, or "
          "model.moe_router_score_function=sigmoid; "
          "weights that were trained without it keep their results only without it");
}

RULE("R0709", expert_bias_needs_sigmoid, "moe_router_enable_expert_bias needs sigmoid scores",
     "model.moe_router_enable_expert_bias", "model.moe_router_score_function") {
  if (!has_experts(c) || !c.model.moe_router_enable_expert_bias ||
      c.model.moe_router_score_function == RouterScore::sigmoid)
    return;
  report
      .error(
          "`model.moe_router_enable_expert_bias` needs `model.moe_router_score_function` sigmoid, it is "
          "softmax")
      .help("set model.moe_router_score_function=sigmoid");
}

RULE("R0710", expert_groups_fit,
     "num_moe_experts is divisible by moe_router_num_groups, the selected groups hold at least "
     "moe_router_topk experts, and a group at least moe_router_group_score_topk",
     "model.moe_router_num_groups", "model.moe_router_group_topk", "model.num_moe_experts",
     "model.moe_router_topk", "model.moe_router_group_score_topk") {
  const auto& m = c.model;
  if (!has_experts(c) || (!m.moe_router_num_groups && !m.moe_router_group_topk)) return;
  if (!m.moe_router_num_groups || !m.moe_router_group_topk) {
    report.error("`model.moe_router_num_groups` and `model.moe_router_group_topk` belong together")
        .help("set both, or neither");
    return;
  }
  const int64_t groups = *m.moe_router_num_groups, chosen = *m.moe_router_group_topk,
                all = *m.num_moe_experts;
  if (all % groups != 0)
    report
        .error("`model.num_moe_experts` " + to_text(all) +
               " is not divisible by `model.moe_router_num_groups` " + to_text(groups))
        .help("nearest legal moe_router_num_groups: " + nearest_divisors(groups, all));
  else if (chosen > groups)
    report
        .error("`model.moe_router_group_topk` " + to_text(chosen) + " is more than the " +
               counted(groups, "group"))
        .help("set model.moe_router_group_topk to at most " + to_text(groups))
        .at("model.moe_router_group_topk");
  else if (m.moe_router_topk > chosen * (all / groups))
    report
        .error("`model.moe_router_topk` " + to_text(m.moe_router_topk) + " is more than the " +
               counted(chosen * (all / groups), "expert") + " of the chosen groups")
        .help("set model.moe_router_topk to at most " + to_text(chosen * (all / groups)))
        .at("model.moe_router_topk");
  else if (m.moe_router_group_score_topk.value_or(1) > all / groups)
    report
        .error("`model.moe_router_group_score_topk` " + to_text(*m.moe_router_group_score_topk) +
               " is more than the " + counted(all / groups, "expert") + " of a group")
        .help("set model.moe_router_group_score_topk to at most " + to_text(all / groups))
        .at("model.moe_router_group_score_topk");
}

bool balances_by(const Config& c, RouterBalancing type) {
  return std::ranges::count(c.model.moe_router_load_balancing_type.items, type) > 0;
}

RULE("R0711", capacity_excludes_sinkhorn,
     "moe_expert_capacity_factor and sinkhorn load balancing exclude each other",
     "model.moe_expert_capacity_factor", "model.moe_router_load_balancing_type") {
  if (!has_experts(c) || !c.model.moe_expert_capacity_factor || !balances_by(c, RouterBalancing::sinkhorn))
    return;
  report.error("`model.moe_expert_capacity_factor` excludes `model.moe_router_load_balancing_type` sinkhorn")
      .help("legal types with a capacity: aux_loss, seq_aux_loss, global_aux_loss, none");
}

RULE("R0712", padding_needs_capacity, "moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor",
     "model.moe_pad_expert_input_to_capacity", "model.moe_expert_capacity_factor") {
  if (!has_experts(c) || !c.model.moe_pad_expert_input_to_capacity || c.model.moe_expert_capacity_factor)
    return;
  report.error("`model.moe_pad_expert_input_to_capacity` needs `model.moe_expert_capacity_factor`")
      .help("set model.moe_expert_capacity_factor=1.0, or model.moe_pad_expert_input_to_capacity=false");
}

RULE("R0713", shared_overlap_needs_exchange,
     "with expert parallelism, moe_shared_expert_overlap needs the alltoall dispatcher",
     "model.moe_shared_expert_overlap", "model.moe_token_dispatcher_type",
     "dist.expert_model_parallel_size") {
  const auto& m = c.model;
  if (!has_experts(c) || c.dist.expert_model_parallel_size == 1 || !m.moe_shared_expert_overlap ||
      m.moe_token_dispatcher_type == TokenDispatcher::alltoall)
    return;
  report
      .error(
          "`model.moe_shared_expert_overlap` needs `model.moe_token_dispatcher_type` alltoall, it is "
          "allgather")
      .help("set model.moe_token_dispatcher_type=alltoall");
}

RULE("R0714", gathered_tokens_have_one_length, "the allgather dispatcher excludes variable_seq_lengths",
     "model.moe_token_dispatcher_type", "dist.variable_seq_lengths") {
  if (!has_experts(c) || c.model.moe_token_dispatcher_type != TokenDispatcher::allgather ||
      !c.dist.variable_seq_lengths)
    return;
  report.error("`model.moe_token_dispatcher_type` allgather excludes `dist.variable_seq_lengths`")
      .help("set model.moe_token_dispatcher_type=alltoall");
}

RULE("R0722", fp64_router_needs_cpu, "a router in fp64 is trained on the CPU only", "model.moe_router_dtype",
     "train.device") {
  const DeviceKind device = c.train.device;
  if (!has_experts(c) || c.model.moe_router_dtype != RouterDtype::fp64 || device == DeviceKind::cpu ||
      device == DeviceKind::checked)
    return;
  report
      .warning("GPUs refuse `model.moe_router_dtype` fp64, and `train.device` is " +
               std::string(enum_name(device)))
      .help("set train.device=cpu, or model.moe_router_dtype=fp32");
}

RULE("R0715", aux_loss_needs_coefficient, "an auxiliary load-balancing loss needs moe_aux_loss_coeff above 0",
     "model.moe_aux_loss_coeff", "model.moe_router_load_balancing_type") {
  const auto& types = c.model.moe_router_load_balancing_type.items;
  const auto& coefficients = c.model.moe_aux_loss_coeff.items;
  if (!has_experts(c) || types.size() != coefficients.size()) return;
  for (size_t i = 0; i < types.size(); ++i)
    if (has_aux_loss(types[i]) && coefficients[i] == 0)
      report
          .warning("`model.moe_router_load_balancing_type` " + std::string(enum_name(types[i])) +
                   " has no effect with `model.moe_aux_loss_coeff` 0")
          .help(types.size() > 1 ? "for example, set its coefficient to 0.01, or leave it out of both lists"
                                 : "for example, set model.moe_aux_loss_coeff=0.01, or "
                                   "model.moe_router_load_balancing_type=none");
}

RULE("R0718", aux_coefficient_needs_loss,
     "moe_aux_loss_coeff needs a load balancing type with an auxiliary loss", "model.moe_aux_loss_coeff",
     "model.moe_router_load_balancing_type") {
  const RouterBalancing type = c.model.moe_router_load_balancing_type.items[0];
  const double coefficient = c.model.moe_aux_loss_coeff.items[0];
  // balancing_losses_combine reports those in lists.
  const bool single = c.model.moe_router_load_balancing_type.items.size() == 1;
  if (has_experts(c) && single && !has_aux_loss(type) && coefficient > 0)
    report
        .error("`model.moe_aux_loss_coeff` " + to_text(coefficient) +
               " weighs a loss that `model.moe_router_load_balancing_type` " + std::string(enum_name(type)) +
               " does not have")
        .help("set model.moe_router_load_balancing_type=aux_loss, or model.moe_aux_loss_coeff=0");
}

RULE("R0723", balancing_losses_combine,
     "a list of load balancing types has different auxiliary losses, with one coefficient for each",
     "model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff") {
  if (!has_experts(c)) return;
  const auto& types = c.model.moe_router_load_balancing_type.items;
  for (auto type = types.begin(); types.size() > 1 && type != types.end(); ++type) {
    const std::string name(enum_name(*type));
    if (!has_aux_loss(*type))
      report.error("`model.moe_router_load_balancing_type` combines " + name + " with other types")
          .help("leave it out: only aux_loss, seq_aux_loss and global_aux_loss can be combined");
    else if (std::find(types.begin(), type, *type) != type)
      report.error("`model.moe_router_load_balancing_type` names " + name + " twice")
          .help("leave one of them out, and add their coefficients");
  }
  const size_t coefficients = c.model.moe_aux_loss_coeff.items.size();
  if (coefficients == types.size()) return;
  std::string example = "0.01";
  for (size_t i = 1; i < types.size(); ++i) example += ", 0.01";
  report
      .error("`model.moe_aux_loss_coeff` has " + counted(static_cast<int64_t>(coefficients), "value") +
             " for " + counted(static_cast<int64_t>(types.size()), "load balancing type"))
      .help("give one coefficient for each type, in the same order: for example, model.moe_aux_loss_coeff=" +
            (types.size() > 1 ? "[" + example + "]" : example))
      .at("model.moe_aux_loss_coeff");
}

RULE("R0716", some_layer_has_experts, "at least one layer of a model with experts has experts",
     "model.moe_first_dense_layers", "model.moe_layer_freq", "model.num_layers") {
  if (!has_experts(c)) return;
  const auto& freq = c.model.moe_layer_freq.items;
  // The rule listed_layers_fit reports a single 0.
  if (!moe_layers(c.model).empty() || freq == std::vector<int64_t>{0}) return;
  const std::string numbers = "moe_first_dense_layers is " + to_text(c.model.moe_first_dense_layers) +
                              ", moe_layer_freq " + to_text(freq[0]);
  report
      .error("no layer has experts: " + (freq.size() > 1 ? "moe_layer_freq has no 1" : numbers) + ", of " +
             counted(c.model.num_layers, "layer"))
      .help(freq.size() > 1 ? "set a 1 for each layer with experts, or leave num_moe_experts unset"
                            : "choose smaller values, or leave num_moe_experts unset");
}

RULE("R0724", listed_layers_fit,
     "a list of moe_layer_freq has a 0 or a 1 for each layer, and excludes moe_first_dense_layers; a single "
     "value is at least 1",
     "model.moe_layer_freq", "model.moe_first_dense_layers", "model.num_layers") {
  if (!has_experts(c)) return;
  const auto& freq = c.model.moe_layer_freq.items;
  if (freq.size() == 1) {
    if (freq[0] < 1)
      report.error("`model.moe_layer_freq` is 0, which no layer's index is a multiple of")
          .help("set model.moe_layer_freq=1 for experts in every layer");
    return;
  }
  const auto other = std::ranges::find_if(freq, [](int64_t n) { return n > 1; });
  if (other != freq.end())
    report.error("`model.moe_layer_freq` is a list with " + to_text(*other) + " in it")
        .help("a list has 1 for each layer with experts and 0 for each dense layer");
  if (std::ssize(freq) != c.model.num_layers)
    report
        .error("`model.moe_layer_freq` lists " + counted(std::ssize(freq), "layer") + ", and the model has " +
               to_text(c.model.num_layers))
        .help("give one value for each layer");
  if (c.model.moe_first_dense_layers > 0)
    report
        .error("`model.moe_first_dense_layers` " + to_text(c.model.moe_first_dense_layers) +
               " stands beside a list of moe_layer_freq, which has a 0 for each dense layer")
        .help("set model.moe_first_dense_layers=0");
}

RULE("R0717", expert_exchange_overlaps,
     "overlap_moe_expert_parallel_comm needs expert parallelism, the alltoall dispatcher and bf16 or fp16 "
     "parameters, and excludes some other settings",
     "comm_overlap.overlap_moe_expert_parallel_comm") {
  if (!c.comm_overlap.overlap_moe_expert_parallel_comm) return;
  const auto refuse = [&](const std::string& why, const char* help) {
    report.error("`comm_overlap.overlap_moe_expert_parallel_comm` " + why).help(help);
  };
  if (c.dist.expert_model_parallel_size == 1)
    refuse("overlaps the exchange between experts, but `dist.expert_model_parallel_size` is 1",
           "set dist.expert_model_parallel_size to 2 or more");
  if (c.model.moe_token_dispatcher_type != TokenDispatcher::alltoall)
    refuse("needs `model.moe_token_dispatcher_type` alltoall",
           "set model.moe_token_dispatcher_type=alltoall");
  if (!is_16_bit(c.mixed_precision.params_dtype))
    refuse("needs bf16 or fp16 parameters", "set mixed_precision=bf16_mixed");
  if (c.dist.pipeline_model_parallel_size > 1 && virtual_stages(c) == 1)
    refuse("needs virtual stages where there are pipeline stages",
           "set dist.virtual_pipeline_model_parallel_size to 2 or more");
  if (c.model.recompute_granularity == RecomputeGranularity::full)
    refuse("excludes full recomputation", "set model.recompute_granularity=selective");
  for (const RecomputeModule module : c.model.recompute_modules)
    if (module == RecomputeModule::moe)
      refuse("excludes recomputation of moe", "leave moe out of model.recompute_modules");
  if (c.model.moe_shared_expert_overlap)
    refuse("excludes `model.moe_shared_expert_overlap`", "set model.moe_shared_expert_overlap=false");
  if (c.model.mtp_num_layers.value_or(0) > 1)
    refuse("allows at most one predicted token", "set model.mtp_num_layers=1");
}

}  // namespace

}  // namespace capstan::config
