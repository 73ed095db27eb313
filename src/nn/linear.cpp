#include "nn/linear.hpp"

#include "ops/linear.hpp"

namespace capstan::nn {

Linear::Linear(ParamList& parameters, const ModulePath& path, const Options& options)
    : parallel_(parameters.parallel().tensor), cut_(options.cut) {
  ParamSpec weight = path.spec("weight", {options.out, options.in}, options.init);
  const Sharding by_output{MeshAxis::tensor, 0, options.blocks, options.groups, options.group_kv};
  if (cut_ == Cut::column) weight.sharding = by_output;
  if (cut_ == Cut::row) weight.sharding = {MeshAxis::tensor, 1};
  weight_ = &parameters.add(std::move(weight));
  adapter_.emplace(parameters, path, *weight_, cut_ == Cut::column, options.parts);
  if (!options.bias) return;
  ParamSpec bias = path.spec("bias", {options.out}, {Init::Kind::zeros});
  if (cut_ == Cut::column) bias.sharding = by_output;
  bias.partial_over_tensor = cut_ == Cut::row && parallel_.shards_rows();  // added to this rank's rows
  bias_ = &parameters.add(std::move(bias));
}

Var Linear::forward(Tape& tape, const Var& x, const TokenContext& context) const {
  CAPSTAN_ASSERT(cut_ != Cut::row || !bias_, "the bias of a row-parallel layer comes after its sum");
  return product(tape, x, bias_, context);
}
Var Linear::forward_without_bias(Tape& tape, const Var& x, const TokenContext& context) const {
  return product(tape, x, nullptr, context);
}
Var Linear::product(Tape& tape, const Var& x, const Parameter* bias, const TokenContext& context) const {
  if (!adapter_->empty()) return adapted_product(tape, x, bias, context);
  if (cut_ == Cut::column) return ops::column_linear(tape, x, *weight_, bias, parallel_);
  if (cut_ == Cut::row) return ops::row_linear(tape, x, *weight_, parallel_);
  return ops::linear(tape, x, *weight_, bias);
}

// The adapter works on the rows and the part of the sum that the base product works on.
Var Linear::adapted_product(Tape& tape, const Var& x, const Parameter* bias,
                            const TokenContext& context) const {
  const Var in = cut_ == Cut::column ? ops::copy_to_tensor_parallel(tape, x, parallel_) : x;
  Var y = adapter_->apply(tape, ops::linear(tape, in, *weight_), in, context);
  if (cut_ == Cut::row) y = ops::reduce_from_tensor_parallel(tape, y, parallel_);
  return bias ? ops::bias_dropout_add(tape, std::move(y), bias, {}, {}) : y;
}

}  // namespace capstan::nn
