// A thread of each rank that reads the rank status table and reports a failure once for all ranks. It
// never calls MPI; it ends its process with exit code 4, and the launcher ends the other processes.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/watchdog/rank_status_files.hpp"

namespace capstan::comm {

struct WatchOptions {
  double timeout = 600;  // seconds
  // Where no parent process reports.
  std::function<void(const Error&)> report;
  // Ends the process; null: _exit(4).
  std::function<void()> leave;
};

class Watchdog {
 public:
  // `self`: this rank's slot. All ranks of the host must have published their process ids.
  Watchdog(RankStatusTable& status_table, int self, WatchOptions options);
  ~Watchdog();
  // Watches the ranks of other hosts too. Call it on the first rank of each host.
  void share(std::unique_ptr<RankStatusFiles> others);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch();
  std::vector<RankStatus> look();
  void found(const Error& error);
  RankStatusTable& status_table_;
  int self_;
  WatchOptions options_;
  // Pidfd of each slot; -1: its own, or unsupported.
  std::vector<int> processes_;
  std::vector<bool> gone_;
  // Guards others_.
  std::mutex mutex_;
  // Null: all ranks are on this host.
  std::unique_ptr<RankStatusFiles> others_;
  // As last read.
  std::vector<RankStatus> remote_;
  int64_t next_exchange_ = 0;  // ns
  // Waiting times count from here, because this process may itself have been stopped before. CLOCK_MONOTONIC,
  // ns.
  int64_t not_before_ = 0;
  // eventfd that ends the thread.
  int wake_ = -1;
  std::thread thread_;
};

}  // namespace capstan::comm
