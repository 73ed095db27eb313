// Formula of the cross-entropy loss that devices share.
#pragma once

#include <cmath>

#include "base/host_device.hpp"

namespace capstan::kernels {

// The loss of a row of logits with the logit `target` of its label. max: the largest logit; sum_exp: the sum
// of e^(logit - max).
CAPSTAN_HOST_DEVICE inline float loss_of_row(float max, float sum_exp, float target) {
  return std::log(sum_exp) + (max - target);
}

}  // namespace capstan::kernels
