#include "tensor/host_view.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace capstan {

HostView::HostView(const Tensor& tensor, Contents contents)
    : tensor_(tensor), data_(tensor.device().host_address(tensor.address())) {
  CAPSTAN_ASSERT(tensor.is_contiguous(), "host view of " + tensor.text());
  if (data_) {
    tensor.device().synchronize();
    return;
  }
  copy_.resize(static_cast<size_t>(tensor.bytes()));
  if (contents == Contents::read) tensor.copy_to_host_bytes(tensor.dtype(), copy_);
  data_ = copy_.data();
}

void read_in_chunks(const Tensor& tensor, int64_t chunk_bytes,
                    const std::function<void(std::span<const std::byte>)>& take) {
  CAPSTAN_ASSERT(tensor.is_contiguous(), "chunks of " + tensor.text());
  Device& device = tensor.device();
  if (const std::byte* data = device.host_address(tensor.address())) {
    device.synchronize();
    take({data, static_cast<size_t>(tensor.bytes())});
    return;
  }
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(tensor.bytes(), chunk_bytes)));
  for (int64_t at = 0; at < tensor.bytes(); at += chunk_bytes) {
    const int64_t bytes = std::min(chunk_bytes, tensor.bytes() - at);
    device.copy_to_host(buffer.data(), tensor.address() + at, bytes);
    take(std::span<const std::byte>(buffer).first(static_cast<size_t>(bytes)));
  }
}

void HostView::store() {
  if (!copy_.empty()) tensor_.copy_from_host_bytes(copy_);
}

}  // namespace capstan
