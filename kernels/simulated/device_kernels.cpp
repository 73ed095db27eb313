#include "kernels/simulated/device_kernels.hpp"

#include <array>
#include <cstring>
#include <string>

#include "base/error.hpp"
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

cuda::SimulatedKernels make_device_kernels() {
  const Table& table = simulated_table();
  cuda::SimulatedKernels kernels{.table = &table, .stream_kernels = {}};
  for_each_family([&](const char* name, auto family) {
    CAPSTAN_ASSERT(table.*family, std::string("no CUDA kernels of the family ") + name);
    add_functions(*(table.*family), kernels.stream_kernels);
  });
  return kernels;
}

}  // namespace

const cuda::SimulatedKernels& simulated_device_kernels() {
  static const cuda::SimulatedKernels kernels = make_device_kernels();
  return kernels;
}

}  // namespace capstan::kernels
