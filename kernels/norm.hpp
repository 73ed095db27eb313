// RMSNorm and LayerNorm over the last dimension, also on strided rows (heads inside packed QKV), optionally
// with the residual addition that precedes them.
#pragma once

#include "base/host_device.hpp"
#include "kernels/quantize.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

// Row r is at (r / inner) * outer_stride + (r % inner) * inner_stride; a plain matrix has inner = 1,
// outer_stride = cols.
struct NormRows {
  int64_t rows = 0, cols = 0;
  int64_t inner = 1, inner_stride = 0, outer_stride = 0;

  // Index of the first element of row `row`.
  CAPSTAN_HOST_DEVICE constexpr int64_t start(int64_t row) const {
    // Plain rows without divisions, of which GPUs have no instruction.
    if (inner == 1) return row * outer_stride;
    return row / inner * outer_stride + row % inner * inner_stride;
  }
};

struct Norm {
  // y = (x - mean) * rstd * (gamma + gamma_offset) + beta;  rstd = 1 / sqrt(mean((x-mean)^2) + eps). rms:
  // mean = 0 and rstd = 1 / sqrt(mean(x^2) + eps); beta and mean are null then. gamma [cols], gamma_offset is
  // 1 for zero-centered gamma. With `residual` (same layout as x, only for plain rows): sum = x + residual is
  // written to `sum` and normalized. `sum` may be x's own storage. Saves mean[rows] (layer) and rstd[rows]. x
  // and y may be the same array. `quantized`: y for a linear layer, only for plain rows; it needs no
  // workspace.
  void (*forward)(Context&, bool rms, NormRows, In x, In residual, Out sum, In gamma, float gamma_offset,
                  In beta, float eps, Out y, float* mean, float* rstd, QuantizedOutput quantized);
  // dx (+)= gradient; `x` is the normalized input (the sum where there was a residual). dgamma/dbeta are fp32
  // and are always accumulated into (null: skipped). dx may be dy's own storage when not accumulating.
  void (*backward)(Context&, bool rms, NormRows, In dy, In x, In gamma, float gamma_offset, const float* mean,
                   const float* rstd, Out dx, bool accumulate, float* dgamma, float* dbeta);

  WorkspaceSize (*forward_workspace)(NormRows);
  // parameter_gradients: dgamma or dbeta is given.
  WorkspaceSize (*backward_workspace)(NormRows, bool parameter_gradients);
};

}  // namespace capstan::kernels
