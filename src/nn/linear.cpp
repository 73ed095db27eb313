#include "nn/linear.hpp"

#include "ops/linear.hpp"

namespace capstan::nn {

Linear::Linear(ParamList& parameters, const ModulePath& path, const Options& options)
    : parallel_(parameters.parallel().tensor), sharding_(options.sharding) {
  ParamSpec weight = path.spec("weight", {options.out, options.in}, options.init);
  const Sharding by_output{ShardingAxis::tensor, 0, options.blocks, options.groups, options.group_kv};
  weight.linear = true;
  if (sharding_ == LinearSharding::column) weight.sharding = by_output;
  if (sharding_ == LinearSharding::row) weight.sharding = {ShardingAxis::tensor, 1};
  // The gradient covers this rank's rows.
  weight.partial_over_tensor = sharding_ == LinearSharding::none && parallel_.shards_rows();
  weight_ = &parameters.add(std::move(weight));
  adapter_.emplace(parameters, path, *weight_, sharding_, options.slices);
  if (!options.bias) return;
  ParamSpec bias = path.spec("bias", {options.out}, {Init::Kind::zeros});
  if (sharding_ == LinearSharding::column) bias.sharding = by_output;
  // Added to this rank's rows.
  bias.partial_over_tensor = sharding_ != LinearSharding::column && parallel_.shards_rows();
  bias_ = &parameters.add(std::move(bias));
}

Var Linear::forward(Tape& tape, const Var& x, const TokenContext& context, Bias use) const {
  const Parameter* bias = use == Bias::added ? bias_ : nullptr;
  CAPSTAN_ASSERT(sharding_ != LinearSharding::row || !bias,
                 "the bias of a row-parallel layer comes after its sum");
  if (!adapter_->empty()) return adapted_matmul(tape, x, bias, context);
  if (sharding_ == LinearSharding::column) return ops::column_linear(tape, x, *weight_, bias, parallel_);
  if (sharding_ == LinearSharding::row) return ops::row_linear(tape, x, *weight_, parallel_);
  return ops::linear(tape, x, *weight_, bias);
}

const Parameter* Linear::input_reader() const {
  if (parallel_.is_single() || sharding_ == LinearSharding::none) return weight_;
  const bool copied = parallel_.shards_rows() || !adapter_->empty();
  return sharding_ == LinearSharding::column && !copied ? weight_ : nullptr;
}

// The adapter's update is in the parallel state of the base product: rows, columns, or a partial sum.
Var Linear::adapted_matmul(Tape& tape, const Var& x, const Parameter* bias,
                           const TokenContext& context) const {
  Var y;
  if (sharding_ != LinearSharding::column) {
    y = adapter_->apply(tape, ops::linear(tape, x, *weight_), x, context);
  } else if (parallel_.shards_rows()) {
    y = adapter_->apply(tape, ops::column_linear(tape, x, *weight_, nullptr, parallel_), x, context);
  } else {
    // The gradients of both inputs are summed over the ranks at once.
    const Var in = ops::copy_to_tensor_parallel(tape, x, parallel_, "input of " + weight_->name());
    y = adapter_->apply(tape, ops::linear(tape, in, *weight_), in, context);
  }
  if (sharding_ == LinearSharding::row)
    y = ops::reduce_from_tensor_parallel(tape, y, parallel_, "output of " + weight_->name());
  return bias ? ops::bias_dropout_add(tape, std::move(y), bias, {}, {}) : y;
}

}  // namespace capstan::nn
