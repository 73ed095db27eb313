// The table of the CUDA backend (src/tensor/cuda/backend.cpp).
#include "kernels/cuda/families.hpp"

namespace capstan::kernels {

const Table& cuda_table();
const Table& cuda_table() {
  return cuda::table_of_families();
}

}  // namespace capstan::kernels
