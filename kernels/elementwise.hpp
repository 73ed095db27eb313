// Element-wise kernels, casts and deterministic reductions.
#pragma once

#include "base/philox.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

struct Elementwise {
  void (*fill)(Context&, Out x, float value, int64_t n);
  void (*cast)(Context&, In x, Out y, int64_t n);                  // fp32 <-> bf16, or a copy
  void (*add)(Context&, In a, In b, Out y, int64_t n);             // y = a + b; y may be a or b
  void (*axpy)(Context&, float alpha, In x, float* y, int64_t n);  // y += alpha x, fp32 y
  void (*scale)(Context&, Out x, float factor, int64_t n);         // x *= factor
  // y = residual + mask * (x + bias) / (1 - p); mask from Philox at (row_ids[r], c): common/dropout.hpp. p =
  // 0 is the plain fused bias + residual. bias [cols] and residual may be null. y may be x or residual.
  void (*bias_dropout_add)(Context&, In x, In bias, In residual, Out y, int64_t rows, int64_t cols, float p,
                           PhiloxKey key, const int64_t* row_ids);
  // y = mask * x / (1 - p), the mask at (row_ids[r], first_column + c); y may be x. The backward pass is the
  // same.
  void (*dropout)(Context&, In x, Out y, int64_t rows, int64_t cols, int64_t first_column, float p,
                  PhiloxKey key, const int64_t* row_ids);
  // Rows [rows, cols] copied between strided matrices (elements between rows).
  void (*copy_rows)(Context&, In x, int64_t x_stride, Out y, int64_t y_stride, int64_t rows, int64_t cols);

  // y[i] = parts[0][i] + parts[1][i] + …, in this order and in fp32, rounded once; or their maximum. The
  // parts are consecutive arrays of n elements. y may be one of them.
  void (*sum_parts)(Context&, In parts, int64_t count, Out y, int64_t n);
  void (*max_parts)(Context&, In parts, int64_t count, Out y, int64_t n);

  // Fixed-shape reductions into one double (the pointer is a device address).
  void (*sum)(Context&, In x, int64_t n, double* out, bool accumulate);
  void (*sum_of_squares)(Context&, In x, int64_t n, double* out, bool accumulate);
  void (*weighted_sum)(Context&, const float* x, const float* weight, int64_t n, double* out,
                       bool accumulate);
  void (*count_nonfinite)(Context&, In x, int64_t n, int64_t* out, bool accumulate);  // NaNs and infinities
};

struct AdamStep {
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  float bias_correction1 = 1, bias_correction2 = 1;  // 1 - beta^t
  bool decoupled = true;                             // AdamW; else L2 added to the gradient
};

struct Optimizers {
  // main[i] fp32 is updated from grad[i] * grad_scale (fp32) with moments m, v (fp32); `model` receives main
  // rounded to its type where it is a separate copy (null otherwise). One pass. 28 bytes read + written an
  // element in fp32.
  void (*adam)(Context&, AdamStep, const float* grad, float grad_scale, float* main, float* m, float* v,
               Out model, int64_t n);
  // SGD with momentum: buf = momentum * buf + g; main -= lr * (nesterov ? g + momentum * buf : buf).
  void (*sgd)(Context&, float lr, float momentum, bool nesterov, float weight_decay, const float* grad,
              float grad_scale, float* main, float* buf, Out model, int64_t n);
};

}  // namespace capstan::kernels
