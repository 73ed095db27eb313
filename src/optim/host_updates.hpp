// Updates on the CPU of buffers whose state lies in host memory (FlatBuffer::host), as Megatron's hybrid
// optimizer makes them: gradients come from the device, and updated parameters return to it, one buffer after
// the other.
//
//   device to host   | gradients 0 | gradients 1 | gradients 2  |
//   host kernels                   | update 0    | update 1     | update 2     |
//   host to device                               | parameters 0 | parameters 1 | parameters 2 |
//
// The step control (scale, clipping factor, skip flag) is copied before the first gradients, and the kernels
// read it where they run: the host does not wait for it. Gradients take two buffers of the largest size, in
// turn. State that lies in a file (state_file.hpp) is read before an update and written after it.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "optim/optimizer.hpp"

namespace capstan::optim {

class HostUpdates {
 public:
  // Sets `gradients` of the offloaded buffers. Null: there are none.
  static std::unique_ptr<HostUpdates> of(std::vector<FlatBuffer>& buffers);

  // Begins a step, after the present work of the compute queue. control: one kernels::StepControl in bytes,
  // on the device.
  void begin(const Tensor& control);
  // Fetches the gradients, updates, and returns the parameters. update: launches kernels on `buffer`; its
  // argument is the step control in host memory.
  void run(const FlatBuffer& buffer, const std::function<void(const Tensor& control)>& update);
  // The compute queue waits for the parameters.
  void finish();

 private:
  HostUpdates(HostDevice& host, std::vector<FlatBuffer>& buffers);

  HostDevice& host_;
  // One kernels::StepControl in bytes.
  Tensor control_;
  // Null: the state lies in host memory only.
  StateFile* file_ = nullptr;
  // Ends of the updates of this step, one for each run() so far.
  std::vector<std::unique_ptr<Event>> updated_;
};

}  // namespace capstan::optim
