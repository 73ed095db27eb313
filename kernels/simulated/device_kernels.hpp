// The kernels of the device `simulated`.
#pragma once

#include "tensor/simulated_device.hpp"

namespace capstan::kernels {

// simulated_table(), all of whose kernels enqueue themselves.
const cuda::SimulatedKernels& simulated_device_kernels();

}  // namespace capstan::kernels
