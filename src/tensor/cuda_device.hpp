// An NVIDIA GPU, on the functions of a CUDA backend (cuda_backend.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tensor/cuda_backend.hpp"
#include "tensor/device.hpp"

namespace capstan::cuda {

// An opened device, and its name in errors. The classes below share it.
struct DeviceContext {
  const Runtime& runtime;
  OpenDevice* device = nullptr;
  std::string name;

  // Throws ErrorCode::failed unless the status is ok; `action` completes "cannot …".
  void check(Status status, const char* action) const;
};

// A range of addresses in which a pool of the allocator lies. It grows and shrinks at its end by mapping
// physical memory.
class MappedRange {
 public:
  MappedRange(const DeviceContext& context, int64_t bytes);
  ~MappedRange();
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;

  std::byte* begin() const { return begin_; }
  // Makes the addresses up to offset `end` usable; false: there is not enough memory.
  bool grow(int64_t end);
  // Returns the memory from offset `end` on. A mapping that begins before `end` stays, of which less than
  // kMaxMapping lies behind it; grow() uses it again.
  void shrink(int64_t end);
  int64_t mapped() const { return mapped_; }

  // Bytes of a mapping at most: few calls for large ranges, and little that cannot be returned.
  static constexpr int64_t kMaxMapping = 16 * kMappingUnit;

 private:
  void unmap_last();

  const DeviceContext& context_;
  const int64_t bytes_;
  std::byte* begin_ = nullptr;
  int64_t mapped_ = 0;
  // Sizes of the mappings, in order of their addresses.
  std::vector<int64_t> mappings_;
};

// Events that are used again and again, because creating one takes longer than recording it.
class EventPool {
 public:
  explicit EventPool(const DeviceContext& context) : context_(context) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  void* take(bool timed);
  void give_back(bool timed, void* event) noexcept;

 private:
  const DeviceContext& context_;
  // Events are released by every thread.
  std::mutex mutex_;
  std::vector<void*> free_[2];
};

// Pinned buffers through which copy_to_device copies, so that the host range may change once it returns. They
// are used in turn; each is free again once the copies from it have run.
class StagingBuffers {
 public:
  StagingBuffers(const DeviceContext& context, EventPool& events);
  ~StagingBuffers();
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  // Queues the copy on the stream, always the same one. Returns how often the host waited for a buffer.
  int64_t copy(std::byte* to, const std::byte* from, int64_t bytes, void* stream);

  static constexpr int64_t kBytes = int64_t{4} << 20;
  static constexpr size_t kBuffers = 4;

 private:
  struct Buffer {
    std::byte* data = nullptr;
    // Recorded after the last copy from it.
    void* event = nullptr;
    bool in_flight = false;
  };
  // Makes the next buffer the current one; true: the host waited for it.
  bool advance(void* stream);

  const DeviceContext& context_;
  EventPool& events_;
  Buffer buffers_[kBuffers];
  size_t current_ = 0;
  // Bytes of the current buffer.
  int64_t used_ = 0;
};

// A queue is a stream. Kernels enqueue themselves (LaunchMode::call), on Context::stream. Memory is allocated
// and freed in the order of the compute queue, as on every device.
class CudaDevice : public Device {
 public:
  // index: of the devices that this process sees. threads: of the host. ErrorCode::failed where the backend
  // reports an error, here and in every function.
  CudaDevice(const Backend& backend, const kernels::Table& table, int index, int threads)
      : CudaDevice(backend, table, index, threads, Variant()) {}
  ~CudaDevice() override;

  DeviceType type() const override { return DeviceType::cuda; }
  std::string description() const override { return context_.name; }
  const DeviceFacts& facts() const { return facts_; }

  // For channels that queue their transfers themselves (comm/nccl_channel.hpp). Null: the backend has no
  // communicators.
  const Communicator* communicator() const { return communicator_; }
  OpenDevice* handle() const { return context_.device; }
  void* stream(Queue queue) {
    submit_graph(queue);
    return queue_of(queue).stream;
  }
  // From now on every wait of the host throws `error`, the first one given: what the queues compute is
  // undefined. From any thread.
  void set_failure(const Error& error);

  void synchronize() override;
  void zero(std::byte* data, int64_t bytes) override;
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override;
  void copy_to_device(std::byte* to, const void* from_host, int64_t bytes) override;
  void copy_to_host(void* to_host, const std::byte* from, int64_t bytes) override;
  void start_copy_to_device(std::byte* to, const void* from_host, int64_t bytes, Queue queue) override;
  void start_copy_to_host(void* to_host, const std::byte* from, int64_t bytes, Queue queue) override;
  std::unique_ptr<Event> record(Queue queue) override;
  std::unique_ptr<Event> record_time(Queue queue) override;
  bool queues_work() const override { return true; }
  Queue add_queue(AddedQueue purpose, std::string name) override;
  std::string queue_name(Queue queue) const override;
  void wait_for(Queue queue, const Event& event) override;
  std::byte* host_address(std::byte*) override { return nullptr; }
  // Runs `work` on a thread of the driver, in the order of the queue. It must not use the device. After an
  // error of such work it does not run until the host has thrown the error, in the same queue and in those
  // that have waited for it.
  void enqueue(Queue queue, std::function<void()> work) override;
  bool has_graphs() const override { return true; }
  void begin_graph(const char* name) override;
  void end_graph() noexcept override;
  GraphCounts graph_counts() const override { return graph_counts_; }
  bool has_ranges() const override { return context_.runtime.begin_range != nullptr; }
  void begin_range(const std::string& name) override { context_.runtime.begin_range(name.c_str()); }
  void end_range() override { context_.runtime.end_range(); }
  void mark(const std::string& name) override {
    if (context_.runtime.mark) context_.runtime.mark(name.c_str());
  }

  static constexpr AllocatorRules rules() {
    AllocatorRules rules;
    rules.small_growth = rules.large_growth = kMappingUnit;
    return rules;
  }

  // Options of a device on a runtime other than CUDA's.
  struct Variant {
    const char* name = "cuda";
    // The block at offset x of a pool lies at spacing * x + first of its addresses: other than 1 and 0 leave
    // memory between blocks.
    int64_t spacing = 1, first = 0;
  };

 protected:
  CudaDevice(const Backend& backend, const kernels::Table& table, int index, int threads,
             const Variant& variant);
  // Like enqueue(), but runs also after an error. The first error is kept.
  void enqueue_always(Queue queue, std::function<void()> work);
  int workers() const override { return 0; }
  void* stream_of(Queue queue) override {
    collect_graph(queue);
    return queue_of(queue).stream;
  }
  // Before work that a graph can have: begins to collect it within a GraphScope.
  void collect_graph(Queue queue);
  bool grow(Pool pool, int64_t end, int64_t bytes) override;
  void shrink(Pool pool, int64_t end, int64_t bytes) override;
  std::byte* place(Pool pool, int64_t offset, int64_t size) override;
  std::byte* place_pinned(int64_t size) override;
  void retire_pinned(std::byte* data) override;

 private:
  friend class CudaEvent;
  // Queues of which an error is one of this queue too: a bit for each of the first 64.
  using QueueSet = uint64_t;
  struct StreamQueue {
    void* stream = nullptr;
    std::string name;
    // Itself, and the queues that it has waited for.
    QueueSet follows = 0;
    // The first error of work of enqueue().
    std::exception_ptr error;
  };
  // A timed event whose moment the host knows.
  struct TimeReference;

  // Before what a graph cannot have: submits what has been collected. Within a GraphScope the queue collects
  // again after it.
  void submit_graph(Queue queue);
  StreamQueue& queue_of(Queue queue) { return queues_[static_cast<size_t>(queue)]; }
  void call_host(StreamQueue& queue, std::function<void()> work);
  // Whether work of enqueue() has failed in these queues.
  bool has_error(QueueSet queues);
  // Addresses of a pool's mapped range for blocks that end at `end`.
  int64_t address_range(int64_t end) const { return end > 0 ? variant_.spacing * end + variant_.first : 0; }
  static QueueSet bit_of(size_t queue) { return queue < 64 ? QueueSet{1} << queue : 0; }
  void make_kernel_error_slots();
  void start_copy(void* to, const void* from, int64_t bytes, CopyDirection direction, Queue queue,
                  const char* action);
  // Throws the error of set_failure(), if there is one.
  void throw_failure();
  // Throws the first error of a kernel, a launch or work of enqueue() in these queues, and empties its slot.
  void throw_error_of(QueueSet queues);
  std::shared_ptr<const TimeReference> time_reference();
  // Waits for all queues and releases what the device holds, without exceptions.
  void close() noexcept;

  const Variant variant_;
  ThreadPool threads_;
  DeviceFacts facts_;
  DeviceContext context_;
  const Communicator* const communicator_;
  std::unique_ptr<EventPool> events_;
  std::unique_ptr<MappedRange> ranges_[2];
  std::unique_ptr<StagingBuffers> staging_;
  // Error slots for kernels, kQueues of them, in pinned memory. A kernel that reports an error while it runs
  // writes `file` last, and texts of the host, which the launch has passed to it.
  kernels::KernelError* slots_ = nullptr;
  std::deque<StreamQueue> queues_;
  // Protects the errors of the queues, which the driver's threads set, their list and failure_.
  std::mutex error_mutex_;
  std::optional<Error> failure_;
  // Open GraphScopes, the name of the outermost, and whether the compute stream collects work.
  int graph_scopes_ = 0;
  const char* graph_name_ = nullptr;
  bool collects_ = false;
  GraphCounts graph_counts_;
  // A stream without work, for time references.
  void* clock_stream_ = nullptr;
  std::shared_ptr<const TimeReference> time_reference_;
};

// table: all families that are launched, which the caller checks.
std::unique_ptr<Device> make_cuda_device(const Backend& backend, const kernels::Table& table, int index,
                                         int threads = 0);

}  // namespace capstan::cuda
