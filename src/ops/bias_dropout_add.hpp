#pragma once

#include "base/philox.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

struct Dropout {
  // Probability that an element is dropped; 0: none.
  float p = 0;
  PhiloxKey key{};
  // i64 [N], only with p > 0.
  Tensor dropout_rows;
};

// y[N, h] = residual + dropout(x + bias); bias and residual may be absent (null, undefined). Move x in, so
// that the result overwrites it. Saves nothing: the backward pass recomputes the mask.
Var bias_dropout_add(Tape& tape, Var x, const Parameter* bias, const Var& residual, const Dropout& dropout);

// y = a + b.
Var add(Tape& tape, Var a, const Var& b);

}  // namespace capstan::ops
