// A CUDA backend of another version of the program.
#include "tensor/cuda_backend.hpp"

extern "C" [[gnu::visibility("default")]] const capstan::cuda::Backend* capstan_cuda_backend() {
  static constexpr capstan::cuda::Backend backend{.interface = "another"};
  return &backend;
}
