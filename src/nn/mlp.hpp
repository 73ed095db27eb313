#pragma once

#include "kernels/activation.hpp"
#include "nn/feed_forward.hpp"
#include "nn/linear.hpp"

namespace capstan::nn {

// fc2(act(fc1(x))), or gated: fc2(act(gate) * up) with fc1 = [gate; up], with the slope, limits and offset of
// the activation.
class Mlp final : public FeedForward {
 public:
  struct Options {
    int64_t hidden = 0, ffn = 0;
    bool bias = false;
    kernels::ActivationFunction activation{.kind = kernels::ActivationKind::gelu, .gated = false};
    Init init, output_init;
  };
  Mlp(ParamList& parameters, const ModulePath& path, const Options& options);

  Var forward(Tape& tape, const Var& x, const TokenContext& context) const override;
  const Parameter* input_reader() const override { return fc1_.input_reader(); }
  const Parameter* output_bias() const override { return fc2_.bias(); }
  const char* name() const override { return "mlp"; }

 private:
  Options options_;
  Linear fc1_, fc2_;
};

}  // namespace capstan::nn
