// Device memory for what runs on the host by its nature: a collective over MPI, a reader of files.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
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

// Hands a contiguous tensor's bytes to `take`, in order: where the host may touch them as they are, else copied through a buffer of
// at most `piece_bytes`. Waits for the device; the tensor must not be launched upon meanwhile.
void read_in_pieces(const Tensor& tensor, int64_t piece_bytes,
                    const std::function<void(std::span<const std::byte>)>& take);

}  // namespace capstan
