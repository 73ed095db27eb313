// Adapters beside a frozen linear layer: LoRA (Hu et al. 2022) and DoRA's magnitudes (Liu et al. 2024). Under
// tensor parallelism both work on a rank's local columns, before the sum of a row-parallel layer.
#pragma once

#include "comm/communicator.hpp"
#include "ops/bias_dropout_add.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// Columns of y: [begin, begin + count) of each of `groups` equal parts. count 0: all columns.
struct ColumnSegments {
  int64_t groups = 1, begin = 0, count = 0;
};

// y[N, out] + scale h B^T on the columns of `segments`; h[N, rank] = x A^T, B[groups * count, rank] (local
// shard). Move y in, so that the result overwrites it. Saves h. Forward 2 N rank columns FLOPs, backward
// twice that.
Var low_rank_add(Tape& tape, Var y, const Var& h, const Parameter& b, float scale,
                 ColumnSegments segments = {});

// u[N, out] with the columns of `segments` scaled: m_j / |row j of W + scale B A|. u = x (W + scale B A)^T;
// W, A and B are constants here. `group`: the ranks over which the columns of W and A are sharded, else null.
// Saves those columns of u. Move u in, so that the result overwrites it.
Var magnitude(Tape& tape, Var u, const Parameter& weight, const Parameter& a, const Parameter& b,
              const Parameter& m, float scale, comm::Communicator* group, ColumnSegments segments = {});

// The squared norms of the rows of W + scale B A, fp32 [groups * count].
Tensor squared_row_lengths(StepContext& context, const Parameter& weight, const Parameter& a,
                           const Parameter& b, float scale, comm::Communicator* group,
                           ColumnSegments segments = {});

// Dropout of a column shard of x that begins at global column first_column. The mask depends on the global
// column.
Var dropout_columns(Tape& tape, Var x, const Dropout& dropout, int64_t first_column);

}  // namespace capstan::ops
