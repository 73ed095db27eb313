// The graphs of the CUDA runtime's backend (src/tensor/cuda/runtime.cpp), with functions of CUDA in the place
// of the library's that do what a test plans: no GPU is needed. Only builds with the CUDA backend have it.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tensor/cuda/runtime.hpp"

using namespace capstan;

namespace {

struct Node {
  cudaGraphNodeType type;
  size_t bytes = 0;
};
struct Planned {
  // What the next capture has.
  std::vector<Node> nodes;
  // The next calls fail.
  bool update_fails = false, instantiate_fails = false, launch_fails = false, end_fails = false;
  int graphs = 0, executables = 0, updates = 0, launches = 0;
  cudaError_t last = cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
};
Planned plan;

cudaError_t result(bool& fails, cudaError_t error) {
  if (!fails) return cudaSuccess;
  fails = false;
  return plan.last = error;
}
CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = size_t{2} << 20;
  return CUDA_SUCCESS;
}

}  // namespace

// The dynamic linker takes these, not those of libcudart.
extern "C" {
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaFree(void*) {
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = plan.last;
  plan.last = cudaSuccess;
  return error;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
#else
cudaError_t cudaGetDriverEntryPoint(const char*, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* found) {
#endif
  *function = reinterpret_cast<void*>(&granularity);
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode mode) {
  plan.mode = mode;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  if (const cudaError_t error = result(plan.end_fails, cudaErrorStreamCaptureInvalidated)) return error;
  ++plan.graphs;
  *graph = reinterpret_cast<cudaGraph_t>(&plan);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) {
  --plan.graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t* nodes, size_t* count) {
  *count = plan.nodes.size();
  for (size_t i = 0; nodes && i < *count; ++i) nodes[i] = reinterpret_cast<cudaGraphNode_t>(&plan.nodes[i]);
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = reinterpret_cast<const Node*>(node)->type;
  return cudaSuccess;
}
cudaError_t cudaGraphMemsetNodeGetParams(cudaGraphNode_t node, cudaMemsetParams* fill) {
  fill->elementSize = 1, fill->width = reinterpret_cast<const Node*>(node)->bytes, fill->height = 1;
  return cudaSuccess;
}
cudaError_t cudaGraphMemcpyNodeGetParams(cudaGraphNode_t node, cudaMemcpy3DParms* copy) {
  copy->extent = {reinterpret_cast<const Node*>(node)->bytes, 1, 1};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  if (const cudaError_t error = result(plan.instantiate_fails, cudaErrorMemoryAllocation)) return error;
  ++plan.executables;
  *executable = reinterpret_cast<cudaGraphExec_t>(&plan);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
  --plan.executables;
  return cudaSuccess;
}
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t, cudaGraph_t, cudaGraphExecUpdateResultInfo* info) {
  info->result = plan.update_fails ? cudaGraphExecUpdateErrorParametersChanged : cudaGraphExecUpdateSuccess;
  if (const cudaError_t error = result(plan.update_fails, cudaErrorGraphExecUpdateFailure)) return error;
  ++plan.updates;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  if (const cudaError_t error = result(plan.launch_fails, cudaErrorInvalidValue)) return error;
  ++plan.launches;
  return cudaSuccess;
}
}

namespace {

struct Opened {
  const cuda::Runtime& runtime = cuda::cuda_runtime();
  cuda::OpenDevice* device = nullptr;
  Opened() {
    plan = {};
    REQUIRE(runtime.open_device(0, &device).ok());
  }
  ~Opened() {
    CHECK(runtime.close_device(device).ok());
    CHECK(plan.executables == 0);
    CHECK(plan.graphs == 0);
  }
  cuda::Status submit(const char* name, std::vector<Node> nodes, cuda::GraphLaunch& launch) {
    launch = {};
    REQUIRE(runtime.begin_graph(device, nullptr).ok());
    plan.nodes = std::move(nodes);
    return runtime.launch_graph(device, nullptr, name, &launch);
  }
};

constexpr Node kKernel{cudaGraphNodeTypeKernel};
Node fill(size_t bytes) {
  return {cudaGraphNodeTypeMemset, bytes};
}
Node copy(size_t bytes) {
  return {cudaGraphNodeTypeMemcpy, bytes};
}

}  // namespace

TEST_CASE("graphs of the CUDA runtime: equal names, kinds and sizes share an executable graph") {
  Opened gpu;
  cuda::GraphLaunch launch;
  const auto instantiates = [&](const char* name, std::vector<Node> nodes) {
    const auto count = static_cast<int64_t>(nodes.size());
    REQUIRE(gpu.submit(name, std::move(nodes), launch).ok());
    CHECK(launch.nodes == count);
    return launch.instantiated;
  };
  CHECK(instantiates("layer", {kKernel, fill(64), kKernel}));
  CHECK(plan.mode == cudaStreamCaptureModeRelaxed);
  CHECK(!instantiates("layer", {kKernel, fill(64), kKernel}));
  CHECK(plan.updates == 1);
  CHECK(instantiates("layer", {kKernel, fill(128), kKernel}));
  CHECK(instantiates("layer", {kKernel, copy(64), kKernel}));
  CHECK(instantiates("layer", {kKernel, kKernel}));
  CHECK(instantiates("token", {kKernel, kKernel}));
  CHECK(!instantiates("layer", {kKernel, kKernel}));
  CHECK(instantiates("layer", {}));
  CHECK(plan.launches == 8);
  CHECK(plan.executables == 6);
}

TEST_CASE("graphs of the CUDA runtime: what cannot be updated is instantiated again, and that is no error") {
  Opened gpu;
  cuda::GraphLaunch launch;
  REQUIRE(gpu.submit("layer", {kKernel}, launch).ok());
  plan.update_fails = true;
  CHECK(gpu.submit("layer", {kKernel}, launch).ok());
  CHECK(launch.instantiated);
  CHECK(plan.executables == 1);
  CHECK(gpu.runtime.last_error(gpu.device).ok());
  CHECK(gpu.submit("layer", {kKernel}, launch).ok());
  CHECK(!launch.instantiated);
}

TEST_CASE("graphs of the CUDA runtime: a failure is a status with the function, and the next graph runs") {
  Opened gpu;
  cuda::GraphLaunch launch;
  for (const auto& [fails, function] : {std::pair{&Planned::end_fails, "cudaStreamEndCapture"},
                                        std::pair{&Planned::instantiate_fails, "cudaGraphInstantiate"},
                                        std::pair{&Planned::launch_fails, "cudaGraphLaunch"}}) {
    CAPTURE(function);
    plan.*fails = true;
    const cuda::Status status = gpu.submit(function, {kKernel}, launch);
    CHECK(status.code == (fails == &Planned::instantiate_fails ? cuda::StatusCode::out_of_memory
                                                               : cuda::StatusCode::failed));
    CHECK(std::string(status.text).starts_with(function));
    CHECK(gpu.runtime.last_error(gpu.device).ok());
    CHECK(gpu.submit(function, {kKernel}, launch).ok());
  }
  CHECK(plan.launches == 3);
}

TEST_CASE("graphs of the CUDA runtime: kinds of work without end keep few executable graphs") {
  Opened gpu;
  cuda::GraphLaunch launch;
  int most = 0;
  for (size_t bytes = 1; bytes <= 1000; ++bytes) {
    REQUIRE(gpu.submit("layer", {fill(bytes)}, launch).ok());
    most = std::max(most, plan.executables);
  }
  CHECK(most == 256);
}
