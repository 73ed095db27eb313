// The functions of the backend on CUDA's runtime and driver.
#pragma once

#include "tensor/cuda_backend.hpp"

namespace capstan::cuda {

const Runtime& cuda_runtime();
// Makes the device current for this thread.
Status use_device(const OpenDevice* device);

}  // namespace capstan::cuda
