#include "base/thread_pool.hpp"

#include <sched.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace capstan {

namespace {
thread_local bool inside_parallel_for = false;
// A training step has hundreds of jobs of a millisecond and less, and to wake a sleeping thread takes a good
// part of that on a virtual machine: both sides look this often (about a tenth of a millisecond) before they
// sleep.
constexpr int kSpins = 4000;

template <class Ready>
bool spin(const Ready& ready) {
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return ready();
}
}  // namespace

struct ThreadPool::State {
  // Held by the caller, so that there is one job at a time.
  std::mutex callers;

  // The number of the current job. A worker that has seen it waits for it to grow before it reads anything
  // else. It has 32 bits because a futex waits on it.
  std::atomic<uint32_t> generation{0};
  // Workers that have not finished the current job.
  std::atomic<int> busy{0};
  std::atomic<bool> stop{false};

  // The current job. Each worker begins with its own range of neighboring tiles, so that a tile finds the
  // data of the one before in the worker's caches. It then takes tiles from the ranges of other workers.
  struct alignas(64) TileRange {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  const FunctionRef<void(int64_t, int)>* body = nullptr;
  std::vector<TileRange> ranges;
  std::mutex error_mutex;
  std::exception_ptr error;
  std::atomic<bool> failed{false};

  std::vector<std::thread> threads;

  explicit State(int size) : ranges(static_cast<size_t>(size)) {}

  void work(int worker) {
    inside_parallel_for = true;
    for (size_t i = 0; i < ranges.size(); ++i) {
      TileRange& range = ranges[(static_cast<size_t>(worker) + i) % ranges.size()];
      for (int64_t tile; !failed.load(std::memory_order_relaxed) &&
                         (tile = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) {
        try {
          (*body)(tile, worker);
        } catch (...) {
          std::lock_guard lock(error_mutex);
          if (!error) error = std::current_exception();
          failed.store(true, std::memory_order_relaxed);
        }
      }
    }
    inside_parallel_for = false;
  }

  void loop(int worker) {
    for (uint32_t seen = 0;;) {
      if (!spin([&] { return generation.load(std::memory_order_acquire) != seen; }))
        generation.wait(seen, std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      ++seen;
      work(worker);
      if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) busy.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads) : size_(threads > 0 ? threads : available_cores()) {
  state_ = std::make_unique<State>(size_);
  for (int worker = 1; worker < size_; ++worker)
    state_->threads.emplace_back([state = state_.get(), worker] { state->loop(worker); });
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true, std::memory_order_relaxed);
  state_->generation.fetch_add(1, std::memory_order_release);
  state_->generation.notify_all();
  for (auto& thread : state_->threads) thread.join();
}

void ThreadPool::parallel_for(int64_t tiles, FunctionRef<void(int64_t, int)> body) {
  if (tiles <= 0) return;
  if (size_ == 1 || tiles == 1 || inside_parallel_for) {
    for (int64_t tile = 0; tile < tiles; ++tile) body(tile, 0);
    return;
  }
  State& s = *state_;
  std::lock_guard one_job(s.callers);
  s.body = &body;
  for (int64_t worker = 0; worker < size_; ++worker) {
    State::TileRange& range = s.ranges[static_cast<size_t>(worker)];
    range.next.store(tiles * worker / size_, std::memory_order_relaxed);
    range.end = tiles * (worker + 1) / size_;
  }
  s.error = nullptr;
  s.failed.store(false, std::memory_order_relaxed);
  s.busy.store(size_ - 1, std::memory_order_relaxed);
  s.generation.fetch_add(1, std::memory_order_release);
  s.generation.notify_all();
  s.work(0);
  if (!spin([&] { return s.busy.load(std::memory_order_acquire) == 0; }))
    for (int left; (left = s.busy.load(std::memory_order_acquire)) != 0;)
      s.busy.wait(left, std::memory_order_acquire);
  if (s.error) std::rethrow_exception(s.error);
}

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  return 1;
}

}  // namespace capstan
