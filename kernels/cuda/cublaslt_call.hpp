// One call of cuBLASLt: what its algorithm depends on, the search for it, and the launch.
#pragma once

#ifdef __CUDACC__
#include "kernels/cuda/cublaslt.hpp"
#else
#include "kernels/simulated/cublaslt.hpp"
#endif

#include <compare>
#include <string>

#include "kernels/cuda/device.hpp"
#include "kernels/gemm.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// A column-major matrix.
struct LtMatrix {
  cudaDataType_t type = CUDA_R_32F;
  cublasOperation_t operation = CUBLAS_OP_N;
  int64_t rows = 0, cols = 0, ld = 0;
  // Elements between the matrices of a batch.
  int64_t stride = 0;
  // Alignment of every matrix of the batch, in bytes: a power of two, at most 16. No algorithm is faster with
  // more, and with the same bound everywhere a matrix gives the same bits wherever it lies in a buffer.
  uint32_t alignment = 16;
  auto operator<=>(const LtMatrix&) const = default;
};

// D = alpha op(A) op(B) + beta D, and the bias: all on which the choice of an algorithm depends.
struct LtCall {
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  LtMatrix a, b, d;
  int64_t batch = 1;
  // Whether A and B are codes, and what their scales are.
  bool has_scales = false;
  ScaleMode a_scales = ScaleMode::tensor, b_scales = ScaleMode::tensor;
  Accumulation accumulation = Accumulation::fp32;
  cublasLtPointerMode_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  cudaDataType_t bias_type = CUDA_R_32F;
  auto operator<=>(const LtCall&) const = default;
};

// The bias begins at a multiple of 16 bytes.
struct LtPointers {
  const void *a = nullptr, *b = nullptr;
  void* d = nullptr;
  const void *a_scale = nullptr, *b_scale = nullptr;
  const void* bias = nullptr;
  // fp32 factors, in host or device memory according to LtCall::pointer_mode.
  const void *alpha = nullptr, *beta = nullptr;
  // cublaslt_workspace_bytes(), aligned to 256 bytes.
  void* workspace = nullptr;
};

// Enqueues the call. False if cuBLASLt has no algorithm for it, and nothing was enqueued; an error is
// reported in the context's slot. Algorithms are kept for the process, by GPU and call.
bool enqueue(Context& c, const LtCall& call, const LtPointers& pointers);
// Reason why the latest search of this thread has found no algorithm.
const std::string& missing_algorithm();

// The text of an error that is reported in a slot: it lives as long as the process.
const char* keep_text(const std::string& text);

}  // namespace capstan::kernels::CAPSTAN_GPU
