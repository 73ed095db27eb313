// Recomputation and offload of activations.
#include <algorithm>

#include "config/sections/moe_layers.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "config/sections/rule_tools.hpp"

namespace capstan::config {

RULES_OF_FILE(recompute_rules)

namespace {

bool full(const Config& c) {
  return c.model.recompute_granularity == RecomputeGranularity::full;
}
bool selective(const Config& c) {
  return c.model.recompute_granularity == RecomputeGranularity::selective;
}
bool recomputes(const Config& c, RecomputeModule module) {
  const auto& modules = c.model.recompute_modules;
  return selective(c) && std::find(modules.begin(), modules.end(), module) != modules.end();
}

RULE("R0801", layers_need_full_recompute,
     "recompute_method and recompute_num_layers are for full recomputation", "model.recompute_granularity",
     "model.recompute_method", "model.recompute_num_layers") {
  if (!selective(c)) return;
  if (c.model.recompute_method)
    report
        .error("`model.recompute_method` " + std::string(enum_name(*c.model.recompute_method)) +
               " is for full recomputation, `model.recompute_granularity` is selective")
        .at("model.recompute_method")
        .help("unset model.recompute_method, or set model.recompute_granularity=full");
  if (c.model.recompute_num_layers)
    report
        .error("`model.recompute_num_layers` " + to_text(*c.model.recompute_num_layers) +
               " is for full recomputation, `model.recompute_granularity` is selective")
        .at("model.recompute_num_layers")
        .help("unset model.recompute_num_layers, or set model.recompute_granularity=full");
}

RULE("R0802", recomputed_layers_fit, "recompute_num_layers above the layers of a stage means all of them",
     "model.recompute_num_layers", "model.num_layers", "dist.pipeline_model_parallel_size") {
  if (!full(c) || !c.model.recompute_num_layers) return;
  const auto stages = pipeline_stages(c);
  if (!stages) return;
  int64_t most = 0;
  for (const auto& stage : *stages) most = std::max(most, stage.layers);
  if (*c.model.recompute_num_layers <= most) return;
  // This is the behavior of Megatron-LM. A recipe for 32 layers stays valid with `model.num_layers=4`.
  report
      .warning("`model.recompute_num_layers` " + to_text(*c.model.recompute_num_layers) +
               " is more than the layers of a stage, " + to_text(most) + ": all of them are recomputed")
      .help("model.recompute_num_layers=" + to_text(most) + " is the same");
}

RULE("R0803", modules_need_selective_recompute, "recompute_modules is for selective recomputation",
     "model.recompute_modules", "model.recompute_granularity") {
  if (!full(c) || c.model.recompute_modules.empty()) return;
  report
      .error(
          "`model.recompute_modules` is for selective recomputation, `model.recompute_granularity` is full")
      .help("unset model.recompute_modules, or set model.recompute_granularity=selective");
}

// Attention never keeps its scores: core_attn is recomputed in any case.
RULE("R0809", selective_names_more_than_core_attn,
     "selective recomputation names a module other than core_attn, which never stores its scores",
     "model.recompute_granularity", "model.recompute_modules") {
  if (!selective(c) || c.model.recompute_modules != std::vector{RecomputeModule::core_attn}) return;
  report
      .warning(
          "`model.recompute_granularity` selective has no effect with `model.recompute_modules` [core_attn]: "
          "attention never stores its scores")
      .help("set model.recompute_modules=[core_attn,mlp] or model.recompute_granularity=full, or remove it");
}

RULE("R0804", recomputed_modules_once, "recompute_modules names each module once",
     "model.recompute_modules") {
  auto modules = c.model.recompute_modules;
  std::sort(modules.begin(), modules.end());
  const auto twice = std::adjacent_find(modules.begin(), modules.end());
  if (twice == modules.end()) return;
  report.error("`model.recompute_modules` names " + std::string(enum_name(*twice)) + " twice")
      .help("name it once");
}

RULE("R0805", recomputed_modules_exist, "recompute_modules names modules of this model",
     "model.recompute_modules", "model.num_moe_experts", "model.moe_layer_freq",
     "model.moe_first_dense_layers", "model.multi_latent_attention", "model.norm_placement") {
  const auto refuse = [&](RecomputeModule module, const char* why) {
    report.error("`model.recompute_modules` names " + std::string(enum_name(module)) + ", but " + why)
        .help("leave it out of model.recompute_modules");
  };
  const bool experts = c.model.num_moe_experts.has_value();
  for (const RecomputeModule module : {RecomputeModule::moe, RecomputeModule::moe_act})
    if (recomputes(c, module) && !experts) refuse(module, "the model has no experts");
  if (recomputes(c, RecomputeModule::moe_act) && experts && !c.model.moe_grouped_gemm)
    refuse(RecomputeModule::moe_act, "`model.moe_grouped_gemm` is false");
  if (recomputes(c, RecomputeModule::shared_experts)) {
    if (!experts || !c.model.moe_shared_expert_intermediate_size)
      refuse(RecomputeModule::shared_experts, "the model has no shared expert");
    else if (c.model.moe_shared_expert_overlap)
      refuse(RecomputeModule::shared_experts, "`model.moe_shared_expert_overlap` is true");
  }
  if (recomputes(c, RecomputeModule::mlp) && every_layer_has_experts(c.model))
    refuse(RecomputeModule::mlp, "every layer has experts; their module is moe");
  if (recomputes(c, RecomputeModule::mla_up_proj) && !c.model.multi_latent_attention)
    refuse(RecomputeModule::mla_up_proj, "`model.multi_latent_attention` is false");
  if (recomputes(c, RecomputeModule::layernorm) && c.model.norm_placement == NormPlacement::output)
    refuse(RecomputeModule::layernorm, "`model.norm_placement` is output: no norm is before a module");
}

RULE("R0810", recomputed_modules_save_memory,
     "recompute_modules names no module within moe beside it, and norms only of GEMMs above 8 bits",
     "model.recompute_modules", "mixed_precision.fp8", "mixed_precision.fp4") {
  if (recomputes(c, RecomputeModule::moe))
    for (const RecomputeModule module : {RecomputeModule::moe_act, RecomputeModule::shared_experts})
      if (recomputes(c, module))
        report
            .warning("`model.recompute_modules` names " + std::string(enum_name(module)) +
                     " beside moe, which recomputes it too: it is computed three times and saves nothing")
            .help("leave it out of model.recompute_modules");
  if (recomputes(c, RecomputeModule::layernorm) && (c.mixed_precision.fp8 || c.mixed_precision.fp4))
    report
        .warning(
            "`model.recompute_modules` names layernorm, which saves nothing where the GEMMs after it are in "
            "8 "
            "or 4 bits: their codes of its output are saved")
        .help("leave it out of model.recompute_modules");
}

RULE("R0806", saved_activations_distribute,
     "distributing saved activations needs tensor parallelism and full recomputation, without "
     "sequence_parallel",
     "model.distribute_saved_activations", "dist.tensor_model_parallel_size", "dist.sequence_parallel",
     "model.recompute_granularity") {
  if (!c.model.distribute_saved_activations) return;
  if (c.dist.tensor_model_parallel_size == 1)
    report
        .error("`model.distribute_saved_activations` splits over the tensor-parallel ranks, but there is one")
        .help("set model.distribute_saved_activations=false");
  else if (c.dist.sequence_parallel)
    report
        .error(
            "`model.distribute_saved_activations` and `dist.sequence_parallel` exclude each other: the "
            "inputs are split already")
        .help("set model.distribute_saved_activations=false");
  else if (!full(c))
    report.error("`model.distribute_saved_activations` needs `model.recompute_granularity` full")
        .help("set model.recompute_granularity=full");
}

RULE("R0807", offloaded_layers_fit, "cpu_offloading_num_layers is at least 1 and less than num_layers",
     "model.cpu_offloading_num_layers", "model.num_layers", "model.cpu_offloading") {
  if (!c.model.cpu_offloading) return;
  const int64_t layers = c.model.cpu_offloading_num_layers, most = c.model.num_layers - 1;
  if (layers >= 1 && layers <= most) return;
  const std::string why = "the last layer's activations are needed at once";
  report
      .error(layers < 1 ? "`model.cpu_offloading` needs the number of layers to offload, and "
                          "`model.cpu_offloading_num_layers` is 0"
                        : "`model.cpu_offloading_num_layers` " + to_text(layers) + " is not between 1 and " +
                              to_text(most))
      .help(most < 1 ? "set model.cpu_offloading=false: " + why + ", and the model has no other"
                     : "set model.cpu_offloading_num_layers to at least 1 and at most " + to_text(most) +
                           ": " + why)
      .at(layers < 1 ? "model.cpu_offloading" : "model.cpu_offloading_num_layers");
}

}  // namespace

}  // namespace capstan::config
