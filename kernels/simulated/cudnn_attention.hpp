// cuDNN's attention for the host compiler, behind the interface of kernels/cuda/cudnn_attention.hpp: it
// refuses what cuDNN 9.19 refuses to plan on the simulated GPU, and plans that need more than the workspace;
// it reports what would be undefined on a GPU (types, strides, addresses), and computes with fp32 sums.
// Attention uses it only while a CudnnAttention exists.
#pragma once

#include <cstddef>
#include <cstdint>

#define CAPSTAN_GPU simulated
#include "kernels/cuda/attention_choice.hpp"
#include "kernels/cuda/cudnn_attention.hpp"

namespace capstan::kernels::simulated {

enum class CudnnUse {
  never,
  // As the table of kernels/cuda/attention_choice.hpp says for the simulated GPU.
  by_table,
  // For everything that its graphs express.
  always
};
CudnnUse cudnn_use();
// In place of kMostMatrixBytes.
int64_t most_matrix_bytes();

// ---- for tests

class CudnnAttention {
 public:
  // extra_workspace: bytes that plans need besides; refuses: no call has a plan.
  explicit CudnnAttention(CudnnUse use, size_t extra_workspace = 0, bool refuses = false,
                          int64_t most_matrix = kMostMatrixBytes);
  ~CudnnAttention();
  CudnnAttention(const CudnnAttention&) = delete;
  CudnnAttention& operator=(const CudnnAttention&) = delete;
};

// Calls of the process so far: those that were computed, and those without a plan.
struct CudnnCounts {
  int64_t computed = 0, refused = 0;
};
CudnnCounts cudnn_counts();

}  // namespace capstan::kernels::simulated
