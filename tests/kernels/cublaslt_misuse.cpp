// The simulated cuBLASLt finds misuse and names it.
#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/thread_pool.hpp"
#include "kernels/simulated/cublaslt.hpp"
#include "tensor/dtype.hpp"
#include "tests/support/simulated_gpu.hpp"

using namespace capstan;
using namespace capstan::kernels::simulated;

namespace {

// A correct call, D [m, n] = A^T B of column-major matrices, into which tests plant defects.
struct Product {
  cudaDataType_t a_type = CUDA_R_16BF, b_type = CUDA_R_16BF, d_type = CUDA_R_32F, scale_type = CUDA_R_32F;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cublasOperation_t trans_a = CUBLAS_OP_T, trans_b = CUBLAS_OP_N;
  int64_t m = 16, n = 8, k = 32;
  // 0: without gaps.
  int64_t lda = 0, ldd = 0;
  const void *a_scale = nullptr, *b_scale = nullptr;
  ScaleMode a_mode = ScaleMode::tensor, b_mode = ScaleMode::tensor;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  int32_t bias_type = -1;
  uint32_t alignment = 16;
  // Of the call after the search.
  size_t workspace_bytes = 4096, workspace_shift = 0, a_shift = 0;
  int64_t n_of_call = 8;
};

alignas(256) std::byte memory[1 << 16];
void* at(size_t byte) {
  return memory + byte;
}

struct Outcome {
  cublasStatus_t status;
  std::string text;
};
Outcome outcome_of(cublasStatus_t status) {
  return {status, text_of(status)};
}

// The first call that fails.
Outcome run(const Product& p) {
  ThreadPool pool(1);
  kernels::KernelError error;
  const kernels::LaunchContext context{&pool, nullptr, {}, &error};
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, d;
  cublasLtMatmulDescInit(&operation, p.compute, p.scale_type);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    CHECK(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof value) ==
          CUBLAS_STATUS_SUCCESS);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, p.trans_a);
  set(CUBLASLT_MATMUL_DESC_TRANSB, p.trans_b);
  set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.a_scale);
  set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.b_scale);
  set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, p.a_mode);
  set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, p.b_mode);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
  set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, p.bias_type);
  const auto lay_out = [&](int64_t n) {
    const auto size = [](int64_t x) { return static_cast<uint64_t>(x); };
    const bool ta = p.trans_a == CUBLAS_OP_T, tb = p.trans_b == CUBLAS_OP_T;
    cublasLtMatrixLayoutInit(&a, p.a_type, size(ta ? p.k : p.m), size(ta ? p.m : p.k),
                             p.lda > 0 ? p.lda
                             : ta      ? p.k
                                       : p.m);
    cublasLtMatrixLayoutInit(&b, p.b_type, size(tb ? n : p.k), size(tb ? p.k : n), tb ? n : p.k);
    cublasLtMatrixLayoutInit(&d, p.d_type, size(p.m), size(n), p.ldd > 0 ? p.ldd : p.m);
  };
  lay_out(p.n);
  cublasLtMatmulPreferenceOpaque_t preference;
  cublasLtMatmulPreferenceInit(&preference);
  const uint64_t most = 4096;
  cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most,
                                       sizeof most);
  for (const auto matrix :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    cublasLtMatmulPreferenceSetAttribute(&preference, matrix, &p.alignment, sizeof p.alignment);
  cublasLtHandle_t handle = nullptr;
  cublasLtCreate(&handle);
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  if (const cublasStatus_t status =
          cublasLtMatmulAlgoGetHeuristic(handle, &operation, &a, &b, &d, &d, &preference, 1, &found, &count);
      status != CUBLAS_STATUS_SUCCESS)
    return outcome_of(status);
  CHECK(count == 1);
  lay_out(p.n_of_call);
  const float alpha = 1, beta = 0;
  return outcome_of(cublasLtMatmul(handle, &operation, &alpha, at(p.a_shift), &a, at(8192), &b, &beta,
                                   at(16384), &d, at(16384), &d, &found.algo, at(32768 + p.workspace_shift),
                                   p.workspace_bytes, &context));
}

// e4m3, with a scale of each tensor.
Product codes() {
  Product p;
  p.a_type = p.b_type = CUDA_R_8F_E4M3;
  p.d_type = CUDA_R_16BF;
  p.a_scale = at(40960), p.b_scale = at(49152);
  return p;
}
Product with_blocks(ScaleMode a, ScaleMode b) {
  Product p = codes();
  p.a_mode = a, p.b_mode = b;
  if (a == ScaleMode::block_1x16) p.a_type = p.b_type = CUDA_R_4F_E2M1;
  return p;
}

void check_runs(const Product& p) {
  const Outcome outcome = run(p);
  INFO(outcome.text);
  CHECK(outcome.status == CUBLAS_STATUS_SUCCESS);
}
void check_fails(const Product& p, cublasStatus_t status, const std::string& reason) {
  const Outcome outcome = run(p);
  INFO(outcome.text, " / ", reason);
  CHECK(outcome.status == status);
  CHECK(outcome.text.find(reason) != std::string::npos);
}

constexpr auto kInvalid = CUBLAS_STATUS_INVALID_VALUE;
constexpr auto kUnsupported = CUBLAS_STATUS_NOT_SUPPORTED;

}  // namespace

TEST_CASE("cuBLASLt: sizes, types and addresses") {
  check_runs({});
  Product p;
  p.lda = 31;
  check_fails(p, kInvalid, "matrix A: the leading dimension 31 is below its 32 rows");
  p = {};
  p.ldd = 15;
  check_fails(p, kInvalid, "matrix D: the leading dimension 15 is below its 16 rows");
  p = {};
  p.b_type = CUDA_R_16F;
  check_fails(p, kUnsupported, "no GEMM of CUDA_R_16BF and CUDA_R_16F gives CUDA_R_32F");
  p = {};
  p.d_type = CUDA_R_16F;
  check_fails(p, kUnsupported, "no GEMM of CUDA_R_16BF and CUDA_R_16BF gives CUDA_R_16F");
  p = {};
  p.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
  check_fails(p, kUnsupported, "CUBLAS_COMPUTE_32F_FAST_TF32 is for matrices of CUDA_R_32F");
  p = {};
  p.scale_type = CUDA_R_16F;
  check_fails(p, kUnsupported, "alpha and beta are not CUDA_R_32F");
  p = {};
  p.a_shift = 8;
  check_fails(p, kInvalid, "matrix A is not aligned to 16 bytes");
  p.alignment = 8;
  check_runs(p);
  p = {};
  p.n_of_call = 7;
  check_fails(p, kInvalid, "the algorithm was found for another problem");
  p = {};
  p.workspace_bytes = 4095;
  check_fails(p, kInvalid, "the algorithm needs a workspace of 4096 bytes, not 4095");
  p = {};
  p.workspace_shift = 64;
  check_fails(p, kInvalid, "the workspace is not aligned to 256 bytes");
}

TEST_CASE("cuBLASLt: 8-bit and 4-bit matrices and their scales") {
  check_runs(codes());
  Product p = codes();
  p.a_scale = nullptr;
  check_fails(p, kInvalid, "matrix A has codes and no scale");
  p = codes();
  p.b_scale = at(49154);
  check_fails(p, kInvalid, "the scales of B are not aligned to 4 bytes");
  p = {};
  p.a_scale = at(40960);
  check_fails(p, kInvalid, "scales are for 8-bit and 4-bit matrices only");
  p = codes();
  p.trans_a = CUBLAS_OP_N;
  check_fails(p, kUnsupported, "8-bit matrices have to be in the TN format");
  p = codes();
  p.k = 24;
  check_fails(p, kUnsupported, "the sizes of 8-bit matrices are not aligned to 16 bytes");
  p = codes();
  p.m = 20;
  check_fails(p, kUnsupported, "the sizes of 8-bit matrices are not aligned to 16 bytes");
  p = codes();
  p.alignment = 8;
  check_fails(p, kUnsupported, "8-bit matrices have to be aligned to 16 bytes");
  p = codes();
  p.a_type = p.b_type = CUDA_R_8F_E5M2;
  check_fails(p, kUnsupported, "no GEMM of CUDA_R_8F_E5M2 and CUDA_R_8F_E5M2");
  p = codes();
  p.a_type = CUDA_R_16BF;
  check_fails(p, kUnsupported, "no GEMM of CUDA_R_16BF and CUDA_R_8F_E4M3");
  {
    const test::SimulatedGpu gpu(80);
    check_fails(codes(), kUnsupported, "8-bit matrices need compute capability 8.9");
  }
  const test::SimulatedGpu gpu(89);
  check_runs(codes());
}

TEST_CASE("cuBLASLt: scales of blocks are for the GPUs that have them") {
  constexpr auto row = ScaleMode::block_1x128, square = ScaleMode::block_128x128, mx = ScaleMode::block_1x32,
                 nv = ScaleMode::block_1x16;
  check_runs(with_blocks(row, row));
  check_runs(with_blocks(square, row));
  check_fails(with_blocks(square, square), kUnsupported, "both have scales of 128 x 128 elements");
  check_fails(with_blocks(row, mx), kUnsupported, "scale modes of A and B do not fit together");
  check_fails(with_blocks(mx, mx), kUnsupported, "scales of 16 and 32 elements need compute capability 10.0");
  check_fails(with_blocks(nv, nv), kUnsupported, "scales of 16 and 32 elements need compute capability 10.0");
  Product p = with_blocks(row, row);
  p.n = p.n_of_call = 6;
  check_fails(p, kUnsupported, "m and n have to be multiples of 4");
  p = with_blocks(row, row);
  p.b_scale = at(49156);
  check_fails(p, kInvalid, "the scales of B are not aligned to 16 bytes");
  const test::SimulatedGpu gpu(100);
  check_runs(with_blocks(mx, mx));
  check_runs(with_blocks(nv, nv));
  check_fails(with_blocks(row, row), kUnsupported, "scales of 128 elements need compute capability 9.0");
  p = with_blocks(nv, nv);
  p.a_mode = p.b_mode = ScaleMode::tensor;
  check_fails(p, kUnsupported, "CUDA_R_4F_E2M1 needs scales of 16 elements");
}

TEST_CASE("cuBLASLt: the bias") {
  Product p;
  p.epilogue = CUBLASLT_EPILOGUE_BIAS;
  check_fails(p, kInvalid, "the epilogue adds a bias, and there is none");
  p.bias = at(57344);
  check_runs(p);
  p.bias_type = CUDA_R_16BF;
  check_fails(p, kUnsupported, "a bias of CUDA_R_16BF: this GEMM takes CUDA_R_32F");
  p = codes();
  p.d_type = CUDA_R_32F;
  p.epilogue = CUBLASLT_EPILOGUE_BIAS;
  p.bias = at(57344);
  check_fails(p, kUnsupported, "a bias of CUDA_R_32F: this GEMM takes CUDA_R_16BF");
  p = {};
  p.epilogue = static_cast<cublasLtEpilogue_t>(3);
  check_fails(p, kUnsupported, "epilogue 3");
}
