// A thread of each rank that reads the rank status table and reports a failure once for all ranks. It
// never calls MPI; it ends its process with exit code 4, and the launcher ends the other processes.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "comm/watchdog/failure_watch.hpp"
#include "comm/watchdog/rank_status_files.hpp"
#include "comm/watchdog/transfer_watch.hpp"

namespace capstan::comm {

class Watchdog {
 public:
  // `self`: this rank's slot. All ranks of the host must have published their process ids.
  Watchdog(RankStatusTable& status_table, int self, FailureWatch options);
  ~Watchdog();
  // From now on watches the ranks of other hosts too, through their files. Call it on the first rank of each
  // host.
  void watch_other_hosts(std::unique_ptr<RankStatusFiles> other_hosts);
  // The channels of this process. A failure of any rank aborts them.
  const std::shared_ptr<TransferWatch>& transfers() const { return transfers_; }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch();
  std::vector<RankStatus> read_statuses();
  // The failure of a rank, or of this rank's transport. A rank that has ended makes the transports of the
  // others fail, and is the better explanation.
  std::optional<Error> find_failure();
  // Reports for all ranks unless another rank has done so, and ends this process or calls after_report.
  void report_failure(const Error& error);
  // On a thread of its own, because it may take long. A second call does nothing.
  void abort_transfers(const Error& error);
  RankStatusTable& status_table_;
  int self_;
  FailureWatch options_;
  // Pidfd of each slot's process; -1 for this process, or where the kernel has no pidfds.
  std::vector<int> pidfds_;
  std::vector<bool> gone_;
  const std::shared_ptr<TransferWatch> transfers_ = std::make_shared<TransferWatch>();
  // When the transport was first seen to have failed, CLOCK_MONOTONIC; 0: it has not.
  int64_t transport_failed_ns_ = 0;
  std::thread aborting_;
  // Protects other_hosts_.
  std::mutex mutex_;
  // Null: all ranks are on this host.
  std::unique_ptr<RankStatusFiles> other_hosts_;
  // Statuses of the ranks of other hosts, as last read.
  std::vector<RankStatus> remote_statuses_;
  // Time of the next exchange of files with the other hosts. CLOCK_MONOTONIC.
  int64_t next_exchange_ns_ = 0;
  // Waiting times count from this time at the earliest, because this process may have been stopped before.
  // CLOCK_MONOTONIC.
  int64_t not_before_ns_ = 0;
  // Eventfd that ends the thread.
  int wake_event_ = -1;
  std::thread thread_;
};

}  // namespace capstan::comm
