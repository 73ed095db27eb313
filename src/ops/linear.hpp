#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// y[N, out] = x[N, in] W^T (+ bias), W[out, in]. `out` and `in` are those of the resolved tensor: a shard
// gives its part. Keeps x for the weight gradient (nothing when W does not train). F, B and W are 2 N in out
// FLOPs each.
Var linear(Tape& tape, const Var& x, const Parameter& weight, const Parameter* bias = nullptr);

}  // namespace capstan::ops
