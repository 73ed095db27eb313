// Host access to device memory, for code that runs on the host: MPI collectives, file readers.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "tensor/tensor.hpp"

namespace capstan {

class HostView {
 public:
  // Undefined: the caller does not need the tensor's values.
  enum class Contents : uint8_t { read, undefined };

  // Waits for the device. Views the memory itself where the host can access it, else a copy in host memory.
  // The tensor must be contiguous; no kernel may use it while the view exists.
  explicit HostView(const Tensor& tensor, Contents contents = Contents::read);
  HostView(HostView&&) noexcept = default;
  HostView& operator=(HostView&&) noexcept = default;

  std::byte* data() { return data_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  // Copies the written data to the tensor. Call it after writing.
  void store();

 private:
  Tensor tensor_;
  std::byte* data_;
  std::vector<std::byte> copy_;
};

// Passes a contiguous tensor's bytes to `take`, in order: directly where the host can access them, else
// through a buffer of at most `chunk_bytes`. Waits for the device; no kernel may use the tensor meanwhile.
void read_in_chunks(const Tensor& tensor, int64_t chunk_bytes,
                    const std::function<void(std::span<const std::byte>)>& take);

}  // namespace capstan
