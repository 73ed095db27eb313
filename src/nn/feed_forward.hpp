#pragma once

#include "nn/token_context.hpp"
#include "ops/tape.hpp"

namespace capstan::nn {

// Interface of the part of a decoder layer that transforms each token by itself: an MLP or a mixture of
// experts.
class FeedForward {
 public:
  virtual ~FeedForward() = default;

  // x[N, hidden] -> [N, hidden], without the output bias, which is fused with the residual addition.
  virtual Var forward(Tape& tape, const Var& x, const TokenContext& context) const = 0;
  // See Linear::input_reader.
  virtual const Parameter* input_reader() const { return nullptr; }
  // Null when there is none.
  virtual const Parameter* output_bias() const { return nullptr; }
  // Whether it adds losses to the gradients in training, which needs TokenContext::loss_weight_sum.
  virtual bool adds_losses() const { return false; }
  // "mlp" or "moe": the name of the region in which it is recomputed.
  virtual const char* name() const = 0;
};

}  // namespace capstan::nn
