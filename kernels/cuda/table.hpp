// The table of the CUDA kernels.
#pragma once

#include "kernels/table.hpp"

namespace capstan::kernels {

const Table& cuda_table();

}  // namespace capstan::kernels
