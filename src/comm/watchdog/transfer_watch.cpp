#include "comm/watchdog/transfer_watch.hpp"

#include <thread>

namespace capstan::comm {

void TransferWatch::add(WatchedTransfers& transfers) {
  const std::lock_guard lock(mutex_);
  channels_.push_back(&transfers);
  if (failure_) transfers.fail(*failure_);
}

void TransferWatch::remove(WatchedTransfers& transfers) {
  const std::lock_guard lock(mutex_);
  std::erase(channels_, &transfers);
}

std::optional<std::string> TransferWatch::poll() {
  const std::lock_guard lock(mutex_);
  std::optional<std::string> first;
  for (WatchedTransfers* channel : channels_) {
    auto problem = channel->poll();
    if (problem && !first) first = std::move(problem);
  }
  return first;
}

void TransferWatch::abort(const Error& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  failure_ = error;
  for (WatchedTransfers* channel : channels_) channel->fail(error);
  // One thread per channel: an abort of NCCL frees memory, which waits for the kernels of all communicators,
  // so that they have to be aborted at the same time.
  std::vector<std::thread> threads;
  for (WatchedTransfers* channel : channels_) threads.emplace_back([channel] { channel->abort(); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace capstan::comm
