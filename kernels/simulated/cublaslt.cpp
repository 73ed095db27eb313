#include "kernels/simulated/cublaslt.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "kernels/block_scales.hpp"
#include "kernels/common/shared_memory_limits.hpp"
#include "kernels/simulated/enqueue.hpp"
#include "kernels/simulated/sample.hpp"
#include "kernels/simulated/shared_memory.hpp"
#include "kernels/table.hpp"

namespace capstan::kernels::simulated {

struct cublasLtContext {};

namespace {

std::atomic<int> capability{90};
std::atomic<WithoutAlgorithm> without_algorithm{WithoutAlgorithm::nothing};
std::mutex calls_mutex;
CublasLtCalls calls;
// Reason why the latest failed call of this thread has failed.
thread_local std::string failure;

cublasStatus_t fail_call(cublasStatus_t status, std::string reason) {
  failure = std::move(reason);
  return status;
}
cublasStatus_t invalid(std::string reason) {
  return fail_call(CUBLAS_STATUS_INVALID_VALUE, std::move(reason));
}
cublasStatus_t unsupported(std::string reason) {
  return fail_call(CUBLAS_STATUS_NOT_SUPPORTED, std::move(reason));
}

// ---- types

const char* text(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F:
      return "CUDA_R_32F";
    case CUDA_R_16F:
      return "CUDA_R_16F";
    case CUDA_R_16BF:
      return "CUDA_R_16BF";
    case CUDA_R_8F_E4M3:
      return "CUDA_R_8F_E4M3";
    case CUDA_R_8F_E5M2:
      return "CUDA_R_8F_E5M2";
    case CUDA_R_4F_E2M1:
      return "CUDA_R_4F_E2M1";
  }
  return "an unknown type";
}
int64_t bits_of_type(cudaDataType_t type) {
  return type == CUDA_R_32F ? 32 : type == CUDA_R_4F_E2M1 ? 4 : type >= CUDA_R_8F_E4M3 ? 8 : 16;
}
bool is_fp8_type(cudaDataType_t type) {
  return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}
bool is_narrow(cudaDataType_t type) {
  return is_fp8_type(type) || type == CUDA_R_4F_E2M1;
}
DType dtype_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_16F:
      return DType::f16;
    case CUDA_R_16BF:
      return DType::bf16;
    case CUDA_R_8F_E4M3:
      return DType::f8e4m3;
    case CUDA_R_8F_E5M2:
      return DType::f8e5m2;
    case CUDA_R_4F_E2M1:
      return DType::f4e2m1x2;
    case CUDA_R_32F:
      break;
  }
  return DType::f32;
}
ScaleLayout layout_of(int32_t mode) {
  switch (static_cast<ScaleMode>(mode)) {
    case ScaleMode::block_1x16:
      return ScaleLayout::block_1x16;
    case ScaleMode::block_1x32:
      return ScaleLayout::block_1x32;
    case ScaleMode::block_1x128:
      return ScaleLayout::block_1x128;
    case ScaleMode::block_128x128:
      return ScaleLayout::block_128x128;
    case ScaleMode::tensor:
      break;
  }
  return ScaleLayout::tensor;
}

// ---- one problem: a description and its layouts

struct Problem {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, d;

  uint64_t m() const { return operation.trans_a == CUBLAS_OP_T ? a.cols : a.rows; }
  uint64_t k() const { return operation.trans_a == CUBLAS_OP_T ? a.rows : a.cols; }
  uint64_t n() const { return operation.trans_b == CUBLAS_OP_T ? b.rows : b.cols; }
  bool is_scaled() const { return is_narrow(a.type) || is_narrow(b.type); }
};

cublasStatus_t check_layout(const char* name, const cublasLtMatrixLayoutOpaque_t& x) {
  const std::string who = std::string("matrix ") + name + ": ";
  if (x.rows == 0 || x.cols == 0) return invalid(who + "it is empty");
  if (x.ld < static_cast<int64_t>(x.rows))
    return invalid(who + "the leading dimension " + std::to_string(x.ld) + " is below its " +
                   std::to_string(x.rows) + " rows");
  if (x.batch < 1) return invalid(who + "a batch of " + std::to_string(x.batch));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_shape(const Problem& p) {
  for (const auto& [name, layout] : {std::pair("A", &p.a), {"B", &p.b}, {"D", &p.d}})
    if (const cublasStatus_t status = check_layout(name, *layout); status != CUBLAS_STATUS_SUCCESS)
      return status;
  const uint64_t k_of_b = p.operation.trans_b == CUBLAS_OP_T ? p.b.cols : p.b.rows;
  if (p.k() != k_of_b || p.d.rows != p.m() || p.d.cols != p.n())
    return invalid("the sizes of A, B and D do not fit together");
  if (p.a.batch != p.b.batch || p.a.batch != p.d.batch) return invalid("A, B and D have different batches");
  return CUBLAS_STATUS_SUCCESS;
}

// Tables 1, 3 and 4 of cublasLtMatmul().
bool has_types(const Problem& p) {
  const cudaDataType_t a = p.a.type, b = p.b.type, d = p.d.type;
  const bool float_result = d == CUDA_R_32F || d == CUDA_R_16BF || d == CUDA_R_16F;
  if (a == CUDA_R_4F_E2M1 || b == CUDA_R_4F_E2M1) return a == b && float_result;
  if (is_fp8_type(a) || is_fp8_type(b))
    return is_fp8_type(a) && is_fp8_type(b) && !(a == CUDA_R_8F_E5M2 && b == CUDA_R_8F_E5M2) && float_result;
  return a == b && (d == CUDA_R_32F || d == a);
}
cublasStatus_t check_types(const Problem& p) {
  if (p.operation.scale_type != CUDA_R_32F) return unsupported("alpha and beta are not CUDA_R_32F");
  const bool all_fp32 = p.a.type == CUDA_R_32F && p.b.type == CUDA_R_32F && p.d.type == CUDA_R_32F;
  if (p.operation.compute != CUBLAS_COMPUTE_32F && !all_fp32)
    return unsupported("CUBLAS_COMPUTE_32F_FAST_TF32 is for matrices of CUDA_R_32F");
  if (!has_types(p))
    return unsupported(std::string("no GEMM of ") + text(p.a.type) + " and " + text(p.b.type) + " gives " +
                       text(p.d.type));
  return CUBLAS_STATUS_SUCCESS;
}

// ---- scales

bool is_blocks_128(int32_t mode) {
  return mode == static_cast<int32_t>(ScaleMode::block_1x128) ||
         mode == static_cast<int32_t>(ScaleMode::block_128x128);
}

cublasStatus_t check_scale_modes(const Problem& p) {
  const int32_t a = p.operation.a_scale_mode, b = p.operation.b_scale_mode;
  const int gpu = capability;
  const auto is = [](int32_t mode, ScaleMode wanted) { return mode == static_cast<int32_t>(wanted); };
  if (p.a.type == CUDA_R_4F_E2M1 && (!is(a, ScaleMode::block_1x16) || !is(b, ScaleMode::block_1x16)))
    return unsupported("CUDA_R_4F_E2M1 needs scales of 16 elements of both matrices");
  if (is_fp8_type(p.a.type) && (is(a, ScaleMode::block_1x16) || is(b, ScaleMode::block_1x16)))
    return unsupported("scales of 16 elements are for CUDA_R_4F_E2M1");
  if (is_blocks_128(a) != is_blocks_128(b) || (!is_blocks_128(a) && a != b))
    return unsupported("the scale modes of A and B do not fit together");
  if (is(a, ScaleMode::block_128x128) && is(b, ScaleMode::block_128x128))
    return unsupported("A and B both have scales of 128 x 128 elements");
  if (gpu < 89) return unsupported("8-bit matrices need compute capability 8.9");
  if (is_blocks_128(a) && gpu != 90) return unsupported("scales of 128 elements need compute capability 9.0");
  if (!is(a, ScaleMode::tensor) && !is_blocks_128(a) && gpu < 100)
    return unsupported("scales of 16 and 32 elements need compute capability 10.0");
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t check_scale(const char* name, const void* scale, int32_t mode) {
  if (!scale) return invalid(std::string("matrix ") + name + " has codes and no scale");
  const uintptr_t unit = mode == 0 ? sizeof(float) : 16;
  if (reinterpret_cast<uintptr_t>(scale) % unit != 0)
    return invalid(std::string("the scales of ") + name + " are not aligned to " + std::to_string(unit) +
                   " bytes");
  return CUBLAS_STATUS_SUCCESS;
}
// The rules of 8-bit and 4-bit matrices: order, 16 bytes, scales.
cublasStatus_t check_narrow(const Problem& p) {
  const cublasLtMatmulDescOpaque_t& o = p.operation;
  if (o.fast_accumulation && (!is_fp8_type(p.a.type) || o.a_scale_mode != 0))
    return unsupported("fast accumulation is for 8-bit matrices with a scale of the tensor");
  if (!p.is_scaled()) {
    if (o.a_scale || o.b_scale || o.a_scale_mode != 0 || o.b_scale_mode != 0)
      return invalid("scales are for 8-bit and 4-bit matrices only");
    return CUBLAS_STATUS_SUCCESS;
  }
  const int gpu = capability;
  if ((o.trans_a != CUBLAS_OP_T || o.trans_b != CUBLAS_OP_N) &&
      (gpu < 100 || gpu >= 120 || p.a.type == CUDA_R_4F_E2M1))
    return unsupported("8-bit matrices have to be in the TN format: A transposed, B not");
  if (const cublasStatus_t status = check_scale_modes(p); status != CUBLAS_STATUS_SUCCESS) return status;
  for (const auto& [name, scale, mode] :
       {std::tuple("A", o.a_scale, o.a_scale_mode), {"B", o.b_scale, o.b_scale_mode}})
    if (const cublasStatus_t status = check_scale(name, scale, mode); status != CUBLAS_STATUS_SUCCESS)
      return status;
  const auto is_aligned = [](int64_t elements, cudaDataType_t type) {
    return elements * bits_of_type(type) % 128 == 0;
  };
  if (!is_aligned(static_cast<int64_t>(p.k()), p.a.type) ||
      !is_aligned(static_cast<int64_t>(p.m()), p.d.type) || !is_aligned(p.a.ld, p.a.type) ||
      !is_aligned(p.b.ld, p.b.type) || !is_aligned(p.d.ld, p.d.type))
    return unsupported("the sizes of 8-bit matrices are not aligned to 16 bytes");
  if (is_blocks_128(o.a_scale_mode) && (p.m() % 4 != 0 || p.n() % 4 != 0))
    return unsupported("with scales of 128 elements m and n have to be multiples of 4");
  if (p.a.batch > 1 && o.a_scale_mode != 0) return unsupported("block scales of a batch have no layout");
  // A limit of this simulation, not of cuBLASLt.
  if (p.a.ld != static_cast<int64_t>(p.a.rows) || p.b.ld != static_cast<int64_t>(p.b.rows) ||
      o.trans_a != CUBLAS_OP_T || o.trans_b != CUBLAS_OP_N)
    return unsupported("8-bit matrices are read in the TN format, without gaps");
  return CUBLAS_STATUS_SUCCESS;
}

// ---- the bias

cublasStatus_t check_bias(const Problem& p) {
  const cublasLtMatmulDescOpaque_t& o = p.operation;
  if (!o.bias) return invalid("the epilogue adds a bias, and there is none");
  const cudaDataType_t given = o.bias_type < 0 ? p.d.type : static_cast<cudaDataType_t>(o.bias_type);
  const cudaDataType_t wanted = p.is_scaled() && p.d.type == CUDA_R_32F ? CUDA_R_16BF : p.d.type;
  if (given != wanted)
    return unsupported(std::string("a bias of ") + text(given) + ": this GEMM takes " + text(wanted));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t check_epilogue(const Problem& p) {
  if (p.operation.epilogue == CUBLASLT_EPILOGUE_BIAS) return check_bias(p);
  if (p.operation.epilogue == CUBLASLT_EPILOGUE_DEFAULT) return CUBLAS_STATUS_SUCCESS;
  // A limit of this simulation, not of cuBLASLt.
  return unsupported("epilogue " + std::to_string(static_cast<uint32_t>(p.operation.epilogue)));
}

cublasStatus_t check_problem(const Problem& p) {
  for (const auto check : {check_shape, check_types, check_narrow, check_epilogue})
    if (const cublasStatus_t status = check(p); status != CUBLAS_STATUS_SUCCESS) return status;
  return CUBLAS_STATUS_SUCCESS;
}

// ---- algorithms

// Identifies a problem; it covers everything but the addresses.
uint64_t digest_of(const Problem& p) {
  uint64_t digest = 0xCBF29CE484222325;
  const auto add = [&](auto value) {
    digest = (digest ^ static_cast<uint64_t>(value)) * 0x100000001B3;
    digest ^= digest >> 29;
  };
  const cublasLtMatmulDescOpaque_t& o = p.operation;
  for (const int64_t value : {int64_t{o.compute}, int64_t{o.pointer_mode}, int64_t{o.trans_a},
                              int64_t{o.trans_b}, int64_t{o.epilogue}, int64_t{o.bias_type},
                              int64_t{o.a_scale_mode}, int64_t{o.b_scale_mode}, int64_t{o.fast_accumulation}})
    add(value);
  for (const auto* x : {&p.a, &p.b, &p.d}) {
    add(x->type), add(x->rows), add(x->cols), add(x->ld), add(x->batch), add(x->stride);
  }
  return digest;
}
// Content of an algorithm.
struct AlgorithmData {
  uint64_t digest, workspace, alignment[3];
};
static_assert(sizeof(AlgorithmData) <= sizeof(cublasLtMatmulAlgo_t));

cublasStatus_t check_alignment(const char* name, const void* data, const cublasLtMatrixLayoutOpaque_t& x,
                               uint64_t alignment) {
  if (!data) return invalid(std::string("matrix ") + name + " is null");
  const int64_t apart = x.batch > 1 ? x.stride * bits_of_type(x.type) / 8 : 0;
  if (reinterpret_cast<uintptr_t>(data) % alignment != 0 ||
      static_cast<uint64_t>(std::abs(apart)) % alignment != 0)
    return invalid(std::string("matrix ") + name + " is not aligned to " + std::to_string(alignment) +
                   " bytes, as given to the search for the algorithm");
  return CUBLAS_STATUS_SUCCESS;
}

// ---- the GEMM

// The operand of a column-major matrix with the elements of k in its columns; scales in the CPU's order.
struct CodeOperand {
  Operand operand;
  std::vector<std::byte> scales;
};
CodeOperand code_operand(const cublasLtMatrixLayoutOpaque_t& x, const void* codes, const void* scale,
                         int32_t mode) {
  static constexpr float kOne = 1;
  CodeOperand result;
  Operand& o = result.operand;
  o.data = codes;
  o.dtype = dtype_of(x.type);
  o.layout = layout_of(mode);
  o.scale = scale;
  o.tensor_scale = &kOne;
  if (o.layout == ScaleLayout::tensor) return result;
  const auto rows = static_cast<int64_t>(x.cols), k = static_cast<int64_t>(x.rows);
  const BlockScales from{o.layout, ScaleOrder::tensor_core, rows, k},
      to{o.layout, ScaleOrder::row_major, rows, k};
  const auto size = static_cast<size_t>(size_of(block_scale_type(o.layout)));
  result.scales.resize(static_cast<size_t>(to.elements()) * size);
  for (int64_t row = 0; row < to.scale_rows(); ++row)
    for (int64_t block = 0; block < to.blocks(); ++block)
      std::memcpy(result.scales.data() + static_cast<size_t>(to.index(row, block)) * size,
                  static_cast<const std::byte*>(scale) + static_cast<size_t>(from.index(row, block)) * size,
                  size);
  o.scale = result.scales.data();
  return result;
}

In bias_of(const Problem& p) {
  const cublasLtMatmulDescOpaque_t& o = p.operation;
  if (o.epilogue != CUBLASLT_EPILOGUE_BIAS) return {};
  return {o.bias, dtype_of(o.bias_type < 0 ? p.d.type : static_cast<cudaDataType_t>(o.bias_type))};
}

// A GEMM and its arrays.
struct MatmulCall {
  Problem problem;
  // Factors in host memory, or addresses of those in device memory.
  float alpha, beta;
  const void *alpha_in_memory, *beta_in_memory;
  const void *a, *b;
  void* d;
  void* workspace;
  size_t workspace_bytes;
};

// Column-major D = A B is row-major D^T = B^T A^T.
GemmShape row_major_shape(const Problem& p) {
  GemmShape s{.trans_a = p.operation.trans_b == CUBLAS_OP_T, .trans_b = p.operation.trans_a == CUBLAS_OP_T};
  s.m = static_cast<int64_t>(p.n());
  s.n = static_cast<int64_t>(p.m());
  s.k = static_cast<int64_t>(p.k());
  s.lda = p.b.ld, s.ldb = p.a.ld, s.ldc = p.d.ld;
  s.batch = p.d.batch;
  s.stride_a = p.b.stride, s.stride_b = p.a.stride, s.stride_c = p.d.stride;
  return s;
}
// Returns a copy of an fp32 matrix rounded to TF32 (10 bits of mantissa): to nearest, ties away from zero.
std::vector<float> rounded_to_tf32(const void* values, const cublasLtMatrixLayoutOpaque_t& x) {
  const int64_t count =
      x.stride * (x.batch - 1) + x.ld * static_cast<int64_t>(x.cols - 1) + static_cast<int64_t>(x.rows);
  const float* const from = static_cast<const float*>(values);
  std::vector<float> rounded(from, from + count);
  for (float& value : rounded)
    if (std::isfinite(value))
      value = std::bit_cast<float>((std::bit_cast<uint32_t>(value) + 0x1000u) & ~uint32_t{0x1fff});
  return rounded;
}

// Reads and writes the first and the last bytes of the arrays of a call.
void touch_matrices(const MatmulCall& x) {
  const Problem& p = x.problem;
  volatile std::byte sink{};
  const auto touch = [&](const void* begin, int64_t bytes) {
    const auto* const first = static_cast<const volatile std::byte*>(begin);
    sink = first[0];
    sink = first[bytes - 1];
  };
  const auto last = [](const cublasLtMatrixLayoutOpaque_t& m) {
    const int64_t elements =
        m.stride * (m.batch - 1) + m.ld * static_cast<int64_t>(m.cols - 1) + static_cast<int64_t>(m.rows);
    return elements * bits_of_type(m.type) / 8;
  };
  touch(x.a, last(p.a));
  touch(x.b, last(p.b));
  touch(x.d, last(p.d));
  auto* const d = static_cast<volatile std::byte*>(x.d);
  d[0] = std::byte{};
  d[last(p.d) - 1] = std::byte{};
  if (x.workspace_bytes > 0) touch(x.workspace, static_cast<int64_t>(x.workspace_bytes));
}

void multiply(const MatmulCall& x, Context& c) {
  if (current_sample()) return touch_matrices(x);
  const Problem& p = x.problem;
  const cublasLtMatmulDescOpaque_t& o = p.operation;
  // An algorithm may write the full workspace.
  if (x.workspace_bytes > 0) std::memset(x.workspace, 0xA5, x.workspace_bytes);
  const bool in_memory = o.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE;
  const float alpha = in_memory ? *static_cast<const float*>(x.alpha_in_memory) : x.alpha;
  const float beta = in_memory ? *static_cast<const float*>(x.beta_in_memory) : x.beta;
  const GemmShape s = row_major_shape(p);
  CodeOperand left, right;
  if (p.is_scaled()) {
    left = code_operand(p.b, x.b, o.b_scale, o.b_scale_mode);
    right = code_operand(p.a, x.a, o.a_scale, o.a_scale_mode);
  } else {
    left.operand = In{x.b, dtype_of(p.b.type)};
    right.operand = In{x.a, dtype_of(p.a.type)};
  }
  std::vector<float> rounded_left, rounded_right;
  if (o.compute == CUBLAS_COMPUTE_32F_FAST_TF32) {
    rounded_left = rounded_to_tf32(x.b, p.b);
    rounded_right = rounded_to_tf32(x.a, p.a);
    left.operand.data = rounded_left.data();
    right.operand.data = rounded_right.data();
  }
  const Out out{x.d, dtype_of(p.d.type)};
  const Gemm& gemm = *cpu_table().gemm;
  const WorkspaceSize need = gemm.run_workspace(
      s, {left.operand.dtype, right.operand.dtype, out.dtype, left.operand.layout, right.operand.layout},
      alpha, beta);
  thread_local std::vector<std::byte> memory;
  memory.resize(std::max(memory.size(), need.total(c.pool->size()) + 64));
  std::byte* const first = memory.data() + -reinterpret_cast<uintptr_t>(memory.data()) % 64;
  KernelError error;
  const LaunchContext context{c.pool, nullptr, {first, memory.size() - 64}, &error};
  gemm.run(context, s, left.operand, right.operand, out, alpha, beta, bias_of(p));
  CAPSTAN_ASSERT(!error.file, "the CPU's GEMM refuses what cuBLASLt accepts");
}

// Copies an attribute, whose size has to be its own.
template <class V>
cublasStatus_t take(V& to, const void* value, size_t bytes) {
  if (!value || bytes != sizeof(V)) return invalid("an attribute has another size");
  std::memcpy(&to, value, sizeof(V));
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

// ---- the interface

void set_compute_capability(int value) {
  capability = value;
  set_most_shared_bytes(shared_bytes_of(value));
}
int compute_capability() {
  return capability;
}
void set_without_algorithm(WithoutAlgorithm what) {
  without_algorithm = what;
}
CublasLtCalls cublaslt_calls() {
  const std::scoped_lock lock(calls_mutex);
  return calls;
}

std::string text_of(cublasStatus_t status) {
  const char* const name = status == CUBLAS_STATUS_SUCCESS           ? "CUBLAS_STATUS_SUCCESS"
                           : status == CUBLAS_STATUS_NOT_INITIALIZED ? "CUBLAS_STATUS_NOT_INITIALIZED"
                           : status == CUBLAS_STATUS_INVALID_VALUE   ? "CUBLAS_STATUS_INVALID_VALUE"
                                                                     : "CUBLAS_STATUS_NOT_SUPPORTED";
  return status == CUBLAS_STATUS_SUCCESS ? name : std::string(name) + ": " + failure;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  static cublasLtContext context;
  if (!handle) return invalid("the address of the handle is null");
  *handle = &context;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t operation, cublasComputeType_t compute,
                                      cudaDataType_t scale_type) {
  if (!operation) return invalid("the address of the description is null");
  *operation = {.compute = compute,
                .scale_type = scale_type,
                .pointer_mode = CUBLASLT_POINTER_MODE_HOST,
                .trans_a = CUBLAS_OP_N,
                .trans_b = CUBLAS_OP_N,
                .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
                .bias = nullptr,
                .bias_type = -1,
                .a_scale = nullptr,
                .b_scale = nullptr,
                .a_scale_mode = 0,
                .b_scale_mode = 0,
                .fast_accumulation = 0};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
  if (!operation) return invalid("no description");
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return take(operation->pointer_mode, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return take(operation->trans_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return take(operation->trans_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return take(operation->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return take(operation->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
      return take(operation->a_scale, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
      return take(operation->b_scale, value, bytes);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
      return take(operation->fast_accumulation, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return take(operation->bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE:
      return take(operation->a_scale_mode, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE:
      return take(operation->b_scale_mode, value, bytes);
  }
  return invalid("a description has no attribute " + std::to_string(static_cast<int32_t>(attribute)));
}

cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType_t type, uint64_t rows,
                                        uint64_t cols, int64_t ld) {
  if (!layout) return invalid("the address of the layout is null");
  *layout = {.type = type, .rows = rows, .cols = cols, .ld = ld, .batch = 1, .stride = 0};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
  if (!layout) return invalid("no layout");
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return take(layout->batch, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return take(layout->stride, value, bytes);
  }
  return invalid("a layout has no attribute " + std::to_string(static_cast<int32_t>(attribute)));
}

cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference) {
  if (!preference) return invalid("the address of the preferences is null");
  *preference = {.workspace = 0, .reduction_schemes = 7, .alignment = {256, 256, 256, 256}};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  if (!preference) return invalid("no preferences");
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return take(preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return take(preference->reduction_schemes, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return take(preference->alignment[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return take(preference->alignment[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return take(preference->alignment[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return take(preference->alignment[3], value, bytes);
  }
  return invalid("the preferences have no attribute " + std::to_string(static_cast<int32_t>(attribute)));
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
  if (!handle) return fail_call(CUBLAS_STATUS_NOT_INITIALIZED, "no handle");
  if (!operation || !a || !b || !c || !d || !preference || !results || !found || requested < 1)
    return invalid("a search without all of its arguments");
  {
    const std::scoped_lock lock(calls_mutex);
    ++calls.searches;
  }
  *found = 0;
  const Problem problem{*operation, *a, *b, *d};
  if (const cublasStatus_t status = check_problem(problem); status != CUBLAS_STATUS_SUCCESS) return status;
  const WithoutAlgorithm missing = without_algorithm;
  if (missing == WithoutAlgorithm::everything ||
      (missing == WithoutAlgorithm::bias && operation->epilogue != CUBLASLT_EPILOGUE_DEFAULT))
    return unsupported("the search has found none");
  const auto& alignment = preference->alignment;
  if (problem.is_scaled() && std::min({alignment[0], alignment[1], alignment[3]}) < 16)
    return unsupported("8-bit matrices have to be aligned to 16 bytes");
  const AlgorithmData data{digest_of(problem),
                           std::min<uint64_t>(preference->workspace, 4096),
                           {alignment[0], alignment[1], alignment[3]}};
  cublasLtMatmulHeuristicResult_t result{};
  std::memcpy(&result.algo, &data, sizeof data);
  result.workspaceSize = data.workspace;
  *results = result;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  if (!handle) return fail_call(CUBLAS_STATUS_NOT_INITIALIZED, "no handle");
  if (!operation || !alpha || !beta || !a_layout || !b_layout || !c_layout || !d_layout || !stream)
    return invalid("cublasLtMatmul lacks an argument");
  const Problem problem{*operation, *a_layout, *b_layout, *d_layout};
  if (const cublasStatus_t status = check_problem(problem); status != CUBLAS_STATUS_SUCCESS) return status;
  // A limit of this simulation, not of cuBLASLt.
  if (c != d || !algorithm) return unsupported("this simulation wants an algorithm, and C in place of D");
  AlgorithmData data;
  std::memcpy(&data, algorithm, sizeof data);
  if (data.digest != digest_of(problem)) return invalid("the algorithm was found for another problem");
  const std::pair<const char*, std::pair<const void*, const cublasLtMatrixLayoutOpaque_t*>> matrices[] = {
      {"A", {a, a_layout}}, {"B", {b, b_layout}}, {"D", {d, d_layout}}};
  for (size_t i = 0; i < 3; ++i)
    if (const cublasStatus_t status = check_alignment(matrices[i].first, matrices[i].second.first,
                                                      *matrices[i].second.second, data.alignment[i]);
        status != CUBLAS_STATUS_SUCCESS)
      return status;
  if (data.workspace > workspace_bytes)
    return invalid("the algorithm needs a workspace of " + std::to_string(data.workspace) + " bytes, not " +
                   std::to_string(workspace_bytes));
  if (data.workspace > 0 && (!workspace || reinterpret_cast<uintptr_t>(workspace) % 256 != 0))
    return invalid("the workspace is not aligned to 256 bytes");
  {
    const std::scoped_lock lock(calls_mutex);
    ++calls.gemms;
    calls.compute = operation->compute;
    calls.fast_accumulation = operation->fast_accumulation != 0;
    calls.epilogue = operation->epilogue;
  }
  MatmulCall call{problem, 0, 0, alpha, beta, a, b, d, workspace, static_cast<size_t>(data.workspace)};
  if (operation->pointer_mode == CUBLASLT_POINTER_MODE_HOST) {
    call.alpha = *static_cast<const float*>(alpha);
    call.beta = *static_cast<const float*>(beta);
  }
  enqueue_work(*stream, [call](Context& context) { multiply(call, context); });
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace capstan::kernels::simulated
