#pragma once

#include "kernels/activation.hpp"
#include "nn/linear.hpp"

namespace capstan::nn {

// fc2(act(fc1(x))), or gated: fc2(act(gate) * up) with fc1 = [gate; up], with the slope, limits and offset of
// the activation.
class Mlp {
 public:
  struct Options {
    int64_t hidden = 0, ffn = 0;
    bool bias = false;
    kernels::ActivationFunction activation{.kind = kernels::ActivationKind::gelu, .gated = false};
    Init init, output_init;
  };
  Mlp(ParamList& parameters, const ModulePath& path, const Options& options);

  // Without the output bias.
  Var forward(Tape& tape, const Var& x, const TokenContext& context) const;
  // See Linear::input_reader.
  const Parameter* input_reader() const { return fc1_.input_reader(); }
  const Parameter* output_bias() const { return fc2_.bias(); }

 private:
  Options options_;
  Linear fc1_, fc2_;
};

}  // namespace capstan::nn
