#include "tensor/host_view.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace capstan {

HostView::HostView(const Tensor& tensor, Contents contents)
    : tensor_(tensor), data_(tensor.device().host_address(tensor.address())) {
  CAPSTAN_ASSERT(tensor.is_contiguous(), "host view of " + tensor.text());
  if (data_) {
    tensor.device().synchronize();
    tensor.device().declare_host_access({data_, tensor.bytes()}, contents == Contents::undefined);
    return;
  }
  copy_.resize(static_cast<size_t>(tensor.bytes()));
  if (contents == Contents::read) tensor.copy_to_host_bytes(tensor.dtype(), copy_);
  data_ = copy_.data();
}

void HostView::store() {
  if (!copy_.empty()) return tensor_.copy_from_host_bytes(copy_);
  tensor_.device().declare_host_access({data_, tensor_.bytes()}, true);
}

ChunkReader::ChunkReader(Device& device, int64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {
  CAPSTAN_ASSERT(chunk_bytes > 0, "chunks of " + std::to_string(chunk_bytes) + " bytes");
  if (device.shares_host_memory()) return;
  for (PinnedBuffer& buffer : buffers_) buffer = PinnedBuffer(device, chunk_bytes);
}

void ChunkReader::read(const Tensor& tensor, const std::function<void(std::span<const std::byte>)>& take) {
  CAPSTAN_ASSERT(tensor.is_contiguous(), "chunks of " + tensor.text());
  Device& device = tensor.device();
  if (const std::byte* data = device.host_address(tensor.address())) {
    device.synchronize();
    take({data, static_cast<size_t>(tensor.bytes())});
    return;
  }
  constexpr Queue kQueue = Queue::device_to_host;
  const auto bytes_at = [&](int64_t at) { return std::min(chunk_bytes_, tensor.bytes() - at); };
  const auto start_copy = [&](int64_t at) -> std::unique_ptr<Event> {
    if (at >= tensor.bytes()) return nullptr;
    const auto& buffer = buffers_[static_cast<size_t>(at / chunk_bytes_ % 2)];
    device.start_copy_to_host(buffer.data(), tensor.address() + at, bytes_at(at), kQueue);
    return device.record(kQueue);
  };
  device.wait_for(kQueue, *device.record(Queue::compute));
  std::unique_ptr<Event> copied = start_copy(0);
  try {
    for (int64_t at = 0; at < tensor.bytes(); at += chunk_bytes_) {
      std::unique_ptr<Event> next = start_copy(at + chunk_bytes_);
      std::exchange(copied, std::move(next))->wait();
      const PinnedBuffer& buffer = buffers_[static_cast<size_t>(at / chunk_bytes_ % 2)];
      take(buffer.host_read().first(static_cast<size_t>(bytes_at(at))));
    }
  } catch (...) {
    // The buffer and the tensor are in use until the next chunk is copied.
    try {
      if (copied) copied->wait();
    } catch (...) {
    }
    throw;
  }
}

}  // namespace capstan
