// The queue of a checked device: work in order on a thread of its own, late on purpose.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "base/philox.hpp"

namespace capstan {

class CheckedQueue {
 public:
  // Counts what was pushed, from 1; what was never pushed is done.
  using Ticket = uint64_t;

  // Work starts late: some of it after up to a millisecond, some (with `patient` all of it) only when somebody waits for it
  // or kMostHeld pieces stand behind it. `seed` says which.
  CheckedQueue(uint64_t seed, bool patient);
  ~CheckedQueue();  // runs what is left
  CheckedQueue(const CheckedQueue&) = delete;
  CheckedQueue& operator=(const CheckedQueue&) = delete;

  Ticket push(std::function<void()> work);
  Ticket last() const;
  bool done(Ticket ticket) const;
  // Waits until the ticket and all before it have run. The first error thrown by work since the last wait is thrown here; what
  // stood behind it in the queue was left out.
  void wait(Ticket ticket);
  // The same for another queue's thread: the error stays for who waits in earnest.
  void wait_without_error(Ticket ticket);

  static constexpr size_t kMostHeld = 1024;

 private:
  void run();
  void hold_or_delay(std::unique_lock<std::mutex>& lock, Ticket ticket);

  mutable std::mutex mutex_;
  std::condition_variable work_, finished_;
  std::deque<std::function<void()>> pending_;
  Ticket pushed_ = 0, finished_up_to_ = 0, demanded_ = 0;
  std::exception_ptr error_;
  bool stop_ = false;
  const bool patient_;
  PhiloxStream random_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace capstan
