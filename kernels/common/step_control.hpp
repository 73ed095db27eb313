// Gradient clipping and the decision at the end of a step, for all devices.
#pragma once

#include <cmath>

#include "base/host_device.hpp"
#include "kernels/step_control.hpp"

namespace capstan::kernels {

// Returns the factor that scales gradients of this norm down to `clip`; 1 if the norm is not larger or `clip`
// is 0.
CAPSTAN_HOST_DEVICE inline double clip_factor(double norm, double clip) {
  return clip > 0 && norm > clip ? clip / (norm + 1e-6) : 1.0;
}

// Computes loss, norm and control of the step from its sums (StepControlKernels::control).
CAPSTAN_HOST_DEVICE inline void control_step(const StepLimits& limits, StepValues& v) {
  const double scale = v.loss_tokens > 0 ? 1.0 / v.loss_tokens : 0.0, unscale = 1.0 / limits.loss_scale;
  v.loss = v.loss_sum * scale * unscale;
  v.norm = std::sqrt(v.gradient_squares) * scale * unscale;
  const bool finite_loss = std::isfinite(v.loss), finite_norm = std::isfinite(v.norm);
  const bool skip = (limits.require_finite != 0 && !(finite_loss && finite_norm)) ||
                    (finite_loss && v.loss > limits.loss_spike) ||
                    (finite_norm && v.norm > limits.norm_spike) || v.norm > limits.largest_norm;
  v.control.gradient = static_cast<float>(scale * clip_factor(v.norm, limits.clip) * unscale);
  v.control.skip = skip ? 1 : 0;
}

}  // namespace capstan::kernels
