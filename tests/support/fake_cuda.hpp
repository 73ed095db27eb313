// A CUDA backend without CUDA, for tests of CudaDevice: the simulated runtime, which fails where a test asks
// for it, and with a count of what is not released.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "tensor/cuda_device.hpp"
#include "tensor/simulated_runtime.hpp"

namespace capstan::test {

struct FakeCuda {
  // Properties of the next device.
  int32_t devices = 1;
  int64_t memory = int64_t{256} << 20;  // bytes
  int32_t capability = 90;
  // No work runs until a wait needs it.
  bool patient = false;
  // The name of the function of cuda::Runtime that fails; empty: none does.
  std::string failing;
  cuda::StatusCode code = cuda::StatusCode::failed;
  // The answer of the next last_error; empty: no error.
  std::string launch_error;

  // Opened or allocated, and not released.
  int64_t open_devices = 0, streams = 0, events = 0, ranges = 0, mapped = 0, pinned = 0;
  // Calls so far.
  int64_t maps = 0, unmaps = 0;
};
FakeCuda& fake_cuda();
// Sets it to the defaults; for the beginning of a test.
FakeCuda& reset_fake_cuda();
const cuda::Backend& fake_backend();

// Kernels see a device address this much further on.
inline std::ptrdiff_t fake_kernel_offset() {
  return cuda::simulated_kernel_offset();
}
template <class T>
T* fake_kernel_address(T* address) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(address) +
                              static_cast<uintptr_t>(fake_kernel_offset()));
}
// As a kernel that enqueues itself on Context::stream.
void fake_launch(void* stream, std::function<void()> kernel);

// Runs kernels of the host on the device: each is queued on its stream, at the addresses of the memory.
class HostKernelCudaDevice final : public cuda::CudaDevice {
 public:
  explicit HostKernelCudaDevice(const kernels::Table& table, int threads = 1,
                                const cuda::Backend& backend = fake_backend(), int index = 0)
      : CudaDevice(backend, table, index, threads) {
    launch_mode_ = LaunchMode::queue;
    kernel_offset_ = fake_kernel_offset();
  }

 protected:
  int workers() const override { return host_threads_->size(); }
};

}  // namespace capstan::test
