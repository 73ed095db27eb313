// The end of a training step on the device: sums over ranks, and the decision whether and with which factor
// the update changes the parameters. The host reads the values once, after the update.
#pragma once

#include <cstdint>
#include <limits>

#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

// Read by the update kernels from device memory.
struct StepControl {
  // Multiplies every gradient: clipping times 1 / (number of loss tokens) times 1 / (loss scale).
  float gradient = 1;
  // Not 0: parameters and optimizer state stay as they are.
  int32_t skip = 0;
};

// The values of a step in device memory.
struct StepValues {
  // Sums of the losses and of their weights.
  double loss_sum = 0, loss_tokens = 0;
  double gradient_squares = 0;
  int64_t zero_gradients = 0;
  double parameter_squares = 0;
  // Sum of StepControlKernels::add_fingerprint, of this rank alone.
  int64_t fingerprint = 0;
  // Set by `control`: the mean loss, the L2 norm of its gradient before clipping.
  double loss = 0, norm = 0;
  StepControl control;
};

// Values that the host knows before the step.
struct StepLimits {
  static constexpr double kNone = std::numeric_limits<double>::infinity();
  // Maximum gradient norm; 0: no clipping.
  double clip = 0;
  // The factor of the loss whose gradients were computed.
  double loss_scale = 1;
  // A finite loss or norm above its spike limit, or any norm above the largest one, skips the update.
  double loss_spike = kNone, norm_spike = kNone, largest_norm = kNone;
  // Whether a loss or norm that is not finite skips the update.
  int32_t require_finite = 0;
};

struct StepControlKernels {
  // total[0] = sums[0] + sums[1] + …, in this order, count may be 0; total[1] = tokens.
  void (*sum_losses)(Context&, const double* sums, int64_t count, double tokens, double* total);
  // sum[i] = parts[0][i] + parts[1][i] + …, in this order; fp64 or i64. The parts are consecutive arrays of
  // n elements.
  void (*sum_ranks)(Context&, In parts, int64_t ranks, Out sum, int64_t n);
  // *sum += the hash of each 32-bit word of `data` with its index and `salt`, modulo 2^64, which does not
  // depend on the order. Equal data give equal sums; different data give equal sums with a probability of
  // about 2^-64. The last 1 to 3 bytes are a word too. Reads each byte once.
  void (*add_fingerprint)(Context&, In data, int64_t bytes, int64_t salt, int64_t* sum);
  // Computes loss, norm and control from the sums. `values`: one StepValues.
  void (*control)(Context&, StepLimits limits, Out values);
};

}  // namespace capstan::kernels
