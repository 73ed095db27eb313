// Owns page-locked host memory of a device (Device::allocate_pinned). Must not outlive the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "tensor/device.hpp"

namespace capstan {

class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  // In the memory category CategoryScope::current().
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

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, static_cast<size_t>(bytes_)}; }

 private:
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

}  // namespace capstan
