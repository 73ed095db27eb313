#include "tensor/device.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/checked.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "tensor/pinned_buffer.hpp"

namespace capstan {

std::string_view name_of(DeviceType type) {
  constexpr std::array<std::string_view, 5> names{"cpu", "cuda", "checked", "simulated", "meta"};
  return names[static_cast<size_t>(type)];
}
std::string_view name_of(MemoryCategory category) {
  constexpr std::array<std::string_view, kMemoryCategories> names{
      "parameters", "gradients", "main_parameters", "moments", "activations",
      "workspace",  "data",      "snapshot"};
  return names[static_cast<size_t>(category)];
}

std::string_view name_of(Queue queue) {
  constexpr std::array<std::string_view, kQueues> names{"compute", "communication", "host to device",
                                                        "device to host"};
  return queue < Queue::count_ ? names[static_cast<size_t>(queue)] : "channel";
}

namespace {
constexpr int64_t kHugePage = int64_t{2} << 20;
thread_local MemoryCategory current_category = MemoryCategory::activations;

// Aligns large blocks to huge pages and requests them, which saves page faults and TLB misses. Null when the
// system refuses.
std::byte* allocate_aligned(size_t bytes) {
  const int64_t alignment = bytes >= size_t{kHugePage} ? kHugePage : 64;
  void* data = std::aligned_alloc(static_cast<size_t>(alignment),
                                  static_cast<size_t>(round_up(static_cast<int64_t>(bytes), alignment)));
  if (data && alignment == kHugePage) ::madvise(data, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}
}  // namespace
CategoryScope::CategoryScope(MemoryCategory category) : before_(current_category) {
  current_category = category;
}
CategoryScope::~CategoryScope() {
  current_category = before_;
}
MemoryCategory CategoryScope::current() {
  return current_category;
}

int64_t AllocatorRules::round(int64_t bytes) const {
  return bytes <= largest_small_block ? round_up(bytes < 1 ? 1 : bytes, small_rounding)
                                      : round_up(bytes, large_rounding);
}

Device::Device(const AllocatorRules& rules)
    : rules_(rules), pools_{BlockAllocator(rules.small_growth), BlockAllocator(rules.large_growth)} {}
Device::~Device() = default;

PinnedPool& Device::pinned_pool() {
  if (!pinned_pool_) pinned_pool_ = std::make_unique<PinnedPool>(*this);
  return *pinned_pool_;
}
void Device::release_pinned_pool() {
  pinned_pool_ = nullptr;
}

namespace {
// Adds to the categories and to the sum; the peak follows.
void count(MemoryUse& use, int64_t bytes, MemoryCategory category) {
  use.now += bytes;
  use.now_by_category[static_cast<size_t>(category)] += bytes;
  if (use.now > use.peak) {
    use.peak = use.now;
    use.peak_by_category = use.now_by_category;
  }
}
}  // namespace

void Device::count_host_memory(int64_t bytes, MemoryCategory category) {
  MemoryUse& use = use_[static_cast<size_t>(host_kind())];
  count(use, bytes, category);
  use.reserved += bytes;
  if (bytes > 0) ++use.system_requests;
}

void Device::limit_memory(MemoryKind kind, std::optional<int64_t> bytes, std::string name) {
  limits_[static_cast<size_t>(kind)] = {bytes, std::move(name)};
}

bool Device::allows(MemoryKind kind, int64_t more) const {
  const auto& limit = limits_[static_cast<size_t>(kind)].bytes;
  return !limit || memory(kind).reserved + more <= *limit;
}

void Device::fail_out_of_memory(MemoryKind kind, int64_t size, MemoryCategory category,
                                const std::string& what, const std::string& help) const {
  const auto text = [](int64_t bytes) { return human_bytes(static_cast<double>(bytes)); };
  const MemoryUse use = memory(kind);
  const Limit& limit = limits_[static_cast<size_t>(kind)];
  std::string by_category;
  for (size_t i = 0; i < kMemoryCategories; ++i)
    if (const int64_t bytes = use.now_by_category[i])
      by_category += (by_category.empty() ? " (" : " | ") +
                     std::string(name_of(static_cast<MemoryCategory>(i))) + " " + text(bytes);
  if (!by_category.empty()) by_category += ")";
  fail(ErrorCode::no_fit,
       "out of memory on " + std::string(name()) + ": " + text(size) + (what.empty() ? "" : " of " + what) +
           " for " + std::string(name_of(category)) + " on top of " + text(use.now) + " in use" +
           by_category +
           (use.reserved > use.now ? ", " + text(use.reserved) + " with gaps between blocks" : "") +
           (limit.bytes ? "; " + limit.name + " allows " + text(*limit.bytes) : ""),
       help);
}

// Ranges grow by the units of AllocatorRules, and to multiples of this. In the first step blocks lie behind
// each other as a range grows, in the second one in the gaps that the first has left: with single pages it
// would ask for more.
constexpr int64_t kGrowth = 64 * 1024;

std::byte* Device::find_block(int64_t size) {
  const Pool pool = pool_of(size);
  BlockAllocator& range = blocks(pool);
  auto offset = range.take(size);
  if (!offset) {
    const int64_t more = round_up(range.end() + range.missing(size), kGrowth) - range.end();
    if (!allows(MemoryKind::device, more) || !grow(pool, range.end(), more)) return nullptr;
    range.grow(more);
    MemoryUse& use = use_[static_cast<size_t>(MemoryKind::device)];
    use.reserved += more;
    ++use.system_requests;
    offset = range.take(size);
  }
  std::byte* data = place(pool, *offset, size);
  if (data)
    offsets_.emplace(data, *offset);
  else
    range.put_back(*offset, size);
  return data;
}

std::byte* Device::allocate(int64_t bytes, MemoryCategory category) {
  const int64_t size = rules_.round(bytes);
  MemoryUse& use = use_[static_cast<size_t>(MemoryKind::device)];
  std::byte* data = find_block(size);
  if (!data) {
    release_cached();
    data = find_block(size);
    if (!data)
      fail_out_of_memory(MemoryKind::device, size, category, "",
                         "a smaller train.micro_batch_size or model.recompute_granularity=full needs less");
  }
  count(use, size, category);
  occupy(data, bytes, size, category);
  if (memory_listener_) memory_listener_->allocated(data, bytes, category);
  return data;
}

void Device::free(std::byte* data, int64_t bytes, MemoryCategory category) {
  if (memory_listener_) memory_listener_->freed(data, bytes, category);
  const int64_t size = rules_.round(bytes);
  count(use_[static_cast<size_t>(MemoryKind::device)], -size, category);
  const auto found = offsets_.find(data);
  CAPSTAN_ASSERT(found != offsets_.end(), "memory is freed that was not allocated");
  blocks(pool_of(size)).put_back(found->second, size);
  offsets_.erase(found);
  retire(data, size);
}

std::byte* Device::allocate_pinned(int64_t bytes, MemoryCategory category) {
  const int64_t size = rules_.round(bytes);
  if (!allows(host_kind(), size) && shares_host_memory()) release_cached();
  std::byte* data = allows(host_kind(), size) ? place_pinned(size) : nullptr;
  if (!data)
    fail_out_of_memory(
        host_kind(), size, category, "pinned host memory",
        category == MemoryCategory::snapshot      ? "checkpoint.async_save=false needs no copy of the state"
        : category == MemoryCategory::activations ? "a smaller train.micro_batch_size needs less"
                                                  : "a smaller optimizer.optimizer_offload_fraction needs "
                                                    "less, where the optimizer is offloaded");
  count_host_memory(size, category);
  occupy_pinned(data, size, category);
  if (memory_listener_) memory_listener_->pinned(bytes, category);
  return data;
}

void Device::free_pinned(std::byte* data, int64_t bytes, MemoryCategory category) {
  if (memory_listener_) memory_listener_->pinned(-bytes, category);
  count_host_memory(-rules_.round(bytes), category);
  retire_pinned(data);
}

void Device::release_cached() {
  synchronize();
  for (const Pool pool : {Pool::small, Pool::large}) {
    const int64_t bytes = blocks(pool).shrink();
    shrink(pool, blocks(pool).end(), bytes);
    use_[static_cast<size_t>(MemoryKind::device)].reserved -= bytes;
  }
}

kernels::Workspace Device::take_workspace(Queue queue, kernels::WorkspaceSize size) {
  require_kernel_queue(queue);
  const size_t bytes = size.total(workers());
  if (bytes == 0) return {};
  const auto allocated = [&] {
    return kernels::Workspace{allocate(static_cast<int64_t>(bytes), MemoryCategory::workspace), bytes};
  };
  kernels::Workspace workspace;
  if (queue == Queue::compute) {
    workspace = allocated();
  } else {
    kernels::Workspace& kept = kept_workspaces_[static_cast<size_t>(queue)];
    if (kept.bytes < bytes) {
      // The compute queue may use the old block after this queue has, and this queue the new one after it.
      if (kept.data) {
        wait_for(Queue::compute, *record(queue));
        free(kept.data, static_cast<int64_t>(kept.bytes), MemoryCategory::workspace);
        kept = {};
      }
      kept = allocated();
      wait_for(queue, *record(Queue::compute));
    }
    workspace = {kept.data, bytes};
  }
  begin_workspace(queue, workspace);
  return workspace;
}

void Device::return_workspace(Queue queue, kernels::Workspace workspace) {
  end_workspace(queue, workspace);
  if (queue == Queue::compute)
    free(workspace.data, static_cast<int64_t>(workspace.bytes), MemoryCategory::workspace);
}

void throw_kernel_error(kernels::KernelError& slot) {
  const kernels::KernelError error = std::exchange(slot, {});
  if (error.reason)
    fail(ErrorCode::unsupported,
         "the kernel " + std::string(error.function) + " (" + error.file + "): " + error.reason);
  fail(ErrorCode::internal, "internal error: the kernel " + std::string(error.function) + " (" + error.file +
                                ") needs a workspace of " + std::to_string(error.needed) +
                                " bytes and was launched with " + std::to_string(error.given));
}

namespace {
class CompletedEvent final : public Event {
 public:
  CompletedEvent(double time, int64_t& host_waits) : time_(time), host_waits_(host_waits) {}
  bool done() const override { return true; }
  void wait() override { ++host_waits_; }
  double time() const override { return time_; }

 private:
  double time_;
  int64_t& host_waits_;
};
}  // namespace

// Copies of devices that complete all work before they return.
void Device::start_copy_to_device(std::byte* to, const void* from, int64_t bytes, Queue) {
  copy_to_device(to, from, bytes);
}
void Device::start_copy_to_host(void* to, const std::byte* from, int64_t bytes, Queue) {
  copy_to_host(to, from, bytes);
}
std::unique_ptr<Event> Device::record(Queue) {
  return std::make_unique<CompletedEvent>(0, host_waits_);
}
std::unique_ptr<Event> Device::record_time(Queue) {
  return std::make_unique<CompletedEvent>(steady_seconds(), host_waits_);
}
void Device::wait_for(Queue, const Event&) {}
Queue Device::add_queue(AddedQueue, std::string) {
  return Queue::communication;
}

std::byte* Device::place_pinned(int64_t size) {
  return allocate_aligned(static_cast<size_t>(size));
}
void Device::retire_pinned(std::byte* data) {
  std::free(data);
}

QueueScope::QueueScope(Device& device, Queue queue) : device_(device), queue_(queue) {
  if (device.listener()) before_ = device.record_time(queue);
}
void QueueScope::end(const std::string& name) {
  if (before_ && device_.listener())
    device_.listener()({device_.queue_name(queue_), name, before_, device_.record_time(queue_)});
}

void Device::reset_peak() {
  for (MemoryUse& use : use_) {
    use.peak = use.now;
    use.peak_by_category = use.now_by_category;
  }
}

namespace {

// Addresses for the two pools of a device, which get memory as the pools grow.
class AddressRanges {
 public:
  AddressRanges() {
    const int64_t memory = ::sysconf(_SC_PHYS_PAGES) * int64_t{::sysconf(_SC_PAGESIZE)};
    // Blocks may lie apart: twice the memory.
    bytes_ = round_up(2 * memory, 16 * kHugePage);
    void* mapped = map();
    // If the address space is limited (RLIMIT_AS), takes at most half of it.
    while (mapped == MAP_FAILED && bytes_ > 64 * kHugePage) {
      bytes_ = round_up(bytes_ / 2, 16 * kHugePage);
      mapped = map();
      if (mapped == MAP_FAILED) continue;
      ::munmap(mapped, static_cast<size_t>(bytes_));
      bytes_ = round_up(bytes_ / 2, 16 * kHugePage);
      mapped = map();
    }
    if (mapped == MAP_FAILED)
      fail(ErrorCode::no_fit, "cannot reserve address space for tensors: " + system_error_text(errno));
    begin_ = static_cast<std::byte*>(mapped);
    large_ = begin_ +
             (kHugePage - static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin_) % kHugePage)) % kHugePage;
    small_ = begin_ + bytes_ / 8 * 7;
    // Huge pages save page faults and TLB misses.
    ::madvise(large_, static_cast<size_t>(small_ - large_), MADV_HUGEPAGE);
  }
  ~AddressRanges() { ::munmap(begin_, static_cast<size_t>(bytes_)); }
  AddressRanges(const AddressRanges&) = delete;
  AddressRanges& operator=(const AddressRanges&) = delete;

  std::byte* at(bool large, int64_t offset) const { return (large ? large_ : small_) + offset; }
  bool commit(bool large, int64_t offset, int64_t bytes) {
    const int64_t size = large ? small_ - large_ : begin_ + bytes_ - small_;
    return bytes <= size - offset &&
           ::mprotect(at(large, offset), static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) == 0;
  }
  void release(bool large, int64_t offset, int64_t bytes) {
    ::madvise(at(large, offset), static_cast<size_t>(bytes), MADV_DONTNEED);
    ::mprotect(at(large, offset), static_cast<size_t>(bytes), PROT_NONE);
  }

 private:
  void* map() const {
    return ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  int64_t bytes_;
  std::byte *begin_, *large_, *small_;
};

class CpuDevice final : public Device {
 public:
  CpuDevice(const kernels::Table& table, int threads) : pool_(threads) {
    table_ = &table;
    host_threads_ = &pool_;
  }
  DeviceType type() const override { return DeviceType::cpu; }
  bool shares_host_memory() const override { return true; }
  void synchronize() override { ++host_waits_; }
  std::byte* host_address(std::byte* address) override { return address; }
  void zero(std::byte* data, int64_t bytes) override { std::memset(data, 0, static_cast<size_t>(bytes)); }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void copy_to_device(std::byte* to, const void* from, int64_t bytes) override {
    count_copy(Queue::host_to_device, bytes);
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void copy_to_host(void* to, const std::byte* from, int64_t bytes) override {
    ++host_waits_;
    start_copy_to_host(to, from, bytes, Queue::compute);
  }
  // Large copies, such as a snapshot of the training state, take the bandwidth of several cores.
  void start_copy_to_host(void* to, const std::byte* from, int64_t bytes, Queue) override {
    count_copy(Queue::device_to_host, bytes);
    constexpr int64_t kBlock = int64_t{4} << 20;
    pool_.parallel_for(ceil_div(bytes, kBlock), [&](int64_t block, int) {
      const int64_t begin = block * kBlock, size = std::min(kBlock, bytes - begin);
      std::memcpy(static_cast<std::byte*>(to) + begin, from + begin, static_cast<size_t>(size));
    });
  }

 protected:
#if defined(__SANITIZE_ADDRESS__)
  // The sanitizer checks the bounds of heap blocks.
  bool grow(Pool, int64_t, int64_t) override {
    return true;
  }
  void shrink(Pool, int64_t, int64_t) override {}
  std::byte* place(Pool, int64_t, int64_t size) override {
    return static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>(round_up(size, 64))));
  }
  void retire(std::byte* data, int64_t) override {
    std::free(data);
  }
#else
  bool grow(Pool pool, int64_t end, int64_t bytes) override {
    return ranges_.commit(pool == Pool::large, end, bytes);
  }
  void shrink(Pool pool, int64_t end, int64_t bytes) override {
    if (bytes > 0) ranges_.release(pool == Pool::large, end, bytes);
  }
  std::byte* place(Pool pool, int64_t offset, int64_t) override {
    return ranges_.at(pool == Pool::large, offset);
  }
#endif

 private:
  ThreadPool pool_;
#if !defined(__SANITIZE_ADDRESS__)
  AddressRanges ranges_;
#endif
};

// Shapes without memory: addresses are never dereferenced, and every block counts its size on a real device.
class MetaDevice final : public Device {
 public:
  MetaDevice(const kernels::Table& table, int workers, const AllocatorRules& rules, bool shares_host_memory,
             bool queues_work)
      : Device(rules), workers_(workers), shares_host_memory_(shares_host_memory), queues_work_(queues_work) {
    table_ = &table;
    launch_mode_ = LaunchMode::none;
  }
  ~MetaDevice() override { release_pinned_pool(); }
  DeviceType type() const override { return DeviceType::meta; }
  bool shares_host_memory() const override { return shares_host_memory_; }
  bool queues_work() const override { return queues_work_; }
  void synchronize() override {}
  std::byte* host_address(std::byte*) override { return nullptr; }
  void zero(std::byte*, int64_t) override {}
  void copy(std::byte*, const std::byte*, int64_t) override {}
  void copy_to_device(std::byte*, const void*, int64_t bytes) override {
    count_copy(Queue::host_to_device, bytes);
  }
  void start_copy_to_host(void*, const std::byte*, int64_t bytes, Queue) override {
    count_copy(Queue::device_to_host, bytes);
  }
  void copy_to_host(void*, const std::byte*, int64_t) override {
    fail(ErrorCode::internal, "internal error: the value of a meta tensor was asked for");
  }

 protected:
  int workers() const override { return workers_; }
  bool grow(Pool, int64_t, int64_t) override { return true; }
  void shrink(Pool, int64_t, int64_t) override {}
  std::byte* place_pinned(int64_t) override { return address(uintptr_t{1} << 12); }
  void retire_pinned(std::byte*) override {}
  std::byte* place(Pool pool, int64_t offset, int64_t) override {
    return address((uintptr_t{1} << (pool == Pool::large ? 60 : 20)) + static_cast<uintptr_t>(offset));
  }

 private:
  // Never dereferenced.
  static std::byte* address(uintptr_t value) {
    return reinterpret_cast<std::byte*>(value);  // NOLINT(performance-no-int-to-ptr)
  }

  const int workers_;
  const bool shares_host_memory_, queues_work_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(const kernels::Table& table, int threads) {
  return std::make_unique<CpuDevice>(table, threads);
}
std::unique_ptr<Device> make_meta_device(const kernels::Table& table, int workers,
                                         const AllocatorRules& rules, bool shares_host_memory,
                                         bool queues_work) {
  return std::make_unique<MetaDevice>(table, workers, rules, shares_host_memory, queues_work);
}

}  // namespace capstan
