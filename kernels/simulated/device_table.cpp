#include "kernels/simulated/device_table.hpp"

#include <array>
#include <cstring>

#include "kernels/each_family.hpp"
#include "kernels/simulated/table.hpp"

namespace capstan::kernels {

namespace {

// A family is a struct of pointers to functions.
template <class Family>
void add_functions(const Family& family, std::unordered_set<const void*>& functions) {
  static_assert(sizeof(Family) % sizeof(void*) == 0);
  std::array<const void*, sizeof(Family) / sizeof(void*)> pointers;
  std::memcpy(pointers.data(), &family, sizeof(Family));
  functions.insert(pointers.begin(), pointers.end());
}

// The CPU's kernels in the place of families that are not written yet.
void add_cpu_families(SimulatedDeviceTable& device) {
  for_each_family([&](const char* name, auto family) {
    if (device.table.*family) {
      add_functions(*(device.table.*family), device.kernels.stream_kernels);
    } else {
      device.table.*family = cpu_table().*family;
      device.cpu_families.emplace_back(name);
    }
  });
  device.kernels.of_the_cpu = !device.cpu_families.empty();
}

}  // namespace

const SimulatedDeviceTable& simulated_device_table() {
  static const SimulatedDeviceTable* const device = [] {
    static SimulatedDeviceTable made{.table = simulated_table(), .cpu_families = {}, .kernels = {}};
    add_cpu_families(made);
    made.kernels.table = &made.table;
    return &made;
  }();
  return *device;
}

}  // namespace capstan::kernels
