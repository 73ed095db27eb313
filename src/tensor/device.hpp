// A device: where tensors live and kernels run. The rest of the program holds a `Device&` and does not ask which kind it
// is; what differs (addresses, queues, copies) is behind this class and `launch` (launch.hpp).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/thread_pool.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan {

namespace kernels {
struct Table;
}

enum class DeviceType : uint8_t { cpu, cuda, checked, meta };
std::string_view name_of(DeviceType type);

// Who asked for memory: the account that the memory table, the planner and the limit speak of.
enum class MemoryCategory : uint8_t {
  parameters,
  gradients,
  main_parameters,
  moments,
  activations,
  workspace,
  data,
  snapshot,  // copies of the state that a save writes while training goes on
  count_
};
inline constexpr size_t kMemoryCategories = static_cast<size_t>(MemoryCategory::count_);
std::string_view name_of(MemoryCategory category);

// While it lives, allocations of this thread are booked to `owner` (activations when there is none).
class CategoryScope {
 public:
  explicit CategoryScope(MemoryCategory category);
  ~CategoryScope();
  CategoryScope(const CategoryScope&) = delete;
  CategoryScope& operator=(const CategoryScope&) = delete;
  static MemoryCategory current();

 private:
  MemoryCategory before_;
};

struct MemoryUse {            // bytes, after the allocator's rounding
  int64_t now = 0, peak = 0;  // all owners together
  std::array<int64_t, kMemoryCategories> now_by_category{};
  std::array<int64_t, kMemoryCategories> peak_by_category{};  // the split at the moment of the peak
  int64_t reserved = 0;         // taken from the system, in use or kept for reuse
  int64_t system_requests = 0;  // how often the system was asked
  // What kernels keep for themselves between launches, beside all of the above. It grows to the largest need and stays.
  int64_t kernel_scratch = 0;
  // Kept for reuse at the peak: blocks of sizes that were in use at another moment.
  int64_t cached() const { return reserved > peak ? reserved - peak : 0; }
  // What tensors and kernels together take from the system.
  int64_t total() const { return peak + cached() + kernel_scratch; }
};

// A device works through its queues in order. compute: kernels, fills and copies. transfer: copies to the host that run
// beside kernels. Where the host is the device both are the calling thread and everything is done on return.
enum class Queue : uint8_t { compute, transfer };

// A point in a queue: done when all that was queued there before it has run. Must not outlive its device.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() const = 0;  // does not wait
  virtual void wait() = 0;        // throws what failed in the queue
};

// How `launch` runs a kernel.
enum class LaunchMode : uint8_t {
  call,  // right away: the kernel is a function of this thread, or puts itself on its device's queue (Context::stream)
  queue,  // through Device::enqueue
  none,   // not at all: there is no memory
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceType type() const = 0;
  bool is_meta() const { return type() == DeviceType::meta; }
  std::string_view name() const { return name_of(type()); }

  // Blocks are rounded (round_allocation), kept for reuse by what fits them to an eighth and returned to the system only by
  // release_cached(). Not thread-safe: a device belongs to the thread that trains. Errors: no_fit when the system refuses.
  std::byte* allocate(int64_t bytes, MemoryCategory category);
  void free(std::byte* data, int64_t bytes, MemoryCategory category);
  void release_cached();
  MemoryUse memory() const;
  void reset_peak();

  // Waits until all that was queued so far has run; throws what failed there.
  virtual void synchronize() = 0;

  // On the compute queue. The host range of copy_to_device may change once it returns; copy_to_host waits.
  virtual void zero(std::byte* data, int64_t bytes) = 0;
  virtual void copy(std::byte* to, const std::byte* from, int64_t bytes) = 0;  // both on this device
  virtual void copy_to_device(std::byte* to, const void* from_host, int64_t bytes) = 0;
  virtual void copy_to_host(void* to_host, const std::byte* from, int64_t bytes) = 0;
  // Returns at once: the host range is complete, and the device memory may be freed or written, when an event recorded
  // later in that queue is done.
  virtual void start_copy_to_host(void* to_host, const std::byte* from, int64_t bytes, Queue queue);
  virtual std::unique_ptr<Event> record(Queue queue);
  // What is put on `queue` from now on runs after the event. The host does not wait.
  virtual void wait_for(Queue queue, const Event& event);

  // Where host code may touch this memory itself, and nullptr where it may not (HostView knows what to do then).
  virtual std::byte* host_address(std::byte* address) = 0;

  // For `launch` only.
  const kernels::Table& table() const { return *table_; }
  kernels::Context& context() { return context_; }
  LaunchMode launch_mode() const { return launch_mode_; }
  // The address at which this device's kernels see the memory at `address`.
  std::byte* kernel_address(std::byte* address) const { return address + kernel_offset_; }
  virtual void enqueue(std::function<void()> work) { work(); }
  // Before a launch whose scratch grows with its shape: what the kernel will ask for. Only a device where nothing runs listens.
  virtual void reserve_workspace(kernels::WorkspaceSize) {}

 protected:
  Device() = default;
  virtual std::byte* system_allocate(int64_t bytes) = 0;  // nullptr when refused
  virtual void system_free(std::byte* data, int64_t bytes) = 0;
  // A block (of its rounded size) goes back to the cache: what is queued from now on may be its next use.
  virtual void retire(std::byte*, int64_t) {}
  LaunchMode launch_mode_ = LaunchMode::call;
  std::ptrdiff_t kernel_offset_ = 0;
  const kernels::Table* table_ = nullptr;
  kernels::Context context_;

 private:
  struct Cache;
  struct CacheDeleter {
    void operator()(Cache*) const;
  };
  std::unique_ptr<Cache, CacheDeleter> cache_;
  MemoryUse use_;
};

// Sizes up to 1 MiB round up to 512 bytes, larger ones to pages of 4096. The meta device uses the same function and the same
// choice of blocks, so that what is estimated is what is taken.
int64_t round_allocation(int64_t bytes);

// The devices of this build. threads as in ThreadPool. `cuda` without its backend is ErrorCode::unsupported and says how
// to go on.
std::unique_ptr<Device> make_cpu_device(const kernels::Table& table, int threads = 0);
// workers: the threads whose scratch is foretold.
std::unique_ptr<Device> make_meta_device(const kernels::Table& table, int workers = 1);

// The CPU dressed as an accelerator, to find out on any machine what would break on one (checked_device.cpp): queues on threads of
// their own and late on purpose, tensors' addresses that crash who follows them on the host, NaNs in memory that nobody has
// written. The same bits as the CPU.
struct CheckedOptions {
  uint64_t seed = 1;     // of the delays
  bool patient = false;  // nothing runs until somebody waits for it: every missing wait shows
};
std::unique_ptr<Device> make_checked_device(const kernels::Table& table, int threads = 0,
                                            const CheckedOptions& options = {});

}  // namespace capstan
