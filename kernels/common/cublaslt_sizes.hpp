// Sizes of the workspace of GEMMs on a GPU.
#pragma once

#include <cstddef>

namespace capstan::kernels {

// The workspace of a call of cuBLASLt, as NVIDIA recommends it: enough for every algorithm that is fast.
inline size_t cublaslt_workspace_of(int compute_capability) {
  return size_t{compute_capability >= 90 ? 32u : 4u} << 20;
}
// fp32 results that are converted to another type (at least one row).
inline constexpr size_t kSumBytesOfGpu = size_t{16} << 20;

}  // namespace capstan::kernels
