// A thread of each rank that watches the others' posts. It never calls MPI: it tells what it finds, once in the whole world, and
// ends its process with exit code 4, whereupon the launcher ends the rest.
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
  double timeout = 600;                      // seconds
  std::function<void(const Error&)> report;  // where the board has no parent that tells
  std::function<void()> leave;               // ends the process; null: _exit(4)
};

class Watchdog {
 public:
  // Watches the board from the slot `self`; all ranks of the host have posted their processes.
  Watchdog(RankStatusTable& status_table, int self, WatchOptions options);
  ~Watchdog();
  // From now on the ranks of other hosts are watched too; by the first slot of a host.
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
  std::vector<int> processes_;  // pidfd of each slot; -1 for our own, and where the system has none
  std::vector<bool> gone_;
  std::mutex mutex_;                         // of the next
  std::unique_ptr<RankStatusFiles> others_;  // null: all ranks are on this host
  std::vector<RankStatus> remote_;           // as last read
  int64_t next_exchange_ = 0;                // ns
  int64_t not_before_ =
      0;           // waiting counts from here: while this process itself was stopped nobody is to blame
  int wake_ = -1;  // eventfd that ends the thread
  std::thread thread_;
};

}  // namespace capstan::comm
