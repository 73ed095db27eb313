// GEMM on cuBLASLt (cublaslt_call.cu). It is column-major: row-major C = A B is its C^T = B^T A^T, so that
// its A is our B, its B our A, its m our n. Bytes moved: A, B and C once each, C twice with beta; tiles of A
// and B several times from the L2 cache.
//
// Where the types or the shape do not fit:
//   - C of a type that cuBLASLt does not offer for A and B: fp32 results in the workspace, some rows at a
//     time, which a pass over C converts
//   - codes whose rows, columns or addresses are not aligned to 16 bytes, or for which cuBLASLt has no
//     algorithm: tiles of our own (gemm_tiles.cu)
//   - scales that the GPU's tensor cores do not apply: refused
// cuBLASLt adds the bias where its type and address fit, otherwise a pass over C does (gemm_passes.cu).
#include <atomic>
#include <bit>
#include <optional>
#include <string>

#include "kernels/block_scales.hpp"
#include "kernels/cuda/cublaslt_call.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/gemm.hpp"
#include "kernels/cuda/notes.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

std::atomic<bool> tf32{false};

// ---- what this GPU multiplies

bool is_scaled(const GemmTypes& t) {
  return t.a_scales != ScaleLayout::none || t.b_scales != ScaleLayout::none;
}
GemmTypes types_of(const Operand& a, const Operand& b, Out c) {
  return {a.dtype, b.dtype, c.dtype, a.layout, b.layout};
}
// Whether blocks have 128 elements of k. The two operands may have such blocks of different shapes.
bool is_block_128(ScaleLayout layout) {
  return layout == ScaleLayout::block_1x128 || layout == ScaleLayout::block_128x128;
}
bool is_fp8(DType type) {
  return type == DType::f8e4m3 || type == DType::f8e5m2;
}

// Why the tensor cores of a GPU do not multiply these codes; null: they do.
const char* scaled_refusal(const GemmTypes& t, int capability) {
  const bool nvfp4 = t.a_scales == ScaleLayout::block_1x16, blocks_128 = is_block_128(t.a_scales);
  if (blocks_128 ? !is_block_128(t.b_scales) : t.a_scales != t.b_scales)
    return "the scales of A and of B have different layouts";
  if (nvfp4 ? t.a != DType::f4e2m1x2 || t.b != DType::f4e2m1x2 : !is_fp8(t.a) || !is_fp8(t.b))
    return "scales of 1 x 16 blocks are for codes of 4 bits, all others for codes of 8 bits";
  if (t.a == DType::f8e5m2 && t.b == DType::f8e5m2)
    return "tensor cores do not multiply e5m2 by e5m2: one of the two has to be e4m3";
  if (t.a_scales == ScaleLayout::block_128x128 && t.b_scales == ScaleLayout::block_128x128)
    return "scales of 128 x 128 blocks are for one of the two operands";
  if (capability < 89) return "GEMMs in 8 bits need a GPU of compute capability 8.9 or newer";
  if (t.a_scales == ScaleLayout::tensor) return nullptr;
  if (!kHasBlockScales) return "scales of blocks need cuBLASLt 12.9 or newer";
  if (blocks_128 && capability != 90)
    return "scales of 1 x 128 and 128 x 128 blocks need a GPU of compute capability 9.0";
  if (!blocks_128 && capability < 100)
    return nvfp4 ? "NVFP4 needs a GPU of compute capability 10.0 or newer"
                 : "MXFP8 needs a GPU of compute capability 10.0 or newer";
  return nullptr;
}
const char* refusal(const GemmTypes& t, int capability) {
  if (is_scaled(t)) return scaled_refusal(t, capability);
  const auto is_float = [](DType x) { return x == DType::f32 || x == DType::bf16 || x == DType::f16; };
  return t.a == t.b && is_float(t.a) ? nullptr : "A and B are both fp32, bf16 or fp16, or have scales";
}

// True if cuBLASLt can store C in this type for these A and B.
bool has_result_type(const GemmTypes& t) {
  return is_scaled(t) || t.c == DType::f32 || t.c == t.a;
}

// ---- the workspace

struct GemmMemory {
  // Bytes: what cuBLASLt uses; alpha and beta; rows of fp32 results.
  size_t shared = 0, scalars = 0, sums = 0;
  int64_t sum_rows = 0;

  GemmMemory(const GemmShape& s, const GemmTypes& t) {
    if (s.m <= 0 || s.n <= 0 || s.k <= 0) return;
    shared = cublaslt_workspace_bytes();
    if (t.a_scales == ScaleLayout::block_1x16) scalars = kAlignment;
    if (!has_result_type(t)) {
      const int64_t row = s.n * static_cast<int64_t>(sizeof(float));
      sum_rows = std::clamp<int64_t>(static_cast<int64_t>(sum_bytes()) / row, 1, s.m);
      sums = static_cast<size_t>(sum_rows * row);
    }
  }
  WorkspaceSize need() const {
    const size_t bytes = aligned(shared) + scalars + sums;
    return {bytes == 0 ? 0 : bytes + kAlignment, 0};
  }
  // Addresses of the buffers in a workspace.
  struct Buffers {
    std::byte* shared = nullptr;
    float *scalars = nullptr, *sums = nullptr;
  };
  Buffers buffers_in(std::byte* memory) const {
    if (!memory) return {};
    auto* const first = reinterpret_cast<std::byte*>(aligned(reinterpret_cast<uintptr_t>(memory)));
    return {first, reinterpret_cast<float*>(first + aligned(shared)),
            reinterpret_cast<float*>(first + aligned(shared) + scalars)};
  }

 private:
  // Alignment of cuBLASLt's workspace.
  static constexpr size_t kAlignment = 256;
  static size_t aligned(size_t bytes) {
    return static_cast<size_t>(round_up(static_cast<int64_t>(bytes), int64_t{kAlignment}));
  }
};

// ---- calls

cudaDataType_t lt_type(DType type) {
  switch (type) {
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    case DType::f8e4m3:
      return CUDA_R_8F_E4M3;
    case DType::f8e5m2:
      return CUDA_R_8F_E5M2;
    case DType::f4e2m1x2:
      return kFp4Type;
    default:
      return CUDA_R_32F;
  }
}
ScaleMode lt_scales(ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::block_1x128:
      return ScaleMode::block_1x128;
    case ScaleLayout::block_128x128:
      return ScaleMode::block_128x128;
    case ScaleLayout::block_1x32:
      return ScaleMode::block_1x32;
    case ScaleLayout::block_1x16:
      return ScaleMode::block_1x16;
    case ScaleLayout::none:
    case ScaleLayout::tensor:
      break;
  }
  return ScaleMode::tensor;
}
int64_t bits_of(DType type) {
  return type == DType::f4e2m1x2 ? 4 : 8 * size_of(type);
}

// Alignment of an address and of the distance of a batch's matrices.
uint32_t alignment_of(const void* data, int64_t stride_bytes) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(stride_bytes) | 16;
  return uint32_t{1} << std::countr_zero(bits);
}

// A row-major matrix of the shape's batch. With one row, `ld` may be anything.
LtMatrix lt_matrix(const void* data, DType type, cublasOperation_t operation, int64_t rows, int64_t cols,
                   int64_t ld, int64_t batch, int64_t stride) {
  const int64_t apart = batch > 1 ? stride : 0;
  return {lt_type(type),
          operation,
          cols,
          rows,
          std::max(ld, cols),
          apart,
          alignment_of(data, apart * bits_of(type) / 8)};
}

struct GemmCall {
  LtCall call;
  LtPointers pointers;
};
GemmCall gemm_call(const GemmShape& s, const Operand& a, const Operand& b, Out out) {
  GemmCall g;
  const auto operation = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  g.call.compute = a.dtype == DType::f32 && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  g.call.a = lt_matrix(b.data, b.dtype, operation(s.trans_b), s.trans_b ? s.n : s.k, s.trans_b ? s.k : s.n,
                       s.ldb, s.batch, s.stride_b);
  g.call.b = lt_matrix(a.data, a.dtype, operation(s.trans_a), s.trans_a ? s.k : s.m, s.trans_a ? s.m : s.k,
                       s.lda, s.batch, s.stride_a);
  g.call.d = lt_matrix(out.data, out.dtype, CUBLAS_OP_N, s.m, s.n, s.ldc, s.batch, s.stride_c);
  g.call.batch = s.batch;
  g.call.has_scales = a.layout != ScaleLayout::none;
  g.call.a_scales = lt_scales(b.layout);
  g.call.b_scales = lt_scales(a.layout);
  if (a.layout == ScaleLayout::tensor) g.call.accumulation = s.accumulation;
  g.pointers.a = b.data;
  g.pointers.b = a.data;
  g.pointers.d = out.data;
  if (g.call.has_scales) {
    g.pointers.a_scale = b.scale;
    g.pointers.b_scale = a.scale;
  }
  return g;
}

// Whether the tensor cores can read these codes: rows, columns and addresses are aligned to 16 bytes; for
// blocks of 128, scales of a multiple of 8 rows, and one matrix.
bool fits_tensor_cores(const GemmShape& s, const Operand& a, const Operand& b, Out out, const LtCall& call) {
  const auto aligned_size = [](int64_t elements, DType type) { return elements * bits_of(type) % 128 == 0; };
  if (!aligned_size(s.k, a.dtype) || !aligned_size(s.k, b.dtype) || !aligned_size(s.n, out.dtype) ||
      !aligned_size(s.ldc, out.dtype))
    return false;
  if (call.a.alignment < 16 || call.b.alignment < 16 || call.d.alignment < 16) return false;
  if (a.layout == ScaleLayout::tensor) return true;
  if (s.batch > 1 || alignment_of(a.scale, 0) < 16 || alignment_of(b.scale, 0) < 16) return false;
  return !is_block_128(a.layout) || (s.m % 8 == 0 && s.n % 8 == 0);
}

// Whether cuBLASLt adds this bias to C. GEMMs of codes take one of 16 bits, and none beside scales of blocks.
bool adds_bias(const Operand& a, Out out, In bias) {
  if (!bias || (a.layout != ScaleLayout::none && a.layout != ScaleLayout::tensor)) return false;
  const DType type = a.layout == ScaleLayout::tensor && out.dtype == DType::f32 ? DType::bf16 : out.dtype;
  return bias.dtype == type && alignment_of(bias.data, 0) == 16;
}

// ---- the GEMM

struct Scalars {
  float alpha, beta;
};

// NVFP4: alpha times the scales of the two tensors, which are in device memory; then beta.
__global__ void scalars_kernel(Scalars scalars, const float* a_scale, const float* b_scale, float* out) {
  if (thread_index() != 0) return;
  out[0] = scalars.alpha * (*a_scale * *b_scale);
  out[1] = scalars.beta;
}

// "A [8, 16] bf16". Appends only: GCC 12 warns of a copy in "text" + string.
void add_matrix_text(std::string& text, const char* name, bool transposed, int64_t rows, int64_t cols,
                     DType type) {
  text.append(name).append(" [").append(std::to_string(rows)).append(", ").append(std::to_string(cols));
  text.append("] ").append(name_of(type)).append(transposed ? ", stored transposed" : "");
}
std::string call_text(const GemmShape& s, const GemmTypes& t) {
  std::string text;
  add_matrix_text(text, "C", false, s.m, s.n, t.c);
  add_matrix_text(text, " = A", s.trans_a, s.m, s.k, t.a);
  add_matrix_text(text, " times B", s.trans_b, s.k, s.n, t.b);
  if (s.batch > 1) text.append(" in a batch of ").append(std::to_string(s.batch));
  return text;
}

// Enqueues the GEMM, and returns the bias that it has not added.
In multiply(Context& c, const GemmShape& s, const Operand& a, const Operand& b, Out out, Scalars scalars,
            In bias, const GemmMemory::Buffers& memory) {
  GemmCall g = gemm_call(s, a, b, out);
  if (g.call.has_scales && !fits_tensor_cores(s, a, b, out, g.call)) {
    run_tiles(c, s, a, b, out, scalars.alpha, scalars.beta);
    return bias;
  }
  g.pointers.workspace = memory.shared;
  g.pointers.alpha = &scalars.alpha;
  g.pointers.beta = &scalars.beta;
  if (a.layout == ScaleLayout::block_1x16) {
    launch(c, {1, kWarp}, scalars_kernel, scalars, a.tensor_scale, b.tensor_scale, memory.scalars);
    g.call.pointer_mode = CUBLASLT_POINTER_MODE_DEVICE;
    g.pointers.alpha = memory.scalars;
    g.pointers.beta = memory.scalars + 1;
  }
  if (adds_bias(a, out, bias)) {
    GemmCall biased = g;
    biased.call.epilogue = CUBLASLT_EPILOGUE_BIAS;
    biased.call.bias_type = lt_type(bias.dtype);
    biased.pointers.bias = bias.data;
    if (enqueue(c, biased.call, biased.pointers)) return {};
    // cuBLASLt may have no algorithm that adds a bias.
  }
  if (enqueue(c, g.call, g.pointers)) return bias;
  const std::string reason =
      "cuBLASLt has no algorithm for " + call_text(s, types_of(a, b, out)) + ": " + missing_algorithm();
  if (!g.call.has_scales) {
    refuse(c, keep_text(reason));
  } else {
    add_note(reason + "; a slower kernel computes it");
    run_tiles(c, s, a, b, out, scalars.alpha, scalars.beta);
  }
  return bias;
}

// GEMM whose C has a type that cuBLASLt does not store: computes fp32 results for some rows at a time.
void multiply_and_convert(Context& c, const GemmShape& s, const Operand& a, const Operand& b, Out out,
                          Scalars scalars, In bias, const GemmMemory& sizes,
                          const GemmMemory::Buffers& memory) {
  for (int64_t i = 0; i < s.batch; ++i)
    for (int64_t row = 0; row < s.m && !c.error->file; row += sizes.sum_rows) {
      GemmShape part = s;
      part.m = std::min(sizes.sum_rows, s.m - row);
      part.batch = 1;
      part.ldc = s.n;
      multiply(c, part, from_element(a, i * s.stride_a + row * (s.trans_a ? 1 : s.lda)),
               from_element(b, i * s.stride_b), Out{memory.sums, DType::f32}, {scalars.alpha, 0}, {}, memory);
      part.ldc = s.ldc;
      finish_result(c, part, from_element(out, i * s.stride_c + row * s.ldc),
                    {true, memory.sums, scalars.beta}, bias);
    }
}

WorkspaceSize run_workspace(GemmShape s, GemmTypes types, float, float) {
  return GemmMemory(s, types).need();
}

void run(Context& c, GemmShape s, Operand a, Operand b, Out out, float alpha, float beta, In bias) {
  if (s.m <= 0 || s.n <= 0) return;
  const GemmTypes types = types_of(a, b, out);
  if (const char* reason = refusal(types, compute_capability())) return refuse(c, reason);
  if (s.k <= 0) return finish_result(c, s, out, {true, nullptr, beta}, bias);
  const GemmMemory sizes(s, types);
  auto* const workspace = workspace_of<std::byte>(c, sizes.need());
  if (!workspace) return;
  const GemmMemory::Buffers memory = sizes.buffers_in(workspace);
  if (!has_result_type(types))
    return multiply_and_convert(c, s, a, b, out, {alpha, beta}, bias, sizes, memory);
  const In rest = multiply(c, s, a, b, out, {alpha, beta}, bias, memory);
  if (rest && !c.error->file) finish_result(c, s, out, {}, rest);
}

WorkspaceSize run_grouped_workspace(GemmShape, GemmGroups, int64_t, GemmTypes, float, float) {
  return {};
}
void run_grouped(Context& c, GemmShape s, GemmGroups groups, const int64_t* sizes, int64_t count, Operand a,
                 Operand b, Out out, float alpha, float beta, In bias) {
  if (s.m <= 0 || s.n <= 0 || count <= 0) return;
  if (const char* reason = refusal(types_of(a, b, out), compute_capability())) return refuse(c, reason);
  run_grouped_tiles(c, s, groups, sizes, count, a, b, out, alpha, beta, bias);
}

}  // namespace

const Gemm& gemm_family() {
  static const Gemm family{.run = run,
                           .run_grouped = run_grouped,
                           .column_sum = column_sum,
                           .run_workspace = run_workspace,
                           .run_grouped_workspace = run_grouped_workspace,
                           .column_sum_workspace = column_sum_workspace,
                           .use_tf32 = [](bool on) { tf32 = on; }};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
