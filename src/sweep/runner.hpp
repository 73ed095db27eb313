// Runs the trials of a sweep: up to `slots` at the same time, each a child process of this program running
// `train`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "sweep/store.hpp"

namespace capstan::sweep {

// Receives the events of a runner.
class RunnerListener {
 public:
  virtual ~RunnerListener() = default;
  virtual void started(const TrialPlan& trial, int64_t attempt, int slot) = 0;
  virtual void ended(const TrialPlan& trial, const StateChange& how, int slot) = 0;
  // The last lines of the log of a trial that failed.
  virtual void failure(const TrialPlan& trial, const StateChange& how, const std::string& log_tail) = 0;
  virtual void progress(int slot, const TrialPlan& trial, std::optional<int64_t> step,
                        std::optional<int64_t> steps, std::optional<double> metric) = 0;
  virtual void note(const std::string& text) = 0;
};

enum class OnFailure : uint8_t { go_on, stop };
// Starts trials with several ranks.
enum class Launcher : uint8_t { mpirun, srun };

struct RunnerOptions {
  // Path of this binary.
  std::string program;
  int64_t slots = 1;
  OnFailure on_failure = OnFailure::go_on;
  Launcher launcher = Launcher::mpirun;
  // Ids of the trials to run. Empty: all.
  std::vector<std::string> trials;
};

struct RunnerResult {
  // Number of selected trials in each final state. elsewhere: another process runs them.
  int64_t done = 0, failed = 0, pruned = 0, pending = 0, elsewhere = 0;
  // Signal that requested the stop. 0: none.
  int signal = 0;
  // A second request killed the trials.
  bool killed = false;
  // 0 all done or pruned; 1 some failed; 75 stopped with trials left; 130 or 143 after a second request.
  int exit_code() const;
};

// SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask the trials to save and end; a second SIGINT or SIGTERM kills them.
RunnerResult run_trials(Store& store, const RunnerOptions& options, RunnerListener& listener);

}  // namespace capstan::sweep
