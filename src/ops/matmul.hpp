// Matrix products on tensors: what operations use instead of spelling out GemmShape.
#pragma once

#include "ops/tape.hpp"
#include "tensor/tensor.hpp"

namespace capstan::ops {

enum class Transpose : uint8_t { no, yes };

// c[m, n] = op(a)[m, k] op(b)[k, n] + beta c. Matrices of two dimensions whose rows may lie apart (slices of
// rows or of columns); a and b fp32 or bf16 alike, c fp32 or bf16.
void matmul(Transpose trans_a, Transpose trans_b, const Tensor& a, const Tensor& b, const Tensor& c,
            float beta = 0);

// 2 m n k FLOPs and the bytes of three matrices.
Cost matmul_cost(int64_t m, int64_t n, int64_t k, DType type);

// gradient[n] += sum over rows of x[m, n].
void add_column_sum(const Tensor& x, const Tensor& gradient);

// gradient += partial, both fp32 with equally many elements: how a weight gradient that a backward kernel has
// made as a by-product reaches the gradient buffer.
void add_into(const Tensor& partial, const Tensor& gradient);

// Matrices of two dimensions and equal sizes, whose rows may lie apart; fp32 and bf16 turn into each other, other types are the
// same on both sides.
void copy_matrix(const Tensor& from, const Tensor& to);

// A copy of `tensor` that nobody else holds.
Tensor copy_of(const Tensor& tensor);

// The tensor itself where it is the only view of its memory, so that the kernel may write over it; else new
// memory of the same shape and type, uninitialised.
Tensor reuse_or_empty(const Tensor& tensor);

}  // namespace capstan::ops
