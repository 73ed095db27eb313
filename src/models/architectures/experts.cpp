#include "models/architectures/experts.hpp"

#include "config/sections/moe_layers.hpp"
#include "models/architectures/options.hpp"
#include "nn/moe.hpp"

namespace capstan::models {

using config::ModelConfig;

namespace {

ops::RouterOptions router_of(const ModelConfig& c) {
  const bool sigmoid = c.moe_router_score_function == config::RouterScore::sigmoid;
  ops::RouterOptions router;
  router.topk = c.moe_router_topk;
  router.score = sigmoid ? kernels::RouterScore::sigmoid : kernels::RouterScore::softmax;
  router.pre_softmax = c.moe_router_pre_softmax;
  router.normalize = sigmoid && c.moe_router_topk > 1;
  router.scaling_factor = c.moe_router_topk_scaling_factor.value_or(1);
  router.groups = c.moe_router_num_groups.value_or(0);
  router.group_topk = c.moe_router_group_topk.value_or(0);
  router.group_best = c.moe_router_group_score_topk.value_or(0);
  return router;
}

nn::Moe::BalanceLoss::Scope scope_of(config::RouterBalancing type) {
  using Scope = nn::Moe::BalanceLoss::Scope;
  return type == config::RouterBalancing::aux_loss       ? Scope::micro_batch
         : type == config::RouterBalancing::seq_aux_loss ? Scope::sequence
                                                         : Scope::global_batch;
}

nn::Moe::Options moe_options(const ModelConfig& c, const nn::Mlp::Options& dense) {
  nn::Moe::Options o;
  o.hidden = dense.hidden;
  o.experts = *c.num_moe_experts;
  o.ffn = resolved(c.moe_ffn_hidden_size, "moe_ffn_hidden_size");
  o.bias = dense.bias;
  o.activation = dense.activation;
  o.router = router_of(c);
  o.router_in_fp64 = c.moe_router_dtype == config::RouterDtype::fp64;
  o.expert_bias = c.moe_router_enable_expert_bias;
  for (const auto& [type, coefficient] : config::balance_losses(c))
    o.balance.push_back({scope_of(type), coefficient});
  o.input_jitter = c.moe_input_jitter_eps.value_or(0);
  o.z_coefficient = c.moe_z_loss_coeff.value_or(0);
  if (c.moe_token_dispatcher_type == config::TokenDispatcher::allgather)
    o.dispatcher = nn::TokenDispatcher::Kind::allgather;
  o.capacity_factor = c.moe_expert_capacity_factor;
  if (c.moe_token_drop_policy == config::TokenDropPolicy::position)
    o.drop_policy = kernels::DropPolicy::position;
  o.pad_to_capacity = c.moe_pad_expert_input_to_capacity;
  o.shared_ffn = c.moe_shared_expert_intermediate_size.value_or(0);
  o.shared_gate = c.moe_shared_expert_gate;
  o.overlap_shared = c.moe_shared_expert_overlap;
  o.recompute_activation = recomputes(c, config::RecomputeModule::moe_act);
  o.recompute_shared = recomputes(c, config::RecomputeModule::shared_experts);
  o.init = dense.init;
  o.output_init = dense.output_init;
  return o;
}

}  // namespace

void check_experts(const ModelConfig& c) {
  if (c.num_moe_experts && c.moe_shared_expert_intermediate_size && config::has_mlp_biases(c))
    fail(ErrorCode::unsupported,
         "this version cannot run a model with model.add_mlp_bias (a shared expert with biases)",
         "set model.add_mlp_bias=false");
}

void use_experts(nn::DecoderLayer::Options& options, const ModelConfig& c, int64_t layer) {
  if (!config::is_moe_layer(c, layer)) return;
  options.feed_forward = [of_moe = moe_options(c, mlp_options(c))](nn::ParamList& parameters,
                                                                   const nn::ModulePath& path) {
    return std::make_unique<nn::Moe>(parameters, path, of_moe);
  };
  options.recompute_feed_forward = recomputes(c, config::RecomputeModule::moe);
}

}  // namespace capstan::models
