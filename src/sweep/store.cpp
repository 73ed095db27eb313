#include "sweep/store.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "train/records/metrics.hpp"
#include "train/records/run_dir.hpp"

namespace capstan::sweep {

namespace fs = std::filesystem;

namespace {

constexpr std::array<std::string_view, 6> kStates{"pending", "running", "done", "failed", "pruned", "lost"};
// Seconds without a heartbeat after which a lock of another host expires.
constexpr int kHeartbeatGrace = 120;

std::string read_all(int fd) {
  std::string text;
  std::array<char, 1 << 16> buffer;
  off_t at = 0;
  for (ssize_t got = 0; (got = ::pread(fd, buffer.data(), buffer.size(), at)) > 0; at += got)
    text.append(buffer.data(), static_cast<size_t>(got));
  return text;
}

bool try_lock(int fd, int how) {
  while (::flock(fd, how | LOCK_NB) != 0)
    if (errno != EINTR) return false;
  return true;
}

// The locked journal: states change under its lock only.
class Journal {
 public:
  explicit Journal(const fs::path& path)
      : path_(path), fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (fd_.get() < 0)
      fail(ErrorCode::io, "cannot open `" + path.string() + "`: " + system_error_text(errno));
    while (::flock(fd_.get(), LOCK_EX) != 0)
      if (errno != EINTR)
        fail(ErrorCode::io, "cannot lock `" + path.string() + "`: " + system_error_text(errno));
    // Drops a line that a killed process left unfinished; repair_journal() writes it again.
    struct stat info {};
    ::fstat(fd_.get(), &info);
    off_t end = info.st_size;
    char last = '\n';
    while (end > 0 && ::pread(fd_.get(), &last, 1, end - 1) == 1 && last != '\n') --end;
    if (end != info.st_size && ::ftruncate(fd_.get(), end) != 0)
      fail(ErrorCode::io, "cannot repair `" + path.string() + "`: " + system_error_text(errno));
    ::lseek(fd_.get(), 0, SEEK_END);
  }
  void append(const std::string& line) {
    if (::write(fd_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      fail(ErrorCode::io, "cannot write `" + path_.string() + "`: " + system_error_text(errno));
    ::fdatasync(fd_.get());
  }
  std::string text() const { return read_all(fd_.get()); }

 private:
  fs::path path_;
  FileDescriptor fd_;
};

std::string journal_line(std::string_view id, const StateChange& transition) {
  OrderedJson line{{"time", records::utc_now()}, {"trial", id}, {"state", name_of(transition.state)}};
  if (transition.attempt) line["attempt"] = transition.attempt;
  if (transition.code) line["code"] = *transition.code;
  if (!transition.reason.empty()) line["reason"] = transition.reason;
  line["host"] = host_name();
  line["pid"] = ::getpid();
  return dump_json(line) + "\n";
}

int64_t newest_attempt(const fs::path& trial) {
  int64_t newest = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(trial / "attempts", error))
    newest = std::max(newest, parse_int(entry.path().filename().string()).value_or(0));
  return newest;
}

}  // namespace

std::string_view name_of(State state) {
  return kStates[static_cast<size_t>(state)];
}

Store::Store(const fs::path& directory)
    : directory_(directory), plan_(read_plan(directory)), stamp_(stamp()) {}

fs::file_time_type Store::stamp() const {
  std::error_code error;
  return fs::last_write_time(directory_ / "plan.json", error);
}
bool Store::refresh() {
  const auto now = stamp();
  if (now == stamp_) return false;
  plan_ = read_plan(directory_);
  stamp_ = now;
  return true;
}

std::optional<State> Store::written(std::string_view id) const {
  try {
    const std::string word(trim(read_file(trial(id) / "state", 4096)));
    const auto at = std::find(kStates.begin(), kStates.end(), word);
    if (at != kStates.end()) return static_cast<State>(at - kStates.begin());
  } catch (const Error& error) {
    // The file exists, but cannot be read now.
    if (error.code() == ErrorCode::io) throw;
  }
  return std::nullopt;
}
std::string Store::damage(std::string_view id) const {
  if (written(id)) return {};
  std::error_code error;
  return fs::is_directory(trial(id), error)
             ? "its state file is missing; `capstan sweep retry` makes it pending again"
             : "its directory is missing; `capstan sweep add` writes it again";
}
State Store::state(std::string_view id) const {
  const State state = written(id).value_or(State::failed);
  return state == State::running && !holder_of(trial(id)) ? State::lost : state;
}

TrialStatus Store::status(const TrialPlan& planned) const {
  TrialStatus out;
  const fs::path directory = trial(planned.id);
  out.state = state(planned.id);
  if (const auto holder = holder_of(directory); holder && out.state == State::running)
    out.owner = holder->text;
  out.attempt = newest_attempt(directory);
  for (int64_t attempt = 1; attempt <= out.attempt; ++attempt) {
    const fs::path file = directory / "attempts" / std::to_string(attempt) / "result.json";
    std::error_code error;
    if (!fs::exists(file, error)) continue;
    try {
      const auto result = ordered_json_of(read_file(file, 1 << 20));
      out.seconds += result.value("seconds", 0.0);
      out.failures = result.value("failures", int64_t{0});
      out.reason = result.value("reason", "");
      out.rungs = result.value("rungs", size_t{0});
    } catch (const Json::exception&) {
      // A damaged file loses one attempt, not the trial.
    }
  }
  if (out.state == State::running || out.state == State::done) out.reason.clear();
  if (out.state == State::failed)
    if (const std::string damaged = damage(planned.id); !damaged.empty()) out.reason = damaged;
  out.total_steps = total_steps(planned);
  const auto curve = read_curve(planned.id, plan_.definition.metric.name);
  if (const auto row = last_logged_step(planned.id)) {
    out.step = row->step;
  } else if (!curve.empty()) {
    // Another program reported the values.
    out.step = curve.back().step;
  }
  out.metric = summarized(curve, plan_.definition.metric);
  return out;
}
std::vector<TrialStatus> Store::statuses() const {
  std::vector<TrialStatus> out;
  for (const TrialPlan& trial : plan_.trials) out.push_back(status(trial));
  return out;
}

int64_t Store::begin_attempt(std::string_view id) const {
  const int64_t number = newest_attempt(trial(id)) + 1;
  std::error_code error;
  fs::create_directories(attempt(id, number), error);
  if (error) fail(ErrorCode::io, "cannot create `" + attempt(id, number).string() + "`: " + error.message());
  fs::create_symlink("../../run/metrics.jsonl", attempt(id, number) / "metrics.jsonl", error);
  // The first attempt creates this link; later ones find it.
  fs::create_symlink("run/checkpoints", trial(id) / "checkpoints", error);
  return number;
}

void Store::change(std::string_view id, const StateChange& transition) const {
  Journal journal(directory_ / "journal.jsonl");
  write_file_durably(trial(id) / "state", std::string(name_of(transition.state)) + "\n");
  journal.append(journal_line(id, transition));
}

void Store::repair_journal() const {
  Journal journal(directory_ / "journal.jsonl");
  std::map<std::string, std::string> last;
  const std::string text = journal.text();
  for (const std::string_view line : split(text, '\n')) {
    if (line.empty()) continue;
    const auto row = ordered_json_of(line, IfNotJson::discard);
    if (row.is_object() && row.contains("trial") && row.contains("state"))
      last[row["trial"].get<std::string>()] = row["state"].get<std::string>();
  }
  for (const TrialPlan& planned : plan_.trials) {
    const auto now = written(planned.id);
    if (!now) continue;
    const auto recorded = last.find(planned.id);
    const std::string_view before =
        recorded == last.end() ? name_of(State::pending) : std::string_view(recorded->second);
    // `lost` is recorded when a trial is taken over from a dead runner; its state file still says running.
    if (before == name_of(*now) || (before == "lost" && now == State::running)) continue;
    journal.append(journal_line(planned.id, {*now,
                                             newest_attempt(trial(planned.id)),
                                             "recorded late: the process that changed the state was killed",
                                             {}}));
  }
}

void Store::record_lost(std::string_view id, int64_t attempt) const {
  Journal(directory_ / "journal.jsonl")
      .append(journal_line(id, {State::lost, attempt, "its runner has ended", {}}));
}

bool Store::has_metrics(std::string_view id) const {
  std::error_code error;
  return fs::exists(metrics(id), error);
}
std::optional<records::ReadRow> Store::last_logged_step(std::string_view id) const {
  return has_metrics(id) ? records::last_logged_step(metrics(id)) : std::nullopt;
}

std::vector<CurvePoint> Store::read_curve(std::string_view id, std::string_view metric) const {
  std::vector<CurvePoint> curve;
  if (!has_metrics(id)) return curve;
  const size_t slash = metric.find('/');
  std::string_view event = slash == std::string_view::npos ? std::string_view() : metric.substr(0, slash);
  if (event == "val") event = "validation";
  const std::string_view name = slash == std::string_view::npos ? metric : metric.substr(slash + 1);
  records::read_metrics(metrics(id), [&](const records::ReadRow& row) {
    if (!row.step || row.event != event) return;
    const auto number =
        std::find_if(row.numbers.begin(), row.numbers.end(), [&](const auto& n) { return n.first == name; });
    if (number == row.numbers.end()) return;
    // A run that went back to a checkpoint logs steps again.
    while (!curve.empty() && curve.back().step >= *row.step) curve.pop_back();
    curve.push_back({*row.step, number->second});
  });
  return curve;
}

std::set<std::string> Store::metric_names(std::string_view id) const {
  std::set<std::string> names;
  if (!has_metrics(id)) return names;
  records::read_metrics(metrics(id), [&](const records::ReadRow& row) {
    if (!row.step) return;
    const std::string event = row.event == "validation" ? "val" : row.event;
    for (const auto& [name, value] : row.numbers) names.insert(event.empty() ? name : event + "/" + name);
  });
  return names;
}

RunMeasurements Store::measured(std::string_view id) const {
  RunMeasurements out;
  const auto row = last_logged_step(id);
  if (!row) return out;
  const auto finite = [](double value) { return std::isfinite(value) ? std::optional(value) : std::nullopt; };
  out.tokens_per_second = finite(row->number("tokens_per_second"));
  out.memory_bytes = finite(row->memory_bytes());
  return out;
}

std::optional<int64_t> Store::total_steps(const TrialPlan& planned) const {
  if (records::is_run(run(planned.id))) {
    try {
      if (const auto steps = records::read_run_file(run(planned.id)).steps) return steps;
    } catch (const Error&) {
      // A damaged file: use what was planned.
    }
  }
  return planned.estimate.steps;
}

RunProgress Store::progress(const TrialPlan& planned) const {
  RunProgress out;
  const State now = state(planned.id);
  const auto row = last_logged_step(planned.id);
  if (!row) return out;
  // More rows of the last step may follow, those of validation, unless the run has ended.
  const bool ended = now == State::done || now == State::failed || now == State::pruned;
  out.reached = row->step.value_or(0) - (ended ? 0 : 1);
  if (now != State::pruned) return out;
  try {
    const auto result = ordered_json_of(
        read_file(attempt(planned.id, newest_attempt(trial(planned.id))) / "result.json", 1 << 20));
    if (result.contains("pruned_at") && result["pruned_at"].is_number_integer())
      out.pruned_at = result["pruned_at"].get<int64_t>();
  } catch (const Error&) {
    // Without result.json, or with one that another program wrote, all rows count.
  } catch (const Json::exception&) {
  }
  return out;
}

std::optional<double> summarized(const std::vector<CurvePoint>& curve, const Metric& metric) {
  if (curve.empty()) return std::nullopt;
  double value = metric.window ? 0 : curve.back().value;
  // Without a window the best value counts.
  if (metric.window == 0) {
    for (const CurvePoint& point : curve)
      if (std::isnan(value) || (!std::isnan(point.value) && metric.better(point.value, value)))
        value = point.value;
  } else {
    const size_t count = std::min(curve.size(), static_cast<size_t>(metric.window));
    for (size_t i = curve.size() - count; i < curve.size(); ++i) value += curve[i].value;
    value /= static_cast<double>(count);
  }
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}

// ---- locks ------------------------------------------------------------------------------------------------

namespace {

// The Slurm job that this process belongs to. One that is put back into the queue keeps its number, and its
// count of restarts rises; by then what it had started before is over.
struct SlurmJob {
  std::string id;
  int64_t restarts = 0;
};
SlurmJob current_slurm_job() {
  const char* const id = std::getenv("SLURM_JOB_ID");
  const char* const restarts = std::getenv("SLURM_RESTART_COUNT");
  return {id ? id : "", restarts ? parse_int(restarts).value_or(0) : 0};
}

struct LockRecord {
  std::string host, since;
  int64_t pid = 0;
  SlurmJob job;
  int64_t beat = 0;  // nanoseconds
  // Rest of the grace period.
  int64_t seconds_left = 0;
};
std::optional<LockRecord> read_lock_record(int fd) {
  const auto text = ordered_json_of(read_all(fd), IfNotJson::discard);
  if (!text.is_object()) return std::nullopt;
  struct stat info {};
  ::fstat(fd, &info);
  try {
    return LockRecord{text.at("host"),
                      text.at("since"),
                      text.at("pid"),
                      {text.value("job", ""), text.value("restarts", int64_t{0})},
                      int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec,
                      kHeartbeatGrace - (::time(nullptr) - info.st_mtim.tv_sec)};
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}
// The kernel frees the lock of a dead process. On a file system whose locks are local to a host, the
// heartbeat decides.
bool held_elsewhere(const std::optional<LockRecord>& claim) {
  if (!claim || claim->host == host_name() || claim->seconds_left <= 0) return false;
  const SlurmJob job = current_slurm_job();
  return job.id.empty() || job.id != claim->job.id || job.restarts <= claim->job.restarts;
}

}  // namespace

std::optional<TrialLock> TrialLock::try_take(const fs::path& trial) {
  const fs::path path = trial / "lock";
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd < 0) fail(ErrorCode::io, "cannot open `" + path.string() + "`: " + system_error_text(errno));
  TrialLock lock(fd);
  // holder_of() takes a shared lock for a moment.
  for (int attempt = 0; !try_lock(fd, LOCK_EX); ++attempt) {
    if (attempt == 5) {
      // The destructor of `lock` would clear the record of the holder.
      ::close(std::exchange(lock.fd_, -1));
      return std::nullopt;
    }
    ::usleep(2000);
  }
  if (held_elsewhere(read_lock_record(fd))) {
    ::close(std::exchange(lock.fd_, -1));
    return std::nullopt;
  }
  OrderedJson claim{{"host", host_name()}, {"pid", ::getpid()}, {"since", records::utc_now()}};
  if (const SlurmJob job = current_slurm_job(); !job.id.empty())
    claim["job"] = job.id, claim["restarts"] = job.restarts;
  const std::string text = dump_json(claim) + "\n";
  if (::ftruncate(fd, 0) != 0 ||
      ::pwrite(fd, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    fail(ErrorCode::io, "cannot write `" + path.string() + "`: " + system_error_text(errno));
  return lock;
}
TrialLock::TrialLock(TrialLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
TrialLock& TrialLock::operator=(TrialLock&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}
TrialLock::~TrialLock() {
  if (fd_ < 0) return;
  if (::ftruncate(fd_, 0) != 0) {
    // The claim stays until its heartbeat is old; the lock itself is free.
  }
  ::close(fd_);
}
void TrialLock::heartbeat() const {
  ::futimens(fd_, nullptr);
}

std::optional<LockHolder> holder_of(const fs::path& trial) {
  const FileDescriptor fd(::open((trial / "lock").c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (fd.get() < 0) return std::nullopt;
  const bool free = try_lock(fd.get(), LOCK_SH);
  const auto claim = read_lock_record(fd.get());
  if (free && !held_elsewhere(claim)) return std::nullopt;
  LockHolder holder;
  if (!claim) return holder;
  holder.text = claim->host + ", process " + std::to_string(claim->pid) + " since " + claim->since;
  holder.here = claim->host == host_name();
  holder.gone = holder.here && ::kill(static_cast<pid_t>(claim->pid), 0) != 0 && errno == ESRCH;
  holder.beat = claim->beat;
  holder.seconds_left = claim->seconds_left;
  return holder;
}

}  // namespace capstan::sweep
