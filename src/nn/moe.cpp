#include "nn/moe.hpp"

#include <algorithm>

#include "ops/collectives.hpp"
#include "ops/expert_permutation.hpp"
#include "ops/grouped_linear.hpp"
#include "ops/matmul.hpp"
#include "ops/router_logits.hpp"

namespace capstan::nn {

// The parts of fc1 with adapters of their own.
static std::vector<OutputSlice> slices_of(const Moe::Options& o, int ranks) {
  if (!o.activation.gated) return {};
  const int64_t ffn = o.ffn / ranks;
  const Sharding sharding{{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 1}};
  return {{"linear_fc1_gate", {1, 0, ffn}, o.ffn, sharding},
          {"linear_fc1_up", {1, ffn, ffn}, o.ffn, sharding}};
}

Moe::Moe(ParamList& parameters, const ModulePath& path, const Options& options)
    : options_(options), parallel_(parameters.parallel()), layer_(path.layer) {
  const bool rows_are_sharded = parallel_.tensor.shards_rows();
  CAPSTAN_ASSERT(
      parallel_.tensor.is_single() || rows_are_sharded ||
          (comm::ranks_of(parallel_.experts.expert) == 1 &&
           comm::ranks_of(parallel_.experts.tensor) == parallel_.tensor.size()),
      "without sequence parallelism, experts must be sharded over exactly the tensor-parallel ranks");
  ParamSpec router = path.inside("router").spec("weight", {options.experts, options.hidden}, options.init);
  router.partial_over_tensor = rows_are_sharded;
  router_ = &parameters.add(std::move(router));
  if (options.bias) {
    ParamSpec bias = path.inside("router").spec("bias", {options.experts}, {Init::Kind::zeros});
    bias.partial_over_tensor = rows_are_sharded;
    router_bias_ = &parameters.add(std::move(bias));
  }
  if (options.expert_bias) {
    ParamSpec bias = path.inside("router").spec("expert_bias", {options.experts}, {Init::Kind::zeros});
    bias.buffer = true;
    expert_bias_ = &parameters.add(std::move(bias));
  }

  const ModulePath experts = path.inside("experts");
  const int64_t parts = options.activation.gated ? 2 : 1, first_width = options.ffn * parts;
  ParamSpec fc1 =
      experts.spec("linear_fc1.weight", {options.experts, first_width, options.hidden}, options.init);
  fc1.sharding = {{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 1, parts}};
  ParamSpec fc2 =
      experts.spec("linear_fc2.weight", {options.experts, options.hidden, options.ffn}, options.output_init);
  fc2.sharding = {{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 2}};
  fc1.linear = fc2.linear = true;
  fc1_ = &parameters.add(std::move(fc1));
  fc2_ = &parameters.add(std::move(fc2));
  fc1_adapter_.emplace(parameters, experts.inside("linear_fc1"), *fc1_, LinearSharding::column,
                       slices_of(options, parallel_.shard_ranks().expert_tensor.size));
  fc2_adapter_.emplace(parameters, experts.inside("linear_fc2"), *fc2_, LinearSharding::row,
                       std::vector<OutputSlice>{});
  if (!fc1_adapter_->empty() || !fc2_adapter_->empty()) adapter_dropout_ = parameters.adapters()->dropout;
  if (options.bias) {
    ParamSpec first = experts.spec("linear_fc1.bias", {options.experts, first_width}, {Init::Kind::zeros}),
              second =
                  experts.spec("linear_fc2.bias", {options.experts, options.hidden}, {Init::Kind::zeros});
    first.no_weight_decay = second.no_weight_decay = true;
    first.sharding = {{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 1, parts}};
    second.sharding = {ShardingAxis::expert, 0};
    const ShardRanks::AxisRank width = parallel_.shard_ranks().expert_tensor;
    second.partial_over_tensor = width.size > 1;
    adds_fc2_bias_ = width.rank == 0;
    fc1_bias_ = &parameters.add(std::move(first));
    fc2_bias_ = &parameters.add(std::move(second));
  }

  dispatcher_ = make_token_dispatcher(options.dispatcher, parallel_,
                                      {.layer = layer_,
                                       .experts = options.experts,
                                       .topk = options.router.topk,
                                       .capacity_factor = options.capacity_factor,
                                       .drop_policy = options.drop_policy,
                                       .pad_to_capacity = options.pad_to_capacity,
                                       .weights_activations = !options.bias});
  if (options.shared_ffn == 0) return;
  const ModulePath shared = path.inside("shared_experts");
  shared_.emplace(parameters, shared,
                  Mlp::Options{.hidden = options.hidden,
                               .ffn = options.shared_ffn,
                               .activation = options.activation,
                               .init = options.init,
                               .output_init = options.output_init});
  if (!options.shared_gate) return;
  ParamSpec gate = shared.spec("gate_weight", {1, options.hidden}, options.init);
  gate.partial_over_tensor = rows_are_sharded;
  shared_gate_ = &parameters.add(std::move(gate));
}

Var Moe::forward(Tape& tape, const Var& x, const TokenContext& context) const {
  const ops::Routing routing = route(tape, x, context);
  const bool counts_dropped = options_.capacity_factor && context.router_statistics && tape.side_effects();
  const auto dispatch =
      dispatcher_->start(tape, x, routing, dropout_rows(context),
                         counts_dropped ? context.router_statistics->dropped(layer_) : Tensor());
  Var shared;
  if (shared_ && options_.overlap_shared) shared = run_shared_expert(tape, x, context);
  Var y = dispatch->combine(tape, run_experts(tape, dispatch->receive(tape), context));
  if (!shared_) return y;
  if (!options_.overlap_shared) shared = run_shared_expert(tape, x, context);
  return ops::add(tape, shared, y);
}

ops::Routing Moe::route(Tape& tape, const Var& x, const TokenContext& context) const {
  const Var input =
      ops::jitter(tape, x, context.router_jitter(options_.input_jitter, static_cast<uint64_t>(layer_)));
  const Var logits = ops::router_logits(tape, input, *router_, router_bias_, options_.router_in_fp64);
  const ParamPin bias = tape.pin(expert_bias_);
  ops::Routing routing = ops::route(tape, logits, options_.router, *bias, context.padding);
  add_losses(tape, logits, context, routing);
  return routing;
}

void Moe::add_losses(Tape& tape, const Var& logits, const TokenContext& context,
                     ops::Routing& routing) const {
  std::vector<Var> balance;
  Var z;
  if (context.training) {
    balance = balance_losses(tape, logits, routing.experts, context);
    if (options_.z_coefficient > 0)
      z = ops::z_loss(tape, logits, options_.z_coefficient / static_cast<double>(context.tokens),
                      context.padding);
  }
  const auto attach = [&](const Var& loss) {
    routing.probabilities = ops::attach_loss(tape, routing.probabilities, loss, context.loss_weight_sum);
  };
  std::ranges::for_each(balance, attach);
  if (z.value.defined()) attach(z);
  // Tensor-parallel ranks that route the same rows count them once.
  const bool counts_here = parallel_.tensor.shards_rows() || parallel_.tensor.rank() == 0;
  if (!context.router_statistics || !tape.side_effects() || !counts_here) return;
  const Tensor counts =
      ops::count_choices(tape, routing.experts, options_.experts, ops::one_segment(logits.size(0)));
  context.router_statistics->add(layer_, counts, balance, z);
}

Tensor Moe::count_choices(Tape& tape, const Tensor& experts, const kernels::TokenSegments& segments,
                          comm::Communicator* group) const {
  Var counts{ops::count_choices(tape, experts, options_.experts, segments)};
  const std::string purpose = "choices of experts of layer " + std::to_string(layer_);
  if (parallel_.tensor.shards_rows())
    counts = ops::all_reduce(tape, counts, *parallel_.tensor.group, purpose);
  if (group) counts = ops::all_reduce(tape, counts, *group, purpose);
  return counts.value;
}

Tensor Moe::load_of_batch(Tape& tape, const Tensor& experts, const TokenContext& context) const {
  Tensor counts = count_choices(tape, experts, ops::one_segment(experts.size(0)),
                                parallel_.data ? parallel_.data : parallel_.context.group);
  if (!context.router_statistics) return counts;
  return ops::copy_of(context.router_statistics->add_to_batch(layer_, counts));
}

// The tokens of a micro-batch, and of a sequence, may be on several ranks. Counts are summed over these
// ranks; the loss of each rank covers its own tokens. A recomputed region uses the counts of its first pass,
// because other micro-batches may have been counted since.
std::vector<Var> Moe::balance_losses(Tape& tape, const Var& logits, const Tensor& experts,
                                     const TokenContext& context) const {
  using Scope = BalanceLoss::Scope;
  const bool rows_are_sharded = parallel_.tensor.shards_rows();
  const int64_t rows = logits.size(0), first_row = rows_are_sharded ? parallel_.tensor.rank() * rows : 0;
  Tensor chosen;
  // As in Megatron, the losses count choices without the group limit and the bias.
  const auto choose = [&] {
    if (chosen.defined()) return;
    chosen = experts;
    if (options_.router.groups <= 1 && !expert_bias_) return;
    ops::RouterOptions unlimited = options_.router;
    unlimited.groups = unlimited.group_topk = unlimited.group_best = 0;
    chosen = ops::choose_experts(tape, logits.value, unlimited, context.padding);
  };
  std::vector<Var> losses;
  for (const BalanceLoss& loss : options_.balance) {
    const Scope scope = loss.scope;
    const kernels::TokenSegments segments =
        scope == Scope::sequence ? kernels::TokenSegments{context.batch, context.seq, first_row}
                                 : ops::one_segment(rows);
    const Tensor counts = tape.choice([&] {
      choose();
      return scope == Scope::global_batch ? load_of_batch(tape, chosen, context)
                                          : count_choices(tape, chosen, segments, parallel_.context.group);
    });
    const double factor =
        loss.coefficient * static_cast<double>(options_.experts) / static_cast<double>(context.tokens);
    losses.push_back(
        ops::balance_loss(tape, logits, counts, options_.router.score, segments, factor, context.padding));
  }
  return losses;
}

Tensor Moe::dropout_rows(const TokenContext& context) const {
  return context.training && adapter_dropout_ > 0 ? context.hidden_dropout_rows : Tensor();
}

Var Moe::run_experts(Tape& tape, const ExpertInput& input, const TokenContext& context) const {
  const RowsOfExperts rows{input.order.sizes(), input.dropout_rows, input.expected_rows};
  const auto linear = [&](const Var& x, const Parameter& weight, const Parameter* bias, bool adds_bias,
                          const Adapter& adapter) {
    Var y = ops::grouped_linear(tape, x, rows.sizes, weight, bias, rows.expected_rows, adds_bias);
    return adapter.empty() ? y : adapter.apply(tape, std::move(y), x, context, &rows);
  };
  Var y = linear(input.rows, *fc1_, fc1_bias_, true, *fc1_adapter_);
  const Var inner = ops::expert_activation(tape, y, input.order, options_.activation, input.weights);
  y = linear(inner, *fc2_, fc2_bias_, adds_fc2_bias_, *fc2_adapter_);
  if (options_.recompute_activation) tape.drop_output(inner);
  return y;
}

Var Moe::run_shared_expert(Tape& tape, const Var& x, const TokenContext& context) const {
  if (!options_.recompute_shared) return shared_output(tape, x, context);
  return tape.recompute("shared_experts", {x}, [this, context](Tape& region, std::span<const Var> inputs) {
    return std::vector<Var>{shared_output(region, inputs[0], context)};
  })[0];
}

Var Moe::shared_output(Tape& tape, const Var& x, const TokenContext& context) const {
  Var y = shared_->forward(tape, x, context);
  if (!shared_gate_) return y;
  // The gate is a router with one expert.
  const ops::RouterOptions sigmoid{.topk = 1, .score = kernels::RouterScore::sigmoid};
  const ops::Routing gate = ops::route(tape, ops::router_logits(tape, x, *shared_gate_), sigmoid);
  const ops::ExpertPermutation rows =
      ops::plan_permutation(tape, gate.experts, gate.probabilities.value, {.experts = 1});
  return ops::unpermute(tape, y, rows, gate.probabilities);
}

}  // namespace capstan::nn
