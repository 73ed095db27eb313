// A device: where tensors live and kernels run. The rest of the program holds a `Device&` and does not ask which kind it
// is; what differs (addresses, queues, copies) is behind this class and `launch` (launch.hpp).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/thread_pool.hpp"
#include "kernels/context.hpp"

namespace capstan {

namespace kernels {
struct Table;
}

enum class DeviceType : uint8_t { cpu, cuda, guard, meta };
std::string_view name_of(DeviceType type);

// Who asked for memory: the account that the memory table, the planner and the limit speak of.
enum class MemoryOwner : uint8_t {
  parameters,
  gradients,
  main_parameters,
  moments,
  activations,
  workspace,
  data,
  count_
};
inline constexpr size_t kMemoryOwners = static_cast<size_t>(MemoryOwner::count_);
std::string_view name_of(MemoryOwner owner);

// While it lives, allocations of this thread are booked to `owner` (activations when there is none).
class OwnerScope {
 public:
  explicit OwnerScope(MemoryOwner owner);
  ~OwnerScope();
  OwnerScope(const OwnerScope&) = delete;
  OwnerScope& operator=(const OwnerScope&) = delete;
  static MemoryOwner current();

 private:
  MemoryOwner before_;
};

struct MemoryUse {            // bytes, after the allocator's rounding
  int64_t now = 0, peak = 0;  // all owners together
  std::array<int64_t, kMemoryOwners> now_by_owner{};
  std::array<int64_t, kMemoryOwners> at_peak_by_owner{};  // the split at the moment of the peak
  int64_t reserved = 0;                                   // taken from the system, in use or kept for reuse
  int64_t system_requests = 0;                            // how often the system was asked
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceType type() const = 0;
  bool is_meta() const { return type() == DeviceType::meta; }
  std::string_view name() const { return name_of(type()); }

  // Blocks are rounded (round_allocation), kept for reuse by exact rounded size and returned to the system only by
  // release_cached(). Not thread-safe: a device belongs to the thread that trains. Errors: no_fit when the system refuses.
  std::byte* allocate(int64_t bytes, MemoryOwner owner);
  void free(std::byte* data, int64_t bytes, MemoryOwner owner);
  void release_cached();
  const MemoryUse& memory() const { return use_; }
  void reset_peak();

  // Waits until all that was launched so far has run.
  virtual void synchronize() = 0;
  // Ordered after earlier launches; the host range must stay valid until synchronize() for copies to the device, and
  // the copy to the host is complete on return.
  virtual void copy_to_device(std::byte* to, const void* from_host, int64_t bytes) = 0;
  virtual void zero(std::byte* data, int64_t bytes) = 0;
  virtual void copy_to_host(void* to_host, const std::byte* from, int64_t bytes) = 0;

  // The address at which host code that is ordered like a kernel (a collective over host memory) may touch this memory.
  virtual std::byte* host_address(std::byte* address) = 0;

  // For `launch` only.
  const kernels::Table& table() const { return *table_; }
  kernels::Context& context() { return context_; }

 protected:
  Device() = default;
  virtual std::byte* system_allocate(int64_t bytes) = 0;  // nullptr when refused
  virtual void system_free(std::byte* data, int64_t bytes) = 0;
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

// Sizes up to 1 MiB round up to 512 bytes, larger ones to an eighth of the power of two below: at most 12.5 % is lost, and
// nearly equal sizes share blocks. The meta device uses the same function, so that what is planned is what is taken.
int64_t round_allocation(int64_t bytes);

// The devices of this build. threads as in ThreadPool. `cuda` without its backend is ErrorCode::unsupported and says how
// to go on.
std::unique_ptr<Device> make_cpu_device(const kernels::Table& table, int threads = 0);
std::unique_ptr<Device> make_meta_device(const kernels::Table& table);

}  // namespace capstan
