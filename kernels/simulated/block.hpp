// A block of simulated threads. Each runs until it waits, for the block or for lanes of its warp, or returns;
// then the next one that can run continues. A thread that waits keeps a stack of its own (Fiber); threads
// that never wait share one and run one after the other.
//
// A defect of the kernel is an Error with the code `internal`, one sentence that begins with file and line:
//   - a barrier that not all threads of the block reach, or a warp operation that not all lanes reach which
//     its mask names, because they have returned or wait elsewhere
//   - a warp operation whose mask does not name a lane that executes it
//   - an element of shared memory that two threads access, one of them to write, without a barrier between,
//     or that lies outside of its array (shared_memory.hpp)
//   - an asynchronous copy that is not waited for, or whose target is accessed before
//   - a signed integer that overflows (overflow.hpp)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "base/function_ref.hpp"
#include "base/thread_pool.hpp"
#include "kernels/simulated/fiber.hpp"
#include "kernels/simulated/location.hpp"
#include "kernels/simulated/order.hpp"
#include "kernels/simulated/shared_memory.hpp"

namespace capstan::kernels::simulated {

inline constexpr int kWarp = 32;
inline constexpr int kMaxThreads = 1024;
inline constexpr int64_t kMaxBlocks = INT32_MAX;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFF;

// SplitMix64: quick, and enough for orders and samples.
uint64_t next_random(uint64_t& state);

// The grid of a launch, and where a kernel function makes it.
struct LaunchShape {
  int64_t blocks = 0;
  int threads = 0;
  // Dynamic shared memory of a block.
  size_t shared_bytes = 0;
  Location at;
};

// Lanes of a warp that wait for each other: those of `mask`, of which `arrived` are there.
struct WarpOperation {
  Location at;
  uint32_t mask = 0, arrived = 0;
};

// Runs the threads of one block after another, with the stacks and the shared memory of the block before.
class Block {
 public:
  Block();
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Runs all threads of block `index`. Errors: the first defect; the other threads are abandoned.
  // most_waits: the barriers and warp operations after which the rest of the block does not run.
  void run(int64_t index, const LaunchShape& launch, const Order& order, int64_t most_waits,
           FunctionRef<void()> kernel);

  // ---- for the running thread

  int thread() const { return thread_; }
  int threads() const { return launch_.threads; }
  int64_t index() const { return index_; }
  int64_t blocks() const { return launch_.blocks; }
  const LaunchShape& launch() const { return launch_; }

  // Waits for all threads of the block.
  void synchronize(Location at);
  // Waits for the lanes of `mask`. True for the last one, which does not wait.
  bool arrive(Location at, uint32_t mask);
  // Waits like arrive(), and orders accesses to shared memory if the mask names all lanes.
  void synchronize_warp(Location at, uint32_t mask);

  // Returns what `combine` makes of the values of the lanes in `mask`: combine(T values[32]) replaces each
  // lane's value by its result.
  template <class T, class Combine>
  T exchange(Location at, uint32_t mask, T value, Combine&& combine) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kSlotBytes);
    Warp& warp = warps_[static_cast<size_t>(thread_ / kWarp)];
    std::byte* slot = warp.slots[static_cast<size_t>(thread_ % kWarp)].data();
    std::memcpy(slot, &value, sizeof(T));
    if (arrive(at, mask)) {
      T values[kWarp] = {};
      for (size_t lane = 0; lane < kWarp; ++lane)
        if ((mask >> lane & 1) != 0) std::memcpy(&values[lane], warp.slots[lane].data(), sizeof(T));
      combine(values);
      for (size_t lane = 0; lane < kWarp; ++lane)
        if ((mask >> lane & 1) != 0) std::memcpy(warp.slots[lane].data(), &values[lane], sizeof(T));
    }
    std::memcpy(&value, slot, sizeof(T));
    return value;
  }

  // The array that a declaration makes for this block; `site` is one object for each declaration.
  SharedArray& shared(const SharedSite& site, int64_t count, size_t element_bytes, bool dynamic = false);
  // All bytes of the launch's dynamic shared memory, as one array.
  SharedArray& dynamic_shared(const SharedSite& site, size_t element_bytes);

  void read(SharedArray& array, int64_t i, Location at);
  void write(SharedArray& array, int64_t i, Location at);
  // Copies `given` of `bytes` bytes to the elements from `first` on at the wait for its group, and writes
  // zeros after them.
  void start_copy(SharedArray& array, int64_t first, const void* from, size_t bytes, int given, Location at);
  void commit_copies() { ++committed_[static_cast<size_t>(thread_)]; }
  // Completes all groups of this thread but the `pending` latest.
  void wait_for_copies(int pending);

  // Throws; `what` is a sentence without its location.
  [[noreturn]] void report(Location at, const std::string& what) const;
  // "thread 5 of block 0"
  std::string name_of(int thread) const;

 private:
  static constexpr size_t kSlotBytes = 16;
  enum class State : uint8_t { fresh, running, ready, at_barrier, in_warp, returned };
  struct Warp {
    std::array<std::array<std::byte, kSlotBytes>, kWarp> slots;
    std::vector<WarpOperation> pending;
    // Lanes.
    uint32_t returned = 0;
    // Barriers of the warp.
    uint32_t epoch = 0;
  };
  struct Copy {
    SharedArray* array = nullptr;
    int64_t first = 0;
    const void* from = nullptr;
    size_t bytes = 0, given = 0;
    Location at;
    int group = 0;
  };

  static void run_threads(void* block);
  void run_thread();
  // The element that the running thread "reads" or "writes". Errors: it is outside of the array, or the
  // target of a copy that has not been waited for.
  SharedElement& accessed(SharedArray& array, int64_t i, Location at, const char* accesses) const;
  void prepare(const Order& order);
  void finish_thread();
  void push(int thread) { queue_[queue_end_++ & (2 * kMaxThreads - 1)] = static_cast<int16_t>(thread); }
  // The next thread that can run, or -1.
  int pop() { return queue_begin_ == queue_end_ ? -1 : queue_[queue_begin_++ & (2 * kMaxThreads - 1)]; }
  // Switches from the running thread, which waits, to the next one.
  void suspend(State state, Location at);
  void switch_to(int thread);
  Fiber& take_fiber();
  void release_warp(int warp, uint32_t lanes);
  [[noreturn]] void report_stuck() const;
  void check_return() const;
  // Whether an access of another thread lies before a barrier that this thread has passed as well.
  bool ordered(int other, uint32_t epoch, uint32_t warp_epoch) const {
    return epoch != epoch_ || (other / kWarp == thread_ / kWarp &&
                               warp_epoch != warps_[static_cast<size_t>(thread_ / kWarp)].epoch);
  }
  [[noreturn]] void report_race(const SharedArray& array, int64_t i, Location at, bool writes,
                                const SharedAccess& other, bool other_writes) const;

  int thread_ = 0;
  int64_t index_ = 0;
  LaunchShape launch_;
  int64_t most_waits_ = 0, waits_ = 0;
  FunctionRef<void()>* kernel_ = nullptr;
  std::exception_ptr error_;

  // Threads in the order of this block, and lanes in that of its warps.
  std::array<int16_t, kMaxThreads> order_{};
  int ordered_threads_ = 0;
  Order::Kind ordered_kind_ = Order::Kind::forward;
  // A ring of threads that can run.
  std::array<int16_t, size_t{2} * kMaxThreads> queue_{};
  size_t queue_begin_ = 0, queue_end_ = 0;

  std::array<State, kMaxThreads> states_{};
  std::array<Location, kMaxThreads> waits_at_{};
  int returned_ = 0, at_barrier_ = 0;
  Location barrier_;
  // Barriers passed.
  uint32_t epoch_ = 0;
  std::vector<Warp> warps_;

  Fiber main_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> free_fibers_;
  std::array<Fiber*, kMaxThreads> fiber_of_{};
  Fiber* running_fiber_ = nullptr;

  SharedMemory memory_;
  // Asynchronous copies of each thread.
  std::array<std::vector<Copy>, kMaxThreads> copies_;
  std::array<int, kMaxThreads> committed_{};
};

// The block that runs on this thread of the host.
extern constinit thread_local Block* running_block;

// Runs `kernel` once for every thread of every block, or of a sample of them (sample.hpp); on the pool's
// threads, if there is one. Returns when all are done. Errors: the defects above; a shape that the simulated
// GPU does not run.
void run_blocks(ThreadPool* pool, const LaunchShape& shape, FunctionRef<void()> kernel);

}  // namespace capstan::kernels::simulated
