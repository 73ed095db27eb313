#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// y[N, out] = x[N, in] W^T (+ bias), W[out, in]. `out` and `in` are the sizes of the local shard. Saves x for
// the weight gradient (nothing when W is frozen). Forward, input gradient and weight gradient take 2 N in out
// FLOPs each.
Var linear(Tape& tape, const Var& x, const Parameter& weight, const Parameter* bias = nullptr);

}  // namespace capstan::ops
