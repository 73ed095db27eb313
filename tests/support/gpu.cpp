// The GPU of the tests NAME_gpu: the CUDA backend that lies beside the test program.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "support/devices.hpp"
#include "tensor/cuda_device.hpp"
#include "tensor/cuda_library.hpp"

namespace capstan::test {

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

std::unique_ptr<Device> make_gpu_device(int threads) {
  return cuda::make_cuda_device(*cuda::library().backend, *cuda::library().backend->table, 0, threads);
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
