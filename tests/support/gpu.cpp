// The GPU of the tests NAME_gpu: that of the local rank, by the CUDA backend that lies beside the test
// program.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "support/devices.hpp"
#include "tensor/cuda_device.hpp"
#include "tensor/cuda_library.hpp"

namespace capstan::test {

namespace {

// The rank of this process on its host, by the variables of the launchers (src/comm/launched.cpp), which
// programs without ranks do not have.
int local_rank() {
  for (const char* variable : {"OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"})
    if (const char* const rank = std::getenv(variable)) return std::atoi(rank);
  return 0;
}

}  // namespace

bool runs_on_gpu() {
  const char* const device = std::getenv("CAPSTAN_TEST_DEVICE");
  return device && std::string_view(device) == "cuda";
}

// Why no GPU can be used; empty: one can. For main.cpp.
std::string gpu_problem() {
  const cuda::Library& library = cuda::library();
  if (!library.backend) return library.reason;
  int32_t devices = 0;
  const cuda::Status counted = library.backend->runtime->count_devices(&devices);
  if (counted.ok()) return "";
  return counted.text ? counted.text : "the CUDA backend finds no device";
}

// As the trainer does: where a host has more ranks than GPUs, they take them in turn.
std::unique_ptr<Device> make_gpu_device(int threads) {
  const cuda::Backend& backend = *cuda::library().backend;
  int32_t devices = 0;
  if (!backend.runtime->count_devices(&devices).ok() || devices < 1) devices = 1;
  return cuda::make_cuda_device(backend, *backend.table, local_rank() % devices, threads);
}

int gpu_capability() {
  static const int capability = [] {
    const auto device = make_gpu_device(1);
    const cuda::DeviceFacts& facts = dynamic_cast<const cuda::CudaDevice&>(*device).facts();
    return 10 * facts.major + facts.minor;
  }();
  return capability;
}

}  // namespace capstan::test
