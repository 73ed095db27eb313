// The checked device keeps its memory in a DoubleMapping. `launch` and the copies below are the only code
// that adds the distance. They also declare what they access, so that AccessOrder finds missing waits.
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
    remove_sentinel(begin, begin + next_);
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

class CheckedEvent final : public Event {
 public:
  CheckedEvent(CheckedQueue& queue, CheckedQueue::Ticket ticket, AccessOrder& order, AccessOrder::Clock clock,
               int64_t& host_waits, std::shared_ptr<const std::atomic<double>> time = nullptr)
      : queue_(queue),
        ticket_(ticket),
        order_(order),
        clock_(std::move(clock)),
        host_waits_(host_waits),
        time_(std::move(time)) {}
  bool done() const override { return queue_.done(ticket_); }
  void wait() override {
    ++host_waits_;
    // The host has waited, even if the next line throws an error of the queue.
    order_.wait_on_host(clock_);
    queue_.wait(ticket_);
  }
  const AccessOrder::Clock& clock() const { return clock_; }
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
  CheckedQueue::Ticket ticket_;
  AccessOrder& order_;
  AccessOrder::Clock clock_;
  int64_t& host_waits_;
  std::shared_ptr<const std::atomic<double>> time_;
};

class CheckedDevice final : public Device {
 public:
  CheckedDevice(const kernels::Table& table, int threads, const CheckedOptions& options)
      : pool_(threads),
        seed_(options.seed),
        hold_(options.patient ? CheckedQueue::HeldItems::all : CheckedQueue::HeldItems::some),
        ignored_wait_(options.ignored_wait) {
    for (size_t i = 0; i < kQueues; ++i) queues_.emplace_back(seed_ + i, hold_);
    table_ = &table;
    host_threads_ = &pool_;
    launch_mode_ = LaunchMode::queue;
    kernel_offset_ = memory_.distance();
    declares_accesses_ = true;
  }
  ~CheckedDevice() override {
    finish();
    release_pinned_pool();
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
    record(Queue::compute)->wait();
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
    // Early readers find NaN, or -1. A pinned buffer that a queue still uses changes in queue order only.
    auto* const target = static_cast<std::byte*>(to);
    if (order_.is_idle(target)) std::memset(to, 0xff, static_cast<size_t>(bytes));
    declare_copy(queue, target, bytes, true, "a copy to the host");
    push_copy(to, from, bytes, queue);
  }
  std::unique_ptr<Event> record(Queue queue) override {
    return std::make_unique<CheckedEvent>(queue_of(queue), queue_of(queue).last(), order_,
                                          order_.record(queue), host_waits_);
  }
  std::unique_ptr<Event> record_time(Queue queue) override {
    const auto time = std::make_shared<std::atomic<double>>(0);
    const CheckedQueue::Ticket ticket = queue_of(queue).push([time] { time->store(steady_seconds()); });
    return std::make_unique<CheckedEvent>(queue_of(queue), ticket, order_, order_.record(queue), host_waits_,
                                          time);
  }
  bool queues_work() const override { return true; }
  void wait_for(Queue queue, const Event& event) override {
    if (!is_of_channel(queue) && waits_++ == ignored_wait_) return;
    const auto& checked = dynamic_cast<const CheckedEvent&>(event);
    checked.follow(queue_of(queue));
    order_.wait(queue, checked.clock());
  }
  Queue add_queue(bool prompt, std::string name) override {
    CAPSTAN_ASSERT(queues_.size() < 255, "more queues than a device has");
    added_.push_back(std::move(name));
    queues_.emplace_back(seed_ + queues_.size(), prompt ? CheckedQueue::HeldItems::none : hold_);
    return static_cast<Queue>(queues_.size() - 1);
  }
  std::string queue_name(Queue queue) const override {
    const auto index = static_cast<size_t>(queue);
    return index < kQueues ? std::string(name_of(queue)) : added_[index - kQueues];
  }
  std::byte* host_address(std::byte*) override { return nullptr; }

 protected:
  // Each block has pages of its own, whose end is watched; offsets in the pools only count.
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
  std::byte* place_pinned(int64_t size) override {
    std::byte* data = Device::place_pinned(size);
    if (data) order_.add_host_block(data, size);
    return data;
  }
  void retire_pinned(std::byte* data) override {
    order_.remove_host_block(data);
    Device::retire_pinned(data);
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
  // A channel waits for its own queues; their number depends on the other ranks.
  bool is_of_channel(Queue queue) const {
    if (static_cast<size_t>(queue) < kQueues) return false;
    const std::string& name = added_[static_cast<size_t>(queue) - kQueues];
    return name.starts_with("transfers of ") || name.starts_with("delivery of ");
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
  // The work that is queued next does not run, and the host finds the error.
  void report(Queue queue, const std::optional<std::string>& missing_wait) {
    if (!missing_wait) return;
    queue_of(queue).push(
        [text = *missing_wait] { fail(ErrorCode::internal, "internal error: missing wait: " + text); });
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
  const CheckedQueue::HeldItems hold_;
  // Calls of wait_for() for the first kQueues queues.
  int64_t waits_ = 0;
  const int64_t ignored_wait_;
  // Names of the queues after the first kQueues.
  std::vector<std::string> added_;
  // Declared last: the threads of the queues use the members above, so they must end first.
  std::deque<CheckedQueue> queues_;
};

}  // namespace

std::unique_ptr<Device> make_checked_device(const kernels::Table& table, int threads,
                                            const CheckedOptions& options) {
  return std::make_unique<CheckedDevice>(table, threads, options);
}

}  // namespace capstan
