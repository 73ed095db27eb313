// Plans of cuDNN, built without a GPU for GPUs that are described to it: every call that the table of
// kernels/cuda/attention_choice.hpp may choose has one, whose workspace is within the declared one, and so
// have others that cuDNN may get later. cuDNN loads a driver that is none
// (tests/support/fake_cuda_driver.cpp).
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/cuda/attention_choice.hpp"
#define CAPSTAN_GPU cuda
#include "kernels/cuda/cudnn_graph.hpp"

using namespace capstan;
using kernels::AttentionPass;
using kernels::AttentionShape;
using kernels::cuda::CudnnCall;

namespace {

// What cuDNN asks of a GPU of that capability; sizes are those of its data sheet.
std::shared_ptr<cudnn_frontend::DeviceProperties> gpu_of(int capability) {
  static void* const driver = dlopen(CAPSTAN_FAKE_CUDA_DRIVER, RTLD_NOW | RTLD_GLOBAL);
  REQUIRE(driver != nullptr);
  const auto number = [](const char* name, int64_t value) {
    return std::string(",\"") + name + "\":" + std::to_string(value);
  };
  const bool is_ampere = capability < 90;
  const std::string text =
      "{\"deviceName\":\"described\",\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,"
      "64]" +
      number("deviceVer", 10 * capability) + number("driverVer", 13000) + number("cudaDeviceId", 0) +
      number("totalGlobalMem", int64_t{80} << 30) + number("regsPerBlock", 65536) +
      number("multiProcessorCount", is_ampere          ? 108
                                    : capability < 100 ? 132
                                                       : 148) +
      number("warpSize", 32) + number("maxSharedMemoryPerBlock", 49152) +
      number("maxSharedMemoryPerBlockOptin", is_ampere ? 166912 : 232448) +
      number("reservedSharedMemoryPerBlock", 1024) + number("maxRegistersPerSM", 65536) +
      number("maxCtasPerSM", 32) + number("maxThreadsPerBlock", 1024) + number("maxThreadsPerSM", 2048) +
      number("pciDeviceId", 0) + number("isTccDriver", 0) + number("supportCoopLaunch", 1) +
      number("smClockRateKHz", 1800000) + number("memClockRateKHz", 2600000) +
      number("l2CacheSize", 50 << 20) + "}";
  auto gpu = std::make_shared<cudnn_frontend::DeviceProperties>();
  auto status = gpu->deserialize({text.begin(), text.end()});
  REQUIRE_MESSAGE(status.is_good(), status.get_message());
  return gpu;
}

AttentionShape plan_shape(int64_t groups, int64_t per_group, int64_t qk_dim, int64_t v_dim, int64_t batch,
                          int64_t seq, int64_t window = 0, bool causal = true) {
  AttentionShape a;
  a.groups = groups;
  a.heads_per_group = per_group;
  a.qk_dim = qk_dim;
  a.v_dim = v_dim;
  a.batch = batch;
  a.seq = seq;
  a.window = window;
  a.causal = causal;
  a.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(qk_dim)));
  return a;
}

// The call for heads without gaps; `apart`: for packed QKV, whose groups stand in the place of sequences.
CudnnCall call_of(int capability, AttentionPass pass, const AttentionShape& a, DType type, bool apart) {
  CudnnCall c{.backward = pass == AttentionPass::backward, .type = type, .seq = a.seq};
  const bool has_matrix = kernels::cudnn_matrix_bytes(capability, pass, a) > 0;
  const int64_t groups = kernels::cudnn_groups(capability, pass, a, kernels::kMostMatrixBytes);
  c.sequences = apart ? groups : has_matrix ? 1 : a.batch;
  c.heads = (apart ? 1 : groups) * a.heads_per_group;
  c.key_heads = apart ? 1 : groups;
  c.qk_dim = a.qk_dim, c.v_dim = a.v_dim, c.scale = a.scale, c.causal = a.causal, c.window = a.window;
  const int64_t group = (a.heads_per_group + 1) * a.qk_dim + a.v_dim, row = a.groups * group;
  const auto strides = [&](int64_t heads, int64_t width) {
    return apart ? kernels::cuda::CudnnStrides{group, width, row}
                 : kernels::cuda::CudnnStrides{a.seq * heads * width, width, heads * width};
  };
  c.q = strides(c.heads, c.qk_dim), c.k = strides(c.key_heads, c.qk_dim);
  c.v = strides(c.key_heads, c.v_dim), c.out = strides(c.heads, c.v_dim);
  if (c.backward) c.dout = c.out, c.dq = c.q, c.dk = c.k, c.dv = c.v;
  return c;
}

// Workspace of the plan; nothing: cuDNN has none.
std::optional<int64_t> plan_workspace(int capability, const CudnnCall& call, std::string& reason) {
  const auto graph = kernels::cuda::cudnn_graph(call, capability);
  graph->set_device_properties(gpu_of(capability));
  const int64_t workspace = kernels::cuda::build_plan(*graph, nullptr, reason);
  return workspace < 0 ? std::nullopt : std::optional(workspace);
}

void check_plan(int capability, AttentionPass pass, const AttentionShape& a, DType type = DType::bf16,
                bool apart = false) {
  INFO("capability ", capability, pass == AttentionPass::backward ? ", backward," : ", forward,",
       " groups=", a.groups, " heads/group=", a.heads_per_group, " qk=", a.qk_dim, " v=", a.v_dim,
       " batch=", a.batch, " seq=", a.seq, " window=", a.window, " causal=", a.causal, " apart=", apart);
  std::string reason;
  const auto workspace = plan_workspace(capability, call_of(capability, pass, a, type, apart), reason);
  CHECK_MESSAGE(workspace.has_value(), reason);
  if (workspace) CHECK(static_cast<size_t>(*workspace) <= kernels::cudnn_workspace(capability, pass, a));
}
// Whether a plan is missing.
bool has_no_plan(int capability, AttentionPass pass, const AttentionShape& a) {
  std::string reason;
  return !plan_workspace(capability, call_of(capability, pass, a, DType::bf16, false), reason);
}

}  // namespace

TEST_CASE("cuDNN has plans for what the table chooses, within the declared workspace") {
  for (const kernels::CudnnHeads& h : kernels::kCudnnHeads) {
    const auto check = [&](const AttentionShape& a, DType type, bool apart) {
      CHECK(kernels::prefers_cudnn(h.capability, h.pass, a));
      check_plan(h.capability, h.pass, a, type, apart);
    };
    for (const int64_t seq : {4096, 8192})
      check(plan_shape(8, 4, h.qk_dim, h.v_dim, 1, seq), DType::bf16, true);
    // It takes the same plans as 10.0.
    if (h.capability == 103) continue;
    check(plan_shape(8, 3, h.qk_dim, h.v_dim, 3, 1024), DType::bf16, false);
    const bool takes_windows = h.capability >= 100 || h.pass == AttentionPass::forward;
    check(plan_shape(16, 1, h.qk_dim, h.v_dim, 2, 640, takes_windows ? 128 : 0), DType::f16, false);
  }
}

TEST_CASE("cuDNN has plans for other heads and for odd lengths") {
  constexpr auto forward = AttentionPass::forward, backward = AttentionPass::backward;
  for (const int capability : {80, 90, 100}) {
    for (const AttentionPass pass : {forward, backward}) {
      check_plan(capability, pass, plan_shape(2, 3, 96, 96, 2, 37));
      check_plan(capability, pass, plan_shape(2, 2, 128, 128, 1, 4097, 1000));
      check_plan(capability, pass, plan_shape(3, 1, 64, 64, 2, 129, 0, false));
      if (pass == forward || capability == 90)
        check_plan(capability, pass, plan_shape(2, 2, 256, 256, 1, 1024));
    }
    check_plan(capability, forward, plan_shape(1, 2, 64, 64, 1, 1));
  }
}

TEST_CASE("cuDNN refuses what the simulated GPU's refuses") {
  CHECK(has_no_plan(90, AttentionPass::backward, plan_shape(1, 2, 64, 64, 1, 1)));
  CHECK(has_no_plan(80, AttentionPass::backward, plan_shape(1, 2, 192, 128, 1, 64)));
  CHECK(has_no_plan(100, AttentionPass::backward, plan_shape(1, 2, 256, 256, 1, 64)));
  CHECK(has_no_plan(100, AttentionPass::backward, plan_shape(1, 2, 160, 128, 1, 64)));
  CHECK(has_no_plan(90, AttentionPass::forward, plan_shape(1, 2, 20, 20, 1, 64)));
  CHECK(has_no_plan(75, AttentionPass::forward, plan_shape(1, 2, 64, 64, 1, 64)));
}
