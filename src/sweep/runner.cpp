#include "sweep/runner.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <map>
#include <memory>
#include <set>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "base/thread_pool.hpp"
#include "sweep/json.hpp"
#include "sweep/pruning.hpp"
#include "train/records/metrics.hpp"
#include "train/records/run_dir.hpp"
#include "train/records/run_list.hpp"

extern char** environ;

namespace capstan::sweep {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

int RunnerResult::exit_code() const {
  if (killed) return 128 + signal;
  if (failed > 0) return 1;
  return pending > 0 ? 75 : 0;
}

namespace {

// Ended early, with a checkpoint.
constexpr int kTerminalStop = 75;
constexpr auto kHeartbeat = std::chrono::seconds(15);
// Time that a trial has to save and end once it was asked to.
constexpr std::chrono::minutes kStopTimeout{10};
constexpr off_t kTail = 8192;
constexpr int kTailLines = 15;

// Blocks signals, which the loop then polls; trials get the previous mask.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&held_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD}) sigaddset(&held_, signal);
    ::sigprocmask(SIG_BLOCK, &held_, &before_);
  }
  ~BlockedSignals() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  // The next signal; 0 after the timeout.
  int next(std::chrono::milliseconds wait) const {
    const timespec time{wait.count() / 1000, (wait.count() % 1000) * 1'000'000};
    const int signal = ::sigtimedwait(&held_, nullptr, &time);
    return signal > 0 ? signal : 0;
  }
  const sigset_t& before() const { return before_; }

 private:
  sigset_t held_, before_;
};

std::string log_tail(const fs::path& log) {
  std::error_code error;
  const auto size = static_cast<off_t>(fs::file_size(log, error));
  if (error) return {};
  const FileDescriptor file(::open(log.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return {};
  std::string text(static_cast<size_t>(std::min(size, kTail)), '\0');
  const ssize_t got = ::pread(file.get(), text.data(), text.size(), std::max<off_t>(0, size - kTail));
  text.resize(static_cast<size_t>(std::max<ssize_t>(0, got)));
  while (text.ends_with('\n')) text.pop_back();
  size_t from = text.size();
  for (int lines = 0; lines < kTailLines && from != std::string::npos; ++lines)
    from = from == 0 ? std::string::npos : text.rfind('\n', from - 1);
  return from == std::string::npos ? text : text.substr(from + 1);
}

// A running trial.
struct RunningTrial {
  // A copy: the plan may grow.
  const TrialPlan trial;
  TrialLock lock;
  int slot = 0;
  int64_t attempt = 0, failures = 0;
  pid_t process = 0;
  // Started through mpirun, whose parent process takes the signals.
  bool launched = false;
  Clock::time_point begun = Clock::now();
  std::string started = records::utc_now();
  // When the trial was asked to save and end.
  std::optional<Clock::time_point> asked;
  // Why it was asked: the decision to prune it, or its time limit.
  PruningDecision pruned;
  std::string too_long;
  // Number of rungs that the trial has passed.
  size_t rungs = 0;
  // When the metrics were last read, and how long that took.
  Clock::time_point last_read{};
  double read_seconds = 0;
  uintmax_t metrics_size = 0;
  std::optional<int64_t> last_step;
  int64_t first_checkpoint = 0;
};

class Runner {
 public:
  Runner(Store& store, const RunnerOptions& options, RunnerListener& listener)
      : store_(store), options_(options), listener_(listener), pruning_(store) {}

  RunnerResult run() {
    store_.repair_journal();
    for (const TrialPlan& trial : store_.plan().trials) {
      device_seconds_ += store_.status(trial).seconds * static_cast<double>(trial.ranks);
      if (!is_selected(trial)) continue;
      if (const std::string damage = store_.damage(trial.id); !damage.empty())
        listener_.note("trial " + trial.id + " (" + trial.label + ") cannot run: " + damage);
    }
    for (;;) {
      fill();
      if (active_.empty() && (stopping() || !candidates_)) break;
      for (int signal = signals_.next(std::chrono::milliseconds(active_.empty() ? 50 : 200)); signal != 0;
           signal = signals_.next(std::chrono::milliseconds(0)))
        if (signal != SIGCHLD) on_signal(signal);
      reap();
      for (auto& active : active_) watch(*active);
    }
    return result();
  }

 private:
  bool stopping() const { return result_.signal != 0 || failed_ || budget_used_; }

  bool is_selected(const TrialPlan& trial) const {
    return options_.trials.empty() ||
           std::find(options_.trials.begin(), options_.trials.end(), trial.id) != options_.trials.end();
  }

  // ---- starting

  void fill() {
    if (stopping()) return;
    const bool full = static_cast<int64_t>(active_.size()) >= options_.slots;
    if (full || (idle_since_ && seconds_since(*idle_since_) < (active_.empty() ? 0.2 : 1))) return;
    candidates_ = false;
    // A second pass follows if another process has added trials.
    for (int pass = 0; pass < 2; ++pass) {
      // The loop uses an index, because the plan may grow while a trial starts.
      for (size_t i = 0; i < store_.plan().trials.size(); ++i) {
        const TrialPlan& trial = store_.plan().trials[i];
        if (finished_.contains(trial.id) || !is_selected(trial)) continue;
        const State state = store_.state(trial.id);
        if (state == State::done || state == State::pruned) finished_.insert(trial.id);
        if (state != State::pending && state != State::lost && state != State::running) continue;
        if (static_cast<int64_t>(active_.size()) >= options_.slots) {
          candidates_ = true;
          return;
        }
        if (state == State::running ? may_become_free(trial) : take(trial) || may_become_free(trial))
          candidates_ = true;
      }
      if (!store_.refresh()) break;
    }
    idle_since_ = Clock::now();
  }

  // Whether the holder of a trial may be dead: a process of this host whose children are ending, or one of
  // another host without a heartbeat so far.
  bool may_become_free(const TrialPlan& trial) {
    const auto holder = holder_of(store_.trial(trial.id));
    awaited_.erase(trial.id);
    if (!holder || (holder->here && !holder->gone)) return false;
    if (!holder->here) {
      const auto [seen, first] = heartbeats_.emplace(trial.id, holder->beat);
      if (seen->second != holder->beat || holder->seconds_left <= 0) return false;
      if (first)
        listener_.note("trial " + trial.id + " is held by " + holder->text + ": waiting up to " +
                       std::to_string(holder->seconds_left) + " s for its heartbeat");
    }
    awaited_.insert(trial.id);
    return true;
  }

  bool take(const TrialPlan& trial) {
    auto lock = TrialLock::try_take(store_.trial(trial.id));
    if (!lock) return false;
    // Check again under the lock: another runner may have run it meanwhile.
    const auto state = store_.written(trial.id);
    if (state != State::pending && state != State::running) return false;
    const TrialStatus before = store_.status(trial);
    if (state == State::running) store_.record_lost(trial.id, before.attempt);
    auto active = std::make_unique<RunningTrial>(RunningTrial{.trial = trial, .lock = std::move(*lock)});
    // A pending trial without retries left was reset by `sweep retry`: its count starts again.
    active->failures = before.failures > store_.plan().definition.limits.retries ? 0 : before.failures;
    active->rungs = before.rungs;
    active->slot = free_slot();
    active->first_checkpoint = newest_checkpoint(trial.id);
    active->attempt = store_.begin_attempt(trial.id);
    store_.change(trial.id, {State::running, active->attempt, "", {}});
    start(*active);
    listener_.started(active->trial, active->attempt, active->slot);
    active_.push_back(std::move(active));
    return true;
  }

  int free_slot() const {
    for (int slot = 0;; ++slot)
      if (std::none_of(active_.begin(), active_.end(),
                       [&](const auto& active) { return active->slot == slot; }))
        return slot;
  }

  std::vector<std::string> command_of(RunningTrial& active) const {
    const TrialPlan& trial = active.trial;
    const fs::path directory = fs::absolute(store_.trial(trial.id));
    std::vector<std::string> command;
    if (trial.ranks > 1 && options_.launcher == Launcher::srun)
      command = {"srun", "--ntasks=" + std::to_string(trial.ranks), "--kill-on-bad-exit=1"};
    command.insert(command.end(), {options_.program, "train", (directory / "recipe.yaml").string(),
                                   "--run-dir", (directory / "run").string(), "--resume=auto"});
    if (trial.ranks > 1 && options_.launcher == Launcher::mpirun) {
      command.insert(command.end(), {"--nproc", std::to_string(trial.ranks)});
      active.launched = true;
    }
    // Slots share the cores; the numbers are the same for any count.
    if (!trial.threads && options_.slots > 1 && options_.launcher == Launcher::mpirun)
      command.push_back("train.threads=" + std::to_string(std::max<int64_t>(
                                               1, available_cores() / (options_.slots * trial.ranks))));
    return command;
  }

  void start(RunningTrial& active) {
    const fs::path attempt = fs::absolute(store_.attempt(active.trial.id, active.attempt));
    std::vector<std::string> command = command_of(active);
    std::vector<std::string> environment;
    for (char** variable = environ; *variable; ++variable)
      if (!std::string_view(*variable).starts_with("CAPSTAN_STOP_FILE=")) environment.emplace_back(*variable);
    environment.push_back("CAPSTAN_STOP_FILE=" + (attempt / "stop").string());
    OrderedJson about{{"command", command},   {"started", active.started}, {"host", host_name()},
                      {"runner", ::getpid()}, {"slot", active.slot},       {"cores", available_cores()}};
    for (const char* name :
         {"SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "CUDA_VISIBLE_DEVICES"})
      if (const char* value = std::getenv(name)) about[name] = value;
    write_file_durably(attempt / "env.json", dump_json(about, 1) + "\n");

    std::vector<char*> argv, envp;
    for (std::string& word : command) argv.push_back(word.data());
    for (std::string& variable : environment) envp.push_back(variable.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    const std::string log = (attempt / "log.txt").string();
    const FileDescriptor output(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (output.get() < 0) fail(ErrorCode::io, "cannot write `" + log + "`: " + system_error_text(errno));
    const FileDescriptor input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const pid_t parent = ::getpid();
    const pid_t child = ::fork();
    if (child == 0) {
      // A group of its own: ctrl-C reaches the runner alone.
      ::setpgid(0, 0);
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(kTerminalStop);
      ::dup2(input.get(), STDIN_FILENO);
      ::dup2(output.get(), STDOUT_FILENO);
      ::dup2(output.get(), STDERR_FILENO);
      // The trial stays taken as long as its process lives.
      ::fcntl(active.lock.descriptor(), F_SETFD, 0);
      ::sigprocmask(SIG_SETMASK, &signals_.before(), nullptr);
      ::execvpe(argv[0], argv.data(), envp.data());
      ::_exit(127);
    }
    if (child < 0) fail(ErrorCode::io, "cannot start a process: " + system_error_text(errno));
    ::setpgid(child, child);
    active.process = child;
  }

  // ---- while they run

  void ask_to_stop(RunningTrial& active) const {
    if (active.asked) return;
    active.asked = Clock::now();
    if (active.launched) {
      // The parent process of the ranks writes their stop file.
      ::kill(active.process, SIGTERM);
      return;
    }
    const fs::path file = store_.attempt(active.trial.id, active.attempt) / "stop";
    const FileDescriptor stop(::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
    if (stop.get() < 0) ::kill(active.process, SIGTERM);
  }

  void on_signal(int signal) {
    if (result_.signal == 0) {
      result_.signal = signal;
      if (!active_.empty())
        listener_.note("stop requested: " + std::to_string(active_.size()) +
                       (active_.size() == 1 ? " trial saves and ends" : " trials save and end") +
                       "; a second request kills them");
      for (auto& active : active_) ask_to_stop(*active);
    } else if (signal == SIGINT || signal == SIGTERM) {
      result_.signal = signal;
      result_.killed = true;
      for (auto& active : active_) ::kill(-active->process, SIGKILL);
    }
  }

  void watch(RunningTrial& active) {
    if (Clock::now() - heartbeat_ > kHeartbeat) {
      heartbeat_ = Clock::now();
      for (const auto& one : active_) one->lock.heartbeat();
    }
    if (active.asked && Clock::now() - *active.asked > kStopTimeout) ::kill(-active.process, SIGKILL);
    const Definition& d = store_.plan().definition;
    if (const auto limit = d.limits.per_trial;
        limit && !active.asked && seconds_since(active.begun) > limit->seconds) {
      active.too_long = "took longer than limits.per_trial, " + human_duration(limit->seconds);
      ask_to_stop(active);
    }
    if (seconds_since(active.last_read) < std::max(0.2, 50 * active.read_seconds)) return;
    active.last_read = Clock::now();
    std::error_code error;
    const auto size = fs::file_size(store_.metrics(active.trial.id), error);
    if (error || size == active.metrics_size) return;
    active.metrics_size = size;
    read_metrics(active);
    active.read_seconds = seconds_since(active.last_read);
  }

  void read_metrics(RunningTrial& active) {
    const Definition& d = store_.plan().definition;
    const auto curve = store_.read_curve(active.trial.id, d.metric.name);
    if (const auto row = store_.last_logged_step(active.trial.id)) active.last_step = row->step;
    const auto metric = summarized(curve, d.metric);
    listener_.progress(active.slot, active.trial, active.last_step, store_.total_steps(active.trial), metric);
    if (active.asked) return;
    // The last row's step is not over: its validation may follow.
    active.pruned = pruning_.decide(active.trial, curve, active.last_step.value_or(1) - 1, active.rungs);
    if (!active.pruned.reason.empty()) ask_to_stop(active);
  }

  // ---- when they end

  void reap() {
    for (size_t i = 0; i < active_.size();) {
      int status = 0;
      const pid_t ended = ::waitpid(active_[i]->process, &status, WNOHANG);
      if (ended == 0) {
        ++i;
        continue;
      }
      const auto active = std::move(active_[i]);
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      finish(*active, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
      idle_since_.reset();
      candidates_ = true;
    }
  }

  // The trainer records a loss or gradient that is not finite in a row of its own.
  std::string diverged(const RunningTrial& active) const {
    const std::string& id = active.trial.id;
    if (!store_.plan().definition.stop.nan || !store_.has_metrics(id)) return {};
    const auto row = records::last_event(store_.metrics(id), "not_finite");
    return row && row->step ? "loss or gradient at step " + std::to_string(*row->step) + " is not finite"
                            : std::string();
  }

  StateChange classify_exit(RunningTrial& active, int code) {
    StateChange change{State::failed, active.attempt, "", code};
    const std::string exit =
        code > 128 ? "ended by signal " + std::to_string(code - 128) : "exit code " + std::to_string(code);
    const bool stopped = active.asked || result_.signal != 0;
    if (code == 0 && active.pruned.reason.empty()) {
      active.pruned = pruning_.decide(
          active.trial, store_.read_curve(active.trial.id, store_.plan().definition.metric.name),
          active.last_step.value_or(0), active.rungs);
      if (!active.pruned.reason.empty()) active.pruned.reason += "; it had ended before the runner checked";
    }
    if (code == 0 && active.pruned.reason.empty()) {
      change.state = State::done;
    } else if (!active.too_long.empty()) {
      change.reason = active.too_long;
    } else if (!active.pruned.reason.empty()) {
      change.state = State::pruned;
      change.reason = active.pruned.reason;
    } else if (code == kTerminalStop && !stopped &&
               newest_checkpoint(active.trial.id) <= active.first_checkpoint) {
      change.reason = "stopped by itself without progress";
    } else if (code == kTerminalStop || (stopped && code > 128)) {
      change.state = State::pending;
      change.reason = code == kTerminalStop ? "stopped with a checkpoint" : "stopped, " + exit;
    } else if (code == 2 || code == 3 || code == 70 || code == 127) {
      // A retry would fail again.
      change.reason = code == 2     ? "configuration: exit code 2"
                      : code == 3   ? "does not fit: exit code 3"
                      : code == 127 ? "the program did not start"
                                    : exit;
    } else if (const std::string reason = diverged(active); !reason.empty()) {
      change.state = State::pruned;
      change.reason = reason;
    } else {
      ++active.failures;
      change.reason = exit;
      if (active.failures <= store_.plan().definition.limits.retries) {
        change.state = State::pending;
        change.reason += ", retry " + std::to_string(active.failures) + " of " +
                         std::to_string(store_.plan().definition.limits.retries);
      }
    }
    if (change.state == State::failed && active.failures <= store_.plan().definition.limits.retries)
      active.failures = store_.plan().definition.limits.retries + 1;
    return change;
  }

  void finish(RunningTrial& active, int code) {
    if (const auto row = store_.last_logged_step(active.trial.id)) active.last_step = row->step;
    const StateChange change = classify_exit(active, code);
    const double seconds = seconds_since(active.begun);
    device_seconds_ += seconds * static_cast<double>(active.trial.ranks);
    const auto metric = summarized(store_.read_curve(active.trial.id, store_.plan().definition.metric.name),
                                   store_.plan().definition.metric);
    const fs::path attempt = store_.attempt(active.trial.id, active.attempt);
    OrderedJson result{{"state", name_of(change.state)}, {"code", code},
                       {"reason", change.reason},        {"started", active.started},
                       {"ended", records::utc_now()},    {"seconds", seconds},
                       {"failures", active.failures},    {"rungs", active.rungs}};
    if (change.state == State::pruned && !active.pruned.reason.empty())
      result["pruned_at"] = active.pruned.step;
    result["step"] = or_null(active.last_step);
    result["metric"] = or_null(metric);
    write_file_durably(attempt / "result.json", dump_json(result, 1) + "\n");
    std::error_code ignored;
    fs::remove(attempt / "stop", ignored);
    store_.change(active.trial.id, change);
    listener_.progress(active.slot, active.trial, active.last_step, store_.total_steps(active.trial), metric);
    listener_.ended(active.trial, change, active.slot);
    const bool again =
        change.state == State::pending && change.code && *change.code != kTerminalStop && !active.asked;
    if (change.state == State::failed || again)
      listener_.failure(active.trial, change, log_tail(attempt / "log.txt"));
    if (change.state == State::failed && options_.on_failure == OnFailure::stop && !failed_) {
      failed_ = true;
      for (auto& other : active_) ask_to_stop(*other);
    }
    const auto hours = store_.plan().definition.limits.device_hours;
    if (hours && device_seconds_ >= *hours * 3600 && !budget_used_) {
      budget_used_ = true;
      listener_.note("limits.device_hours=" + to_text(*hours) + " are used up: no further trials start");
    }
  }

  int64_t newest_checkpoint(const std::string& id) const {
    if (!records::is_run(store_.run(id))) return 0;
    const auto checkpoints = records::summarize(store_.run(id)).checkpoints;
    return checkpoints.empty() ? 0 : checkpoints.front();
  }

  RunnerResult result() {
    for (const TrialPlan& trial : store_.plan().trials) {
      if (!is_selected(trial)) continue;
      const State state = store_.state(trial.id);
      const bool elsewhere = state == State::running && !awaited_.contains(trial.id);
      ++(state == State::done     ? result_.done
         : state == State::failed ? result_.failed
         : state == State::pruned ? result_.pruned
         : elsewhere              ? result_.elsewhere
                                  : result_.pending);
    }
    return result_;
  }

  Store& store_;
  const RunnerOptions& options_;
  RunnerListener& listener_;
  Pruning pruning_;
  BlockedSignals signals_;
  std::vector<std::unique_ptr<RunningTrial>> active_;
  std::set<std::string> finished_, awaited_;
  // Heartbeats of holders on other machines, when first seen.
  std::map<std::string, int64_t> heartbeats_;
  std::optional<Clock::time_point> idle_since_;
  // Some trials may be free.
  bool candidates_ = true;
  bool failed_ = false, budget_used_ = false;
  double device_seconds_ = 0;
  Clock::time_point heartbeat_ = Clock::now();
  RunnerResult result_;
};

}  // namespace

RunnerResult run_trials(Store& store, const RunnerOptions& options, RunnerListener& listener) {
  return Runner(store, options, listener).run();
}

}  // namespace capstan::sweep
