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
#include <string>
#include <string_view>
#include <vector>

#include "sweep/plan.hpp"
#include "train/records/metrics.hpp"

namespace capstan::sweep {

// lost: the state file says running, and no process holds the trial.
enum class State : uint8_t { pending, running, done, failed, pruned, lost };
std::string_view name_of(State state);

std::string host_name();  // of this machine; empty: unknown

struct TrialStatus {
  State state = State::pending;
  int64_t attempt = 0;                       // the newest; 0: never started
  int64_t failures = 0;                      // that count against limits.retries
  std::string reason;                        // of failed and pruned, and why a pending one stopped
  std::string owner;                         // running: "host, process 123 since 2026-01-31T12:34:56Z"
  std::optional<int64_t> step, total_steps;  // step: last logged
  // As the definition's metric says; nullopt: none yet, or not finite.
  std::optional<double> metric;
  double seconds = 0;  // in all attempts that ended
  // Of successive halving that it has passed, as the newest attempt says.
  size_t rungs = 0;
};

// How far a trial's rows go.
struct RunProgress {
  // The last step after which no more rows of it or of an earlier one come.
  int64_t reached = 0;
  std::optional<int64_t> pruned_at;  // the step at which it was stopped, whatever it did afterwards
};

struct CurvePoint {
  int64_t step = 0;
  double value = 0;  // NaN where the file says null
};

// Measurements of the last logged step of a run.
struct RunMeasurements {
  std::optional<double> tokens_per_second, memory_bytes;  // the latter with the kernels' scratch
};

// One line of the journal.
struct StateChange {
  State state = State::pending;
  int64_t attempt = 0;
  std::string reason;
  std::optional<int> code;  // exit code of the attempt that ended
};

class Store {
 public:
  explicit Store(const std::filesystem::path& directory);  // reads the plan; throws like read_plan

  const std::filesystem::path& directory() const { return directory_; }
  const Plan& plan() const { return plan_; }
  bool refresh();  // reads the plan again where another process has added trials
  std::filesystem::path trial(std::string_view id) const { return directory_ / "trials" / id; }
  std::filesystem::path run(std::string_view id) const { return trial(id) / "run"; }
  std::filesystem::path metrics(std::string_view id) const { return run(id) / "metrics.jsonl"; }
  bool has_metrics(std::string_view id) const;
  std::optional<records::ReadRow> last_logged_step(std::string_view id) const;  // nullopt: none yet

  std::optional<State> written(
      std::string_view id) const;  // the state file; nullopt: nothing that is a state
  // failed: also a trial whose directory or state file is missing; damage() gives the reason and the fix.
  State state(std::string_view id) const;
  std::string damage(std::string_view id) const;  // empty: none
  TrialStatus status(const TrialPlan& trial) const;
  std::vector<TrialStatus> statuses() const;  // in the order of the plan

  // A new attempt's directory, with its links; its number.
  int64_t begin_attempt(std::string_view id) const;
  std::filesystem::path attempt(std::string_view id, int64_t number) const {
    return trial(id) / "attempts" / std::to_string(number);
  }

  // State file by rename and one journal line, both under the journal's lock. The caller holds the trial's
  // lock.
  void change(std::string_view id, const StateChange& transition) const;
  // Adds the journal lines that a killed process did not write after it had changed a state.
  void repair_journal() const;
  // Adds a journal line before a trial is taken over from a runner that has died.
  void record_lost(std::string_view id, int64_t attempt) const;

  // The metric over steps, from the run's metrics.jsonl; empty when there is none yet.
  std::vector<CurvePoint> read_curve(std::string_view id, std::string_view metric) const;
  RunMeasurements measured(std::string_view id) const;
  RunProgress progress(const TrialPlan& trial) const;
  // Of the whole trial, as its run says once it has begun, else as planned; nullopt: not known yet.
  std::optional<int64_t> total_steps(const TrialPlan& trial) const;

 private:
  std::filesystem::file_time_type stamp() const;
  std::filesystem::path directory_;
  Plan plan_;
  std::filesystem::file_time_type stamp_;
};

// The metric's one number of a curve: last, best, or mean of the last rows. nullopt: empty, or not finite.
std::optional<double> summarized(const std::vector<CurvePoint>& curve, const Metric& metric);

// A trial for one process and what it starts: the lock is inherited by the trial's own process, so that a
// trial whose runner was killed stays taken until its last process is gone. Holds host, pid and time; another
// host's claim counts as gone when its heartbeat is old, or when Slurm has started the same job again.
class TrialLock {
 public:
  static std::optional<TrialLock> try_take(const std::filesystem::path& trial);
  TrialLock(TrialLock&& other) noexcept;
  TrialLock& operator=(TrialLock&& other) noexcept;
  ~TrialLock();
  void heartbeat() const;  // every few seconds
  int descriptor() const { return fd_; }

 private:
  explicit TrialLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

// The process that holds a trial.
struct LockHolder {
  std::string text = "another process";  // "host, process 123 since 2026-01-31T12:34:56Z"
  bool here = false;                     // the process is on this host
  bool gone = false;                     // it has ended, and a child of it holds the lock
  int64_t beat = 0;                      // last sign of life, in nanoseconds of its clock
  int64_t seconds_left = 0;              // of another host: until the lock expires without a heartbeat
};
std::optional<LockHolder> holder_of(const std::filesystem::path& trial);  // nullopt: not held

}  // namespace capstan::sweep
