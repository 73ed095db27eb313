// GEMM on row-major arrays.
#pragma once

#include "kernels/operand.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

// How tensor cores add products of FP8 with scales of tensors. fast: without moving partial sums to fp32
// registers, which on sm_89 and sm_90 is faster and less accurate. Other operands and devices add in fp32.
enum class Accumulation : uint8_t { fp32, fast };

struct GemmShape {
  bool trans_a = false, trans_b = false;
  int64_t m = 0, n = 0, k = 0;
  // Leading dimensions: elements between the rows as stored.
  int64_t lda = 0, ldb = 0, ldc = 0;
  // Number of independent GEMMs of this shape (strided batch).
  int64_t batch = 1;
  // Elements between the matrices of consecutive GEMMs; 0: all have the same matrix. Matrices with scales lie
  // one after the other: their stride is rows * k, or 0.
  int64_t stride_a = 0, stride_b = 0, stride_c = 0;
  Accumulation accumulation = Accumulation::fp32;
};

// Dimension of a grouped GEMM that is divided into consecutive groups (experts). m: the rows of A and C; each
// group is multiplied by its own B. k: the dimension that is summed over; each group has its own C.
enum class GemmGroups : uint8_t { m, k };

// The types of a GEMM, on which its workspace depends besides the shape.
struct GemmTypes {
  DType a = DType::f32, b = DType::f32, c = DType::f32;
  ScaleLayout a_scales = ScaleLayout::none, b_scales = ScaleLayout::none;
};

struct Gemm {
  // C[m,n] = alpha * op(A)[m,k] op(B)[k,n] + beta * C + bias[n] (null: none). Sums in fp32. 2mnk FLOPs. C:
  // fp32, bf16 or fp16. A, B: one of them, both the same; or both with scales, each in its own type of 8 or 4
  // bits, with A stored as [m,k] and B as [n,k] (trans_a false, trans_b true) as the tensor cores of GPUs
  // read them. The result depends on the shape only, not on the number of threads. k = 0 gives beta * C.
  void (*run)(Context&, GemmShape, Operand a, Operand b, Out c, float alpha, float beta, In bias);
  // The same in groups of sizes[count] rows, in device memory. The shape's m (or k) is an upper bound of the
  // sum of sizes; rows beyond that sum are not touched. GemmGroups::m: group g multiplies with
  // B + g * stride_b. GemmGroups::k: it writes C + g * stride_c, and where it is empty beta * C; scales
  // must begin anew with each group, that is, sizes are multiples of the block. bias: of
  // GemmGroups::m alone, [count, n].
  void (*run_grouped)(Context&, GemmShape, GemmGroups, const int64_t* sizes, int64_t count, Operand a,
                      Operand b, Out c, float alpha, float beta, In bias);
  // out[n] (+)= sum over rows of x[m,n]: bias gradients. out is fp32.
  void (*column_sum)(Context&, In x, float* out, int64_t rows, int64_t cols, int64_t row_stride,
                     bool accumulate);
  // Workspaces, for the arguments of the launch.
  WorkspaceSize (*run_workspace)(GemmShape, GemmTypes, float alpha, float beta);
  WorkspaceSize (*run_grouped_workspace)(GemmShape, GemmGroups, int64_t count, GemmTypes, float alpha,
                                         float beta);
  WorkspaceSize (*column_sum_workspace)(int64_t rows, int64_t cols);
  // Selects whether fp32 GEMMs of this process round A and B to TF32 (10 bits of mantissa), from the next
  // launch on; initially false. Null on devices without TF32.
  void (*use_tf32)(bool) = nullptr;
};

}  // namespace capstan::kernels
