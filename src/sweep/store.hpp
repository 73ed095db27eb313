// The directory of a sweep:
//
//   sweep.yaml                 the definition
//   plan.json                  the trials
//   journal.jsonl              every change of a state, one line each
//   trials/ID/
//     recipe.yaml              complete, runnable by itself
//     overrides.txt            what differs from the base
//     state                    pending, running, done, failed, pruned
//     lock                     held while a process works on the trial
//     run/                     the run directory of all attempts
//     checkpoints              → run/checkpoints
//     attempts/N/              log.txt, result.json, env.json, metrics.jsonl → the run's
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "sweep/plan.hpp"
#include "train/records/metrics.hpp"

namespace capstan::sweep {

// lost: the state file says running, and no process holds the trial.
enum class State : uint8_t { pending, running, done, failed, pruned, lost };
std::string_view name_of(State state);

struct TrialStatus {
  State state = State::pending;
  // Number of the newest attempt. 0: the trial was never started.
  int64_t attempt = 0;
  // Number of failures that count against limits.retries.
  int64_t failures = 0;
  // Why the trial failed, was pruned, or was stopped and is pending.
  std::string reason;
  // Process that runs the trial: "host, process 123 since 2026-01-31T12:34:56Z".
  std::string owner;
  // Last logged step, and number of steps of the trial.
  std::optional<int64_t> step, total_steps;
  // Value of the definition's metric. nullopt: there is none yet, or it is not finite.
  std::optional<double> metric;
  // Duration of all attempts that ended, in seconds.
  double seconds = 0;
  // Number of rungs of successive halving that the trial has passed in the newest attempt.
  size_t rungs = 0;
};

// How far the rows of a trial in metrics.jsonl reach.
struct RunProgress {
  // The last step that is complete: no more rows of it or of an earlier step will be written.
  int64_t reached = 0;
  // The step at which the trial was pruned, whatever it did afterward.
  std::optional<int64_t> pruned_at;
};

struct CurvePoint {
  int64_t step = 0;
  // NaN if the file has null.
  double value = 0;
};

// Measurements of the last logged step of a run.
struct RunMeasurements {
  // memory_bytes includes the workspaces of kernels.
  std::optional<double> tokens_per_second, memory_bytes;
};

// One line of the journal.
struct StateChange {
  State state = State::pending;
  int64_t attempt = 0;
  std::string reason;
  // Exit code of the attempt that ended.
  std::optional<int> code;
};

class Store {
 public:
  // Reads the plan; throws like read_plan.
  explicit Store(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  const Plan& plan() const { return plan_; }
  // Reads the plan again if another process has added trials.
  bool refresh();
  std::filesystem::path trial(std::string_view id) const { return directory_ / "trials" / id; }
  std::filesystem::path run(std::string_view id) const { return trial(id) / "run"; }
  std::filesystem::path metrics(std::string_view id) const { return run(id) / "metrics.jsonl"; }
  bool has_metrics(std::string_view id) const;
  // nullopt: no step is logged yet.
  std::optional<records::ReadRow> last_logged_step(std::string_view id) const;

  // Content of the state file. nullopt: it is missing or holds no state.
  std::optional<State> written(std::string_view id) const;
  // A trial whose directory or state file is missing counts as failed; damage() gives the reason and the fix.
  State state(std::string_view id) const;
  // Describes the damage of a trial's directory. Empty: it is not damaged.
  std::string damage(std::string_view id) const;
  TrialStatus status(const TrialPlan& trial) const;
  // Statuses in the order of the plan.
  std::vector<TrialStatus> statuses() const;

  // Makes the directory of a new attempt with its links, and returns the number of the attempt.
  int64_t begin_attempt(std::string_view id) const;
  std::filesystem::path attempt(std::string_view id, int64_t number) const {
    return trial(id) / "attempts" / std::to_string(number);
  }

  // Replaces the state file by a rename and appends one line to the journal, both under the journal's lock.
  // The caller holds the trial's lock.
  void change(std::string_view id, const StateChange& transition) const;
  // Adds the journal lines that a killed process did not write after it had changed a state.
  void repair_journal() const;
  // Adds a journal line before a trial is taken over from a runner that has died.
  void record_lost(std::string_view id, int64_t attempt) const;

  // Reads the values of a metric over steps from the run's metrics.jsonl. Empty: there are none yet.
  std::vector<CurvePoint> read_curve(std::string_view id, std::string_view metric) const;
  // The names that read_curve() knows for this trial; empty: none yet.
  std::set<std::string> metric_names(std::string_view id) const;
  RunMeasurements measured(std::string_view id) const;
  RunProgress progress(const TrialPlan& trial) const;
  // Number of steps of the trial: as recorded by its run once that has begun, and as planned before. nullopt:
  // not known yet.
  std::optional<int64_t> total_steps(const TrialPlan& trial) const;

 private:
  std::filesystem::file_time_type stamp() const;
  std::filesystem::path directory_;
  Plan plan_;
  std::filesystem::file_time_type stamp_;
};

// Reduces a curve to one number according to the metric: last value, best value, or mean of the last rows.
// nullopt: the curve is empty, or the number is not finite.
std::optional<double> summarized(const std::vector<CurvePoint>& curve, const Metric& metric);

// Lock of a trial, for one process and its children. The trial's own process inherits the lock, so that a
// trial whose runner was killed stays locked until its last process has ended. The lock records host, process
// id and time. A lock of another host expires when its heartbeat is old, or when Slurm has started the same
// job again.
class TrialLock {
 public:
  static std::optional<TrialLock> try_take(const std::filesystem::path& trial);
  TrialLock(TrialLock&& other) noexcept;
  TrialLock& operator=(TrialLock&& other) noexcept;
  ~TrialLock();
  // Called every few seconds while the lock is held.
  void heartbeat() const;
  int descriptor() const { return fd_; }

 private:
  explicit TrialLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

// The process that holds a trial.
struct LockHolder {
  // Description such as "host, process 123 since 2026-01-31T12:34:56Z".
  std::string text = "another process";
  // Whether the process is on this host.
  bool here = false;
  // Whether the process has ended and a child of it holds the lock.
  bool gone = false;
  // Time of the last heartbeat, in nanoseconds of the holder's clock.
  int64_t beat = 0;
  // Seconds until the lock of a holder on another host expires without a heartbeat.
  int64_t seconds_left = 0;
};
// nullopt: no process holds the trial.
std::optional<LockHolder> holder_of(const std::filesystem::path& trial);

}  // namespace capstan::sweep
