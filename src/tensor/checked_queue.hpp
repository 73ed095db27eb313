// A queue of a checked device: runs work in order on its own thread, with deliberate delays.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "base/philox.hpp"

namespace capstan {

class CheckedQueue {
 public:
  // The number of the work item, from 1; 0 is always done.
  using Ticket = uint64_t;

  // Selects the items that are held until a wait needs them or kMaxHeld items follow.
  enum class DelayedItems : uint8_t { none, some, all };
  // Delays work: some items by up to a millisecond, and those that are held. `seed` selects which.
  CheckedQueue(uint64_t seed, DelayedItems hold);
  // Runs the remaining work.
  ~CheckedQueue();
  CheckedQueue(const CheckedQueue&) = delete;
  CheckedQueue& operator=(const CheckedQueue&) = delete;

  // always: runs also after an error, which it does not replace.
  Ticket push(std::function<void()> work, bool always = false);
  Ticket last() const;
  bool done(Ticket ticket) const;
  // Waits until the ticket and all earlier ones have run. Throws the first error thrown by work since the
  // last wait; the work queued after that error is skipped.
  void wait(Ticket ticket);
  // Waits, and returns the error of the work up to the ticket, or null; keeps the error for the next wait().
  std::exception_ptr wait_for_error(Ticket ticket);

  static constexpr size_t kMaxHeld = 1024;

 private:
  struct Item {
    std::function<void()> work;
    bool always;
  };
  void run();
  void hold_or_delay(std::unique_lock<std::mutex>& lock, Ticket ticket);

  mutable std::mutex mutex_;
  std::condition_variable work_, finished_;
  std::deque<Item> pending_;
  Ticket pushed_ = 0, finished_up_to_ = 0, demanded_ = 0;
  std::exception_ptr error_;
  Ticket failed_ = 0;
  // The tickets for which threads wait. Threads are notified for these only, not for each of the many items.
  std::multiset<Ticket> awaited_;
  // Why the queue's thread waits on work_: it is notified only for this, not for each of the many items.
  bool waits_for_items_ = false, holds_item_ = false;
  bool stop_ = false;
  const DelayedItems hold_;
  PhiloxSequence random_;
  // Declared last: the thread uses the members above, so it must end first.
  std::thread thread_;
};

}  // namespace capstan
