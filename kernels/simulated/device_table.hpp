// The kernels of the device `simulated`.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "kernels/table.hpp"

namespace capstan::kernels {

struct SimulatedDeviceTable {
  // simulated_table(), with the CPU's kernels where a family is not written yet.
  Table table;
  // Names of the CPU's families in it.
  std::vector<std::string> cpu_families;
  // The functions of the CPU's families in it, which do not enqueue themselves.
  std::unordered_set<const void*> cpu_kernels;
};
const SimulatedDeviceTable& simulated_device_table();

// The functions of all families of a table of the CPU's kernels.
std::unordered_set<const void*> kernels_of(const Table& table);

}  // namespace capstan::kernels
