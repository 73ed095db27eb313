// Formulas of the kernels of optimizers.hpp over a range of a flat buffer, for all devices.
#pragma once

#include "base/host_device.hpp"
#include "kernels/optimizers.hpp"

namespace capstan::kernels {

// The learning rate and weight decay of a range.
struct RangeScale {
  float lr, decay;
};
CAPSTAN_HOST_DEVICE inline RangeScale scale_of(const StepScale& step, const UpdateRange& range) {
  const double lr = range.decoupled_lr != 0 ? step.decoupled_lr : step.lr;
  return {static_cast<float>(lr * range.lr_factor), range.weight_decay != 0 ? step.weight_decay : 0.0f};
}

// Index of the scale of element `i` of the buffer, in a moment of fp8.
CAPSTAN_HOST_DEVICE inline int64_t moment_block(const UpdateRange& range, int64_t i) {
  return range.first_block + (i - range.begin) / kMomentBlock;
}

// The first tile of every range, and the number of all tiles.
constexpr WorkspaceSize update_workspace(int64_t range_count) {
  return {static_cast<size_t>(range_count + 1) * sizeof(int64_t), 0};
}

}  // namespace capstan::kernels
