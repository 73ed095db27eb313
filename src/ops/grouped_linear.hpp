#pragma once

#include "ops/tape.hpp"

namespace capstan::ops {

// y[rows of expert e] = x[rows of expert e] W[e]^T (+ bias[e]). x [rows, in], W [experts, out, in], bias
// [experts, out]; `out`, `in` and `experts` are the sizes of the local shard. sizes i64 [experts]: the rows
// of each expert, which follow one another; it stays on the device. Rows beyond their sum are neither read
// nor written; GEMMs in 8 bits set those of x to 0. Saves x for the weight gradient (nothing when W is
// frozen). Forward, input gradient and weight gradient take 2 rows in out FLOPs each.
// expected_rows: how many of the rows are used on average, for the counts of FLOPs; 0: all.
// adds_bias: false where y is a part of a sum over ranks and another rank adds the bias, whose gradient here
// is then 0.
Var grouped_linear(Tape& tape, const Var& x, const Tensor& sizes, const Parameter& weight,
                   const Parameter* bias = nullptr, int64_t expected_rows = 0, bool adds_bias = true);

// The adapters of experts: y[rows of expert e, out] + scale h[rows of e] B[e]^T on the columns from
// first_column on; h[rows, rank] = x A[e]^T, B[experts, columns, rank] (local shard). Move y in, so that the
// result overwrites it. Saves h. Forward 2 rows rank columns FLOPs, backward twice that.
Var grouped_low_rank_add(Tape& tape, Var y, const Var& h, const Tensor& sizes, const Parameter& b,
                         float scale, int64_t first_column = 0, int64_t expected_rows = 0);

}  // namespace capstan::ops
