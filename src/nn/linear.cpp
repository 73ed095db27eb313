#include "nn/linear.hpp"

#include "ops/linear.hpp"

namespace capstan::nn {

Linear::Linear(ParamList& parameters, const Place& place, const Options& options) {
  ParamSpec weight = place.spec("weight", {options.out, options.in}, options.init);
  if (options.cut != Cut::none)
    weight.sharding = {MeshAxis::tensor, options.cut == Cut::column ? 0 : 1, options.blocks};
  weight_ = &parameters.add(std::move(weight));
  if (!options.bias) return;
  ParamSpec bias = place.spec("bias", {options.out}, {Init::Kind::zeros});
  if (options.cut == Cut::column) bias.sharding = {MeshAxis::tensor, 0, options.blocks};
  bias_ = &parameters.add(std::move(bias));
}

Var Linear::forward(Tape& tape, const Var& x) const {
  return ops::linear(tape, x, *weight_, bias_);
}
Var Linear::forward_without_bias(Tape& tape, const Var& x) const {
  return ops::linear(tape, x, *weight_);
}

}  // namespace capstan::nn
