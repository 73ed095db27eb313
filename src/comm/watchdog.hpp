// A thread of each rank that watches the others' posts. It never calls MPI: it tells what it finds, once in the whole world, and
// ends its process with exit code 4, whereupon the launcher ends the rest.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "comm/board.hpp"

namespace capstan::comm {

class Watchdog {
 public:
  // Watches the board from the slot `self`, as soon as all of the host's ranks have posted their processes.
  // tell: what to do with the error where the board has no parent that tells it.
  Watchdog(Board& board, int self, double timeout, std::function<void(const Error&)> tell);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch();
  std::vector<Post> look();
  void leave(const Error& error);  // ends the process
  Board& board_;
  int self_;
  double timeout_;
  std::function<void(const Error&)> tell_;
  std::vector<int> processes_;  // pidfd of each slot; -1 for our own, and where the system has none
  std::vector<bool> gone_;
  int64_t not_before_ = 0;  // waiting counts from here: while this process itself was stopped nobody is to blame
  int wake_ = -1;           // eventfd that ends the thread
  std::thread thread_;
};

}  // namespace capstan::comm
