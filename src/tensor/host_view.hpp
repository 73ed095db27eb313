// Device memory for what runs on the host by its nature: a collective over MPI, a reader of files.
#pragma once

#include <cstddef>
#include <vector>

#include "tensor/tensor.hpp"

namespace capstan {

class HostView {
 public:
  enum class Contents : uint8_t { read, undefined };  // whether the tensor's values are wanted

  // Waits for the device. The memory itself where the host may touch it, else a copy in host memory. The tensor must be
  // contiguous; it must not be launched upon while the view is in use.
  explicit HostView(const Tensor& tensor, Contents contents = Contents::read);
  HostView(HostView&&) noexcept = default;
  HostView& operator=(HostView&&) noexcept = default;

  std::byte* data() { return data_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  // Hands what was written to the tensor; to be called by who has written.
  void store();

 private:
  Tensor tensor_;
  std::byte* data_;
  std::vector<std::byte> copy_;
};

}  // namespace capstan
