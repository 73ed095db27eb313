// What libcapstan_cuda.so exports.
#include "tensor/cuda_backend.hpp"

#include "tensor/cuda/runtime.hpp"

namespace capstan::kernels {
// The kernels of kernels/cuda/. Weak: null in an object that was linked without them.
[[gnu::weak]] const Table& cuda_table();
}  // namespace capstan::kernels

extern "C" [[gnu::visibility("default")]] const capstan::cuda::Backend* capstan_cuda_backend() {
  static const capstan::cuda::Backend backend{
      .interface = CAPSTAN_CUDA_INTERFACE,
      .runtime = &capstan::cuda::cuda_runtime(),
      .communicator = nullptr,
      .table = capstan::kernels::cuda_table ? &capstan::kernels::cuda_table() : nullptr};
  return &backend;
}
