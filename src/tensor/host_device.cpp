#include "tensor/host_device.hpp"

#include <algorithm>
#include <cstring>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace capstan {

HostDevice::HostDevice(Device& device, const kernels::Table& table)
    : Device(device.allocator_rules()),
      device_(device),
      queue_(device.add_queue(AddedQueue::work, "host kernels")) {
  table_ = &table;
  launch_mode_ = device.is_meta() ? LaunchMode::none : LaunchMode::queue;
  if (!device.is_meta()) host_threads_ = &device.host_threads();
  declares_accesses_ = device.declares_accesses();
}

// An error of a queue is reported where the host waits for its results.
HostDevice::~HostDevice() {
  for (const Queue queue : {Queue::device_to_host, queue_, Queue::host_to_device}) try {
      device_.record(queue)->wait();
    } catch (...) {
    }
  free_kept_blocks();
}

void HostDevice::follow_device() {
  device_.wait_for(Queue::device_to_host, *device_.record(Queue::compute));
}

void HostDevice::start_download(const Tensor& from, const Tensor& to, const std::string& name,
                                const Event* after) {
  CAPSTAN_ASSERT(&from.device() == &device_ && &to.device() == this && from.is_contiguous() &&
                     to.is_contiguous() && from.bytes() == to.bytes(),
                 "download of " + from.text() + " to " + to.text());
  if (after) device_.wait_for(Queue::device_to_host, *after);
  QueueScope traced(device_, Queue::device_to_host);
  device_.start_copy_to_host(to.address(), from.address(), from.bytes(), Queue::device_to_host);
  traced.end(name);
}

void HostDevice::wait_for_downloads() {
  device_.wait_for(queue_, *device_.record(Queue::device_to_host));
}

void HostDevice::start_upload(const Tensor& from, const Tensor& to, const std::string& name) {
  CAPSTAN_ASSERT(&from.device() == this && &to.device() == &device_ && from.is_contiguous() &&
                     to.is_contiguous() && from.bytes() == to.bytes(),
                 "upload of " + from.text() + " to " + to.text());
  device_.wait_for(Queue::host_to_device, *device_.record(queue_));
  QueueScope traced(device_, Queue::host_to_device);
  device_.start_copy_to_device(to.address(), from.address(), from.bytes(), Queue::host_to_device);
  traced.end(name);
}

void HostDevice::finish_uploads() {
  device_.wait_for(Queue::compute, *device_.record(Queue::host_to_device));
}

void HostDevice::synchronize() {
  ++host_waits_;
  device_.record(queue_)->wait();
}

void HostDevice::zero(std::byte* data, int64_t bytes) {
  if (bytes <= 0 || device_.is_meta()) return;
  declare_access(Queue::compute, {data, bytes}, true, "a fill of the host's memory");
  enqueue(Queue::compute, [data, bytes] { std::memset(data, 0, static_cast<size_t>(bytes)); });
}

void HostDevice::copy(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes <= 0 || device_.is_meta()) return;
  declare_access(Queue::compute, {const_cast<std::byte*>(from), bytes}, false, "a copy within the host");
  declare_access(Queue::compute, {to, bytes}, true, "a copy within the host");
  enqueue(Queue::compute, [to, from, bytes, threads = host_threads_] {
    // Large copies, such as a snapshot of the training state, take the bandwidth of several cores.
    constexpr int64_t kBlock = int64_t{4} << 20;
    threads->parallel_for(ceil_div(bytes, kBlock), [&](int64_t block, int) {
      const int64_t begin = block * kBlock, size = std::min(kBlock, bytes - begin);
      std::memcpy(to + begin, from + begin, static_cast<size_t>(size));
    });
  });
}

void HostDevice::start_copy_to_device(std::byte* to, const void* from_host, int64_t bytes, Queue) {
  copy(to, static_cast<const std::byte*>(from_host), bytes);
}
void HostDevice::start_copy_to_host(void* to_host, const std::byte* from, int64_t bytes, Queue) {
  copy(static_cast<std::byte*>(to_host), from, bytes);
}

// For initial values and loads, between steps: kernels and uploads that use the tensor have to be done.
void HostDevice::copy_to_device(std::byte* to, const void* from_host, int64_t bytes) {
  if (bytes <= 0 || device_.is_meta()) return;
  device_.record(Queue::host_to_device)->wait();
  synchronize();
  declare_host_access({to, bytes}, true);
  std::memcpy(to, from_host, static_cast<size_t>(bytes));
}
void HostDevice::copy_to_host(void* to_host, const std::byte* from, int64_t bytes) {
  CAPSTAN_ASSERT(!device_.is_meta(), "the value of a meta tensor was asked for");
  synchronize();
  if (bytes <= 0) return;
  declare_host_access({const_cast<std::byte*>(from), bytes}, false);
  std::memcpy(to_host, from, static_cast<size_t>(bytes));
}

std::byte* HostDevice::place(Pool pool, int64_t offset, int64_t size) {
  const SizeAndCategory key{size, CategoryScope::current()};
  std::vector<std::byte*>& kept = kept_[key];
  std::byte* data = nullptr;
  if (kept.empty()) {
    data = device_.allocate_pinned(size, key.second);
  } else {
    data = kept.back();
    kept.pop_back();
  }
  // The meta device has one address for all pinned blocks.
  if (device_.is_meta())
    data = reinterpret_cast<std::byte*>((uintptr_t{1} << (pool == Pool::large ? 60 : 20)) +
                                        static_cast<uintptr_t>(offset));
  blocks_[data] = key;
  return data;
}

void HostDevice::retire(std::byte* data, int64_t) {
  const auto found = blocks_.find(data);
  CAPSTAN_ASSERT(found != blocks_.end(), "memory is freed that was not allocated");
  kept_[found->second].push_back(data);
  blocks_.erase(found);
}

void HostDevice::shrink(Pool pool, int64_t, int64_t) {
  if (pool != Pool::large) return;
  // synchronize() has waited for the kernels alone.
  for (const Queue queue : {Queue::device_to_host, Queue::host_to_device}) device_.record(queue)->wait();
  free_kept_blocks();
}

void HostDevice::free_kept_blocks() {
  for (const auto& [key, blocks] : kept_)
    for (std::byte* data : blocks) device_.free_pinned(data, key.first, key.second);
  kept_.clear();
}

}  // namespace capstan
