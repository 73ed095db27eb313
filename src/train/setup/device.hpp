// The device of a recipe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "tensor/device.hpp"

namespace capstan::train {

// A rank among those of its host.
struct LocalRank {
  int index = 0, count = 1;
};

// The resources of one device: threads of the host, and the rank on the host, which selects the accelerator.
struct DeviceRequest {
  int threads = 1;
  int local_rank = 0;
};

// Why a device cannot be used here, and what to do.
struct DeviceProblem {
  std::string reason, help;
};

// A GPU whose compute capability limits the number formats of GEMMs.
struct GpuFormats {
  std::string name;
  // 90 for 9.0.
  int capability = 0;
};
// ErrorCode::unsupported, with field and value, for low-precision GEMMs that the tensor cores of this GPU do
// not have.
void check_precision(const config::MixedPrecisionConfig& precision, const GpuFormats& gpu);

// The ranks that share the memory of this rank's host, and of its GPU.
struct MemorySharers {
  int host = 1;
  // 0: the ranks of the host take the GPUs in turn that this process sees.
  int gpu = 0;
  MemorySharers(int of_host, int of_gpu = 0) : host(of_host), gpu(of_gpu) {}  // NOLINT: on purpose
};

// Properties of a kind of device that the trainer uses. "Add a device" in CONTRIBUTING.md begins here.
struct DeviceBackend {
  const kernels::Table& (*table)() = nullptr;
  AllocatorRules rules;
  // Threads of the host run the kernels, each with a part of their workspace.
  bool runs_on_host_threads = false;
  // Tensors lie in the host's memory, where the host accesses them.
  bool shares_host_memory = false;
  // The memory is part of the host's, also where the host does not access it.
  bool lies_in_host_memory = false;
  // Bytes of other memory for each of the ranks that share it. Null, and nothing without the device: unknown.
  std::optional<int64_t> (*memory)(MemorySharers sharers) = nullptr;
  // Bytes of it that the device's libraries take.
  int64_t library_memory = 0;
  // Device::queues_work().
  bool queues_work = false;
  // The type whose GEMM throughput bounds a step that computes in `compute`: another one where the kernels
  // widen the operands.
  DType (*gemm_type)(DType compute) = nullptr;
  // The order of magnitude of its GEMM throughput in GFLOP/s, where it is not measured.
  double gemm_gflops = 100;
  // For the log, what runs the kernels: "avx2, fp16 GEMMs widened to fp32". Empty: the name of the device
  // says it.
  std::string (*kernels_text)(DType compute) = nullptr;
  // Null: it can be used everywhere.
  std::optional<DeviceProblem> (*problem)() = nullptr;
  // The GPU of a local rank, of a device that can be used. Null: every format is computed.
  GpuFormats (*formats)(int local_rank) = nullptr;
  std::unique_ptr<Device> (*make)(const DeviceRequest&) = nullptr;
};
const DeviceBackend& backend_of(config::DeviceKind kind);

// The kind that `auto` stands for in this process: CUDA where a device can be used, else the CPU. Other kinds
// stand for themselves.
config::DeviceKind device_kind(config::DeviceKind kind);

// Sentences for the log: `auto` is the CPU although the program has a CUDA backend; the device that `auto`
// stands for has no TF32.
std::vector<std::string> device_notes(const config::Config& config);

// ErrorCode::unsupported for a device that cannot be used here.
void check_device(config::DeviceKind kind);
// The same; also checks the precision on the GPU of a local rank, and that the device has a router in
// `model.moe_router_dtype`.
void check_device(const config::Config& config, int local_rank);

// The device `meta` that stands for the recipe's device: its kernels with their workspaces, the rounding and
// growth of its allocator, and memory of its own or the host's. threads 0, here and below: the cores of this
// host / local ranks.
std::unique_ptr<Device> make_meta_device_for(config::DeviceKind kind, int64_t threads, int local_ranks);

std::unique_ptr<Device> make_device(config::DeviceKind kind, int64_t threads, LocalRank rank = {});
// Makes mixed_precision.tf32 the choice of this process, on devices that have TF32.
void choose_tf32(const Device& device, const config::MixedPrecisionConfig& precision);
// Whether the launches after `done` steps, or passes of generation, are CUDA graphs (model.cuda_graph_impl).
bool launches_graphs(const config::ModelConfig& model, int64_t done);
// For training: after check_device(), and with choose_tf32().
std::unique_ptr<Device> make_device(const config::Config& config, LocalRank rank);
// Limits the allocator to what memory_limit() (fit.hpp) compares with the estimate of a step, so that it
// takes no more either where the estimate is too low.
void limit_memory(Device& device, const config::ResilienceConfig& limits);
// Local rank on the host of `world`.
inline LocalRank local_rank_of(const comm::World& world) {
  return {world.local_rank(), world.local_size()};
}

}  // namespace capstan::train
