#include "support/fake_cuda.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "base/checked.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "tensor/checked_queue.hpp"

namespace capstan::cuda {
// No stream or range depends on it.
struct OpenDevice {
  int32_t index = 0;
};
}  // namespace capstan::cuda

namespace capstan::test {

namespace {

using cuda::OpenDevice;
using cuda::Status;
using cuda::StatusCode;

FakeCuda state;

// A NaN as bf16, fp16, fp32 and fp64, in memory that was not written.
constexpr uint16_t kNotWritten = 0x7FF4;

// All device memory: mapped once without access rights, at the addresses of tensors, and once for kernels.
class Arena {
 public:
  Arena() {
    file_ = ::memfd_create("fake cuda", MFD_CLOEXEC);
    CAPSTAN_ASSERT(file_ >= 0 && ::ftruncate(file_, kBytes) == 0, "memfd_create");
    front_ = map(PROT_NONE);
    back_ = map(PROT_NONE);
  }
  std::ptrdiff_t distance() const { return back_ - front_; }
  std::byte* reserve(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.find(bytes); found != free_.end()) {
      std::byte* const begin = found->second;
      free_.erase(found);
      return begin;
    }
    if (next_ + bytes > kBytes) return nullptr;
    return front_ + std::exchange(next_, next_ + bytes);
  }
  void release(std::byte* begin, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    free_.emplace(bytes, begin);
  }
  bool map_memory(std::byte* address, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (overlaps(address, bytes)) return false;
    mapped_.emplace(address, bytes);
    ::mprotect(address + distance(), static_cast<size_t>(bytes), PROT_READ | PROT_WRITE);
    std::fill_n(reinterpret_cast<uint16_t*>(address + distance()), bytes / 2, kNotWritten);
    return true;
  }
  // Exactly one mapping.
  bool unmap_memory(std::byte* address, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto found = mapped_.find(address);
    if (found == mapped_.end() || found->second != bytes) return false;
    mapped_.erase(found);
    ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, address - front_, bytes);
    ::mprotect(address + distance(), static_cast<size_t>(bytes), PROT_NONE);
    return true;
  }
  // Whether all of the range is memory.
  bool holds(const void* data, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto* address = static_cast<const std::byte*>(data);
    while (bytes > 0) {
      auto after = mapped_.upper_bound(const_cast<std::byte*>(address));
      if (after == mapped_.begin()) return false;
      --after;
      const int64_t here = after->first + after->second - address;
      if (here <= 0) return false;
      address += here, bytes -= here;
    }
    return true;
  }

 private:
  static constexpr int64_t kBytes = int64_t{64} << 30;
  std::byte* map(int access) const {
    void* address = ::mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file_, 0);
    CAPSTAN_ASSERT(address != MAP_FAILED, "mmap");
    ::madvise(address, kBytes, MADV_DONTDUMP);
    return static_cast<std::byte*>(address);
  }
  bool overlaps(std::byte* address, int64_t bytes) const {
    const auto after = mapped_.lower_bound(address);
    if (after != mapped_.end() && after->first < address + bytes) return true;
    return after != mapped_.begin() && std::prev(after)->first + std::prev(after)->second > address;
  }

  int file_ = -1;
  std::byte *front_ = nullptr, *back_ = nullptr;
  int64_t next_ = 0;
  std::multimap<int64_t, std::byte*> free_;
  std::map<std::byte*, int64_t> mapped_;
  std::mutex mutex_;
};
Arena& arena() {
  static Arena memory;
  return memory;
}

struct FakeEvent {
  CheckedQueue* queue = nullptr;
  CheckedQueue::Ticket ticket = 0;
  // Of a timed event.
  std::shared_ptr<std::atomic<double>> time;
  bool timed = false;
};

thread_local char status_text[128];
Status failed(const char* function, const char* why, StatusCode code = StatusCode::failed) {
  std::snprintf(status_text, sizeof status_text, "fake_%s: %s", function, why);
  return {code, status_text};
}
#define FAKE_CUDA_FUNCTION(name) \
  if (state.failing == (name)) return failed(name, "planted error", state.code)

CheckedQueue& queue_at(void* stream) {
  return *static_cast<CheckedQueue*>(stream);
}
FakeEvent& event_at(void* event) {
  return *static_cast<FakeEvent*>(event);
}
void finish(CheckedQueue& queue, CheckedQueue::Ticket ticket) {
  CAPSTAN_ASSERT(!queue.wait_for_error(ticket), "work of a stream has thrown");
}

Status count_devices(int32_t* count) {
  FAKE_CUDA_FUNCTION("count_devices");
  *count = state.devices;
  return {};
}
Status describe_device(int32_t index, cuda::DeviceFacts* facts) {
  FAKE_CUDA_FUNCTION("describe_device");
  if (index < 0 || index >= state.devices) return failed("describe_device", "no such device");
  std::snprintf(facts->name, sizeof facts->name, "fake GPU");
  std::snprintf(facts->pci_address, sizeof facts->pci_address, "0000:%02x:00.0",
                static_cast<unsigned>(index));
  facts->major = 9, facts->minor = 0, facts->multiprocessors = 1, facts->memory = state.memory;
  return {};
}
Status open_device(int32_t index, OpenDevice** device) {
  FAKE_CUDA_FUNCTION("open_device");
  *device = new OpenDevice{index};
  ++state.open_devices;
  return {};
}
Status close_device(OpenDevice* device) {
  FAKE_CUDA_FUNCTION("close_device");
  delete device;
  --state.open_devices;
  return {};
}
Status last_error(OpenDevice*) {
  FAKE_CUDA_FUNCTION("last_error");
  if (state.launch_error.empty()) return {};
  return failed("last_error", std::exchange(state.launch_error, "").c_str());
}

Status create_stream(OpenDevice*, bool prompt, void** stream) {
  FAKE_CUDA_FUNCTION("create_stream");
  // Other ranks wait for the work of a prompt stream.
  const CheckedQueue::Hold hold = prompt          ? CheckedQueue::Hold::none
                                  : state.patient ? CheckedQueue::Hold::all
                                                  : CheckedQueue::Hold::some;
  *stream = new CheckedQueue(static_cast<uint64_t>(++state.streams), hold);
  return {};
}
Status destroy_stream(OpenDevice*, void* stream) {
  FAKE_CUDA_FUNCTION("destroy_stream");
  delete &queue_at(stream);
  --state.streams;
  return {};
}
Status wait_stream(OpenDevice*, void* stream) {
  FAKE_CUDA_FUNCTION("wait_stream");
  finish(queue_at(stream), queue_at(stream).last());
  return {};
}
Status call_host(OpenDevice*, void* stream, void (*function)(void*), void* argument) {
  FAKE_CUDA_FUNCTION("call_host");
  queue_at(stream).push([=] { function(argument); });
  return {};
}

Status create_event(OpenDevice*, bool timed, void** event) {
  FAKE_CUDA_FUNCTION("create_event");
  *event = new FakeEvent{.timed = timed};
  ++state.events;
  return {};
}
Status destroy_event(OpenDevice*, void* event) {
  FAKE_CUDA_FUNCTION("destroy_event");
  delete &event_at(event);
  --state.events;
  return {};
}
Status record_event(OpenDevice*, void* event, void* stream) {
  FAKE_CUDA_FUNCTION("record_event");
  FakeEvent& recorded = event_at(event);
  recorded.queue = &queue_at(stream);
  if (recorded.timed) {
    recorded.time = std::make_shared<std::atomic<double>>(0);
    recorded.ticket = recorded.queue->push([time = recorded.time] { time->store(steady_seconds()); });
  } else {
    recorded.ticket = recorded.queue->last();
  }
  return {};
}
Status query_event(OpenDevice*, void* event) {
  FAKE_CUDA_FUNCTION("query_event");
  const FakeEvent& recorded = event_at(event);
  if (recorded.queue && !recorded.queue->done(recorded.ticket)) return {StatusCode::not_ready, nullptr};
  return {};
}
Status wait_event(OpenDevice*, void* event) {
  FAKE_CUDA_FUNCTION("wait_event");
  const FakeEvent& recorded = event_at(event);
  if (recorded.queue) finish(*recorded.queue, recorded.ticket);
  return {};
}
Status stream_wait_event(OpenDevice*, void* stream, void* event) {
  FAKE_CUDA_FUNCTION("stream_wait_event");
  const FakeEvent recorded = event_at(event);
  if (recorded.queue && recorded.queue != &queue_at(stream))
    queue_at(stream).push([recorded] { finish(*recorded.queue, recorded.ticket); });
  return {};
}
Status elapsed(OpenDevice*, void* from, void* to, double* seconds) {
  FAKE_CUDA_FUNCTION("elapsed");
  if (!event_at(from).time || !event_at(to).time) return failed("elapsed", "an event without a time");
  // The precision of CUDA's answer.
  *seconds = static_cast<double>(static_cast<float>(event_at(to).time->load() - event_at(from).time->load()));
  return {};
}

Status reserve_range(OpenDevice*, int64_t bytes, void** address) {
  FAKE_CUDA_FUNCTION("reserve_range");
  if (bytes % cuda::kMappingUnit != 0) return failed("reserve_range", "not a multiple of 2 MiB");
  *address = arena().reserve(bytes);
  if (!*address) return failed("reserve_range", "no addresses are left");
  ++state.ranges;
  return {};
}
Status release_range(OpenDevice*, void* address, int64_t bytes) {
  FAKE_CUDA_FUNCTION("release_range");
  arena().release(static_cast<std::byte*>(address), bytes);
  --state.ranges;
  return {};
}
Status map_memory(OpenDevice*, void* address, int64_t bytes) {
  FAKE_CUDA_FUNCTION("map_memory");
  if (bytes <= 0 || bytes % cuda::kMappingUnit != 0) return failed("map_memory", "not a multiple of 2 MiB");
  if (state.mapped + bytes > state.memory)
    return failed("map_memory", "out of memory", StatusCode::out_of_memory);
  if (!arena().map_memory(static_cast<std::byte*>(address), bytes))
    return failed("map_memory", "mapped already");
  state.mapped += bytes, ++state.maps;
  return {};
}
Status unmap_memory(OpenDevice*, void* address, int64_t bytes) {
  FAKE_CUDA_FUNCTION("unmap_memory");
  if (!arena().unmap_memory(static_cast<std::byte*>(address), bytes))
    return failed("unmap_memory", "not what one call has mapped");
  state.mapped -= bytes, ++state.unmaps;
  return {};
}
Status allocate_pinned(OpenDevice*, int64_t bytes, void** address) {
  FAKE_CUDA_FUNCTION("allocate_pinned");
  *address = std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64)));
  ++state.pinned;
  return {};
}
Status free_pinned(OpenDevice*, void* address) {
  FAKE_CUDA_FUNCTION("free_pinned");
  std::free(address);
  --state.pinned;
  return {};
}
Status copy(OpenDevice*, void* to, const void* from, int64_t bytes, cuda::CopyDirection direction,
            void* stream) {
  FAKE_CUDA_FUNCTION("copy");
  const bool from_device = direction != cuda::CopyDirection::host_to_device;
  const bool to_device = direction != cuda::CopyDirection::device_to_host;
  if ((from_device && !arena().holds(from, bytes)) || (to_device && !arena().holds(to, bytes)))
    return failed("copy", "not an address of the device");
  // Early readers find NaN, or -1.
  if (!to_device) std::memset(to, 0xff, static_cast<size_t>(bytes));
  if (from_device) from = fake_kernel_address(static_cast<const std::byte*>(from));
  if (to_device) to = fake_kernel_address(static_cast<std::byte*>(to));
  queue_at(stream).push([=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
  return {};
}
Status zero(OpenDevice*, void* data, int64_t bytes, void* stream) {
  FAKE_CUDA_FUNCTION("zero");
  if (!arena().holds(data, bytes)) return failed("zero", "not an address of the device");
  queue_at(stream).push([to = fake_kernel_address(static_cast<std::byte*>(data)), bytes] {
    std::memset(to, 0, static_cast<size_t>(bytes));
  });
  return {};
}

constexpr cuda::Runtime kFakeRuntime{.count_devices = count_devices,
                                     .describe_device = describe_device,
                                     .open_device = open_device,
                                     .close_device = close_device,
                                     .last_error = last_error,
                                     .create_stream = create_stream,
                                     .destroy_stream = destroy_stream,
                                     .wait_stream = wait_stream,
                                     .call_host = call_host,
                                     .create_event = create_event,
                                     .destroy_event = destroy_event,
                                     .record_event = record_event,
                                     .query_event = query_event,
                                     .wait_event = wait_event,
                                     .stream_wait_event = stream_wait_event,
                                     .elapsed = elapsed,
                                     .reserve_range = reserve_range,
                                     .release_range = release_range,
                                     .map_memory = map_memory,
                                     .unmap_memory = unmap_memory,
                                     .allocate_pinned = allocate_pinned,
                                     .free_pinned = free_pinned,
                                     .copy = copy,
                                     .zero = zero};

}  // namespace

FakeCuda& fake_cuda() {
  return state;
}
FakeCuda& reset_fake_cuda() {
  return state = {};
}
const cuda::Backend& fake_backend() {
  static constexpr cuda::Backend backend{.interface = "fake", .runtime = &kFakeRuntime};
  return backend;
}
std::ptrdiff_t fake_kernel_offset() {
  return arena().distance();
}
void fake_launch(void* stream, std::function<void()> kernel) {
  queue_at(stream).push(std::move(kernel));
}

}  // namespace capstan::test
