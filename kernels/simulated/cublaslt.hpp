// cuBLASLt for the host compiler: the names of cublasLt.h that the kernels use. It checks each call as
// cuBLASLt documents its restrictions (types, scales, the bias, leading dimensions, alignment, workspace),
// and computes with the CPU's GEMM. A call that the library would not run returns the library's status, and
// text_of() gives the reason. It is stricter than the library where that would silently give wrong results:
//   - a matrix of codes needs a scale
//   - the pointers of a call have the alignment that was given to the search for its algorithm
//   - an algorithm runs only the call for which it was found
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/cublaslt_sizes.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels::simulated {

// ---- of the CUDA runtime

using cudaStream_t = Context*;
enum cudaDataType_t : int32_t {
  CUDA_R_32F = 0,
  CUDA_R_16F = 2,
  CUDA_R_16BF = 14,
  CUDA_R_8F_E4M3 = 28,
  CUDA_R_8F_E5M2 = 29,
  CUDA_R_4F_E2M1 = 33,
};

// ---- of cuBLAS

enum cublasStatus_t : int32_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_NOT_INITIALIZED = 1,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_NOT_SUPPORTED = 15,
};
enum cublasOperation_t : int32_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t : int32_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };

enum cublasLtPointerMode_t : int32_t { CUBLASLT_POINTER_MODE_HOST = 0, CUBLASLT_POINTER_MODE_DEVICE = 1 };
enum cublasLtEpilogue_t : uint32_t {
  CUBLASLT_EPILOGUE_DEFAULT = 1,
  CUBLASLT_EPILOGUE_BIAS = 4,
};
enum cublasLtReductionScheme_t : uint32_t {
  CUBLASLT_REDUCTION_SCHEME_NONE = 0,
  CUBLASLT_REDUCTION_SCHEME_INPLACE = 1,
  CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2,
  CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE = 4,
};
enum cublasLtMatmulDescAttributes_t : int32_t {
  CUBLASLT_MATMUL_DESC_POINTER_MODE = 2,
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,
  CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18,
  CUBLASLT_MATMUL_DESC_FAST_ACCUM = 25,
  CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26,
  CUBLASLT_MATMUL_DESC_A_SCALE_MODE = 31,
  CUBLASLT_MATMUL_DESC_B_SCALE_MODE = 32,
};
enum cublasLtMatrixLayoutAttribute_t : int32_t {
  CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
  CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,
};
enum cublasLtMatmulPreferenceAttributes_t : int32_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};

// The structs that the library hides.
struct cublasLtMatmulDescOpaque_t {
  cublasComputeType_t compute;
  cudaDataType_t scale_type;
  cublasLtPointerMode_t pointer_mode;
  cublasOperation_t trans_a, trans_b;
  cublasLtEpilogue_t epilogue;
  const void* bias;
  // -1: the type of D.
  int32_t bias_type;
  const void *a_scale, *b_scale;
  int32_t a_scale_mode, b_scale_mode;
  int8_t fast_accumulation;
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType_t type;
  uint64_t rows, cols;
  int64_t ld;
  int32_t batch;
  int64_t stride;
};
struct cublasLtMatmulPreferenceOpaque_t {
  uint64_t workspace;
  uint32_t reduction_schemes;
  // Alignment of A, B, C and D.
  uint32_t alignment[4];
};
struct cublasLtMatmulAlgo_t {
  uint64_t data[8];
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
  float wavesCount;
};
struct cublasLtContext;
using cublasLtHandle_t = cublasLtContext*;
using cublasLtMatmulDesc_t = cublasLtMatmulDescOpaque_t*;
using cublasLtMatrixLayout_t = cublasLtMatrixLayoutOpaque_t*;
using cublasLtMatmulPreference_t = cublasLtMatmulPreferenceOpaque_t*;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle);
cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t operation, cublasComputeType_t compute,
                                      cudaDataType_t scale_type);
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes);
cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType_t type, uint64_t rows,
                                        uint64_t cols, int64_t ld);
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes);
cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference);
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes);
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t* results, int* found);
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream);

// ---- as in kernels/cuda/cublaslt.hpp

inline constexpr bool kHasBlockScales = true;
inline constexpr auto kFp4Type = CUDA_R_4F_E2M1;
inline constexpr auto kScaleModeOfA = CUBLASLT_MATMUL_DESC_A_SCALE_MODE;
inline constexpr auto kScaleModeOfB = CUBLASLT_MATMUL_DESC_B_SCALE_MODE;
enum class ScaleMode : int32_t {
  tensor = 0,
  block_1x16 = 1,
  block_1x32 = 2,
  block_1x128 = 4,
  block_128x128 = 5
};

int compute_capability();
// Each capability is a GPU, with algorithms of its own.
inline int current_gpu() {
  return compute_capability();
}
// While an object of this class exists, kernels of this thread declare the workspace of a GPU of compute
// capability 9.0.
class SizesOfGpu {
 public:
  SizesOfGpu() { active = true; }
  ~SizesOfGpu() { active = false; }
  SizesOfGpu(const SizesOfGpu&) = delete;
  SizesOfGpu& operator=(const SizesOfGpu&) = delete;
  inline static thread_local bool active = false;
};
// Without SizesOfGpu the size is small, because tests fill the workspace of every launch.
inline size_t cublaslt_workspace_bytes() {
  return SizesOfGpu::active ? cublaslt_workspace_of(90) : size_t{16} << 10;
}
inline size_t sum_bytes() {
  return SizesOfGpu::active ? kSumBytesOfGpu : size_t{1} << 20;
}
inline cudaStream_t stream_of(Context& c) {
  return &c;
}
// Text of a status, with the reason of the latest failed call of this thread.
std::string text_of(cublasStatus_t status);
inline std::string earlier_error() {
  return {};
}

// ---- for tests

// The simulated GPU of the process; 90 at first.
void set_compute_capability(int capability);
// Calls of cublasLtMatmul, and searches for an algorithm, of the process so far.
struct CublasLtCalls {
  int64_t gemms = 0, searches = 0;
  // Types of the latest GEMM.
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  bool fast_accumulation = false;
};
CublasLtCalls cublaslt_calls();
// What cuBLASLt has no algorithm for, although it documents no reason: nothing at first. It remains the
// result of a search that was made meanwhile.
enum class WithoutAlgorithm { nothing, bias, everything };
void set_without_algorithm(WithoutAlgorithm what);

}  // namespace capstan::kernels::simulated
