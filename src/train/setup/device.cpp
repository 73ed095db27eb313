#include "train/setup/device.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"
#include "kernels/bench/bench.hpp"
#include "kernels/simulated/cublaslt.hpp"
#include "kernels/simulated/device_kernels.hpp"
#include "kernels/simulated/table.hpp"
#include "kernels/table.hpp"
#include "tensor/cuda_device.hpp"
#include "tensor/simulated_device.hpp"
#include "train/setup/cuda.hpp"

namespace capstan::train {

namespace {

std::unique_ptr<Device> make_cpu(const DeviceRequest& request) {
  return make_cpu_device(kernels::cpu_table(), request.threads);
}
std::unique_ptr<Device> make_checked(const DeviceRequest& request) {
  return make_checked_device(kernels::cpu_table(), request.threads);
}

std::string cpu_kernels_text(DType compute) {
  const auto features = kernels::cpu_features();
  const bool native = compute == DType::f32 || (compute == DType::bf16 && features.native_bf16_gemm);
  return std::string(features.instruction_set) +
         (native ? "" : ", " + std::string(name_of(compute)) + " GEMMs widened to fp32");
}

constexpr DeviceBackend kCpu{.table = kernels::cpu_table,
                             .runs_on_host_threads = true,
                             .shares_host_memory = true,
                             .lies_in_host_memory = true,
                             .gemm_type = kernels::cpu_gemm_type,
                             .kernels_text = cpu_kernels_text,
                             .make = make_cpu};
constexpr DeviceBackend kChecked{.table = kernels::cpu_table,
                                 .runs_on_host_threads = true,
                                 .lies_in_host_memory = true,
                                 .queues_work = true,
                                 .gemm_type = kernels::cpu_gemm_type,
                                 .kernels_text = cpu_kernels_text,
                                 .make = make_checked};

std::unique_ptr<Device> make_simulated(const DeviceRequest& request) {
  return std::make_unique<cuda::SimulatedDevice>(kernels::simulated_device_kernels(),
                                                 cuda::SimulatedOptions{.threads = request.threads},
                                                 request.local_rank);
}

// Without the backend, estimates use what the same sources declare when they are compiled for the host.
const kernels::Table& cuda_table() {
  const kernels::Table* const table = cuda_status().table;
  return table ? *table : kernels::gpu_estimate_table();
}
std::optional<DeviceProblem> cuda_problem() {
  const CudaStatus& status = cuda_status();
  if (status.usable) return std::nullopt;
  return DeviceProblem{status.reason, status.help};
}
std::unique_ptr<Device> make_cuda(const DeviceRequest& request) {
  return make_cuda_device(cuda_status(), request.local_rank, request.threads);
}
GpuFormats cuda_formats(int local_rank) {
  const cuda::DeviceFacts facts = facts_of_rank(cuda_status(), local_rank);
  return {facts.name, 10 * facts.major + facts.minor};
}
GpuFormats simulated_formats(int) {
  return {"simulated", kernels::simulated::compute_capability()};
}
constexpr DeviceBackend kCuda{
    .table = cuda_table,
    .rules = cuda::CudaDevice::rules(),
    .memory = [](MemorySharers all) { return gpu_memory_of_rank(cuda_status(), all); },
    .library_memory = kCudaMemory,
    .queues_work = true,
    .gemm_type = [](DType compute) { return compute; },
    .gemm_gflops = 1e5,
    .kernels_text = [](DType) { return std::string(); },
    .problem = cuda_problem,
    .formats = cuda_formats,
    .make = make_cuda};

constexpr DeviceBackend kSimulated{.table = kernels::simulated_table,
                                   .rules = cuda::CudaDevice::rules(),
                                   .lies_in_host_memory = true,
                                   .queues_work = true,
                                   .gemm_type = kernels::cpu_gemm_type,
                                   .kernels_text = [](DType) { return std::string(); },
                                   .formats = simulated_formats,
                                   .make = make_simulated};

}  // namespace

config::DeviceKind device_kind(config::DeviceKind kind) {
  if (kind != config::DeviceKind::automatic) return kind;
  return cuda_problem() ? config::DeviceKind::cpu : config::DeviceKind::cuda;
}

const DeviceBackend& backend_of(config::DeviceKind kind) {
  kind = device_kind(kind);
  if (kind == config::DeviceKind::checked) return kChecked;
  if (kind == config::DeviceKind::simulated) return kSimulated;
  return kind == config::DeviceKind::cuda ? kCuda : kCpu;
}

std::vector<std::string> device_notes(const config::Config& config) {
  std::vector<std::string> notes;
  if (config.train.device != config::DeviceKind::automatic) return notes;
  if (const auto problem = cuda_problem(); problem && cuda_status().built)
    notes.push_back("train.device=auto: on the CPU, because " + problem->reason);
  if (device_kind(config.train.device) != config::DeviceKind::cpu) return notes;
  if (config.mixed_precision.tf32)
    notes.emplace_back(
        "mixed_precision.tf32 has no effect on the CPU: fp32 operands are multiplied as they are");
  if (config.model.cuda_graph_impl == config::CudaGraphImpl::local)
    notes.emplace_back("model.cuda_graph_impl has no effect on the CPU: it has no launches to save");
  return notes;
}

void check_device(config::DeviceKind kind) {
  const DeviceBackend& backend = backend_of(kind);
  if (const auto problem = backend.problem ? backend.problem() : std::nullopt)
    fail(ErrorCode::unsupported,
         "train.device: " + std::string(config::enum_name(kind)) + ": " + problem->reason,
         problem->help + "; train.device=cpu trains here");
  if (kind == config::DeviceKind::meta)
    fail(ErrorCode::unsupported,
         "train.device: meta: the meta device holds shapes and no values, and cannot train",
         "train.device=cpu");
}

void check_precision(const config::MixedPrecisionConfig& precision, const GpuFormats& gpu) {
  using config::Fp8Recipe;
  const auto refuse = [&](const char* field, std::string_view value, const std::string& needed) {
    fail(ErrorCode::unsupported,
         "mixed_precision." + std::string(field) + ": " + std::string(value) +
             " needs a GPU of compute capability " + needed + ", and this one (" + gpu.name + ") has " +
             capability_text(gpu.capability),
         gpu.capability < 89 ? "mixed_precision=bf16_mixed trains on it"
                             : "mixed_precision=bf16_mixed trains on it, and so does FP8 with "
                               "mixed_precision.fp8_recipe=tensorwise");
  };
  if (precision.fp4 && gpu.capability < 100)
    refuse("fp4_recipe", config::enum_name(precision.fp4_recipe), "10.0 or newer");
  if (!precision.fp8) return;
  const std::string_view name = config::enum_name(precision.fp8_recipe);
  if (gpu.capability < 89) refuse("fp8_recipe", name, "8.9 or newer");
  if (precision.fp8_recipe == Fp8Recipe::blockwise && gpu.capability != 90) refuse("fp8_recipe", name, "9.0");
  if (precision.fp8_recipe == Fp8Recipe::mxfp8 && gpu.capability < 100)
    refuse("fp8_recipe", name, "10.0 or newer");
}

void check_device(const config::Config& config, int local_rank) {
  check_device(config.train.device);
  const DeviceBackend& backend = backend_of(config.train.device);
  if (backend.formats) check_precision(config.mixed_precision, backend.formats(local_rank));
  const bool fp64 =
      config.model.num_moe_experts && config.model.moe_router_dtype == config::RouterDtype::fp64;
  if (fp64 && !backend.table().router->logits)
    fail(ErrorCode::unsupported,
         "model.moe_router_dtype: fp64: train.device " +
             std::string(config::enum_name(device_kind(config.train.device))) + " has no router in fp64",
         "model.moe_router_dtype=fp32");
}

static int threads_per_rank(int64_t threads, int local_ranks) {
  return threads > 0 ? static_cast<int>(threads) : std::max(1, available_cores() / local_ranks);
}

std::unique_ptr<Device> make_meta_device_for(config::DeviceKind kind, int64_t threads, int local_ranks) {
  const DeviceBackend& backend = backend_of(kind);
  return make_meta_device(backend.table(),
                          backend.runs_on_host_threads ? threads_per_rank(threads, local_ranks) : 0,
                          backend.rules, backend.shares_host_memory, backend.queues_work);
}

std::unique_ptr<Device> make_device(config::DeviceKind kind, int64_t threads, LocalRank rank) {
  check_device(kind);
  return backend_of(kind).make({.threads = threads_per_rank(threads, rank.count), .local_rank = rank.index});
}

void choose_tf32(const Device& device, const config::MixedPrecisionConfig& precision) {
  if (const auto use_tf32 = device.table().gemm->use_tf32)
    use_tf32(precision.tf32 && precision.params_dtype == config::Precision::fp32);
}

bool launches_graphs(const config::ModelConfig& model, int64_t done) {
  return model.cuda_graph_impl == config::CudaGraphImpl::local && done >= model.cuda_graph_warmup_steps;
}

void limit_memory(Device& device, const config::ResilienceConfig& limits) {
  const auto set = [&](MemoryKind kind, const std::optional<config::Bytes>& limit, const char* field) {
    if (limit) device.limit_memory(kind, limit->value, field);
  };
  const auto &on_device = limits.memory_limit, &on_host = limits.memory_limit_host;
  const bool host_is_less = on_host && (!on_device || on_host->value < on_device->value);
  if (device.shares_host_memory() && host_is_less)
    set(MemoryKind::device, on_host, "resilience.memory_limit_host");
  else
    set(MemoryKind::device, on_device, "resilience.memory_limit");
  if (!device.shares_host_memory()) set(MemoryKind::host, on_host, "resilience.memory_limit_host");
}

std::unique_ptr<Device> make_device(const config::Config& config, LocalRank rank) {
  check_device(config, rank.index);
  std::unique_ptr<Device> device = make_device(config.train.device, config.train.threads.value_or(0), rank);
  choose_tf32(*device, config.mixed_precision);
  return device;
}

}  // namespace capstan::train
