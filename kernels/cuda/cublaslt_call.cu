// Calls of cuBLASLt. The search for an algorithm takes tens of microseconds, and is made once for each kind
// of call; its first proposal is taken. Only algorithms whose bits do not depend on the order of blocks are
// allowed: those that sum over k in one sequence, or in parts that lie in the workspace as fp32 and are added
// by a second kernel. The heuristics give the same proposal on every GPU of a model.
#include "kernels/cuda/cublaslt_call.hpp"

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "kernels/cuda/device.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

struct LtAlgorithm {
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  cublasLtMatmulAlgo_t algorithm{};
  std::string reason;
};

// Handles and algorithms. They are never destroyed, because the driver may be unloaded before them at the end
// of a process.
struct LtState {
  std::mutex mutex;
  std::map<int, cublasLtHandle_t> handles;
  std::map<std::pair<int, LtCall>, LtAlgorithm> algorithms;
};
LtState& lt_state() {
  static LtState& state = *new LtState;
  return state;
}

thread_local std::string missing;

// Sets attributes of descriptors, up to the first failure.
class LtDescriptors {
 public:
  LtDescriptors(const LtCall& call, const LtPointers& p) {
    check(cublasLtMatmulDescInit(&operation, call.compute, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, call.a.operation);
    set(CUBLASLT_MATMUL_DESC_TRANSB, call.b.operation);
    set(CUBLASLT_MATMUL_DESC_POINTER_MODE, call.pointer_mode);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, call.epilogue);
    if (p.bias) {
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, call.bias_type);
    }
    if (call.has_scales) {
      set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.a_scale);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.b_scale);
      // One scale for the tensor is the default, and the only mode of versions before 12.9.
      if (call.a_scales != ScaleMode::tensor) set(kScaleModeOfA, call.a_scales);
      if (call.b_scales != ScaleMode::tensor) set(kScaleModeOfB, call.b_scales);
      if (call.accumulation == Accumulation::fast) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
    }
    lay_out(a, call.a, call.batch);
    lay_out(b, call.b, call.batch);
    lay_out(d, call.d, call.batch);
  }

  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, d;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;

 private:
  void check(cublasStatus_t result) {
    if (status == CUBLAS_STATUS_SUCCESS) status = result;
  }
  template <class V>
  void set(cublasLtMatmulDescAttributes_t attribute, const V& value) {
    check(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof value));
  }
  void lay_out(cublasLtMatrixLayoutOpaque_t& layout, const LtMatrix& x, int64_t batch) {
    check(cublasLtMatrixLayoutInit(&layout, x.type, static_cast<uint64_t>(x.rows),
                                   static_cast<uint64_t>(x.cols), x.ld));
    if (batch == 1) return;
    const auto count = narrow<int32_t>(batch);
    check(
        cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    check(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &x.stride,
                                           sizeof x.stride));
  }
};

// Returns addresses that are aligned to 16 bytes and no more, in place of those of the call. The search for
// an algorithm uses only the alignment of addresses, and its result has to be valid for all calls of this
// kind.
LtPointers stand_ins(const LtPointers& p) {
  void* const aligned = reinterpret_cast<void*>(uintptr_t{16});
  const auto stand_in = [&](const void* array) { return array ? aligned : nullptr; };
  LtPointers result;
  result.a_scale = stand_in(p.a_scale);
  result.b_scale = stand_in(p.b_scale);
  result.bias = stand_in(p.bias);
  return result;
}

LtAlgorithm search(cublasLtHandle_t handle, const LtCall& call, const LtPointers& pointers) {
  LtDescriptors descriptors(call, stand_ins(pointers));
  cublasLtMatmulPreferenceOpaque_t preference;
  LtAlgorithm result;
  result.status = descriptors.status;
  if (result.status == CUBLAS_STATUS_SUCCESS) result.status = cublasLtMatmulPreferenceInit(&preference);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    if (result.status == CUBLAS_STATUS_SUCCESS)
      result.status = cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(cublaslt_workspace_bytes()));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, call.a.alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, call.b.alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, call.d.alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, call.d.alignment);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  if (result.status == CUBLAS_STATUS_SUCCESS)
    result.status =
        cublasLtMatmulAlgoGetHeuristic(handle, &descriptors.operation, &descriptors.a, &descriptors.b,
                                       &descriptors.d, &descriptors.d, &preference, 1, &found, &count);
  if (result.status == CUBLAS_STATUS_SUCCESS)
    result.status = count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : found.state;
  result.algorithm = found.algo;
  if (result.status != CUBLAS_STATUS_SUCCESS) result.reason = text_of(result.status);
  return result;
}

// The handle for the GPU of this thread; null with an error in the slot.
cublasLtHandle_t handle_of(Context& c, LtState& state, int gpu) {
  cublasLtHandle_t& handle = state.handles[gpu];
  if (!handle)
    if (const cublasStatus_t status = cublasLtCreate(&handle); status != CUBLAS_STATUS_SUCCESS) {
      handle = nullptr;
      refuse(c, keep_text("cublasLtCreate: " + text_of(status)));
    }
  return handle;
}

}  // namespace

// Whether this is an error, and not an answer to the question whether an algorithm exists.
static bool fails(cublasStatus_t status) {
  return status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED;
}

const char* keep_text(const std::string& text) {
  static std::mutex& mutex = *new std::mutex;
  static std::set<std::string>& texts = *new std::set<std::string>;
  const std::scoped_lock lock(mutex);
  return texts.insert(text).first->c_str();
}

const std::string& missing_algorithm() {
  return missing;
}

bool enqueue(Context& c, const LtCall& call, const LtPointers& p) {
  LtState& state = lt_state();
  const int gpu = current_gpu();
  LtAlgorithm algorithm;
  cublasLtHandle_t handle = nullptr;
  {
    const std::scoped_lock lock(state.mutex);
    handle = handle_of(c, state, gpu);
    if (!handle) return true;
    const auto [entry, is_new] = state.algorithms.try_emplace({gpu, call});
    if (is_new) entry->second = search(handle, call, p);
    algorithm = entry->second;
    if (fails(algorithm.status)) {
      state.algorithms.erase(entry);
      refuse(c, keep_text("cublasLtMatmulAlgoGetHeuristic: " + algorithm.reason + earlier_error()));
      return true;
    }
  }
  if (algorithm.status == CUBLAS_STATUS_NOT_SUPPORTED) {
    missing = algorithm.reason;
    return false;
  }
  LtDescriptors descriptors(call, p);
  cublasStatus_t status = descriptors.status;
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatmul(handle, &descriptors.operation, p.alpha, p.a, &descriptors.a, p.b, &descriptors.b,
                            p.beta, p.d, &descriptors.d, p.d, &descriptors.d, &algorithm.algorithm,
                            p.workspace, cublaslt_workspace_bytes(), stream_of(c));
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) {
    // The search has proposed what the library does not run after all: nothing was enqueued.
    const std::scoped_lock lock(state.mutex);
    state.algorithms[{gpu, call}] = {status, {}, missing = text_of(status)};
    return false;
  }
  if (fails(status)) refuse(c, keep_text("cublasLtMatmul: " + text_of(status) + earlier_error()));
  return true;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
