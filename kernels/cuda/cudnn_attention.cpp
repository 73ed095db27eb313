// Attention by the library, compiled by the host compiler: cudnn-frontend is headers of C++. A plan is built
// once for each kind of call, from cuDNN's first proposal, in tenths of a second.
#define CAPSTAN_GPU cuda
#include "kernels/cuda/cudnn_attention.hpp"

#include <cuda_runtime_api.h>

#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "kernels/cuda/cudnn_graph.hpp"
#include "kernels/cuda/notes.hpp"

namespace capstan::kernels::cuda {

namespace {

// Without a graph: cuDNN has no plan for the call.
struct CudnnPlan {
  std::shared_ptr<CudnnGraph> graph;
  size_t workspace = 0;
};

// Handles, whose stream each call sets, and plans by GPU and call. They are never destroyed, because the
// driver may be unloaded before them at the end of a process.
struct CudnnState {
  std::mutex mutex;
  std::map<int, cudnnHandle_t> handles;
  std::map<std::pair<int, CudnnCall>, CudnnPlan> plans;
  // Texts of errors, to which error slots point.
  std::deque<std::string> errors;
};
CudnnState& cudnn_state() {
  static CudnnState& state = *new CudnnState;
  return state;
}

void report(Context& c, CudnnState& state, std::string text) {
  *c.error = {__FILE__, "enqueue_cudnn", 0, 0, state.errors.emplace_back(std::move(text)).c_str()};
}

// The kernels here compute attention instead.
CudnnPlan no_plan(const CudnnCall& call, const std::string& reason) {
  add_note("cuDNN does not compute " + std::string(call.backward ? "the backward pass of " : "") +
           "attention of " + std::to_string(call.heads) + " heads of " + std::to_string(call.qk_dim) +
           " and " + std::to_string(call.seq) + " tokens: " + reason);
  return {};
}

// The handle for a GPU, on the stream of the context. Null: cuDNN cannot be used.
cudnnHandle_t handle_of(Context& c, CudnnState& state, int gpu) {
  const auto [entry, is_new] = state.handles.try_emplace(gpu, nullptr);
  cudnnHandle_t& handle = entry->second;
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  if (is_new) status = cudnnCreate(&handle);
  if (status != CUDNN_STATUS_SUCCESS) handle = nullptr;
  if (handle) status = cudnnSetStream(handle, static_cast<cudaStream_t>(c.stream));
  if (status == CUDNN_STATUS_SUCCESS) return handle;
  add_note(std::string("cuDNN does not compute attention: ") + cudnnGetErrorString(status));
  return nullptr;
}

CudnnPlan plan_of(const CudnnCall& call, cudnnHandle_t handle) {
  CudnnPlan plan;
  try {
    plan.graph = cudnn_graph(call);
    std::string reason;
    const int64_t workspace = build_plan(*plan.graph, handle, reason);
    if (workspace < 0) return no_plan(call, reason);
    plan.workspace = static_cast<size_t>(workspace);
  } catch (const std::exception& error) {
    // The frontend throws where memory, or a library of cuDNN, is missing.
    return no_plan(call, error.what());
  }
  return plan;
}

std::unordered_map<int64_t, void*> pointers_of(const CudnnCall& call, const CudnnPointers& p) {
  const auto input = [](const void* data) { return const_cast<void*>(data); };
  std::unordered_map<int64_t, void*> pointers{
      {kQ, input(p.q)}, {kK, input(p.k)}, {kV, input(p.v)}, {kOut, p.out}, {kLse, p.lse}};
  if (call.backward) pointers.insert({{kDout, input(p.dout)}, {kDq, p.dq}, {kDk, p.dk}, {kDv, p.dv}});
  return pointers;
}

}  // namespace

bool enqueue_cudnn(Context& c, const CudnnCall& call, const CudnnPointers& p) {
  CudnnState& state = cudnn_state();
  int gpu = 0;
  if (cudaGetDevice(&gpu) != cudaSuccess) return false;
  // Also around the execution, which uses the stream of the handle.
  const std::scoped_lock lock(state.mutex);
  const cudnnHandle_t handle = handle_of(c, state, gpu);
  if (!handle) return false;
  const auto [entry, is_new] = state.plans.try_emplace({gpu, call});
  CudnnPlan& plan = entry->second;
  if (is_new) plan = plan_of(call, handle);
  if (!plan.graph || plan.workspace > p.workspace_bytes) return false;
  auto pointers = pointers_of(call, p);
  auto status = plan.graph->execute(handle, pointers, p.workspace);
  if (status.is_bad()) report(c, state, "cuDNN: " + status.get_message());
  return true;
}

}  // namespace capstan::kernels::cuda
