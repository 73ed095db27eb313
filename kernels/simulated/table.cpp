#include "kernels/simulated/table.hpp"

#include "kernels/cuda/families.hpp"

namespace capstan::kernels {

const Table& simulated_table() {
  return simulated::table_of_families();
}

}  // namespace capstan::kernels
