#include "tensor/simulated_runtime.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "tensor/checked_queue.hpp"
#include "tensor/double_mapping.hpp"

namespace capstan::cuda {

namespace {

thread_local SimulatedGpu next_gpu;

// The object to which an OpenDevice* of this runtime points.
struct OpenGpu {
  SimulatedGpu gpu;
  int64_t mapped = 0;  // bytes
  uint64_t streams = 0;
  // The name, and the kinds of work, of each executable graph.
  std::set<std::pair<std::string, std::string>> graphs = {};
  // Copies from host memory that may not have run.
  struct HostRead {
    const std::byte *begin, *end;
    CheckedQueue* queue;
    CheckedQueue::Ticket ticket;
  };
  std::vector<HostRead> host_reads = {};
  // A block of pinned memory, its last copy from the device, and the streams that have waited for such copies
  // and whose work may read them: the kernels of a HostDevice.
  struct Pinned {
    int64_t bytes = 0;
    CheckedQueue* queue = nullptr;
    CheckedQueue::Ticket ticket = 0;
    std::set<CheckedQueue*> readers = {};
  };
  std::map<const std::byte*, Pinned> pinned = {};

  // Null: not pinned memory.
  Pinned* pinned_at(const void* memory) {
    const auto* const address = static_cast<const std::byte*>(memory);
    const auto after = pinned.upper_bound(address);
    if (after == pinned.begin()) return nullptr;
    const auto& found = std::prev(after);
    return address < found->first + found->second.bytes ? &found->second : nullptr;
  }
  void add_waiter(CheckedQueue& waiter, const CheckedQueue* queue, CheckedQueue::Ticket ticket) {
    for (auto& [begin, block] : pinned)
      if (block.queue == queue && block.ticket <= ticket) block.readers.insert(&waiter);
  }
  void add_read(const HostRead& read) {
    std::erase_if(host_reads, [](const HostRead& earlier) { return earlier.queue->done(earlier.ticket); });
    host_reads.push_back(read);
  }
  bool reads(const void* memory, int64_t bytes) {
    const auto* const begin = static_cast<const std::byte*>(memory);
    const auto works = [](const CheckedQueue* queue) { return !queue->done(queue->last()); };
    if (const Pinned* block = pinned_at(memory); block && std::ranges::any_of(block->readers, works))
      return true;
    return std::ranges::any_of(host_reads, [&](const HostRead& read) {
      return read.begin < begin + bytes && begin < read.end && !read.queue->done(read.ticket);
    });
  }
};
OpenGpu& gpu_at(OpenDevice* device) {
  return *reinterpret_cast<OpenGpu*>(device);
}

// The memory of all devices of the process.
class Arena {
 public:
  std::ptrdiff_t distance() const { return mapping_.distance(); }
  // Null: no addresses are left.
  std::byte* reserve(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.find(bytes); found != free_.end()) {
      std::byte* const begin = found->second;
      free_.erase(found);
      return begin;
    }
    if (next_ + bytes > mapping_.bytes()) return nullptr;
    return mapping_.begin() + std::exchange(next_, next_ + bytes);
  }
  void release(std::byte* begin, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    free_.emplace(bytes, begin);
  }
  bool map(std::byte* address, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (overlaps(address, bytes) || !mapping_.allow(address - mapping_.begin(), bytes)) return false;
    mapped_.emplace(address, bytes);
    fill_not_written(address + distance(), bytes);
    return true;
  }
  // Unmaps one mapping; false if address and size are not those of a mapping.
  bool unmap(std::byte* address, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto found = mapped_.find(address);
    if (found == mapped_.end() || found->second != bytes) return false;
    mapped_.erase(found);
    const int64_t offset = address - mapping_.begin();
    mapping_.discard(offset, bytes);
    return mapping_.forbid(offset, bytes);
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
  static constexpr int64_t kBytes = int64_t{256} << 30;
  bool overlaps(std::byte* address, int64_t bytes) const {
    const auto after = mapped_.lower_bound(address);
    if (after != mapped_.end() && after->first < address + bytes) return true;
    return after != mapped_.begin() && std::prev(after)->first + std::prev(after)->second > address;
  }

  DoubleMapping mapping_{"simulated device", kBytes, false};
  int64_t next_ = 0;
  // Ranges by size, to be reserved again.
  std::multimap<int64_t, std::byte*> free_;
  // Sizes of the mappings, by address.
  std::map<std::byte*, int64_t> mapped_;
  std::mutex mutex_;
};
Arena& arena() {
  static Arena memory;
  return memory;
}
template <class T>
T* kernel_address(T* address) {
  return reinterpret_cast<T*>(  // NOLINT: addresses of two mappings
      reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(arena().distance()));
}

struct StreamEvent {
  CheckedQueue* queue = nullptr;
  CheckedQueue::Ticket ticket = 0;
  // Time of a timed event.
  std::shared_ptr<std::atomic<double>> time;
  bool timed = false;
};

thread_local char status_text[128];
Status failed(const char* function, const char* why, StatusCode code = StatusCode::failed) {
  std::snprintf(status_text, sizeof status_text, "simulated %s: %s", function, why);
  return {code, status_text};
}

// The object to which a void* stream of this runtime points.
struct Stream {
  CheckedQueue queue;
  // Between begin_graph and launch_graph.
  bool collects = false;
  // A letter for each of `work`.
  std::string kinds = {};
  std::vector<std::function<void()>> work = {};

  void push(char kind, std::function<void()> item) {
    if (!collects) {
      queue.push(std::move(item));
      return;
    }
    kinds += kind;
    work.push_back(std::move(item));
  }
};
Stream& stream_at(void* stream) {
  return *static_cast<Stream*>(stream);
}
CheckedQueue& queue_at(void* stream) {
  return stream_at(stream).queue;
}
constexpr const char* kCollects = "the stream collects a graph";
StreamEvent& event_at(void* event) {
  return *static_cast<StreamEvent*>(event);
}
void finish(CheckedQueue& queue, CheckedQueue::Ticket ticket) {
  CAPSTAN_ASSERT(!queue.wait_for_error(ticket), "work of a stream has thrown");
}

// ---- devices

Status count_devices(int32_t* count) {
  *count = 1;
  return {};
}
Status describe_device(int32_t index, DeviceFacts* facts) {
  std::snprintf(facts->name, sizeof facts->name, "CUDA kernels on the host");
  std::snprintf(facts->pci_address, sizeof facts->pci_address, "simulated:%d", index);
  facts->major = 9, facts->minor = 0, facts->multiprocessors = 1, facts->memory = next_gpu.memory;
  return {};
}
Status open_device(int32_t, OpenDevice** device) {
  *device = reinterpret_cast<OpenDevice*>(new OpenGpu{.gpu = next_gpu});
  return {};
}
Status close_device(OpenDevice* device) {
  delete &gpu_at(device);
  return {};
}
Status last_error(OpenDevice*) {
  return {};
}

// ---- streams

Status create_stream(OpenDevice* device, bool high_priority, void** stream) {
  OpenGpu& open = gpu_at(device);
  // Other ranks wait for the work of a high-priority stream.
  const auto hold = high_priority      ? CheckedQueue::DelayedItems::none
                    : open.gpu.patient ? CheckedQueue::DelayedItems::all
                                       : CheckedQueue::DelayedItems::some;
  *stream = new Stream{.queue = {open.gpu.seed + ++open.streams, hold}};
  return {};
}
Status destroy_stream(OpenDevice* device, void* stream) {
  std::erase_if(gpu_at(device).host_reads,
                [&](const OpenGpu::HostRead& read) { return read.queue == &queue_at(stream); });
  for (auto& [begin, block] : gpu_at(device).pinned) {
    block.readers.erase(&queue_at(stream));
    if (block.queue == &queue_at(stream)) block.queue = nullptr;
  }
  delete &stream_at(stream);
  return {};
}
Status wait_stream(OpenDevice*, void* stream) {
  if (stream_at(stream).collects) return failed("wait_stream", kCollects);
  finish(queue_at(stream), queue_at(stream).last());
  return {};
}
Status call_host(OpenDevice*, void* stream, void (*function)(void*), void* argument) {
  stream_at(stream).push('k', [=] { function(argument); });
  return {};
}

// ---- events

Status create_event(OpenDevice*, bool timed, void** event) {
  *event = new StreamEvent{.timed = timed};
  return {};
}
Status destroy_event(OpenDevice*, void* event) {
  delete &event_at(event);
  return {};
}
Status record_event(OpenDevice*, void* event, void* stream) {
  if (stream_at(stream).collects) return failed("record_event", kCollects);
  StreamEvent& recorded = event_at(event);
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
  const StreamEvent& recorded = event_at(event);
  if (recorded.queue && !recorded.queue->done(recorded.ticket)) return {StatusCode::not_ready, nullptr};
  return {};
}
Status wait_event(OpenDevice*, void* event) {
  const StreamEvent& recorded = event_at(event);
  if (recorded.queue) finish(*recorded.queue, recorded.ticket);
  return {};
}
Status stream_wait_event(OpenDevice* device, void* stream, void* event) {
  if (stream_at(stream).collects) return failed("stream_wait_event", kCollects);
  const StreamEvent recorded = event_at(event);
  if (recorded.queue && recorded.queue != &queue_at(stream)) {
    gpu_at(device).add_waiter(queue_at(stream), recorded.queue, recorded.ticket);
    queue_at(stream).push([recorded] { finish(*recorded.queue, recorded.ticket); });
  }
  return {};
}
Status elapsed(OpenDevice*, void* from, void* to, double* seconds) {
  if (!event_at(from).time || !event_at(to).time) return failed("elapsed", "an event without a time");
  // The precision of CUDA's answer.
  *seconds = static_cast<double>(static_cast<float>(event_at(to).time->load() - event_at(from).time->load()));
  return {};
}

// ---- graphs

Status begin_graph(OpenDevice*, void* stream) {
  if (stream_at(stream).collects) return failed("begin_graph", kCollects);
  stream_at(stream).collects = true;
  return {};
}
Status launch_graph(OpenDevice* device, void* stream, const char* name, GraphLaunch* launch) {
  Stream& collected = stream_at(stream);
  if (!collected.collects) return failed("launch_graph", "the stream collects no graph");
  collected.collects = false;
  launch->nodes = static_cast<int64_t>(collected.work.size());
  launch->instantiated = gpu_at(device).graphs.emplace(name, std::move(collected.kinds)).second;
  for (std::function<void()>& item : collected.work) collected.queue.push(std::move(item));
  collected.kinds.clear();
  collected.work.clear();
  return {};
}

// ---- memory

Status reserve_range(OpenDevice*, int64_t bytes, void** address) {
  if (bytes % kMappingUnit != 0) return failed("reserve_range", "not a multiple of 2 MiB");
  *address = arena().reserve(bytes);
  return *address ? Status() : failed("reserve_range", "no addresses are left");
}
Status release_range(OpenDevice*, void* address, int64_t bytes) {
  arena().release(static_cast<std::byte*>(address), bytes);
  return {};
}
Status map_memory(OpenDevice* device, void* address, int64_t bytes) {
  OpenGpu& open = gpu_at(device);
  if (bytes <= 0 || bytes % kMappingUnit != 0) return failed("map_memory", "not a multiple of 2 MiB");
  if (open.mapped + bytes > open.gpu.memory)
    return failed("map_memory", "out of memory", StatusCode::out_of_memory);
  if (!arena().map(static_cast<std::byte*>(address), bytes)) return failed("map_memory", "mapped already");
  open.mapped += bytes;
  return {};
}
Status unmap_memory(OpenDevice* device, void* address, int64_t bytes) {
  if (!arena().unmap(static_cast<std::byte*>(address), bytes))
    return failed("unmap_memory", "not what one call has mapped");
  gpu_at(device).mapped -= bytes;
  return {};
}
Status allocate_pinned(OpenDevice* device, int64_t bytes, void** address) {
  *address = std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64)));
  if (!*address) return failed("allocate_pinned", "out of memory", StatusCode::out_of_memory);
  gpu_at(device).pinned[static_cast<const std::byte*>(*address)] = {.bytes = bytes};
  return {};
}
Status free_pinned(OpenDevice* device, void* address) {
  gpu_at(device).pinned.erase(static_cast<const std::byte*>(address));
  std::free(address);
  return {};
}
Status copy(OpenDevice* device, void* to, const void* from, int64_t bytes, CopyDirection direction,
            void* stream) {
  const bool from_device = direction != CopyDirection::host_to_device;
  const bool to_device = direction != CopyDirection::device_to_host;
  if ((from_device && !arena().holds(from, bytes)) || (to_device && !arena().holds(to, bytes)))
    return failed("copy", "not an address of the device");
  if (from_device) from = kernel_address(static_cast<const std::byte*>(from));
  if (to_device) to = kernel_address(static_cast<std::byte*>(to));
  const auto run = [=] { std::memcpy(to, from, static_cast<size_t>(bytes)); };
  if (from_device && to_device) {
    stream_at(stream).push('c', run);
    return {};
  }
  if (stream_at(stream).collects) return failed("copy", kCollects);
  // Reads before the first write give NaN, or -1 as an integer. A pinned buffer that another copy or the work
  // of another stream may still read changes in stream order only.
  OpenGpu& open = gpu_at(device);
  if (!to_device && !open.reads(to, bytes)) std::memset(to, 0xff, static_cast<size_t>(bytes));
  const CheckedQueue::Ticket ticket = queue_at(stream).push(run);
  if (OpenGpu::Pinned* block = to_device ? nullptr : open.pinned_at(to))
    block->queue = &queue_at(stream), block->ticket = ticket;
  if (!from_device) {
    const auto* const begin = static_cast<const std::byte*>(from);
    open.add_read({begin, begin + bytes, &queue_at(stream), ticket});
  }
  return {};
}
Status zero(OpenDevice*, void* data, int64_t bytes, void* stream) {
  if (!arena().holds(data, bytes)) return failed("zero", "not an address of the device");
  stream_at(stream).push('z', [to = kernel_address(static_cast<std::byte*>(data)), bytes] {
    std::memset(to, 0, static_cast<size_t>(bytes));
  });
  return {};
}

}  // namespace

void set_simulated_gpu(const SimulatedGpu& gpu) {
  next_gpu = gpu;
}

const Runtime& simulated_runtime() {
  static constexpr Runtime runtime{.count_devices = count_devices,
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
                                   .begin_graph = begin_graph,
                                   .launch_graph = launch_graph,
                                   .reserve_range = reserve_range,
                                   .release_range = release_range,
                                   .map_memory = map_memory,
                                   .unmap_memory = unmap_memory,
                                   .allocate_pinned = allocate_pinned,
                                   .free_pinned = free_pinned,
                                   .copy = copy,
                                   .zero = zero};
  return runtime;
}

std::ptrdiff_t simulated_kernel_offset() {
  return arena().distance();
}

}  // namespace capstan::cuda
