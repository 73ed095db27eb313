// The function that libcapstan_cuda.so exports: the runtime of src/tensor/cuda/, and the kernels.
#include "tensor/cuda_backend.hpp"

#include "kernels/cuda/table.hpp"
#include "tensor/cuda/communicator.hpp"
#include "tensor/cuda/runtime.hpp"

extern "C" [[gnu::visibility("default")]] const capstan::cuda::Backend* capstan_cuda_backend() {
  static const capstan::cuda::Backend backend{
      .interface = CAPSTAN_CUDA_INTERFACE,
      .runtime = &capstan::cuda::cuda_runtime(),
      .communicator = capstan::cuda::nccl_communicator ? &capstan::cuda::nccl_communicator() : nullptr,
      .table = &capstan::kernels::cuda_table()};
  return &backend;
}
