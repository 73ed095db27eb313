// Softmax cross-entropy over rows of logits, divided into the steps of chunked and vocabulary-parallel
// losses. Logits are fp32, bf16 or fp16. Bytes moved for rows x cols logits of e bytes and gradients of g
// bytes: softcap 2 e, row_max e, row_sums e, backward and full e + g each.
#pragma once

#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

struct CrossEntropy {
  // In place: logits[i] = cap tanh(logits[i] / cap), cap > 0.
  void (*softcap)(Context&, Out logits, float cap, int64_t n);
  // Per row: row_max[r] = max_c logits[r,c] for c < cols (padding beyond is not read). logits [rows,
  // row_stride].
  void (*row_max)(Context&, In logits, int64_t rows, int64_t cols, int64_t row_stride, float* row_max);
  // sum_exp[r] = sum_c exp(logits[r,c] - row_max[r]); target[r] = logits[r, labels[r] - first_col], 0 when
  // the label lies outside [first_col, first_col + cols).
  void (*row_sums)(Context&, In logits, const int32_t* labels, const float* row_max, int64_t rows,
                   int64_t cols, int64_t row_stride, int64_t first_col, float* sum_exp, float* target);
  // loss[r] = log(sum_exp) + row_max - target; negative log-likelihood, natural logarithm.
  void (*loss)(Context&, const float* row_max, const float* sum_exp, const float* target, int64_t rows,
               float* loss);
  // dlogits[r,c] = (exp(logits - row_max) / sum_exp - [c == label]) * weight[r] for c < cols and 0 for the
  // padding up to row_stride; with row stride dlogits_stride. dlogits may overwrite the logits: with their
  // type and stride, or in 16 bits in the first half of each fp32 row (a stride of 2 row_stride). cap > 0:
  // the logits are the output of `softcap`, and dlogits is the gradient of its input: times 1 - (logits /
  // cap)².
  void (*backward)(Context&, In logits, const int32_t* labels, const float* row_max, const float* sum_exp,
                   const float* weight, int64_t rows, int64_t cols, int64_t row_stride, int64_t first_col,
                   float cap, Out dlogits, int64_t dlogits_stride);
  // All steps for unsharded rows (first_col 0), row after row, so that each row is read into the cache once.
  // cap > 0: softcap first. dlogits may be null to compute only the loss.
  void (*full)(Context&, Out logits, const int32_t* labels, const float* weight, int64_t rows, int64_t cols,
               int64_t row_stride, float cap, float* loss, Out dlogits, int64_t dlogits_stride);

  // Rows of logits that a chunk of a loss over `rows` rows holds: enough to make the accumulation of the
  // columns x hidden weight gradient cheap relative to the GEMMs, few enough to keep the logits small. The
  // same for all chunks but the last, at least 1. compute: the type of the GEMMs' operands; differentiates:
  // whether a backward pass follows.
  int64_t (*chunk_rows)(int64_t rows, int64_t columns, DType compute, bool differentiates);
  // The type in which the head's GEMM writes the logits of a loss: fp32, or `compute` where this device
  // gives up precision for half of the memory traffic.
  DType (*logits_type)(DType compute);
};

}  // namespace capstan::kernels
