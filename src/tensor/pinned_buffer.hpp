// Page-locked host memory of a device (Device::allocate_pinned). It must not outlive the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "tensor/device.hpp"

namespace capstan {

class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  // The buffer counts in the memory category CategoryScope::current().
  PinnedBuffer(Device& device, int64_t bytes)
      : device_(&device),
        bytes_(bytes),
        category_(CategoryScope::current()),
        data_(device.allocate_pinned(bytes, category_)) {}
  ~PinnedBuffer() {
    if (data_) device_->free_pinned(data_, bytes_, category_);
  }
  PinnedBuffer(PinnedBuffer&& other) noexcept { swap(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  // The address, for copies that queues make.
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // The memory, for the host. Before it reads, the host waits for the copies to the buffer; before it writes,
  // also for those from it. The checked device throws where it has not (Device::declare_host_access()).
  std::span<const std::byte> host_read() const {
    declare(false);
    return {data_, static_cast<size_t>(bytes_)};
  }
  std::span<std::byte> host_write() {
    declare(true);
    return {data_, static_cast<size_t>(bytes_)};
  }

 private:
  void declare(bool writes) const {
    if (data_) device_->declare_host_access({data_, bytes_}, writes);
  }
  void swap(PinnedBuffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(bytes_, other.bytes_);
    std::swap(category_, other.category_);
    std::swap(data_, other.data_);
  }

  Device* device_ = nullptr;
  int64_t bytes_ = 0;
  MemoryCategory category_ = MemoryCategory::activations;
  std::byte* data_ = nullptr;
};

// Buffers that transfers use one after the other. A request of the same size gets a buffer that was given
// back, and the host waits for its last use if that is not done: so the number of buffers follows from the
// order of the calls alone, and the meta device takes as many.
class PinnedPool {
 public:
  explicit PinnedPool(Device& device) : device_(device) {}

  PinnedBuffer take(int64_t bytes) {
    const int64_t size = device_.allocator_rules().round(bytes);
    std::deque<Returned>& returned = returned_[size];
    if (returned.empty()) {
      CategoryScope scope(MemoryCategory::workspace);
      return {device_, size};
    }
    Returned first = std::move(returned.front());
    returned.pop_front();
    if (first.last_use) first.last_use->wait();
    // No copy may be under way, whatever the next owner does with the buffer.
    (void)first.buffer.host_write();
    return std::move(first.buffer);
  }
  // last_use: null where the buffer is not in use any more.
  void give_back(PinnedBuffer buffer, std::shared_ptr<Event> last_use) {
    const int64_t size = buffer.bytes();
    returned_[size].push_back({std::move(buffer), std::move(last_use)});
  }

 private:
  struct Returned {
    PinnedBuffer buffer;
    std::shared_ptr<Event> last_use;
  };
  Device& device_;
  // Returned buffers by size, in the order in which they were given back.
  std::map<int64_t, std::deque<Returned>> returned_;
};

}  // namespace capstan
