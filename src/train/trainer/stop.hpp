// Requests to stop: SIGINT and SIGTERM (and SIGUSR1, which mpirun forwards) ask the loop to save and leave
// after the current step; a second SIGINT or SIGTERM ends the process at once with 130 or 143.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "comm/world.hpp"
#include "train/trainer/progress.hpp"

namespace capstan::train {

// The answer to a request: "stopping after this step, about 12 s; again to stop now". phase: name_of(Phase)
// of what runs; step: its number, 0 before the first; remaining_ns: until the run can stop, 0 or less:
// unknown. Safe in a signal handler.
std::string_view stop_notice(std::span<char> buffer, std::string_view phase, int64_t step,
                             int64_t remaining_ns);

class StopSignals {
 public:
  // Installs the handlers; one object at a time. `sink` gets the answer to the first signal, from within the
  // handler; null: no answer. handles false: signals keep their default action, and only the file counts.
  explicit StopSignals(ProgressSink* sink, bool handles = true);
  // Puts back what was there.
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  // A signal has come, or a parent of several ranks has left the file that CAPSTAN_STOP_FILE names.
  static bool received();
  // Inputs of the answer. `phase`: a literal; seconds: from now until the run can stop, 0: unknown.
  static void at_step(int64_t step);
  static void at_phase(std::string_view phase);
  static void expect(double seconds);

 private:
  bool handles_;
};

// Publishes the seconds until the run can stop, to the signal handler and to the watchdog of the other ranks;
// 0: unknown.
void publish_expected_stop(comm::World& world, double seconds);

}  // namespace capstan::train
