// cuBLASLt for nvcc; kernels/simulated/cublaslt.hpp has the same names for the host compiler.
#pragma once

#include <cublasLt.h>

#include <string>

#include "kernels/common/cublaslt_sizes.hpp"
#include "kernels/cuda/intrinsics.hpp"

namespace capstan::kernels::cuda {

// Constants of cuBLASLt since 12.9, by their numbers: the sources compile with earlier versions, which refuse
// them.
inline constexpr bool kHasBlockScales = CUBLAS_VERSION >= 120900;
inline constexpr auto kFp4Type = static_cast<cudaDataType_t>(33);
inline constexpr auto kScaleModeOfA = static_cast<cublasLtMatmulDescAttributes_t>(31);
inline constexpr auto kScaleModeOfB = static_cast<cublasLtMatmulDescAttributes_t>(32);
enum class ScaleMode : int32_t {
  tensor = 0,
  block_1x16 = 1,
  block_1x32 = 2,
  block_1x128 = 4,
  block_128x128 = 5
};
#if CUBLAS_VERSION >= 120900
static_assert(kFp4Type == CUDA_R_4F_E2M1);
static_assert(kScaleModeOfA == CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
static_assert(kScaleModeOfB == CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
static_assert(int(ScaleMode::block_1x16) == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3);
static_assert(int(ScaleMode::block_1x32) == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
static_assert(int(ScaleMode::block_1x128) == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
static_assert(int(ScaleMode::block_128x128) == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
#endif

// Index of the current GPU of this thread, to which launches and handles belong. -1: there is none.
inline int current_gpu() {
  int gpu = -1;
  if (cudaGetDevice(&gpu) == cudaSuccess) return gpu;
  // Clears the error; otherwise a later call would return it.
  (void)cudaGetLastError();
  return -1;
}
// Compute capability of current_gpu(), for example 90 for 9.0; without a GPU 90, for estimates.
inline int compute_capability() {
  const int gpu = current_gpu();
  int major = 9, minor = 0;
  if (gpu < 0 || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu) != cudaSuccess)
    return 90;
  return 10 * major + minor;
}

inline size_t cublaslt_workspace_bytes() {
  return cublaslt_workspace_of(compute_capability());
}
inline size_t sum_bytes() {
  return kSumBytesOfGpu;
}

inline cudaStream_t stream_of(Context& c) {
  return static_cast<cudaStream_t>(c.stream);
}
inline std::string text_of(cublasStatus_t status) {
  return cublasLtGetStatusString(status);
}
// What CUDA says of an earlier kernel, which can be the cause of an error of the library; else nothing.
inline std::string earlier_error() {
  const cudaError_t error = cudaPeekAtLastError();
  return error == cudaSuccess ? "" : std::string(" (") + cudaGetErrorString(error) + ")";
}

}  // namespace capstan::kernels::cuda
