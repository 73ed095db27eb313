// Kernels of adapters: DoRA's magnitudes (Liu et al. 2024) and weights of 4 bits (NF4, Dettmers et al. 2023).
#pragma once

#include <cstdint>

#include "tensor/kernel_context.hpp"
#include "tensor/region.hpp"

namespace capstan::kernels {

struct Adapter {
  // Squared lengths of the rows of W + s B A, without computing the sum: n2[j] = |w_j|^2 + 2 s p_j . b_j +
  // s^2 b_j G b_j, with P = W A^T [out, rank] and G = A A^T [rank, rank]. W[out, in] and B[out, rank] are of
  // the compute type.
  void (*row_lengths)(Context&, In w, const float* p, In b, const float* g, float s, float* n2, int64_t out,
                      int64_t in, int64_t rank);
  // y[r, j] = u[r, j] m[j] / sqrt(n2[j]); y may be u.
  void (*scale_columns)(Context&, In u, In m, const float* n2, Out y, int64_t rows, int64_t columns);
  // dm[j] += sum over r of dy[r, j] u[r, j] / sqrt(n2[j]).
  void (*magnitude_gradient)(Context&, In dy, In u, const float* n2, float* dm, int64_t rows,
                             int64_t columns);
  // Writes the scale of each block of x[n], its largest magnitude, and the code of the value nearest to each
  // element. Codes as below.
  void (*nf4_quantize)(Context&, const float* x, int64_t n, int64_t block, uint8_t* codes, float* scales);
  // y[rows, columns] = the value of each 4-bit code times the scale of its block, for a region of a matrix
  // with `matrix_columns` columns. `block` neighboring elements share a scale, counted row-major over the
  // matrix; the region consists of full rows, or its column offset and column count are multiples of the
  // block. codes: two per byte, the first in the high bits. The scale of block i of the region is scales[i];
  // where `scales` is null (double quantization) it is map[scale_codes[i]] * nested[k / 256] + *offset, with
  // k the index of the block in the matrix.
  void (*nf4_dequantize)(Context&, Region region, int64_t matrix_columns, int64_t block, const uint8_t* codes,
                         const float* scales, const uint8_t* scale_codes, const float* nested,
                         const float* map, const float* offset, Out y);

  WorkspaceSize (*row_lengths_workspace)(int64_t rank);
  WorkspaceSize (*scale_columns_workspace)(int64_t columns);
  WorkspaceSize (*magnitude_gradient_workspace)();
};

}  // namespace capstan::kernels
