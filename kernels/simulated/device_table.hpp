// The kernels of the device `simulated`.
#pragma once

#include <string>
#include <vector>

#include "kernels/table.hpp"
#include "tensor/simulated_device.hpp"

namespace capstan::kernels {

struct SimulatedDeviceTable {
  // simulated_table(), with the CPU's kernels where a family is not written yet.
  Table table;
  // Names of the CPU's families in it.
  std::vector<std::string> cpu_families;
  // `table`, as the device takes it.
  cuda::SimulatedKernels kernels;
};
const SimulatedDeviceTable& simulated_device_table();

}  // namespace capstan::kernels
