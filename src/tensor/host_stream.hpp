// Context::stream of a device whose kernels enqueue themselves and run on the host.
#pragma once

#include <functional>

namespace capstan {

class HostStream {
 public:
  // Runs the work after what is queued before it, on another thread.
  virtual void enqueue(std::function<void()> work) = 0;

 protected:
  ~HostStream() = default;
};

}  // namespace capstan
