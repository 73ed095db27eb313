// Requests to stop: SIGINT and SIGTERM (and SIGUSR1, which mpirun forwards) ask the loop to save and leave
// after the current step; a second SIGINT or SIGTERM ends the process at once with 130 or 143. A save that is
// under way then is abandoned; readers ignore its files, and the next start of the run removes them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "comm/world.hpp"
#include "train/trainer/progress.hpp"

namespace capstan::train {

// Seconds from now until the run can stop. 0: unknown. Before a step is timed, a lower bound: the estimate of
// its matrix products, or 0.
struct ExpectedStop {
  double seconds = 0;
  bool lower_bound = false;
  // CLOCK_MONOTONIC, ns, of the expected end; negative for a lower bound, 0 if unknown.
  int64_t encoded() const;
};

// The answer to a request: "stopping after this step, about 12 s; a second signal stops at once". phase:
// name_of(Phase) of what runs; step: its number, 0 before the first; expected_end: ExpectedStop::encoded();
// now: of the same clock. Safe in a signal handler.
std::string_view stop_notice(std::span<char> buffer, std::string_view phase, int64_t step,
                             int64_t expected_end, int64_t now);
// The answer to a second request: "stopped now; the newest checkpoint is of step 40". saved: that step, -1
// without a checkpoint; saving: step of the save that is abandoned, -1 without one. Safe in a signal handler.
std::string_view stopped_notice(std::span<char> buffer, int64_t saved, int64_t saving);

class StopSignals {
 public:
  // Installs the handlers; one object at a time. `sink` gets the answers, from within the handler; null: no
  // answer. handles false: signals keep their default action, and only the file counts.
  explicit StopSignals(ProgressSink* sink, bool handles = true);
  // Restores the earlier handlers.
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  // True after a signal, or once the parent process of several ranks has created the file that
  // CAPSTAN_STOP_FILE names.
  static bool received();
  // Inputs of the answers. `phase`: a literal.
  static void publish_step(int64_t step);
  static void publish_phase(std::string_view phase);
  static void publish_expected_end(int64_t encoded);
  // The save of this step begins; its directory appears when it is complete.
  static void publish_save(int64_t step, const std::filesystem::path& directory);
  // The step of the newest checkpoint of the run. Ends what publish_save() began.
  static void publish_saved_step(int64_t step);

 private:
  bool handles_;
};

// Publishes to the signal handler and to the parent of several ranks when the run can stop.
void publish_expected_stop(comm::World& world, const ExpectedStop& expected);
// Publishes the step of the newest checkpoint of the run to both.
void publish_saved_step(comm::World& world, int64_t step);

}  // namespace capstan::train
