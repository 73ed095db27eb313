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

SimulatedDeviceTable make_device_table() {
  SimulatedDeviceTable result{.table = simulated_table(), .cpu_families = {}, .cpu_kernels = {}};
  for_each_family([&](const char* name, auto family) {
    if (result.table.*family) return;
    result.table.*family = cpu_table().*family;
    result.cpu_families.emplace_back(name);
    add_functions(*(result.table.*family), result.cpu_kernels);
  });
  return result;
}

}  // namespace

const SimulatedDeviceTable& simulated_device_table() {
  static const SimulatedDeviceTable table = make_device_table();
  return table;
}

std::unordered_set<const void*> kernels_of(const Table& table) {
  std::unordered_set<const void*> functions;
  for_each_family([&](const char*, auto family) {
    if (table.*family) add_functions(*(table.*family), functions);
  });
  return functions;
}

}  // namespace capstan::kernels
