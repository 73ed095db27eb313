#include "train/trainer/timers.hpp"

namespace capstan::train {

std::string_view name_of(Phase phase) {
  constexpr std::array<std::string_view, kPhases> names{
      "data", "forward", "backward", "pipeline", "reduce", "optimizer", "evaluate", "save", "other"};
  return names[static_cast<size_t>(phase)];
}

void StepTimers::start_step() {
  seconds_ = {};
  phase_ = Phase::other;
  mark_ = Clock::now();
}

void StepTimers::enter(Phase phase) {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - mark_).count();
  seconds_[static_cast<size_t>(phase_)] += seconds;
  if (listener_) listener_(phase_, std::chrono::duration<double>(now.time_since_epoch()).count(), seconds);
  mark_ = now;
  if (phase_callback_ && phase != phase_) phase_callback_(phase);
  phase_ = phase;
}

double StepTimers::step_seconds() {
  enter(phase_);
  double total = 0;
  for (const double value : seconds_) total += value;
  return total;
}

}  // namespace capstan::train
