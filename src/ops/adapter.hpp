// Adapters beside a frozen linear layer: LoRA (Hu et al. 2022) and DoRA's magnitudes (Liu et al. 2024).
//
// Under tensor parallelism both work on what a rank holds: after a column-parallel layer's rows have come together, before a
// row-parallel layer's sum.
#pragma once

#include "comm/communicator.hpp"
#include "ops/bias_dropout_add.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// Columns of y: [begin, begin + count) of each of `groups` equal parts. count 0: all columns.
struct ColumnRuns {
  int64_t groups = 1, begin = 0, count = 0;
};

// y[N, out] + scale (x A^T) B^T on the columns of `runs`; x[N, in], A[rank, in], B[groups * count, rank] (local shards). Move y in:
// its memory then takes the result. Keeps x and x A^T. Of each pass 2 N rank (in + columns) FLOPs, twice that backward.
Var low_rank_add(Tape& tape, Var y, const Var& x, const Parameter& a, const Parameter& b, float scale,
                 ColumnRuns runs = {});

// u[N, out] with the columns of `runs` scaled: m_j / |row j of W + scale B A|. u is the product with W + scale B A; W, A and B
// count as constants here. `group`: ranks that hold parts of the rows (W and A are cut by columns), else null. Keeps those columns
// of u. Move u in: its memory then takes the result of a part of the columns.
Var magnitude(Tape& tape, Var u, const Parameter& weight, const Parameter& a, const Parameter& b,
              const Parameter& m, float scale, comm::Communicator* group, ColumnRuns runs = {});

// The squared lengths of those rows, fp32 [groups * count].
Tensor squared_row_lengths(StepContext& context, const Parameter& weight, const Parameter& a,
                           const Parameter& b, float scale, comm::Communicator* group, ColumnRuns runs = {});

// Dropout of a part of x's columns: those from first_column on. The mask depends on the global column.
Var dropout_columns(Tape& tape, Var x, const Dropout& dropout, int64_t first_column);

}  // namespace capstan::ops
