// The CUDA kernels on the host.
#pragma once

#include "kernels/table.hpp"

namespace capstan::kernels {

// The kernels of kernels/cuda/, compiled for the host and run thread by thread. A defect of a
// kernel is an Error of its launch (kernels/simulated/block.hpp).
const Table& simulated_table();

// The same table for estimates of a GPU, of compute capability 9.0: it declares the workspace that GEMMs take
// there. Its GEMMs do not run.
const Table& gpu_estimate_table();

}  // namespace capstan::kernels
