// Host access to device memory, for code that runs on the host: MPI collectives, file readers.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "tensor/pinned_buffer.hpp"
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

// Reads contiguous tensors in chunks. Where the host cannot access their memory, the device-to-host queue
// copies them to two pinned buffers: one receives a chunk while the caller uses the other.
class ChunkReader {
 public:
  // Takes the buffers, of `chunk_bytes` each, in the memory category CategoryScope::current(). A device whose
  // memory is the host's needs none.
  ChunkReader(Device& device, int64_t chunk_bytes);
  // Passes the bytes of a tensor to `take`, in order: all at once where the host can access them. They are
  // those that the work of the compute queue until now leaves; no later work may write the tensor meanwhile.
  void read(const Tensor& tensor, const std::function<void(std::span<const std::byte>)>& take);

 private:
  int64_t chunk_bytes_;
  std::array<PinnedBuffer, 2> buffers_;
};

}  // namespace capstan
