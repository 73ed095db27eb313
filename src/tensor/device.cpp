#include "tensor/device.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/checked.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"

namespace capstan {

std::string_view name_of(DeviceType type) {
  constexpr std::array<std::string_view, 4> names{"cpu", "cuda", "checked", "meta"};
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
thread_local MemoryCategory current_owner = MemoryCategory::activations;

// Aligns large blocks to huge pages and requests them, which
// saves page faults and TLB misses. Null when the system refuses.
std::byte* allocate_aligned(size_t bytes) {
  const int64_t alignment = bytes >= size_t{kHugePage} ? kHugePage : 64;
  void* data = std::aligned_alloc(static_cast<size_t>(alignment),
                                  static_cast<size_t>(round_up(static_cast<int64_t>(bytes), alignment)));
  if (data && alignment == kHugePage) ::madvise(data, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}
}  // namespace
CategoryScope::CategoryScope(MemoryCategory category) : before_(current_owner) {
  current_owner = category;
}
CategoryScope::~CategoryScope() {
  current_owner = before_;
}
MemoryCategory CategoryScope::current() {
  return current_owner;
}

int64_t round_allocation(int64_t bytes) {
  return bytes <= Device::kLargestSmallBlock ? round_up(bytes < 1 ? 1 : bytes, 512) : round_up(bytes, 4096);
}

// The small pool grows by pages, the large one by the pages of 2 MiB that the system, or an accelerator,
// maps.
Device::Device() : pools_{BlockAllocator(4096), BlockAllocator(kHugePage)} {}

std::byte* Device::find_block(int64_t size) {
  const Pool pool = pool_of(size);
  BlockAllocator& range = blocks(pool);
  auto offset = range.take(size);
  if (!offset) {
    const int64_t more = range.missing(size);
    if (!grow(pool, range.end(), more)) return nullptr;
    range.grow(more);
    use_.reserved += more;
    ++use_.system_requests;
    offset = range.take(size);
  }
  std::byte* data = place(pool, *offset, size);
  if (data)
    offsets_.emplace(data, *offset);
  else
    range.put_back(*offset);
  return data;
}

std::byte* Device::allocate(int64_t bytes, MemoryCategory category) {
  const int64_t size = round_allocation(bytes);
  std::byte* data = find_block(size);
  if (!data) {
    release_cached();
    data = find_block(size);
    if (!data)
      fail(ErrorCode::no_fit,
           "out of memory on " + std::string(name()) + ": " + human_bytes(static_cast<double>(size)) +
               " for " + std::string(name_of(category)) + " on top of " +
               human_bytes(static_cast<double>(use_.now)) + " in use",
           "a smaller train.micro_batch_size or model.recompute_granularity=full needs less");
  }
  use_.now += size;
  use_.now_by_category[static_cast<size_t>(category)] += size;
  if (use_.now > use_.peak) {
    use_.peak = use_.now;
    use_.peak_by_category = use_.now_by_category;
  }
  return data;
}

void Device::free(std::byte* data, int64_t bytes, MemoryCategory category) {
  const int64_t size = round_allocation(bytes);
  use_.now -= size;
  use_.now_by_category[static_cast<size_t>(category)] -= size;
  const auto found = offsets_.find(data);
  CAPSTAN_ASSERT(found != offsets_.end(), "memory is freed that was not allocated");
  blocks(pool_of(size)).put_back(found->second);
  offsets_.erase(found);
  retire(data, size);
}

std::byte* Device::allocate_pinned(int64_t bytes, MemoryCategory category) {
  const int64_t size = round_allocation(bytes);
  std::byte* data = place_pinned(size);
  if (!data)
    fail(ErrorCode::no_fit,
         "out of memory: " + human_bytes(static_cast<double>(size)) + " of pinned host memory for " +
             std::string(name_of(category)),
         category == MemoryCategory::snapshot ? "checkpoint.async_save=false needs no copy of the state"
                                              : "a smaller train.micro_batch_size needs less");
  use_.pinned += size;
  use_.pinned_by_category[static_cast<size_t>(category)] += size;
  return data;
}

void Device::free_pinned(std::byte* data, int64_t bytes, MemoryCategory category) {
  const int64_t size = round_allocation(bytes);
  use_.pinned -= size;
  use_.pinned_by_category[static_cast<size_t>(category)] -= size;
  retire_pinned(data);
}

void Device::release_cached() {
  synchronize();
  for (const Pool pool : {Pool::small, Pool::large}) {
    const int64_t bytes = blocks(pool).shrink();
    shrink(pool, blocks(pool).end(), bytes);
    use_.reserved -= bytes;
  }
}

namespace {
class Done final : public Event {
 public:
  Done(double time, int64_t& host_waits) : time_(time), host_waits_(host_waits) {}
  bool done() const override { return true; }
  void wait() override { ++host_waits_; }
  double time() const override { return time_; }

 private:
  double time_;
  int64_t& host_waits_;
};
}  // namespace

// For devices that complete all work before they return.
void Device::start_copy_to_device(std::byte* to, const void* from, int64_t bytes, Queue) {
  copy_to_device(to, from, bytes);
}
void Device::start_copy_to_host(void* to, const std::byte* from, int64_t bytes, Queue) {
  copy_to_host(to, from, bytes);
}
std::unique_ptr<Event> Device::record(Queue) {
  return std::make_unique<Done>(0, host_waits_);
}
std::unique_ptr<Event> Device::record_time(Queue) {
  return std::make_unique<Done>(steady_seconds(), host_waits_);
}
void Device::wait_for(Queue, const Event&) {}
Queue Device::add_queue(bool, std::string) {
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

MemoryUse Device::memory() const {
  MemoryUse use = use_;
  for (const kernels::Context& context : contexts_)
    use.kernel_scratch += static_cast<int64_t>(context.scratch_bytes());
  return use;
}

void Device::reset_peak() {
  use_.peak = use_.now;
  use_.peak_by_category = use_.now_by_category;
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
    // Where addresses are limited (RLIMIT_AS): at most half of what there is.
    while (mapped == MAP_FAILED && bytes_ > 64 * kHugePage) {
      bytes_ = round_up(bytes_ / 2, 16 * kHugePage);
      mapped = map();
      if (mapped == MAP_FAILED) continue;
      ::munmap(mapped, static_cast<size_t>(bytes_));
      bytes_ = round_up(bytes_ / 2, 16 * kHugePage);
      mapped = map();
    }
    if (mapped == MAP_FAILED)
      fail(ErrorCode::no_fit, "the system gives no addresses for tensors: " + system_error_text(errno));
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
    for (kernels::Context& context : contexts_) {
      context.pool = &pool_;
      context.prepare(pool_.size());
    }
  }
  DeviceType type() const override { return DeviceType::cpu; }
  void synchronize() override { ++host_waits_; }
  std::byte* host_address(std::byte* address) override { return address; }
  void zero(std::byte* data, int64_t bytes) override { std::memset(data, 0, static_cast<size_t>(bytes)); }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void copy_to_device(std::byte* to, const void* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void copy_to_host(void* to, const std::byte* from, int64_t bytes) override {
    ++host_waits_;
    start_copy_to_host(to, from, bytes, Queue::compute);
  }
  // Large copies, such as a snapshot of the training state, take the bandwidth of several cores.
  void start_copy_to_host(void* to, const std::byte* from, int64_t bytes, Queue) override {
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
  MetaDevice(const kernels::Table& table, int workers) : workers_(workers) {
    table_ = &table;
    launch_mode_ = LaunchMode::none;
  }
  DeviceType type() const override { return DeviceType::meta; }
  void synchronize() override {}
  std::byte* host_address(std::byte*) override { return nullptr; }
  void zero(std::byte*, int64_t) override {}
  void copy(std::byte*, const std::byte*, int64_t) override {}
  void copy_to_device(std::byte*, const void*, int64_t) override {}
  void reserve_workspace(kernels::WorkspaceSize need) override {
    context().reserve_workspace(need, workers_);
  }
  void copy_to_host(void*, const std::byte*, int64_t) override {
    fail(ErrorCode::internal, "internal error: the value of a meta tensor was asked for");
  }

 protected:
  bool grow(Pool, int64_t, int64_t) override { return true; }
  void shrink(Pool, int64_t, int64_t) override {}
  // Never dereferenced.
  std::byte* place_pinned(int64_t) override { return reinterpret_cast<std::byte*>(uintptr_t{1} << 12); }
  void retire_pinned(std::byte*) override {}
  std::byte* place(Pool pool, int64_t offset, int64_t) override {
    return reinterpret_cast<std::byte*>((pool == Pool::large ? uintptr_t{1} << 60 : uintptr_t{1} << 20) +
                                        static_cast<uintptr_t>(offset));
  }

 private:
  int workers_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(const kernels::Table& table, int threads) {
  return std::make_unique<CpuDevice>(table, threads);
}
std::unique_ptr<Device> make_meta_device(const kernels::Table& table, int workers) {
  return std::make_unique<MetaDevice>(table, workers);
}

}  // namespace capstan

namespace capstan::kernels {

void Context::prepare(int workers) {
  if (blocks_.size() < static_cast<size_t>(workers) + 1) blocks_.resize(static_cast<size_t>(workers) + 1);
}

void Context::reserve_workspace(WorkspaceSize need, int workers) {
  prepare(workers);
  const auto count = [&](Block& block, size_t bytes) {
    if (block.bytes >= bytes) return;
    total_ += grown(bytes) - block.bytes;
    block.bytes = grown(bytes);
  };
  count(blocks_[0], need.shared);
  for (int worker = 0; worker < workers; ++worker)
    count(blocks_[static_cast<size_t>(worker) + 1], need.each_worker);
}

std::byte* Context::scratch(int worker, size_t bytes) {
  const auto index = static_cast<size_t>(worker + 1);
  CAPSTAN_ASSERT(index < blocks_.size(), "scratch of a worker that was not prepared");
  Block& block = blocks_[index];
  if (block.bytes >= bytes) return block.memory.get();
  total_ -= block.bytes;
  // First: its contents are not needed, and both might not fit.
  block = {};
  size_t wanted = grown(bytes);
  block.memory.reset(allocate_aligned(wanted));
  if (!block.memory) {
    wanted = bytes;
    block.memory.reset(allocate_aligned(wanted));
  }
  if (!block.memory)
    fail(ErrorCode::no_fit,
         "out of memory: a kernel needs " + human_bytes(static_cast<double>(bytes)) +
             " of scratch on top of " + human_bytes(static_cast<double>(scratch_bytes())) +
             " that kernels keep",
         "a smaller train.micro_batch_size needs less");
  block.bytes = wanted;
  total_ += wanted;
  return block.memory.get();
}

}  // namespace capstan::kernels
