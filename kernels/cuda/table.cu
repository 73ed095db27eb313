#include "kernels/cuda/table.hpp"

#include "kernels/cuda/families.hpp"

namespace capstan::kernels {

const Table& cuda_table() {
  return cuda::table_of_families();
}

}  // namespace capstan::kernels
