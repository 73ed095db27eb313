// The checked device keeps its memory in a DoubleMapping. `launch` and the copies below are the only code
// that adds the distance. They also declare what they access, so that AccessOrder finds missing waits; the
// host declares what it accesses itself.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "tensor/access_order.hpp"
#include "tensor/checked_queue.hpp"
#include "tensor/device.hpp"
#include "tensor/double_mapping.hpp"
#include "tensor/sentinels.hpp"

namespace capstan {

namespace {

// Limit of host bytes queued for copies to the device; beyond it the host waits.
constexpr int64_t kMaxStaged = int64_t{64} << 20;

// Blocks at addresses that are never used again, so that access to released memory crashes. The address range
// is therefore larger than memory.
class BlockPages {
 public:
  BlockPages()
      : page_(static_cast<int64_t>(::sysconf(_SC_PAGESIZE))),
        mapping_("checked device",
                 std::min(2 * static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * page_, int64_t{256} << 30),
                 true),
        next_(page_) {}
  // Workspaces that queues keep still have their sentinels, whose addresses the next mapping may use.
  ~BlockPages() {
    std::byte* const begin = mapping_.begin() + distance();
    unpoison(begin, begin + next_);
  }
  BlockPages(const BlockPages&) = delete;
  BlockPages& operator=(const BlockPages&) = delete;
  std::ptrdiff_t distance() const { return mapping_.distance(); }

  // The block ends at a page boundary, and kernels cannot access the next page. Sentinels fit before it.
  std::byte* take(int64_t size) {
    const int64_t end = round_up(checked_add(next_, size + Sentinels::kBytes), page_);
    if (end + page_ > mapping_.bytes() || !mapping_.forbid(end, page_)) return nullptr;
    next_ = end + page_;
    return mapping_.begin() + (end - size);
  }
  void give_back(std::byte* data, int64_t size) {
    const int64_t end = (data - mapping_.begin()) + size;
    const int64_t begin = (end - size - Sentinels::kBytes) / page_ * page_;
    mapping_.discard(begin, end - begin);
    mapping_.forbid(begin, end - begin);
  }

 private:
  const int64_t page_;
  DoubleMapping mapping_;
  int64_t next_;
};

// State that all events of a device share.
struct HostWaits {
  AccessOrder& order;
  // Device::host_waits().
  int64_t& count;
  // CheckedOptions::ignored_host_wait, and the number of waits by Event::wait() so far.
  const int64_t ignored;
  int64_t made = 0;
  const std::thread::id thread = std::this_thread::get_id();
};

class CheckedEvent final : public Event {
 public:
  // queue, source: the queue on which the event is recorded, and its identifier.
  CheckedEvent(CheckedQueue& queue, Queue source, CheckedQueue::Ticket ticket, HostWaits& waits,
               std::shared_ptr<const std::atomic<double>> time = nullptr)
      : queue_(queue),
        source_(source),
        ticket_(ticket),
        waits_(waits),
        clock_(waits.order.record(source)),
        time_(std::move(time)) {}
  bool done() const override {
    const bool done = queue_.done(ticket_);
    // The thread of the host that uses the device goes on because of it.
    if (done && std::this_thread::get_id() == waits_.thread) waits_.order.wait_on_host(clock_);
    return done;
  }
  void wait() override {
    ++waits_.count;
    if (waits_.made++ != waits_.ignored) wait_for_queue();
  }
  void wait_for_queue() {
    // The host has waited, even if the next line throws an error of the queue.
    waits_.order.wait_on_host(clock_);
    queue_.wait(ticket_);
  }
  const AccessOrder::Clock& clock() const { return clock_; }
  Queue source() const { return source_; }
  double time() const override {
    CAPSTAN_ASSERT(time_, "the time of an event that has none");
    return time_->load();
  }
  // Makes `queue` wait for the event. An error of the event's queue also fails the waiting queue, because its
  // inputs were not computed.
  void follow(CheckedQueue& queue) const {
    if (&queue == &queue_) return;
    queue.push([&before = queue_, ticket = ticket_] {
      if (const std::exception_ptr error = before.wait_for_error(ticket)) std::rethrow_exception(error);
    });
  }

 private:
  CheckedQueue& queue_;
  const Queue source_;
  CheckedQueue::Ticket ticket_;
  HostWaits& waits_;
  AccessOrder::Clock clock_;
  std::shared_ptr<const std::atomic<double>> time_;
};

class CheckedDevice final : public Device {
 public:
  CheckedDevice(const kernels::Table& table, int threads, const CheckedOptions& options)
      : pool_(threads),
        seed_(options.seed),
        hold_(options.patient ? CheckedQueue::DelayedItems::all : CheckedQueue::DelayedItems::some),
        options_(options),
        event_waits_{.order = order_, .count = host_waits_, .ignored = options.ignored_host_wait} {
    for (size_t i = 0; i < kQueues; ++i) queues_.emplace_back(seed_ + i, hold_);
    table_ = &table;
    host_threads_ = &pool_;
    launch_mode_ = LaunchMode::queue;
    kernel_offset_ = memory_.distance();
    declares_accesses_ = true;
  }
  ~CheckedDevice() override {
    finish();
    order_.wait_for_all();
    release_pinned_pool();
    for (std::byte* data : released_early_) Device::retire_pinned(data);
  }
  DeviceType type() const override { return DeviceType::checked; }

  void synchronize() override {
    ++host_waits_;
    staged_ = 0;
    finish();
    check_sentinels();
    std::exception_ptr first;
    for (CheckedQueue& queue : queues_) {
      try {
        queue.wait(queue.last());
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    }
    order_.wait_for_all();
    if (first) std::rethrow_exception(first);
  }
  void declare_access(Queue queue, const ByteRows& memory, bool writes, const std::string& by) override {
    report(queue, order_.access(queue, memory, writes, by));
  }
  void declare_host_access(const ByteRows& memory, bool writes) override {
    using Use = AccessOrder::HostUse;
    if (const auto missing = order_.host_access(memory, writes ? Use::writes : Use::reads))
      fail(ErrorCode::internal, text_of_missing_wait(missing->text));
  }
  void enqueue(Queue queue, std::function<void()> work) override { queue_of(queue).push(std::move(work)); }

  void zero(std::byte* data, int64_t bytes) override {
    if (bytes <= 0) return;
    declare_copy(Queue::compute, data, bytes, true, "a fill");
    compute().push([to = kernel_address(data), bytes] { std::memset(to, 0, static_cast<size_t>(bytes)); });
  }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    declare_copy(Queue::compute, to, bytes, true, "a copy");
    push_copy(kernel_address(to), from, bytes, Queue::compute);
  }
  void copy_to_device(std::byte* to, const void* from, int64_t bytes) override {
    if (bytes <= 0) return;
    count_copy(Queue::host_to_device, bytes);
    const auto* begin = static_cast<const std::byte*>(from);
    std::vector<std::byte> staged(begin, begin + bytes);
    declare_copy(Queue::compute, to, bytes, true, "a copy from the host");
    compute().push([to = kernel_address(to), staged = std::move(staged)] {
      std::memcpy(to, staged.data(), staged.size());
    });
    staged_ += bytes;
    if (staged_ > kMaxStaged) synchronize();
  }
  void copy_to_host(void* to, const std::byte* from, int64_t bytes) override {
    check_sentinels();
    start_copy_to_host(to, from, bytes, Queue::compute);
    ++host_waits_;
    make_event(Queue::compute)->wait_for_queue();
  }
  void push_copy(void* to, const std::byte* from, int64_t bytes, Queue queue) {
    if (bytes <= 0) return;
    declare_copy(queue, const_cast<std::byte*>(from), bytes, false, "a copy");
    queue_of(queue).push([to, from = kernel_address(const_cast<std::byte*>(from)), bytes] {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    });
  }
  void start_copy_to_device(std::byte* to, const void* from, int64_t bytes, Queue queue) override {
    if (bytes <= 0) return;
    count_copy(Queue::host_to_device, bytes);
    declare_copy(queue, static_cast<std::byte*>(const_cast<void*>(from)), bytes, false,
                 "a copy from the host");
    declare_copy(queue, to, bytes, true, "a copy from the host");
    queue_of(queue).push(
        [to = kernel_address(to), from, bytes] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
  }
  void start_copy_to_host(void* to, const std::byte* from, int64_t bytes, Queue queue) override {
    if (bytes <= 0) return;
    count_copy(Queue::device_to_host, bytes);
    // Early readers find NaN, or -1. Memory that a queue still uses changes in queue order only.
    auto* const target = static_cast<std::byte*>(to);
    if (order_.is_idle({target, bytes})) std::memset(to, 0xff, static_cast<size_t>(bytes));
    declare_copy(queue, target, bytes, true, "a copy to the host");
    push_copy(to, from, bytes, queue);
  }
  std::unique_ptr<Event> record(Queue queue) override { return make_event(queue); }
  std::unique_ptr<Event> record_time(Queue queue) override {
    const auto time = std::make_shared<std::atomic<double>>(0);
    const CheckedQueue::Ticket ticket = queue_of(queue).push([time] { time->store(steady_seconds()); });
    return std::make_unique<CheckedEvent>(queue_of(queue), queue, ticket, event_waits_, time);
  }
  bool queues_work() const override { return true; }
  void wait_for(Queue queue, const Event& event) override {
    const auto& checked = dynamic_cast<const CheckedEvent&>(event);
    if (is_counted(queue, checked.source()) && waits_++ == options_.ignored_wait) return;
    checked.follow(queue_of(queue));
    order_.wait(queue, checked.clock());
  }
  Queue add_queue(AddedQueue purpose, std::string name) override {
    CAPSTAN_ASSERT(queues_.size() < 255, "more queues than a device has");
    added_.push_back({purpose, std::move(name)});
    queues_.emplace_back(seed_ + queues_.size(),
                         purpose == AddedQueue::transfers ? CheckedQueue::DelayedItems::none : hold_);
    return static_cast<Queue>(queues_.size() - 1);
  }
  std::string queue_name(Queue queue) const override {
    const auto index = static_cast<size_t>(queue);
    return index < kQueues ? std::string(name_of(queue)) : added_[index - kQueues].name;
  }
  std::byte* host_address(std::byte*) override { return nullptr; }

 protected:
  // Each block has its own pages, so that an access after its end crashes; pool offsets are only counted.
  bool grow(Pool, int64_t, int64_t) override { return true; }
  void shrink(Pool pool, int64_t, int64_t) override {
    if (pool != Pool::large) return;
    for (const auto& [size, blocks] : free_blocks_)
      for (std::byte* data : blocks) memory_.give_back(data, size);
    free_blocks_.clear();
  }
  std::byte* place(Pool, int64_t, int64_t size) override {
    std::byte* data = take_block(size);
    if (data) order_.add_block(data, size);
    return data;
  }
  void occupy_pinned(std::byte* data, int64_t size, MemoryCategory category) override {
    order_.add_host_block(data, size, "a pinned buffer (" + std::string(name_of(category)) + ")");
  }
  void retire_pinned(std::byte* data) override {
    const auto missing = order_.remove_host_block(data);
    if (!missing) return Device::retire_pinned(data);
    // Work that uses the memory may still run.
    released_early_.push_back(data);
    report(missing->queue, missing->text);
  }
  void occupy(std::byte* data, int64_t bytes, int64_t size, MemoryCategory category) override {
    compute().push(sentinels_.add(data, bytes, size, category, launches()), true);
  }
  void retire(std::byte* data, int64_t size) override {
    report(Queue::compute, order_.remove_block(data));
    compute().push(sentinels_.remove(data, launches()), true);
    spoil(data, size);
    free_blocks_[size].push_back(data);
  }

 private:
  struct NamedQueue {
    AddedQueue purpose;
    std::string name;
  };
  std::unique_ptr<CheckedEvent> make_event(Queue queue) {
    return std::make_unique<CheckedEvent>(queue_of(queue), queue, queue_of(queue).last(), event_waits_);
  }
  // Whether CheckedOptions::ignored_wait counts a wait of `queue` for an event of `source`. A channel waits
  // for its own queues; their number depends on the other ranks.
  bool is_counted(Queue queue, Queue source) const {
    const auto index = static_cast<size_t>(queue);
    if (index >= kQueues && added_[index - kQueues].purpose != AddedQueue::work) return false;
    const auto matches = [](Queue wanted, Queue found) { return wanted == Queue::count_ || wanted == found; };
    return matches(options_.ignored_waiter, queue) && matches(options_.ignored_source, source);
  }
  std::byte* take_block(int64_t size) {
    if (const auto found = free_blocks_.find(size); found != free_blocks_.end() && !found->second.empty()) {
      std::byte* data = found->second.back();
      found->second.pop_back();
      return data;
    }
    std::byte* data = memory_.take(size);
    if (data) spoil(data, size);
    return data;
  }
  void declare_copy(Queue queue, std::byte* address, int64_t bytes, bool writes, const char* what) {
    declare_access(queue, {address, bytes}, writes, std::string(what) + " on the queue " + queue_name(queue));
  }
  static std::string text_of_missing_wait(const std::string& what) {
    return "internal error: missing wait: " + what;
  }
  // The work that is queued next does not run, and the host finds the error.
  void report(Queue queue, const std::optional<std::string>& missing_wait) {
    if (!missing_wait) return;
    queue_of(queue).push([text = text_of_missing_wait(*missing_wait)] { fail(ErrorCode::internal, text); });
  }

  void begin_workspace(Queue queue, kernels::Workspace workspace) override {
    queue_of(queue).push(sentinels_.begin_workspace(workspace, queue != Queue::compute));
  }
  void end_workspace(Queue queue, kernels::Workspace workspace) override {
    queue_of(queue).push(sentinels_.end_workspace(workspace, launches(queue), std::string(name_of(queue))));
  }
  void check_sentinels() { compute().push(sentinels_.check(launches())); }

  // In queue order: a read of the block before its first write or after its release gives NaNs.
  void spoil(std::byte* data, int64_t bytes) {
    compute().push([to = kernel_address(data), bytes] { fill_not_written(to, bytes); });
  }
  // The queues may wait for each other: all are empty before an error is thrown or one of them ends.
  void finish() {
    for (CheckedQueue& queue : queues_) queue.wait_for_error(queue.last());
  }
  CheckedQueue& queue_of(Queue queue) { return queues_[static_cast<size_t>(queue)]; }
  CheckedQueue& compute() { return queue_of(Queue::compute); }

  BlockPages memory_;
  Sentinels sentinels_{memory_.distance(), allocator_rules()};
  AccessOrder order_;
  // Free blocks by size.
  std::map<int64_t, std::vector<std::byte*>> free_blocks_;
  ThreadPool pool_;
  // Bytes queued for the device since the host last waited.
  int64_t staged_ = 0;
  const uint64_t seed_;
  const CheckedQueue::DelayedItems hold_;
  const CheckedOptions options_;
  // Calls of wait_for() that is_counted().
  int64_t waits_ = 0;
  HostWaits event_waits_;
  // Pinned memory that was released while a queue used it.
  std::vector<std::byte*> released_early_;
  // The queues after the first kQueues.
  std::vector<NamedQueue> added_;
  // Declared last: the threads of the queues use the members above, so they must end first.
  std::deque<CheckedQueue> queues_;
};

}  // namespace

std::unique_ptr<Device> make_checked_device(const kernels::Table& table, int threads,
                                            const CheckedOptions& options) {
  return std::make_unique<CheckedDevice>(table, threads, options);
}

}  // namespace capstan
