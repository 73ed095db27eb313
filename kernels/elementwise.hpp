// Element-wise kernels, casts and deterministic reductions.
#pragma once

#include "base/philox.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

struct Elementwise {
  void (*fill)(Context&, Out x, float value, int64_t n);
  // y = x, each fp32, bf16 or fp16.
  void (*cast)(Context&, In x, Out y, int64_t n);
  // y = a + b; y may be a or b.
  void (*add)(Context&, In a, In b, Out y, int64_t n);
  // y += alpha x, fp32 y.
  void (*axpy)(Context&, float alpha, In x, float* y, int64_t n);
  // x *= factor.
  void (*scale)(Context&, Out x, float factor, int64_t n);
  // y = residual + mask * (x + bias) / (1 - p); mask from Philox at (dropout_rows[r], c): common/dropout.hpp.
  // p = 0 is the plain fused bias + residual. bias [cols] and residual may be null. y may be x or residual.
  void (*bias_dropout_add)(Context&, In x, In bias, In residual, Out y, int64_t rows, int64_t cols, float p,
                           PhiloxKey key, const int64_t* dropout_rows);
  // y = mask * x / (1 - p), the mask at (dropout_rows[r], first_column + c); y may be x. The backward pass is
  // the same.
  void (*dropout)(Context&, In x, Out y, int64_t rows, int64_t cols, int64_t first_column, float p,
                  PhiloxKey key, const int64_t* dropout_rows);
  // y = x times the factors of jitter (common/dropout.hpp) at (dropout_rows[r], c); y may be x. The backward
  // pass is the same.
  void (*jitter)(Context&, In x, Out y, int64_t rows, int64_t cols, float epsilon, PhiloxKey key,
                 const int64_t* dropout_rows);
  // Rows [rows, cols] copied between strided matrices (elements between rows).
  void (*copy_rows)(Context&, In x, int64_t x_stride, Out y, int64_t y_stride, int64_t rows, int64_t cols);

  // y[i] = parts[0][i] + parts[1][i] + …, in this order and in fp32, rounded once; or their maximum. The
  // parts are consecutive arrays of n elements. y may be one of them.
  void (*sum_parts)(Context&, In parts, int64_t count, Out y, int64_t n);
  void (*max_parts)(Context&, In parts, int64_t count, Out y, int64_t n);

  // Fixed-shape reductions into one double (the pointer is a device address).
  void (*sum)(Context&, In x, int64_t n, double* out, bool accumulate);
  void (*weighted_sum)(Context&, const float* x, const float* weight, int64_t n, double* out,
                       bool accumulate);
  // NaNs and infinities.
  void (*count_nonfinite)(Context&, In x, int64_t n, int64_t* out, bool accumulate);

  WorkspaceSize (*bias_dropout_add_workspace)(bool bias, int64_t cols);
  WorkspaceSize (*sum_workspace)(int64_t n);
  WorkspaceSize (*weighted_sum_workspace)(int64_t n);
  WorkspaceSize (*count_nonfinite_workspace)(int64_t n);
};

}  // namespace capstan::kernels
