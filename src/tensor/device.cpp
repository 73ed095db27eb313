#include "tensor/device.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <unordered_map>
#include <vector>

#include "base/checked.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
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
constexpr int64_t kSmallBlock = 1 << 20;
thread_local MemoryCategory current_owner = MemoryCategory::activations;
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
  return bytes <= kSmallBlock ? round_up(bytes < 1 ? 1 : bytes, 512) : round_up(bytes, 4096);
}

struct Device::Cache {
  std::map<int64_t, std::vector<std::byte*>> free_blocks;  // by size
  // Blocks in use whose size is not the rounded one.
  std::unordered_map<std::byte*, int64_t> larger;

  // The smallest free block that holds `size` and is larger by at most an eighth.
  std::byte* take(int64_t size) {
    for (auto found = free_blocks.lower_bound(size);
         found != free_blocks.end() && found->first <= size + size / 8; ++found) {
      if (found->second.empty()) continue;
      std::byte* data = found->second.back();
      found->second.pop_back();
      if (found->first != size) larger.emplace(data, found->first);
      return data;
    }
    return nullptr;
  }
  // Returns the size of the block.
  int64_t put_back(std::byte* data, int64_t size) {
    if (const auto found = larger.find(data); found != larger.end()) {
      size = found->second;
      larger.erase(found);
    }
    free_blocks[size].push_back(data);
    return size;
  }
};
void Device::CacheDeleter::operator()(Cache* cache) const {
  delete cache;
}

std::byte* Device::allocate(int64_t bytes, MemoryCategory category) {
  if (!cache_) cache_.reset(new Cache);
  const int64_t size = round_allocation(bytes);
  std::byte* data = cache_->take(size);
  if (!data) {
    data = system_allocate(size);
    if (!data) {
      release_cached();
      data = system_allocate(size);
    }
    if (!data)
      fail(ErrorCode::no_fit,
           "out of memory on " + std::string(name()) + ": " + human_bytes(static_cast<double>(size)) +
               " for " + std::string(name_of(category)) + " on top of " +
               human_bytes(static_cast<double>(use_.now)) + " in use",
           "a smaller train.micro_batch_size or model.recompute_granularity=full needs less");
    use_.reserved += size;
    ++use_.system_requests;
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
  retire(data, cache_->put_back(data, size));
}

void Device::release_cached() {
  if (!cache_) return;
  synchronize();
  for (auto& [size, blocks] : cache_->free_blocks) {
    for (std::byte* data : blocks) system_free(data, size);
    use_.reserved -= size * static_cast<int64_t>(blocks.size());
  }
  cache_->free_blocks.clear();
}

namespace {
class Done final : public Event {
 public:
  explicit Done(double time) : time_(time) {}
  bool done() const override { return true; }
  void wait() override {}
  double time() const override { return time_; }

 private:
  double time_;
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
  return std::make_unique<Done>(0);
}
std::unique_ptr<Event> Device::record_time(Queue) {
  return std::make_unique<Done>(steady_seconds());
}
void Device::wait_for(Queue, const Event&) {}
Queue Device::add_queue(bool, std::string) {
  return Queue::communication;
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

constexpr size_t kHugePage = size_t{2} << 20;
#if defined(__SANITIZE_ADDRESS__)
// The sanitizer checks the bounds of heap blocks.
constexpr int64_t kLargestFromHeap = INT64_MAX;
#else
constexpr int64_t kLargestFromHeap = kSmallBlock;
#endif

// For memory that lives as long as the program. Aligns large blocks to huge pages and requests them, which
// saves page faults and TLB misses. Null when the system refuses.
std::byte* allocate_aligned(size_t bytes) {
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  const int64_t size = round_up(static_cast<int64_t>(bytes), static_cast<int64_t>(alignment));
  void* data = std::aligned_alloc(alignment, static_cast<size_t>(size));
  if (data && alignment == kHugePage) ::madvise(data, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}

// The same in a mapping of exactly `bytes` (full pages): no adjacent page becomes resident, and unmapping
// returns all of it to the system.
std::byte* map_pages(size_t bytes) {
  const size_t spare = bytes >= kHugePage ? kHugePage : 0;
  void* mapped = ::mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(mapped);
  if (spare == 0) return begin;
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (before > 0) ::munmap(begin, before);
  ::munmap(begin + before + bytes, spare - before);
  ::madvise(begin + before, bytes, MADV_HUGEPAGE);
  return begin + before;
}

class CpuDevice final : public Device {
 public:
  CpuDevice(const kernels::Table& table, int threads) : pool_(threads) {
    table_ = &table;
    for (kernels::Context& context : contexts_) {
      context.pool = &pool_;
      context.prepare(pool_.size());
    }
  }
  ~CpuDevice() override { release_cached(); }
  DeviceType type() const override { return DeviceType::cpu; }
  void synchronize() override {}
  std::byte* host_address(std::byte* address) override { return address; }
  void zero(std::byte* data, int64_t bytes) override { std::memset(data, 0, static_cast<size_t>(bytes)); }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void copy_to_device(std::byte* to, const void* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void copy_to_host(void* to, const std::byte* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }

 protected:
  std::byte* system_allocate(int64_t bytes) override {
    const auto size = static_cast<size_t>(bytes);
    return bytes > kLargestFromHeap ? map_pages(size) : allocate_aligned(size);
  }
  void system_free(std::byte* data, int64_t bytes) override {
    if (bytes > kLargestFromHeap)
      ::munmap(data, static_cast<size_t>(bytes));
    else
      std::free(data);
  }

 private:
  ThreadPool pool_;
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
  std::byte* system_allocate(int64_t bytes) override {
    std::byte* address = reinterpret_cast<std::byte*>(next_);
    next_ += static_cast<uintptr_t>(bytes);
    return address;
  }
  void system_free(std::byte*, int64_t) override {}

 private:
  int workers_;
  uintptr_t next_ = 1 << 20;
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
