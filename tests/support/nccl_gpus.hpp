// The GPUs of tests that transfer by NCCL: on any machine the stand-ins of fake_cuda.hpp and fake_nccl.hpp,
// and in the tests NAME_several_gpus those of the machine, a GPU for each rank. What the stand-ins count is 0
// there.
#pragma once

#include <memory>

#include "kernels/table.hpp"
#include "support/fake_nccl.hpp"
#include "tensor/cuda_library.hpp"

namespace capstan::test {

#ifdef CAPSTAN_SEVERAL_GPUS
inline constexpr bool kRealNccl = true;
#else
inline constexpr bool kRealNccl = false;
#endif

// gpu: which of those that this process sees. gpus: how many stand-ins it sees. patient: a stand-in runs no
// work until a wait needs it.
inline std::unique_ptr<cuda::CudaDevice> make_nccl_gpu(int gpu, [[maybe_unused]] int gpus = 1,
                                                       [[maybe_unused]] bool patient = false) {
#ifdef CAPSTAN_SEVERAL_GPUS
  const cuda::Backend& backend = *cuda::library().backend;
  std::unique_ptr<Device> device = cuda::make_cuda_device(backend, *backend.table, gpu, 1);
  return std::unique_ptr<cuda::CudaDevice>(dynamic_cast<cuda::CudaDevice*>(device.release()));
#else
  FakeCuda& fake = reset_fake_cuda();
  fake.devices = gpus;
  fake.patient = patient;
  reset_fake_nccl();
  return std::make_unique<HostKernelCudaDevice>(kernels::cpu_table(), 1, fake_nccl_backend(), gpu);
#endif
}

}  // namespace capstan::test
