#include "comm/watchdog/watchdog.hpp"

#include <chrono>
#include <thread>

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <string>

#include "base/file.hpp"

namespace capstan::comm {

namespace {

// True where a process is stopped: state T or t in /proc/PID/stat, after the name in parentheses.
bool is_stopped(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return false;
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return false;
  return text[name_end + 2] == 'T' || text[name_end + 2] == 't';
}

}  // namespace

Watchdog::Watchdog(RankStatusTable& status_table, int self, FailureWatch options)
    : status_table_(status_table), self_(self), options_(std::move(options)) {
  wake_event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_event_ < 0) fail(ErrorCode::io, "cannot start the watchdog: " + system_error_text(errno));
  for (int i = 0; i < status_table.ranks(); ++i) {
    const int pid = status_table.slot(i).pid;
    pidfds_.push_back(i == self || pid <= 0 ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  }
  gone_.assign(pidfds_.size(), false);
  not_before_ns_ = monotonic_ns();
  // The main thread handles signals.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { watch(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Watchdog::~Watchdog() {
  const uint64_t one = 1;
  if (::write(wake_event_, &one, sizeof one) == sizeof one) thread_.join();
  if (aborting_.joinable()) aborting_.join();
  ::close(wake_event_);
  for (const int pidfd : pidfds_)
    if (pidfd >= 0) ::close(pidfd);
}

std::vector<RankStatus> Watchdog::read_statuses() {
  std::vector<RankStatus> statuses;
  for (int i = 0; i < status_table_.ranks(); ++i) {
    statuses.push_back(status_table_.read(i, not_before_ns_));
    RankStatus& status = statuses.back();
    status.gone = gone_[static_cast<size_t>(i)];
    if (i != self_ && status.seconds >= options_.timeout && status.state != RankState::ended &&
        status.state != RankState::absent)
      status.stopped = is_stopped(status.pid);
  }
  const std::lock_guard lock(mutex_);
  if (!other_hosts_) return statuses;
  // Read files less often than memory.
  if (const int64_t now = monotonic_ns(); now >= next_exchange_ns_) {
    next_exchange_ns_ = now + static_cast<int64_t>(1e9 * std::clamp(options_.timeout / 8, 0.01, 30.0));
    other_hosts_->write(statuses);
    remote_statuses_ = other_hosts_->read(options_.timeout);
  }
  statuses.insert(statuses.end(), remote_statuses_.begin(), remote_statuses_.end());
  return statuses;
}

void Watchdog::watch() {
  // The end of a process wakes this thread at once; other states are checked several times within the
  // timeout.
  const double interval = std::clamp(options_.timeout / 8, 0.01, 1.0);
  int64_t before = monotonic_ns();
  while (true) {
    std::vector<pollfd> events{{wake_event_, POLLIN, 0}};
    std::vector<size_t> index{0};
    for (size_t i = 0; i < pidfds_.size(); ++i)
      if (pidfds_[i] >= 0 && !gone_[i]) events.push_back({pidfds_[i], POLLIN, 0}), index.push_back(i);
    ::poll(events.data(), events.size(), static_cast<int>(interval * 1000));
    if (events[0].revents) return;
    for (size_t e = 1; e < events.size(); ++e)
      if (events[e].revents) gone_[index[e]] = true;
    const int64_t now = monotonic_ns();
    if (1e-9 * static_cast<double>(now - before) > 2 * interval + 2) not_before_ns_ = now;
    before = now;
    status_table_.slot(self_).heartbeat.fetch_add(1, std::memory_order_relaxed);
    // Another process reports; the launcher ends this one.
    if (status_table_.report_claimed()) {
      abort_transfers(Error(ErrorCode::rank_failure, "another rank has failed; its report has the error"));
      continue;
    }
    if (const auto error = find_failure()) report_failure(*error);
  }
}

std::optional<Error> Watchdog::find_failure() {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  // While the transport has failed, for a short time only a rank that has ended counts.
  const double patience = std::min(2.0, options_.timeout / 2);
  const auto problem = transfers_->poll();
  const std::vector<RankStatus> statuses = read_statuses();
  if (auto error = diagnose_stall(statuses, problem ? kNever : options_.timeout)) return error;
  if (!problem) return std::nullopt;
  const int64_t now = monotonic_ns();
  if (transport_failed_ns_ == 0) transport_failed_ns_ = now;
  if (1e-9 * static_cast<double>(now - transport_failed_ns_) < patience) return std::nullopt;
  return transport_error(statuses[static_cast<size_t>(self_)], *problem);
}

void Watchdog::watch_other_hosts(std::unique_ptr<RankStatusFiles> other_hosts) {
  const std::lock_guard lock(mutex_);
  other_hosts_ = std::move(other_hosts);
}

void Watchdog::abort_transfers(const Error& error) {
  if (!aborting_.joinable())
    aborting_ = std::thread([transfers = transfers_, error] { transfers->abort(error); });
}

void Watchdog::report_failure(const Error& error) {
  if (!status_table_.claim_report()) return;
  // Whether this rank is the first of all hosts to claim the report.
  bool first = true;
  {
    const std::lock_guard lock(mutex_);
    if (other_hosts_) first = other_hosts_->claim_report();
  }
  if (first) {
    status_table_.write_report(error);
    if (!status_table_.has_parent() && options_.report) options_.report(error);
  }
  abort_transfers(error);
  if (options_.after_report) return options_.after_report();
  // Give the launcher time to report the signal of the dead rank and to end this process.
  std::this_thread::sleep_for(std::chrono::seconds(1));
  ::_exit(exit_code_of(ErrorCode::rank_failure));
}

}  // namespace capstan::comm
