// A device: holds tensors and runs kernels. The rest of the program uses a `Device&` without knowing its
// kind; this class and `launch` (launch.hpp) hide the differences (addresses, queues, copies).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "tensor/block_allocator.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan {

namespace kernels {
struct Table;
}

enum class DeviceType : uint8_t { cpu, cuda, checked, simulated, meta };
std::string_view name_of(DeviceType type);

// The purpose of an allocation, by which the memory table, the estimate and the limit account for memory.
enum class MemoryCategory : uint8_t {
  parameters,
  gradients,
  main_parameters,
  moments,
  activations,
  workspace,
  data,
  // Copies of the training state for an asynchronous save, and the host buffers of any save.
  snapshot,
  count_
};
inline constexpr size_t kMemoryCategories = static_cast<size_t>(MemoryCategory::count_);
std::string_view name_of(MemoryCategory category);

// Sets the memory category of this thread's allocations while it lives. Without a scope it is `activations`.
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

// Location of memory. A device that uses the host's memory has only the kind `device`.
enum class MemoryKind : uint8_t { device, host };
inline constexpr size_t kMemoryKinds = 2;

// Bytes of one kind, after the allocator's rounding.
struct MemoryUse {
  // Sums over all categories.
  int64_t now = 0, peak = 0;
  std::array<int64_t, kMemoryCategories> now_by_category{};
  // Bytes in use at the time of the peak.
  std::array<int64_t, kMemoryCategories> peak_by_category{};
  // Taken from the system, in use or kept for reuse.
  int64_t reserved = 0;
  // Number of requests to the system for memory.
  int64_t system_requests = 0;
  // Memory that is reserved but not in use at the peak: gaps between blocks that were too small for the
  // allocations.
  int64_t cached() const { return reserved > peak ? reserved - peak : 0; }
  // The memory that tensors and the workspaces of kernels together take from the system.
  int64_t total() const { return peak + cached(); }
};

// Is called for all memory that a device allocates and frees, with the bytes that were asked for.
class MemoryListener {
 public:
  virtual ~MemoryListener() = default;
  virtual void allocated(const std::byte* data, int64_t bytes, MemoryCategory category) = 0;
  virtual void freed(const std::byte* data, int64_t bytes, MemoryCategory category) = 0;
  // Pinned memory of the host. bytes: negative where it is freed.
  virtual void pinned(int64_t bytes, MemoryCategory category) = 0;
};

// How the allocator of a device rounds sizes and grows its two ranges of addresses, in bytes. The meta device
// takes those of the device that it stands for, so that estimates are exact.
struct AllocatorRules {
  // Blocks up to this size lie in the small range, larger ones in the large one.
  int64_t largest_small_block = int64_t{1} << 20;
  // Multiples to which sizes are rounded up.
  int64_t small_rounding = 512, large_rounding = 4096;
  // Multiples by which the ranges grow: pages, and the pages of 2 MiB that the system, or an accelerator,
  // maps.
  int64_t small_growth = 4096, large_growth = int64_t{2} << 20;

  int64_t round(int64_t bytes) const;
};

// A device runs the work of each queue in order, and different queues at the same time; events order them. On
// the CPU device, work of every queue runs in the calling thread and is done on return.
enum class Queue : uint8_t {
  // Kernels of the forward and backward passes and of the update, fills, and the copies that do not name a
  // queue. Memory is allocated and freed in the order of this queue: a block that another queue uses may be
  // freed once the compute queue waits for that use.
  compute,
  // Transfers between ranks through host memory, and the kernels that reduce what transfers bring. A channel
  // of NCCL, and its stand-in, transfer on a queue of their own for each group.
  communication,
  // Copies between host and device that overlap with kernels.
  host_to_device,
  device_to_host,
  count_
};
inline constexpr size_t kQueues = static_cast<size_t>(Queue::count_);
std::string_view name_of(Queue queue);

// The purpose of a queue of Device::add_queue().
enum class AddedQueue : uint8_t {
  // Copies, and work of the host.
  work,
  // Transfers of a channel: other processes wait for them, and they begin as soon as they can.
  transfers,
  // Delivery of what a channel's transfers have brought.
  delivery,
};

// A point in a queue: done when all work queued before it has run. Must not outlive its device.
class Event {
 public:
  virtual ~Event() = default;
  // Does not wait.
  virtual bool done() const = 0;
  // Throws the first error of the queue, and of the queues that it waited for.
  virtual void wait() = 0;
  // When it was done: seconds of the host's steady clock. Only for an event of record_time() that is done.
  virtual double time() const = 0;
};

// Work on a queue beside the compute queue, for traces. Both events have times.
struct QueueSpan {
  std::string queue, name;
  std::shared_ptr<Event> before, after;
};

// Memory of a strided view: `rows` rows of `row_bytes`, which begin `stride` bytes apart.
struct ByteRows {
  std::byte* begin;
  int64_t row_bytes;
  int64_t rows = 1, stride = 0;

  int64_t bytes() const { return rows * row_bytes; }
  std::byte* row(int64_t index) const { return begin + index * stride; }
  // The end of the last row.
  std::byte* end() const { return row(rows - 1) + row_bytes; }
};

class PinnedPool;

// How `launch` runs a kernel.
enum class LaunchMode : uint8_t {
  // Calls the kernel in this thread; an accelerator's kernel enqueues itself (Context::stream).
  call,
  // Through Device::enqueue.
  queue,
  // Does not run it: the device has no memory.
  none,
};

class Device {
 public:
  virtual ~Device();
  virtual DeviceType type() const = 0;
  bool is_meta() const { return type() == DeviceType::meta; }
  std::string_view name() const { return name_of(type()); }
  // For the log: "cuda 0 (NVIDIA H100 80GB HBM3, compute capability 9.0)".
  virtual std::string description() const { return std::string(name()); }

  // The two ranges of addresses (AllocatorRules).
  enum class Pool : uint8_t { small, large };
  // The allocator. Rounds sizes up, and divides two ranges of addresses into blocks, for small blocks and for
  // large ones (BlockAllocator). A range grows where no free block is large enough, and returns memory to the
  // system in release_cached() only, which is called before memory is refused. Not thread-safe: the training
  // thread owns the device. Errors: no_fit when the system refuses memory, or the limit of limit_memory().
  std::byte* allocate(int64_t bytes, MemoryCategory category);
  void free(std::byte* data, int64_t bytes, MemoryCategory category);
  void release_cached();
  // Host memory that the device copies from and to without a staging buffer, 64-byte aligned; ordinary memory
  // where the device is the host. It is counted as memory of the host. PinnedBuffer owns such memory. Errors:
  // no_fit.
  std::byte* allocate_pinned(int64_t bytes, MemoryCategory category);
  void free_pinned(std::byte* data, int64_t bytes, MemoryCategory category);
  // Pinned buffers of transfers between ranks (pinned_buffer.hpp).
  PinnedPool& pinned_pool();
  // kind host: memory of the host that the device uses, such as buffers for copies. On a device without
  // memory of its own it is part of `device`.
  MemoryUse memory(MemoryKind kind = MemoryKind::device) const { return use_[static_cast<size_t>(kind)]; }
  // The use of host memory: `device` if the device's memory is the host's.
  MemoryUse host_memory() const {
    return memory(shares_host_memory() ? MemoryKind::device : MemoryKind::host);
  }
  void reset_peak();
  // nullptr: no listener.
  void listen_to_memory(MemoryListener* listener) { memory_listener_ = listener; }
  // Refuses requests to the system that would raise MemoryUse::reserved above `bytes`; nullopt: no limit.
  // `name`: for messages, such as the field that sets the limit. kind host: a device whose memory is the
  // host's has no such memory.
  void limit_memory(MemoryKind kind, std::optional<int64_t> bytes, std::string name);
  const AllocatorRules& allocator_rules() const { return rules_; }
  // Whether tensors lie in host memory, so that one memory limit holds for both.
  virtual bool shares_host_memory() const { return false; }

  // Temporary memory for a launch on `queue`, for LaunchWorkspace (launch.hpp). For the compute queue it is
  // allocated and freed around the launch: the next block at these addresses is used after the kernel. Every
  // other queue keeps one block, which grows to its largest need: allocations follow the compute queue alone.
  kernels::Workspace take_workspace(Queue queue, kernels::WorkspaceSize size);
  void return_workspace(Queue queue, kernels::Workspace workspace);

  // Launches of kernels on `queue` so far, also on the meta device. Fills and copies do not count.
  int64_t launches(Queue queue = Queue::compute) const { return launches_[static_cast<size_t>(queue)]; }
  // Bytes copied so far in the direction host_to_device or device_to_host, on whatever queue, also on the
  // meta device.
  int64_t copied_bytes(Queue direction) const { return copied_bytes_[static_cast<size_t>(direction)]; }

  // How often the host has waited for this device so far: calls of synchronize(), copy_to_host() and
  // Event::wait(), also on devices that complete all work before they return.
  int64_t host_waits() const { return host_waits_; }

  // Waits for the work of all queues; throws the first error of the first queue that has one.
  virtual void synchronize() = 0;

  // These run on the compute queue. The host range of copy_to_device may change once it returns; copy_to_host
  // waits.
  virtual void zero(std::byte* data, int64_t bytes) = 0;
  // Both addresses are on this device.
  virtual void copy(std::byte* to, const std::byte* from, int64_t bytes) = 0;
  virtual void copy_to_device(std::byte* to, const void* from_host, int64_t bytes) = 0;
  virtual void copy_to_host(void* to_host, const std::byte* from, int64_t bytes) = 0;
  // Asynchronous copies on `queue`, without waiting for other queues. Once an event recorded later in that
  // queue is done, the target is complete and the source may be written or freed.
  virtual void start_copy_to_device(std::byte* to, const void* from_host, int64_t bytes, Queue queue);
  virtual void start_copy_to_host(void* to_host, const std::byte* from, int64_t bytes, Queue queue);
  virtual std::unique_ptr<Event> record(Queue queue);
  // An event with a time. Recording it may be slower than record().
  virtual std::unique_ptr<Event> record_time(Queue queue);
  // Whether calls return before their work is done, and queues run at the same time; on the meta device,
  // those of the device that it stands for.
  virtual bool queues_work() const { return false; }
  // A further queue, for copies and `enqueue` only: a launch on it is an internal error.
  virtual Queue add_queue(AddedQueue purpose, std::string name);
  virtual std::string queue_name(Queue queue) const { return std::string(name_of(queue)); }
  // Calls `listener` with every span that a QueueScope marks; empty: no listener.
  void listen(std::function<void(const QueueSpan&)> listener) { listener_ = std::move(listener); }
  const std::function<void(const QueueSpan&)>& listener() const { return listener_; }
  // Whether the device has CUDA graphs, and GraphScope submits launches as such.
  virtual bool has_graphs() const { return false; }
  void use_graphs(bool use) { uses_graphs_ = use && has_graphs(); }
  bool uses_graphs() const { return uses_graphs_; }
  // For GraphScope. begin_graph: the name of the outermost scope.
  virtual void begin_graph(const char* /*name*/) {}
  virtual void end_graph() noexcept {}
  // Graphs that were submitted so far, the launches, fills and copies in them, and how many of the graphs
  // were instantiated: the others updated one of those.
  struct GraphCounts {
    int64_t graphs = 0, nodes = 0, instantiated = 0;
  };
  virtual GraphCounts graph_counts() const { return {}; }

  // Whether profilers see the ranges of RangeScope.
  virtual bool has_ranges() const { return false; }
  // Ranges of this thread. They nest, and a mark is a moment within them.
  virtual void begin_range(const std::string& /*name*/) {}
  virtual void end_range() {}
  virtual void mark(const std::string& /*name*/) {}
  // Work queued on `queue` from now on runs after the event. The host does not wait.
  virtual void wait_for(Queue queue, const Event& event);

  // Declares that work which is queued next on `queue` through enqueue() reads or writes memory of this
  // device. The checked device reports accesses of two queues that no event orders, with both descriptions
  // (`by`).
  virtual void declare_access(Queue, const ByteRows&, bool /*writes*/, const std::string& /*by*/) {}
  // Declares that the host reads or writes host memory now, from which or to which queues copy. The checked
  // device throws ErrorCode::internal if such a copy is under way for which the host has not waited, and
  // names it. PinnedBuffer declares the accesses to its memory.
  virtual void declare_host_access(const ByteRows&, bool /*writes*/) {}

  // The address at which host code can access this memory; nullptr where it cannot (HostView then copies).
  virtual std::byte* host_address(std::byte* address) = 0;

  // Threads of the host, for work beside the kernels such as initial values. Not on the meta device.
  ThreadPool& host_threads() { return *host_threads_; }

  // The kernels of this device; only `launch` runs them.
  const kernels::Table& table() const { return *table_; }
  // The context of kernels on `queue`, without the workspace. Each queue has its own error slot: two
  // queues may run kernels at the same time.
  kernels::LaunchContext context(Queue queue = Queue::compute) {
    require_kernel_queue(queue);
    return {kernel_threads(), stream_of(queue), {}, kernel_errors_ + static_cast<size_t>(queue)};
  }
  // How the kernel with this address is launched.
  virtual LaunchMode launch_mode(const void* /*kernel*/) const { return launch_mode_; }
  void count_launch(Queue queue) {
    require_kernel_queue(queue);
    ++launches_[static_cast<size_t>(queue)];
    launch_queue_ = queue;
  }
  // Whether declare_kernel_access() is of use.
  bool declares_accesses() const { return declares_accesses_; }
  // Declares an access of the kernel that was counted last.
  void declare_kernel_access(const ByteRows& rows, bool writes) {
    if (declares_accesses_)
      declare_access(
          launch_queue_, rows, writes,
          "kernel " + std::to_string(launches(launch_queue_)) + " of the queue " + queue_name(launch_queue_));
  }
  // The address that this device's kernels use for the memory at `address`.
  std::byte* kernel_address(std::byte* address) const { return address + kernel_offset_; }
  virtual void enqueue(Queue, std::function<void()> work) { work(); }

 protected:
  explicit Device(const AllocatorRules& rules = {});
  // Threads of the host that run a kernel, each with a part of its workspace; 0: an accelerator's kernels.
  virtual int workers() const { return host_threads_->size(); }
  // Context::pool.
  virtual ThreadPool* kernel_threads() { return workers() > 0 ? host_threads_ : nullptr; }
  // Context::stream of an accelerator's queue.
  virtual void* stream_of(Queue) { return nullptr; }
  // Called before a kernel on `queue` gets the workspace, and after it was enqueued.
  virtual void begin_workspace(Queue, kernels::Workspace) {}
  virtual void end_workspace(Queue, kernels::Workspace) {}
  // Gives memory to the next `bytes` addresses of a pool's range, from offset `end` on; false: the system
  // refuses.
  virtual bool grow(Pool pool, int64_t end, int64_t bytes) = 0;
  // Returns the memory of the range from offset `end` on, and of blocks that are kept for reuse.
  virtual void shrink(Pool pool, int64_t end, int64_t bytes) = 0;
  // The address of a block in a pool's range; nullptr: the system refuses memory.
  virtual std::byte* place(Pool pool, int64_t offset, int64_t size) = 0;
  // Pinned memory of a rounded size; nullptr: the system refuses memory.
  virtual std::byte* place_pinned(int64_t size);
  virtual void retire_pinned(std::byte* data);
  // Called when pinned memory of this (rounded) size is allocated.
  virtual void occupy_pinned(std::byte*, int64_t /*size*/, MemoryCategory) {}
  // Returns the memory of pinned_pool(). The destructor of a device with a retire_pinned() of its own calls
  // it.
  void release_pinned_pool();
  // Called when a block of this (rounded) size is allocated for `bytes` bytes.
  virtual void occupy(std::byte*, int64_t /*bytes*/, int64_t /*size*/, MemoryCategory) {}
  // Called when a block of this (rounded) size is free; work queued later may use its memory again.
  virtual void retire(std::byte*, int64_t) {}
  LaunchMode launch_mode_ = LaunchMode::call;
  bool uses_graphs_ = false;
  // Whether declare_access() is of use.
  bool declares_accesses_ = false;
  std::ptrdiff_t kernel_offset_ = 0;
  const kernels::Table* table_ = nullptr;
  ThreadPool* host_threads_ = nullptr;
  // The slots of the queues; an accelerator's lie in memory that its kernels can access.
  std::array<kernels::KernelError, kQueues> host_kernel_errors_{};
  kernels::KernelError* kernel_errors_ = host_kernel_errors_.data();
  std::array<int64_t, kQueues> launches_{};
  void count_copy(Queue direction, int64_t bytes) { copied_bytes_[static_cast<size_t>(direction)] += bytes; }
  int64_t host_waits_ = 0;

 private:
  static void require_kernel_queue(Queue queue) {
    CAPSTAN_ASSERT(static_cast<size_t>(queue) < kQueues,
                   "a kernel is launched on a queue that add_queue() made, which is for copies only");
  }
  // Counts memory of the host that the device uses; negative: it is freed.
  void count_host_memory(int64_t bytes, MemoryCategory category);
  // The kind as which host memory that the device uses is counted.
  MemoryKind host_kind() const { return shares_host_memory() ? MemoryKind::device : MemoryKind::host; }
  // Whether the limit of this kind allows `more` bytes.
  bool allows(MemoryKind kind, int64_t more) const;
  // ErrorCode::no_fit for a block of `size` bytes. what: "pinned host memory"; empty: memory of the device.
  [[noreturn]] void fail_out_of_memory(MemoryKind kind, int64_t size, MemoryCategory category,
                                       const std::string& what, const std::string& help) const;
  std::byte* find_block(int64_t size);
  Pool pool_of(int64_t size) const { return size <= rules_.largest_small_block ? Pool::small : Pool::large; }
  BlockAllocator& blocks(Pool pool) { return pools_[static_cast<size_t>(pool)]; }

  const AllocatorRules rules_;
  std::array<BlockAllocator, 2> pools_;
  // Offsets of the blocks in use, by address.
  std::unordered_map<std::byte*, int64_t> offsets_;
  std::array<MemoryUse, kMemoryKinds> use_;
  struct Limit {
    std::optional<int64_t> bytes;
    std::string name;
  };
  std::array<Limit, kMemoryKinds> limits_;
  std::array<int64_t, kQueues> copied_bytes_{};
  // The block that each queue except compute keeps.
  std::array<kernels::Workspace, kQueues> kept_workspaces_{};
  std::function<void(const QueueSpan&)> listener_;
  MemoryListener* memory_listener_ = nullptr;
  Queue launch_queue_ = Queue::compute;
  std::unique_ptr<PinnedPool> pinned_pool_;
};

// Marks the work that is queued on `queue` from construction to end() as a span, if the device has a
// listener.
class QueueScope {
 public:
  QueueScope(Device& device, Queue queue);
  void end(const std::string& name);

 private:
  Device& device_;
  Queue queue_;
  std::shared_ptr<Event> before_;
};

// Submits the work of the compute queue from construction to destruction as one CUDA graph, where
// Device::uses_graphs(): many small kernels then cost the host and the GPU less time than one launch each.
// Results and their order are those without it. What cannot be part of a graph (an event, a wait for another
// queue, a copy from or to the host) divides it. Scopes nest within the outermost one, whose name tells
// sections of code apart: graphs of equal name and equal kinds of work share an executable graph, which is
// updated. An error of a graph is thrown at the next wait of the host.
class GraphScope {
 public:
  GraphScope(Device& device, const char* name) : device_(device.uses_graphs() ? &device : nullptr) {
    if (device_) device_->begin_graph(name);
  }
  ~GraphScope() {
    if (device_) device_->end_graph();
  }
  GraphScope(const GraphScope&) = delete;
  GraphScope& operator=(const GraphScope&) = delete;

 private:
  Device* device_;
};

// Names what the host does and queues from construction to destruction, for profilers of the device (NVTX).
// Ranges nest. `name` returns the name, and is called only where the device has ranges.
class RangeScope {
 public:
  template <class Name>
  RangeScope(Device& device, Name&& name) : device_(device.has_ranges() ? &device : nullptr) {
    if (device_) device_->begin_range(name());
  }
  ~RangeScope() {
    if (device_) device_->end_range();
  }
  RangeScope(const RangeScope&) = delete;
  RangeScope& operator=(const RangeScope&) = delete;

 private:
  Device* device_;
};

// threads: as in ThreadPool.
std::unique_ptr<Device> make_cpu_device(const kernels::Table& table, int threads = 0);
// Stands for a device with these kernels, run by `workers` threads (0: an accelerator), this allocator,
// memory of its own or the host's, and Device::queues_work().
std::unique_ptr<Device> make_meta_device(const kernels::Table& table, int workers = 1,
                                         const AllocatorRules& rules = {}, bool shares_host_memory = true,
                                         bool queues_work = false);

// Throws the error that a kernel reported as an internal error, and empties the slot.
[[noreturn]] void throw_kernel_error(kernels::KernelError& slot);

// A CPU device that behaves like an accelerator, to find missing copies and waits on any machine
// (checked_device.cpp): queues on their own threads with deliberate delays, tensor addresses that crash host
// code, NaNs in uninitialized memory. Work of two queues on the same memory that no event orders is an error,
// which names both, where the host next waits for the queue of the second. So is an access of the host to
// memory of a copy for which it has not waited, where it is declared (declare_host_access()), and the release
// of a pinned buffer that is still in use, where the host next waits for the queue that uses it. Gives the
// same bits as the CPU device.
struct CheckedOptions {
  // Seed of the delays.
  uint64_t seed = 1;
  // No work runs until a wait needs it: finds every missing wait.
  bool patient = false;
  // Tests plant missing waits with the following. The index of a call of wait_for() that is ignored, not
  // counting those of the queues of channels; -1: none.
  int64_t ignored_wait = -1;
  // Counts the calls alone in which this queue waits for an event of that one; count_: of every queue.
  Queue ignored_waiter = Queue::count_, ignored_source = Queue::count_;
  // The index of a call of Event::wait() that is ignored; -1: none.
  int64_t ignored_host_wait = -1;
};
std::unique_ptr<Device> make_checked_device(const kernels::Table& table, int threads = 0,
                                            const CheckedOptions& options = {});

}  // namespace capstan
