#include "nn/mlp.hpp"

#include "ops/activation.hpp"

namespace capstan::nn {

static std::vector<OutputSlice> slices_of(const Mlp::Options& o, int ranks) {
  if (!o.activation.gated) return {};
  const int64_t ffn = o.ffn / ranks;
  return {{"linear_fc1_gate", {1, 0, ffn}, o.ffn, {ShardingAxis::tensor, 0}},
          {"linear_fc1_up", {1, ffn, ffn}, o.ffn, {ShardingAxis::tensor, 0}}};
}

Mlp::Mlp(ParamList& parameters, const ModulePath& path, const Options& options)
    : options_(options),
      fc1_(parameters, path.inside("linear_fc1"),
           {.in = options.hidden,
            .out = options.ffn * (options.activation.gated ? 2 : 1),
            .bias = options.bias,
            .init = options.init,
            .sharding = LinearSharding::column,
            .blocks = options.activation.gated ? 2 : 1,
            .slices = slices_of(options, parameters.parallel().tensor.size())}),
      fc2_(parameters, path.inside("linear_fc2"),
           {.in = options.ffn,
            .out = options.hidden,
            .bias = options.bias,
            .init = options.output_init,
            .sharding = LinearSharding::row}) {}

Var Mlp::forward(Tape& tape, const Var& x, const TokenContext& context) const {
  const kernels::ActivationFunction& function = options_.activation;
  Var inner =
      fc1_.forward(tape, x, context, function.is_plain() ? Linear::Bias::by_caller : Linear::Bias::added);
  inner = function.is_plain() ? ops::bias_activation(tape, inner, fc1_.bias(), function.kind, function.gated,
                                                     fc2_.input_reader())
                              : ops::activation(tape, inner, function);
  return fc2_.forward(tape, inner, context, Linear::Bias::by_caller);
}

}  // namespace capstan::nn
