#include "tensor/host_view.hpp"

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

void HostView::store() {
  if (!copy_.empty()) tensor_.copy_from_host_bytes(copy_);
}

}  // namespace capstan
