// The CUDA kernels on the host.
#pragma once

#include "kernels/table.hpp"

namespace capstan::kernels {

// The kernels of kernels/cuda/, compiled for the host and run thread by thread. Families that are not written
// yet are null. A defect of a kernel is an Error of its launch (kernels/simulated/block.hpp).
const Table& simulated_table();

}  // namespace capstan::kernels
