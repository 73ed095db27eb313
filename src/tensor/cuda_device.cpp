#include "tensor/cuda_device.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/checked.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"

namespace capstan::cuda {

void DeviceContext::check(Status status, const char* action) const {
  if (status.ok()) return;
  fail(ErrorCode::failed,
       name + ": cannot " + action + ": " + (status.text ? status.text : "the CUDA backend gives no reason"));
}

// ---- MappedRange

MappedRange::MappedRange(const DeviceContext& context, int64_t bytes)
    : context_(context), bytes_(round_up(bytes, kMappingUnit)) {
  void* address = nullptr;
  context_.check(context_.runtime.reserve_range(context_.device, bytes_, &address),
                 "reserve addresses for tensors");
  begin_ = static_cast<std::byte*>(address);
}

MappedRange::~MappedRange() {
  while (!mappings_.empty()) {
    mapped_ -= mappings_.back();
    (void)context_.runtime.unmap_memory(context_.device, begin_ + mapped_, mappings_.back());
    mappings_.pop_back();
  }
  (void)context_.runtime.release_range(context_.device, begin_, bytes_);
}

void MappedRange::unmap_last() {
  const int64_t size = mappings_.back();
  context_.check(context_.runtime.unmap_memory(context_.device, begin_ + mapped_ - size, size),
                 "return memory to the system");
  mapped_ -= size;
  mappings_.pop_back();
}

bool MappedRange::grow(int64_t end) {
  if (end > bytes_) return false;
  const size_t before = mappings_.size();
  while (mapped_ < end) {
    const int64_t size = std::min(kMaxMapping, round_up(end - mapped_, kMappingUnit));
    const Status status = context_.runtime.map_memory(context_.device, begin_ + mapped_, size);
    if (status.code == StatusCode::out_of_memory) {
      while (mappings_.size() > before) unmap_last();
      return false;
    }
    context_.check(status, "map memory");
    mapped_ += size;
    mappings_.push_back(size);
  }
  return true;
}

void MappedRange::shrink(int64_t end) {
  while (!mappings_.empty() && mapped_ - mappings_.back() >= end) unmap_last();
}

// ---- EventPool

EventPool::~EventPool() {
  for (const auto& events : free_)
    for (void* event : events) (void)context_.runtime.destroy_event(context_.device, event);
}

void* EventPool::take(bool timed) {
  {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& events = free_[timed ? 1 : 0];
    if (!events.empty()) {
      void* const event = events.back();
      events.pop_back();
      return event;
    }
  }
  void* event = nullptr;
  context_.check(context_.runtime.create_event(context_.device, timed, &event), "create an event");
  return event;
}

void EventPool::give_back(bool timed, void* event) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    free_[timed ? 1 : 0].push_back(event);
  } catch (const std::bad_alloc&) {
    (void)context_.runtime.destroy_event(context_.device, event);
  }
}

// ---- StagingBuffers

StagingBuffers::StagingBuffers(const DeviceContext& context, EventPool& events)
    : context_(context), events_(events) {}

StagingBuffers::~StagingBuffers() {
  for (const Buffer& buffer : buffers_) {
    if (buffer.event) events_.give_back(false, buffer.event);
    if (buffer.data) (void)context_.runtime.free_pinned(context_.device, buffer.data);
  }
}

bool StagingBuffers::advance(void* stream) {
  Buffer& full = buffers_[current_];
  if (!full.event) full.event = events_.take(false);
  context_.check(context_.runtime.record_event(context_.device, full.event, stream), "record an event");
  full.in_flight = true;
  current_ = (current_ + 1) % kBuffers;
  used_ = 0;
  Buffer& next = buffers_[current_];
  if (!next.in_flight) return false;
  const Status status = context_.runtime.query_event(context_.device, next.event);
  if (status.code != StatusCode::not_ready) context_.check(status, "query an event");
  if (!status.ok())
    context_.check(context_.runtime.wait_event(context_.device, next.event), "wait for an event");
  next.in_flight = false;
  return !status.ok();
}

int64_t StagingBuffers::copy(std::byte* to, const std::byte* from, int64_t bytes, void* stream) {
  int64_t waits = 0;
  while (bytes > 0) {
    if (used_ == kBytes && advance(stream)) ++waits;
    Buffer& buffer = buffers_[current_];
    if (!buffer.data) {
      void* address = nullptr;
      context_.check(context_.runtime.allocate_pinned(context_.device, kBytes, &address),
                     "allocate pinned memory for copies from the host");
      buffer.data = static_cast<std::byte*>(address);
    }
    const int64_t part = std::min(bytes, kBytes - used_);
    std::memcpy(buffer.data + used_, from, static_cast<size_t>(part));
    context_.check(context_.runtime.copy(context_.device, to, buffer.data + used_, part,
                                         CopyDirection::host_to_device, stream),
                   "copy to the device");
    // Copies begin at cache lines.
    used_ = std::min(kBytes, round_up(used_ + part, 64));
    to += part, from += part, bytes -= part;
  }
  return waits;
}

// ---- CudaEvent

struct CudaDevice::TimeReference {
  EventPool& events;
  void* event;
  // Time of the event by the host's steady clock.
  double seconds;
  ~TimeReference() { events.give_back(true, event); }
};

class CudaEvent final : public Event {
 public:
  // reference: of a timed event.
  CudaEvent(CudaDevice& device, CudaDevice::QueueSet follows, bool timed,
            std::shared_ptr<const CudaDevice::TimeReference> reference = nullptr)
      : device_(device),
        follows_(follows),
        timed_(timed),
        reference_(std::move(reference)),
        handle_(device.events_->take(timed)) {}
  ~CudaEvent() override { device_.events_->give_back(timed_, handle_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void* handle() const { return handle_; }
  CudaDevice::QueueSet follows() const { return follows_; }

  // True if the work has run or has failed; wait() throws the error.
  bool done() const override {
    const DeviceContext& context = device_.context_;
    return context.runtime.query_event(context.device, handle_).code != StatusCode::not_ready;
  }
  void wait() override {
    ++device_.host_waits_;
    const DeviceContext& context = device_.context_;
    const Status status = context.runtime.wait_event(context.device, handle_);
    device_.throw_failure();
    context.check(status, "wait for an event");
    device_.throw_error_of(follows_);
  }
  double time() const override {
    CAPSTAN_ASSERT(reference_, "the time of an event that has none");
    const DeviceContext& context = device_.context_;
    double seconds = 0;
    context.check(context.runtime.elapsed(context.device, reference_->event, handle_, &seconds),
                  "read the time of an event");
    return reference_->seconds + seconds;
  }

 private:
  CudaDevice& device_;
  const CudaDevice::QueueSet follows_;
  const bool timed_;
  const std::shared_ptr<const CudaDevice::TimeReference> reference_;
  void* const handle_;
};

// ---- CudaDevice

CudaDevice::CudaDevice(const Backend& backend, const kernels::Table& table, int index, int threads,
                       const Variant& variant)
    : Device(rules()),
      variant_(variant),
      threads_(threads),
      context_{*backend.runtime, nullptr, variant.name + (" " + std::to_string(index))},
      communicator_(backend.communicator) {
  const Runtime& runtime = context_.runtime;
  context_.check(runtime.describe_device(index, &facts_), "read the properties of the device");
  context_.name += " (" + std::string(facts_.name) + ", compute capability " + std::to_string(facts_.major) +
                   "." + std::to_string(facts_.minor) + ")";
  context_.check(runtime.open_device(index, &context_.device), "open the device");
  table_ = &table;
  host_threads_ = &threads_;
  try {
    events_ = std::make_unique<EventPool>(context_);
    staging_ = std::make_unique<StagingBuffers>(context_, *events_);
    // The ranges have more addresses than the GPU has memory, because free gaps may separate blocks.
    ranges_[static_cast<size_t>(Pool::small)] = std::make_unique<MappedRange>(context_, facts_.memory / 2);
    ranges_[static_cast<size_t>(Pool::large)] = std::make_unique<MappedRange>(context_, 2 * facts_.memory);
    make_kernel_error_slots();
    for (size_t queue = 0; queue < kQueues; ++queue) {
      const auto which = static_cast<Queue>(queue);
      // Transfers have a high priority: other ranks wait for them, and they use few multiprocessors.
      CudaDevice::add_queue(which == Queue::communication ? AddedQueue::transfers : AddedQueue::work,
                            std::string(name_of(which)));
    }
    context_.check(runtime.create_stream(context_.device, true, &clock_stream_), "create a stream");
  } catch (...) {
    close();
    throw;
  }
}

CudaDevice::~CudaDevice() {
  close();
}

void CudaDevice::close() noexcept {
  const Runtime& runtime = context_.runtime;
  OpenDevice* const device = context_.device;
  for (const StreamQueue& queue : queues_) (void)runtime.wait_stream(device, queue.stream);
  release_pinned_pool();
  time_reference_.reset();
  staging_.reset();
  for (auto& range : ranges_) range.reset();
  events_.reset();
  for (const StreamQueue& queue : queues_) (void)runtime.destroy_stream(device, queue.stream);
  if (clock_stream_) (void)runtime.destroy_stream(device, clock_stream_);
  if (slots_) (void)runtime.free_pinned(device, slots_);
  (void)runtime.close_device(device);
}

void CudaDevice::make_kernel_error_slots() {
  void* memory = nullptr;
  context_.check(
      context_.runtime.allocate_pinned(context_.device, kQueues * sizeof(kernels::KernelError), &memory),
      "allocate pinned memory for the errors of kernels");
  slots_ = static_cast<kernels::KernelError*>(memory);
  std::uninitialized_default_construct_n(slots_, kQueues);
  kernel_errors_ = slots_;
}

Queue CudaDevice::add_queue(AddedQueue purpose, std::string name) {
  CAPSTAN_ASSERT(queues_.size() < 255, "more queues than a device has");
  StreamQueue queue{.name = std::move(name), .follows = bit_of(queues_.size())};
  const bool high_priority = purpose == AddedQueue::transfers;
  context_.check(context_.runtime.create_stream(context_.device, high_priority, &queue.stream),
                 "create a stream");
  const std::lock_guard lock(error_mutex_);
  queues_.push_back(std::move(queue));
  return static_cast<Queue>(queues_.size() - 1);
}
std::string CudaDevice::queue_name(Queue queue) const {
  return queues_[static_cast<size_t>(queue)].name;
}

void CudaDevice::set_failure(const Error& error) {
  const std::lock_guard lock(error_mutex_);
  if (!failure_) failure_ = error;
}
void CudaDevice::throw_failure() {
  const std::lock_guard lock(error_mutex_);
  if (failure_) throw Error(*failure_);
}

void CudaDevice::throw_error_of(QueueSet queues) {
  context_.check(context_.runtime.last_error(context_.device), "launch a kernel");
  for (size_t queue = 0; queue < queues_.size(); ++queue) {
    // A QueueSet has 64 bits; added queues beyond them are in no set and are always checked.
    if (const QueueSet bit = bit_of(queue); bit != 0 && !(queues & bit)) continue;
    if (queue < kQueues && slots_[queue].file) throw_kernel_error(slots_[queue]);
    std::exception_ptr error;
    {
      const std::lock_guard lock(error_mutex_);
      std::swap(error, queues_[queue].error);
    }
    if (error) std::rethrow_exception(error);
  }
}

void CudaDevice::begin_graph(const char* name) {
  if (graph_scopes_++ == 0) graph_name_ = name;
}

void CudaDevice::end_graph() noexcept {
  if (--graph_scopes_ > 0) return;
  try {
    submit_graph(Queue::compute);
  } catch (const Error& error) {
    set_failure(error);
  }
}

void CudaDevice::collect_graph(Queue queue) {
  if (queue != Queue::compute || graph_scopes_ == 0 || collects_) return;
  context_.check(context_.runtime.begin_graph(context_.device, queue_of(queue).stream),
                 "begin a CUDA graph (model.cuda_graph_impl)");
  collects_ = true;
}

void CudaDevice::submit_graph(Queue queue) {
  if (queue != Queue::compute || !collects_) return;
  collects_ = false;
  GraphLaunch launch;
  const Status status =
      context_.runtime.launch_graph(context_.device, queue_of(queue).stream, graph_name_, &launch);
  ++graph_counts_.graphs;
  graph_counts_.nodes += launch.nodes;
  graph_counts_.instantiated += launch.instantiated;
  context_.check(status, "run a CUDA graph (model.cuda_graph_impl)");
}

void CudaDevice::synchronize() {
  submit_graph(Queue::compute);
  ++host_waits_;
  const char* const action = "wait for a queue";
  std::exception_ptr first;
  for (const StreamQueue& queue : queues_) {
    try {
      context_.check(context_.runtime.wait_stream(context_.device, queue.stream), action);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  throw_failure();
  if (first) std::rethrow_exception(first);
  throw_error_of(~QueueSet{0});
}

void CudaDevice::zero(std::byte* data, int64_t bytes) {
  if (bytes <= 0) return;
  collect_graph(Queue::compute);
  context_.check(context_.runtime.zero(context_.device, data, bytes, queue_of(Queue::compute).stream),
                 "fill memory");
}

void CudaDevice::start_copy(void* to, const void* from, int64_t bytes, CopyDirection direction, Queue queue,
                            const char* action) {
  if (bytes <= 0) return;
  if (direction == CopyDirection::on_device)
    collect_graph(queue);
  else
    submit_graph(queue);
  context_.check(context_.runtime.copy(context_.device, to, from, bytes, direction, queue_of(queue).stream),
                 action);
}

void CudaDevice::copy(std::byte* to, const std::byte* from, int64_t bytes) {
  start_copy(to, from, bytes, CopyDirection::on_device, Queue::compute, "copy on the device");
}
void CudaDevice::copy_to_device(std::byte* to, const void* from_host, int64_t bytes) {
  if (bytes <= 0) return;
  count_copy(Queue::host_to_device, bytes);
  submit_graph(Queue::compute);
  host_waits_ +=
      staging_->copy(to, static_cast<const std::byte*>(from_host), bytes, queue_of(Queue::compute).stream);
}
void CudaDevice::copy_to_host(void* to_host, const std::byte* from, int64_t bytes) {
  start_copy_to_host(to_host, from, bytes, Queue::compute);
  record(Queue::compute)->wait();
}
void CudaDevice::start_copy_to_device(std::byte* to, const void* from_host, int64_t bytes, Queue queue) {
  if (bytes <= 0) return;
  count_copy(Queue::host_to_device, bytes);
  start_copy(to, from_host, bytes, CopyDirection::host_to_device, queue, "copy to the device");
}
void CudaDevice::start_copy_to_host(void* to_host, const std::byte* from, int64_t bytes, Queue queue) {
  if (bytes <= 0) return;
  count_copy(Queue::device_to_host, bytes);
  start_copy(to_host, from, bytes, CopyDirection::device_to_host, queue, "copy to the host");
}

std::unique_ptr<Event> CudaDevice::record(Queue queue) {
  submit_graph(queue);
  auto event = std::make_unique<CudaEvent>(*this, queue_of(queue).follows, false);
  context_.check(context_.runtime.record_event(context_.device, event->handle(), queue_of(queue).stream),
                 "record an event");
  return event;
}

// CUDA gives the time between two events in fp32. A recent reference event keeps the difference small, and so
// precise and close to the host's clock.
std::shared_ptr<const CudaDevice::TimeReference> CudaDevice::time_reference() {
  constexpr double kOldest = 1;  // seconds
  if (time_reference_ && steady_seconds() - time_reference_->seconds < kOldest) return time_reference_;
  const std::shared_ptr<TimeReference> reference(new TimeReference{*events_, events_->take(true), 0});
  const Runtime& runtime = context_.runtime;
  context_.check(runtime.record_event(context_.device, reference->event, clock_stream_), "record an event");
  // The stream has no work.
  context_.check(runtime.wait_event(context_.device, reference->event), "wait for an event");
  reference->seconds = steady_seconds();
  return time_reference_ = reference;
}

std::unique_ptr<Event> CudaDevice::record_time(Queue queue) {
  submit_graph(queue);
  auto event = std::make_unique<CudaEvent>(*this, queue_of(queue).follows, true, time_reference());
  context_.check(context_.runtime.record_event(context_.device, event->handle(), queue_of(queue).stream),
                 "record an event");
  return event;
}

void CudaDevice::wait_for(Queue queue, const Event& event) {
  const auto& recorded = dynamic_cast<const CudaEvent&>(event);
  submit_graph(queue);
  StreamQueue& waiting = queue_of(queue);
  waiting.follows |= recorded.follows();
  context_.check(context_.runtime.stream_wait_event(context_.device, waiting.stream, recorded.handle()),
                 "make a queue wait for an event");
}

namespace {
// Work of enqueue(), from the call until it has run.
struct QueuedWork {
  std::function<void()> work;
  std::function<void(std::exception_ptr)> failed;
};
void run_queued_work(void* argument) {
  const std::unique_ptr<QueuedWork> queued(static_cast<QueuedWork*>(argument));
  try {
    queued->work();
  } catch (...) {
    queued->failed(std::current_exception());
  }
}
}  // namespace

void CudaDevice::call_host(StreamQueue& queue, std::function<void()> work) {
  auto queued =
      std::make_unique<QueuedWork>(QueuedWork{std::move(work), [this, &queue](std::exception_ptr error) {
                                                const std::lock_guard lock(error_mutex_);
                                                if (!queue.error) queue.error = std::move(error);
                                              }});
  context_.check(context_.runtime.call_host(context_.device, queue.stream, run_queued_work, queued.get()),
                 "queue work of the host");
  (void)queued.release();
}

bool CudaDevice::has_error(QueueSet queues) {
  const std::lock_guard lock(error_mutex_);
  for (size_t queue = 0; queue < queues_.size(); ++queue)
    if (bit_of(queue) & queues && queues_[queue].error) return true;
  return false;
}

void CudaDevice::enqueue(Queue queue, std::function<void()> work) {
  call_host(queue_of(queue), [this, follows = queue_of(queue).follows, work = std::move(work)] {
    if (!has_error(follows)) work();
  });
}
void CudaDevice::enqueue_always(Queue queue, std::function<void()> work) {
  call_host(queue_of(queue), std::move(work));
}

bool CudaDevice::grow(Pool pool, int64_t end, int64_t bytes) {
  return ranges_[static_cast<size_t>(pool)]->grow(address_range(end + bytes));
}
void CudaDevice::shrink(Pool pool, int64_t end, int64_t) {
  ranges_[static_cast<size_t>(pool)]->shrink(address_range(end));
}
std::byte* CudaDevice::place(Pool pool, int64_t offset, int64_t) {
  return ranges_[static_cast<size_t>(pool)]->begin() + variant_.spacing * offset + variant_.first;
}
std::byte* CudaDevice::place_pinned(int64_t size) {
  void* address = nullptr;
  const Status status = context_.runtime.allocate_pinned(context_.device, size, &address);
  if (status.code == StatusCode::out_of_memory) return nullptr;
  context_.check(status, "allocate pinned memory");
  return static_cast<std::byte*>(address);
}
void CudaDevice::retire_pinned(std::byte* data) {
  // Ignores the status: an error of the device is reported at the next wait for it.
  (void)context_.runtime.free_pinned(context_.device, data);
}

std::unique_ptr<Device> make_cuda_device(const Backend& backend, const kernels::Table& table, int index,
                                         int threads) {
  return std::make_unique<CudaDevice>(backend, table, index, threads);
}

}  // namespace capstan::cuda
