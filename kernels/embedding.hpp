// Token (and learned position) embedding.
#pragma once

#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

struct Embedding {
  // out[r] = table[ids[r] - first_row] (+ position_table[positions[r]] when given); ids outside [first_row,
  // first_row+rows_here) give zero (a vocabulary shard of another rank). table [rows_here, cols].
  void (*forward)(Context&, In table, const int32_t* ids, In position_table, const int32_t* positions,
                  Out out, int64_t rows, int64_t cols, int64_t first_row, int64_t rows_here);
  // dtable[ids[r] - first_row] += dout[r] in the order of r (deterministic: sorted by id, no atomics). dtable
  // fp32.
  void (*backward)(Context&, In dout, const int32_t* ids, float* dtable, int64_t rows, int64_t cols,
                   int64_t first_row, int64_t rows_here);
  WorkspaceSize (*backward_workspace)(int64_t rows, int64_t cols, int64_t rows_here);
};

}  // namespace capstan::kernels
