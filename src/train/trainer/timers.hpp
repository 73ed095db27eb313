// Measures the phases of a training step. Every moment belongs to exactly one phase, so that the phases add
// up to the step.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>

#include "base/clock.hpp"

namespace capstan::train {

enum class Phase : uint8_t {
  data,
  forward,
  backward,
  pipeline,
  reduce,
  optimizer,
  evaluate,
  save,
  other,
  count_
};
inline constexpr size_t kPhases = static_cast<size_t>(Phase::count_);
std::string_view name_of(Phase phase);

class StepTimers {
 public:
  StepTimers() { start_step(); }
  // Sets all phases to zero. The time until the first enter() counts as `other`.
  void start_step();
  // Ends the current phase and begins this one.
  void enter(Phase phase);
  double seconds(Phase phase) const { return seconds_[static_cast<size_t>(phase)]; }
  // Returns the sum of all phases up to now.
  double step_seconds();
  // Excludes the last `seconds` from the step, because something else was measured in that time.
  void exclude(double seconds) {
    mark_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  // Called for each interval of a phase as it ends, with the host clock (steady, seconds) and its length.
  using Listener = std::function<void(Phase phase, double end, double seconds)>;
  void listen(Listener listener) { listener_ = std::move(listener); }
  // Called for each phase as it begins.
  void announce(std::function<void(Phase)> phase_callback) { phase_callback_ = std::move(phase_callback); }

 private:
  using Clock = std::chrono::steady_clock;
  Listener listener_;
  std::function<void(Phase)> phase_callback_;
  std::array<double, kPhases> seconds_{};
  Phase phase_ = Phase::other;
  Clock::time_point mark_;
};

// Time of the steps between two logged points. Only the steps that this process ran count.
struct IntervalSeconds {
  int64_t steps = 0;
  int64_t samples = 0;
  double total = 0;
  std::array<double, kPhases> phases{};

  void add(double step_seconds, int64_t step_samples, const StepTimers& timers) {
    ++steps;
    samples += step_samples;
    total += step_seconds;
    for (size_t p = 0; p < kPhases; ++p) phases[p] += timers.seconds(static_cast<Phase>(p));
  }
  // Mean time of a step.
  double mean() const { return total / static_cast<double>(steps); }
};

}  // namespace capstan::train
