#pragma once

#include "base/philox.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// Uniform noise in [1 - epsilon, 1 + epsilon].
struct Jitter {
  // 0: none.
  float epsilon = 0;
  PhiloxKey key{};
  // i64 [N], only with epsilon > 0.
  Tensor dropout_rows;
};
// y[N, hidden] = x times noise (common/dropout.hpp), rounded to x's type; x itself without noise. Saves
// nothing: the backward pass draws the same noise.
Var jitter(Tape& tape, const Var& x, const Jitter& jitter);

// The logits of a router, fp32 [N, experts] = x[N, hidden] W^T, plus bias [experts] unless it is null. x,
// W[experts, hidden] and the bias are in the compute type; logits, their gradients and all sums are in fp32,
// because small differences decide which experts a token chooses. in_fp64: logits and their sums are in fp64;
// ErrorCode::unsupported on a device without it. Saves x.
Var router_logits(Tape& tape, const Var& x, const Parameter& weight, const Parameter* bias = nullptr,
                  bool in_fp64 = false);

}  // namespace capstan::ops
