// Offload of activations: what the operations of a layer save for its backward pass lies in pinned host
// memory until then.
//
//   forward    compute            | layer 0 | layer 1      | layer 2      |
//              device to host               | copy 0       | copy 1       |
//   backward   compute            | layer 2      | layer 1      | layer 0 |
//              host to device     | fetch 1      | fetch 0      |
//
// Copies overlap with the computation of the next layer; the compute queue waits for a copy one layer later,
// so that the device holds the saved tensors of at most two offloaded layers in each direction. The host
// waits only where a layer saves more than each one before it: for a buffer that a larger one replaces.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensor/pinned_buffer.hpp"
#include "tensor/tensor.hpp"

namespace capstan {

// The offloaded tensors of one layer and micro-batch.
class OffloadedLayer;

class ActivationOffload {
 public:
  // The saved tensors of each operation.
  using SavedTensors = std::vector<std::vector<Tensor>>;

  explicit ActivationOffload(Device& device) : device_(device) {}
  // Waits for the copies.
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;

  // Starts the copies to the host. Tensors of other categories than `activations`, such as the micro-batch,
  // stay on the device, because others use them too. name: "layer 3", for traces.
  std::shared_ptr<OffloadedLayer> start_offload(std::string name, SavedTensors saved);
  // Frees the device memory of the layer whose copies were started last.
  void free_copied();
  // Allocates device memory and starts the copies to it, unless the tensors are still on the device.
  void start_fetch(OffloadedLayer& layer);
  // The saved tensors on the device, for kernels launched from now on. May be called once.
  SavedTensors take(OffloadedLayer& layer);

 private:
  friend class OffloadedLayer;
  // Work of the queue device_to_host writes a buffer, and work of host_to_device reads it. The compute queue
  // waits for both, and both for the compute queue, so that a free buffer can be used again without a wait.
  struct HostBuffer {
    PinnedBuffer memory;
    // The last copies to and from it; null: none.
    std::shared_ptr<Event> written, read;
    bool used = false;
  };
  // The index of a buffer of at least this size, for one layer and micro-batch.
  size_t take_buffer(int64_t bytes);

  Device& device_;
  std::vector<HostBuffer> buffers_;
  // The layer whose copies have been started, and whose device memory has not been freed. Null: none.
  std::shared_ptr<OffloadedLayer> copying_;
};

}  // namespace capstan
