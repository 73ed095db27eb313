// Matrix products on tensors, so that operations need not fill in a GemmShape.
#pragma once

#include "kernels/gemm_arguments.hpp"
#include "ops/tape.hpp"
#include "tensor/flat_range.hpp"
#include "tensor/tensor.hpp"

namespace capstan::ops {

enum class Transpose : uint8_t { no, yes };

// c[m, n] = alpha op(a)[m, k] op(b)[k, n] + beta c. Matrices whose rows may have a stride (slices of rows or
// of columns); a and b in fp32, bf16 or fp16 alike, c in any of them. Adds the bias [n]
// where it is defined.
void matmul(Transpose trans_a, Transpose trans_b, const Tensor& a, const Tensor& b, const Tensor& c,
            float beta = 0, float alpha = 1, const Tensor& bias = {});
// c[m, n] = a[m, k] b[n, k]^T + beta c + bias of matrices with scales.
void scaled_matmul(const GemmOperand& a, const GemmOperand& b, const Tensor& c, float beta = 0,
                   const Tensor& bias = {}, kernels::Accumulation accumulation = kernels::Accumulation::fp32);

// 2 m n k FLOPs and the bytes of three matrices.
Cost matmul_cost(int64_t m, int64_t n, int64_t k, DType type);

// gradient[n] += sum over rows of x[m, n].
void add_column_sum(const Tensor& x, const Tensor& gradient);

// gradient += partial, both fp32 with the same number of elements. For weight gradients that are a by-product
// of a backward kernel.
void add_into(const Tensor& partial, const Tensor& gradient);

// Copies a matrix whose rows may have a stride to one of equal sizes. Converts between fp32, bf16 and fp16;
// other types must agree.
void copy_matrix(const Tensor& from, const Tensor& to);

// Rows of a matrix, which share its memory.
Tensor rows_of(const Tensor& x, const FlatRange& rows);

// A contiguous copy of `tensor` in new memory.
Tensor copy_of(const Tensor& tensor);

// The tensor itself where it is the only view of its memory, so that the kernel may overwrite it; otherwise
// an uninitialized tensor of the same shape and type.
Tensor reuse_or_empty(const Tensor& tensor);

}  // namespace capstan::ops
