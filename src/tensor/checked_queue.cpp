#include "tensor/checked_queue.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace capstan {

CheckedQueue::CheckedQueue(uint64_t seed, DelayedItems hold)
    : hold_(hold), random_(philox_key(seed, purpose::test, 0)), thread_([this] { run(); }) {}

CheckedQueue::~CheckedQueue() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  thread_.join();
}

CheckedQueue::Ticket CheckedQueue::push(std::function<void()> work, bool always) {
  Ticket ticket = 0;
  bool needed = false;
  {
    std::lock_guard lock(mutex_);
    pending_.push_back({std::move(work), always});
    ticket = ++pushed_;
    needed = waits_for_items_ || (holds_item_ && pending_.size() >= kMaxHeld);
  }
  if (needed) work_.notify_one();
  return ticket;
}

CheckedQueue::Ticket CheckedQueue::last() const {
  std::lock_guard lock(mutex_);
  return pushed_;
}

bool CheckedQueue::done(Ticket ticket) const {
  std::lock_guard lock(mutex_);
  return finished_up_to_ >= ticket;
}

std::exception_ptr CheckedQueue::wait_for_error(Ticket ticket) {
  std::unique_lock lock(mutex_);
  demanded_ = std::max(demanded_, ticket);
  if (finished_up_to_ < ticket) {
    if (holds_item_) work_.notify_one();
    const auto awaited = awaited_.insert(ticket);
    finished_.wait(lock, [&] { return finished_up_to_ >= ticket; });
    awaited_.erase(awaited);
  }
  return error_ && failed_ <= ticket ? error_ : nullptr;
}

void CheckedQueue::wait(Ticket ticket) {
  wait_for_error(ticket);
  std::exception_ptr error;
  {
    std::lock_guard lock(mutex_);
    std::swap(error, error_);
  }
  if (error) std::rethrow_exception(error);
}

void CheckedQueue::hold_or_delay(std::unique_lock<std::mutex>& lock, Ticket ticket) {
  constexpr uint64_t kHoldOneIn = 16, kDelayOneIn = 256, kMaxDelay = 1000;  // microseconds
  if (demanded_ < ticket &&
      (hold_ == DelayedItems::all || (hold_ == DelayedItems::some && random_.below(kHoldOneIn) == 0))) {
    holds_item_ = true;
    work_.wait(lock, [&] { return stop_ || demanded_ >= ticket || pending_.size() >= kMaxHeld; });
    holds_item_ = false;
  }
  if (hold_ == DelayedItems::all || random_.below(kDelayOneIn) != 0) return;
  const std::chrono::microseconds delay(1 + random_.below(kMaxDelay));
  lock.unlock();
  std::this_thread::sleep_for(delay);
  lock.lock();
}

void CheckedQueue::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    waits_for_items_ = true;
    work_.wait(lock, [&] { return stop_ || !pending_.empty(); });
    waits_for_items_ = false;
    if (pending_.empty()) return;
    hold_or_delay(lock, finished_up_to_ + 1);
    const bool left_out = error_ != nullptr;
    Item item = std::move(pending_.front());
    pending_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      if (!left_out || item.always) item.work();
    } catch (...) {
      error = std::current_exception();
    }
    // Release its captures before reporting completion.
    item.work = nullptr;
    lock.lock();
    ++finished_up_to_;
    // Moved, so that the thread that waits for the error holds its last reference.
    if (error && !error_) error_ = std::move(error), failed_ = finished_up_to_;
    if (awaited_.empty() || *awaited_.begin() > finished_up_to_) continue;
    // A thread that wakes up while the lock is held waits again at once.
    lock.unlock();
    finished_.notify_all();
    lock.lock();
  }
}

}  // namespace capstan
