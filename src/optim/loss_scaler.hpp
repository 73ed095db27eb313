// Loss scaling for fp16 gradients: Megatron's rules.
//
// The loss is multiplied by a scale, and the gradients are divided by it before clipping. A step whose
// gradients overflow (infinities or NaN) is left out. A dynamic scale then shrinks once `hysteresis` such
// steps have been counted; it grows after `window` steps in a row without overflow, and only this growth
// starts the count again. A static scale never changes.
#pragma once

#include <cstdint>
#include <optional>

#include "config/sections/mixed_precision.hpp"

namespace capstan::optim {

// A part of the training state.
struct LossScale {
  double scale = 1;
  // Steps without overflow since the last overflow or growth.
  int64_t clean_steps = 0;
  // Overflows until the scale shrinks; not above 0: each further one shrinks it.
  int64_t overflows_left = 0;
  bool operator==(const LossScale&) const = default;
};

class LossScaler {
 public:
  explicit LossScaler(const config::MixedPrecisionConfig& config) : config_(config) {}

  bool is_dynamic() const { return !config_.loss_scale.has_value(); }
  LossScale initial() const;
  // Updates the scale; called after each step.
  void update(LossScale& state, bool overflow) const;

 private:
  config::MixedPrecisionConfig config_;
};

}  // namespace capstan::optim
