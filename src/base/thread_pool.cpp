#include "base/thread_pool.hpp"

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace capstan {

namespace {
thread_local bool inside_parallel_for = false;
// A job of a few microseconds is common in a training step: workers look this often before they sleep.
constexpr int kSpins = 2000;
}  // namespace

struct ThreadPool::State {
  std::mutex callers;  // one job at a time

  std::mutex mutex;
  std::condition_variable wake, done;
  std::atomic<uint64_t> generation{0};
  bool stop = false;
  int busy = 0;  // workers that have not finished the current generation

  // The current job.
  const FunctionRef<void(int64_t, int)>* body = nullptr;
  int64_t tiles = 0;
  std::atomic<int64_t> next{0};
  std::exception_ptr error;

  std::vector<std::thread> threads;

  void work(int worker) {
    inside_parallel_for = true;
    for (int64_t tile; (tile = next.fetch_add(1, std::memory_order_relaxed)) < tiles;) {
      try {
        (*body)(tile, worker);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next.store(tiles, std::memory_order_relaxed);
      }
    }
    inside_parallel_for = false;
  }

  void loop(int worker) {
    uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && generation.load(std::memory_order_acquire) == seen; ++spin)
        __builtin_ia32_pause();
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stop || generation.load(std::memory_order_relaxed) != seen; });
        if (stop) return;
        seen = generation.load(std::memory_order_relaxed);
      }
      work(worker);
      std::lock_guard lock(mutex);
      if (--busy == 0) done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads)
    : state_(std::make_unique<State>()), size_(threads > 0 ? threads : available_cores()) {
  for (int worker = 1; worker < size_; ++worker)
    state_->threads.emplace_back([state = state_.get(), worker] { state->loop(worker); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
    // Ends the spinning as well; stop is looked at first.
    state_->generation.fetch_add(1, std::memory_order_release);
  }
  state_->wake.notify_all();
  for (auto& thread : state_->threads) thread.join();
}

void ThreadPool::parallel_for(int64_t tiles, FunctionRef<void(int64_t, int)> body) {
  if (tiles <= 0) return;
  if (size_ == 1 || tiles == 1 || inside_parallel_for) {
    for (int64_t tile = 0; tile < tiles; ++tile) body(tile, 0);
    return;
  }
  std::lock_guard one_job(state_->callers);
  {
    std::lock_guard lock(state_->mutex);
    state_->body = &body;
    state_->tiles = tiles;
    state_->next.store(0, std::memory_order_relaxed);
    state_->error = nullptr;
    state_->busy = size_ - 1;
    state_->generation.fetch_add(1, std::memory_order_release);
  }
  state_->wake.notify_all();
  state_->work(0);
  std::unique_lock lock(state_->mutex);
  state_->done.wait(lock, [&] { return state_->busy == 0; });
  if (state_->error) std::rethrow_exception(state_->error);
}

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  return 1;
}

}  // namespace capstan
