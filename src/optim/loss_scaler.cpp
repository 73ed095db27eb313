#include "optim/loss_scaler.hpp"

#include <algorithm>

namespace capstan::optim {

namespace {
constexpr double kGrowth = 2.0, kBackoff = 0.5;
}  // namespace

LossScale LossScaler::initial() const {
  return {.scale = config_.loss_scale.value_or(config_.initial_loss_scale),
          .clean_steps = 0,
          .overflows_left = config_.hysteresis};
}

void LossScaler::update(LossScale& state, bool overflow) const {
  if (!is_dynamic()) return;
  if (overflow) {
    state.clean_steps = 0;
    if (--state.overflows_left <= 0) state.scale = std::max(state.scale * kBackoff, config_.min_loss_scale);
    return;
  }
  if (++state.clean_steps < config_.loss_scale_window) return;
  state.clean_steps = 0;
  state.overflows_left = config_.hysteresis;
  state.scale *= kGrowth;
}

}  // namespace capstan::optim
