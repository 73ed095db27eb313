// GEMM on row-major arrays.
#pragma once

#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

struct GemmShape {
  bool trans_a = false, trans_b = false;
  int64_t m = 0, n = 0, k = 0;
  // Elements between rows as stored.
  int64_t lda = 0, ldb = 0, ldc = 0;
};

struct Gemm {
  // C[m,n] = alpha * op(A)[m,k] op(B)[k,n] + beta * C. A, B: fp32 or bf16 (both the same); C: fp32 or bf16.
  // Sums in fp32. 2mnk FLOPs. The result depends on the shape only, not on the number of threads. k = 0 gives
  // beta * C.
  void (*run)(Context&, GemmShape, In a, In b, Out c, float alpha, float beta);
  // out[n] (+)= sum over rows of x[m,n]: bias gradients. out is fp32.
  void (*column_sum)(Context&, In x, float* out, int64_t rows, int64_t cols, int64_t row_stride,
                     bool accumulate);
  WorkspaceSize (*run_workspace)(GemmShape, DType a, DType c, float alpha, float beta);
  WorkspaceSize (*column_sum_workspace)(int64_t rows, int64_t cols);
};

}  // namespace capstan::kernels
