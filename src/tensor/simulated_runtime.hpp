// The runtime of a CUDA backend (cuda_backend.hpp) without CUDA, on every machine: device memory is a
// DoubleMapping, and streams are the delayed queues of the checked device. The device `simulated` uses it,
// and tests of CudaDevice with errors that they plan (tests/support/fake_cuda.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/cuda_backend.hpp"

namespace capstan::cuda {

// The devices that this thread opens from now on.
struct SimulatedGpu {
  // Bytes that can be mapped.
  int64_t memory = int64_t{32} << 30;
  // Seed of the delays of streams.
  uint64_t seed = 1;
  // Runs no work of a stream until a wait needs it. Otherwise the work of high-priority streams is not
  // delayed.
  bool patient = false;
};
void set_simulated_gpu(const SimulatedGpu& gpu);

// Any index is a device. Errors are texts of misuse, and of memory that runs out; work of call_host() throws
// no exceptions.
const Runtime& simulated_runtime();

// Distance from the addresses of tensors to those that kernels use, in bytes.
std::ptrdiff_t simulated_kernel_offset();

}  // namespace capstan::cuda
