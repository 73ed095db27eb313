// For main.cpp: all cases of the tests NAME_several_gpus are of GPUs, of which there have to be two.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>

#include "tensor/cuda_backend.hpp"
#include "tensor/cuda_library.hpp"

namespace capstan::test {

bool runs_on_gpu() {
  return true;
}

// Why these tests cannot run here; empty: they can.
std::string gpu_problem() {
  const cuda::Library& library = cuda::library();
  if (!library.backend) return library.reason;
  if (!library.backend->communicator) return "the CUDA backend was built without NCCL";
  int32_t devices = 0;
  const cuda::Status counted = library.backend->runtime->count_devices(&devices);
  if (!counted.ok()) return counted.text ? counted.text : "the CUDA backend finds no device";
  return devices < 2 ? "one GPU, and the tests need two" : "";
}

int run_cases(doctest::Context& context) {
  return context.run();
}

}  // namespace capstan::test
