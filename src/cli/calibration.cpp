#include "cli/calibration.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/commit.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "comm/channel.hpp"
#include "comm/mesh.hpp"
#include "comm/reduce.hpp"
#include "kernels/bench/bench.hpp"
#include "kernels/table.hpp"
#include "planner/cluster.hpp"
#include "planner/gemm_fit.hpp"
#include "planner/kernels.hpp"
#include "planner/step_time.hpp"
#include "train/records/run_dir.hpp"
#include "train/setup/cuda.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/setup/transport.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/step_measurement.hpp"

namespace capstan::cli {

namespace {

using planner::GemmFormat;

double rounded(double value) {
  return parse_double(significant(value, 4)).value_or(value);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

class ClusterMeasurement {
 public:
  ClusterMeasurement(const config::Config& config, comm::World& world, double seconds)
      : config_(config),
        world_(world),
        seconds_(seconds),
        backend_(train::backend_of(config.train.device)),
        device_(train::make_device(config_, train::local_rank_of(world))),
        type_(backend_.gemm_type(train::compute_type(config.mixed_precision))) {}

  std::string text() {
    begin();
    measure_memory_kernels();
    measure_gemms();
    measure_attention();
    measure_collectives();
    cluster_.calibration = planner::Calibration::measured;
    note("calibration", "");
    measure_step();
    return "# Measured by `capstan bench --calibrate FILE` on " + counted(world_.size(), "rank") + ", " +
           records::utc_now() + ", commit " + program_commit() + ".\n" +
           planner::cluster_text(cluster_, sources_);
  }

 private:
  void note(const std::string& field, const std::string& source) { sources_[field] = source; }

  // A preset of the GPU gives the peaks of its data sheet; those of other devices are measured.
  void begin() {
    const std::string gpu = train::gpu_name(*device_);
    const auto preset = planner::cluster_of_gpu(gpu);
    if (preset) cluster_ = *preset;
    has_peaks_ = preset.has_value();
    cluster_.device = train::device_kind(config_.train.device);
    cluster_.gpu = gpu.empty() ? device_->description() + ", " +
                                     counted(device_->host_threads().size(), "thread") + " of a rank"
                               : gpu;
    if (!gpu.empty()) cluster_.device_name = gpu;
    config::Config without_limits = config_;
    without_limits.resilience.memory_limit.reset(), without_limits.resilience.memory_limit_host.reset();
    const auto memory =
        train::memory_limit(without_limits, MemoryKind::device,
                            train::memory_sharers(world_, train::gpu_of_rank(world_, config_)));
    if (!memory)
      fail(ErrorCode::unsupported, "the memory of the device is not known: " + device_->description(),
           "measure on cpu or cuda");
    constexpr int64_t kReserved = int64_t{3} << 30;
    const int64_t bytes = memory->bytes + train::backend_of(config_.train.device).library_memory;
    cluster_.memory = {bytes};
    cluster_.usable_memory = {gpu.empty() ? bytes : std::max<int64_t>(1, bytes - kReserved)};
    note("memory", "reported by the system, for one rank");
    note("usable_memory",
         gpu.empty() ? "all of it" : "without CUDA context, NCCL and the driver's part: 3 GiB");
    cluster_.gpus_per_node = world_.local_size();
    cluster_.kernel_latency = rounded(1e6 * kernels::kernel_latency_seconds(*device_));
    note("kernel_latency", "the shortest time of a kernel on few numbers");
  }

  // Kernels of layers that are bound by memory, as the median of their shapes.
  void measure_memory_kernels() {
    const double copy = kernels::measured_copy_gbps(*device_);
    if (!has_peaks_) cluster_.memory_bandwidth = rounded(copy);
    std::vector<double> fractions;
    const auto of_layers = [](std::string_view name) {
      constexpr std::string_view kParts[] = {"norm forward", "norm backward", "rope",   "residual",
                                             "gelu forward", "gelu backward", "swiglu", "column sum"};
      return name.find("expert") == name.npos &&
             std::ranges::any_of(kParts, [&](std::string_view part) { return name.find(part) != name.npos; });
    };
    for (const kernels::KernelRate& kernel : measured(of_layers))
      if (kernel.peak == kernels::Peak::copy) fractions.push_back(kernel.rate / cluster_.memory_bandwidth);
    cluster_.memory_efficiency = rounded(std::min(1.0, median(fractions)));
    if (!has_peaks_) note("memory_bandwidth", "bytes read and written by a copy");
    note("memory_efficiency", "median of " + counted(std::ssize(fractions), "kernel"));
  }

  std::vector<kernels::KernelRate> measured(std::function<bool(std::string_view)> wanted) {
    return kernels::measure_kernels(*device_,
                                    {.attention = type_,
                                     .activations = backend_.runs_on_host_threads ? DType::f32 : type_,
                                     .seconds = seconds_,
                                     .large_model = accelerator_,
                                     .wanted = std::move(wanted)});
  }

  // GEMMs that take much longer than `seconds` are left out.
  std::vector<planner::GemmTime> gemm_times(DType type, double peak_gflops) {
    constexpr double kLongest = 20;
    std::vector<kernels::NamedGemm> shapes = kernels::named_gemms(accelerator_);
    // The inner dimension alone.
    for (const int64_t inner : {64, 256, 1024, 4096}) shapes.push_back({"", false, true, 1024, 1024, inner});
    std::vector<planner::GemmTime> times;
    for (const kernels::NamedGemm& s : shapes) {
      const double rows = planner::real(s.m), columns = planner::real(s.n), inner = planner::real(s.k);
      const double gflop = 2e-9 * rows * columns * inner;
      if (gflop > kLongest * seconds_ * peak_gflops && !times.empty()) continue;
      times.push_back({rows, columns, inner, gflop / kernels::gemm_gflops(*device_, s, type, seconds_)});
    }
    return times;
  }

  // The fit of a type, at that fill length if it is given. Where no data sheet says the peak, it becomes what
  // is attained.
  planner::GemmFit measure_gemms_in(DType type, GemmFormat format,
                                    std::optional<double> fill_length = std::nullopt) {
    const double measured = kernels::measured_gemm_gflops(*device_, type);
    const bool from_sheet = has_peaks_ && (format != GemmFormat::fp32 || cluster_.fp32_tflops);
    if (format == GemmFormat::fp32 && !from_sheet) cluster_.fp32_tflops = 0;
    double& peak = format == GemmFormat::fp32 ? *cluster_.fp32_tflops : cluster_.bf16_tflops;
    if (!from_sheet) peak = 1e-3 * measured;
    const std::vector<planner::GemmTime> times = gemm_times(type, measured);
    planner::GemmFit fitted = planner::fit_gemms(cluster_, format, times, fill_length);
    const std::string origin = "least error over " + counted(std::ssize(times), "GEMM") + " in " +
                               std::string(name_of(type)) + ": " + significant(100 * fitted.error, 2) + " %";
    if (!from_sheet) {
      peak = rounded(peak * fitted.fraction), fitted.fraction = 1;
      note(format == GemmFormat::fp32 ? "fp32_tflops" : "bf16_tflops", origin);
    } else {
      note("gemm_efficiency", origin);
    }
    return fitted;
  }

  void measure_gemms() {
    if (!has_peaks_) {
      // The cores of a host work on one GEMM together, without the waves of a GPU's tiles.
      cluster_.multiprocessors = 1, cluster_.gemm_tile_rows = cluster_.gemm_tile_columns = 8;
      note("gemm_efficiency", "the peaks are what GEMMs attain");
    }
    const planner::GemmFit fitted = measure_gemms_in(type_, format_);
    cluster_.gemm_efficiency = rounded(std::min(1.0, fitted.fraction));
    cluster_.gemm_fill_length = fitted.fill_length;
    note("gemm_fill_length", "the same fit, in " + std::string(name_of(type_)));
    // Without a data sheet the other type is measured too; a CPU may compute bf16 in fp32.
    if (has_peaks_) return;
    if (format_ == GemmFormat::fp32)
      (void)measure_gemms_in(backend_.gemm_type(DType::bf16), GemmFormat::bf16, fitted.fill_length);
    else
      (void)measure_gemms_in(DType::f32, GemmFormat::fp32, fitted.fill_length);
  }

  void measure_attention() {
    const double peak = 1e-9 * planner::peak_flops(cluster_, format_);
    const auto fraction = [&](const std::string& pass) {
      std::vector<double> fractions;
      for (const kernels::KernelRate& kernel :
           measured([&](std::string_view name) { return name.find("attention " + pass) != name.npos; }))
        fractions.push_back(kernel.rate / peak);
      return rounded(std::min(1.0, median(fractions)));
    };
    cluster_.attention_forward_efficiency = fraction("forward");
    cluster_.attention_backward_efficiency = fraction("backward");
    for (const char* field : {"attention_forward_efficiency", "attention_backward_efficiency"})
      note(field, "causal, in " + std::string(name_of(type_)));
    cluster_.attention_fill_length = 0;
    note("attention_fill_length", "not measured; the fractions are those of the lengths of two models");
  }

  // Seconds of an all-gather of that many bytes, on the slowest rank.
  double all_gather_seconds(comm::Communicator& group, int64_t bytes) {
    const int64_t part = std::max<int64_t>(1, bytes / 4 / group.size());
    const Tensor mine = Tensor::zeros(*device_, {part}), all = Tensor::zeros(*device_, {part * group.size()});
    double best = std::numeric_limits<double>::infinity();
    const double start = steady_seconds();
    // As many runs on all ranks.
    for (int more = 1, run = 0; more > 0; ++run) {
      world_.communicator().barrier();
      const double taken = kernels::seconds_on(*device_, [&] {
        comm::TransferBatch batch("calibration");
        batch.all_gather(mine, all);
        group.channel().start(std::move(batch)).wait();
      });
      best = std::min(best, comm::all_reduce(world_.communicator(), taken, comm::ReduceOp::max));
      const bool goes_on = run < 3 || steady_seconds() - start < seconds_;
      more =
          static_cast<int>(comm::all_reduce(world_.communicator(), goes_on ? 1.0 : 0.0, comm::ReduceOp::max));
    }
    return best;
  }

  // Latency of a step in us, and GB/s of one rank, of a ring over the group.
  std::pair<double, double> ring_of(comm::Communicator& group) {
    constexpr int64_t kSmall = 4 << 10, kLarge = 32 << 20;
    const auto ranks = static_cast<double>(group.size());
    const double small = all_gather_seconds(group, kSmall), large = all_gather_seconds(group, kLarge);
    const double rate = (ranks - 1) / ranks * static_cast<double>(kLarge - kSmall) / (large - small);
    return {rounded(std::min(1e4, 1e6 * small / (ranks - 1))), rounded(1e-9 * rate)};
  }

  // The ranks of a host are a tensor-parallel group; those with the same place on each host a data-parallel
  // one.
  void measure_collectives() {
    const int64_t local = world_.local_size(), nodes = world_.size() / local;
    config::Config layout = config_;
    layout.dist = {}, layout.ddp = {}, layout.model.num_moe_experts.reset();
    layout.dist.world_size = world_.size(), layout.dist.tensor_model_parallel_size = local;
    layout.dist.data_parallel_size = nodes,
    layout.dist.distributed_backend = config_.dist.distributed_backend;
    layout.model.num_query_groups.reset();
    comm::Mesh mesh(train::mesh_sizes(layout, world_.size()), world_.rank());
    const auto gpu = train::gpu_of(world_, *device_);
    train::connect(mesh, train::choose_transport(layout, world_, gpu).transport, layout, world_, *device_);
    cluster_.intra_efficiency = cluster_.inter_efficiency = 1;
    for (const char* field : {"intra_efficiency", "inter_efficiency"}) note(field, "");
    if (local > 1) {
      std::tie(cluster_.intra_latency, cluster_.intra_bandwidth) = ring_of(mesh.group("tp"));
      cluster_.intra_peer_bandwidth.reset();
    } else if (!has_peaks_) {
      cluster_.intra_bandwidth = rounded(cluster_.memory_bandwidth / 2);
    }
    const std::string intra = "all-gather over " + std::to_string(local) + " ranks of a node";
    for (const char* field : {"intra_bandwidth", "intra_latency"})
      note(field, local > 1 ? intra : "not measured: one rank on each node");
    if (nodes > 1)
      std::tie(cluster_.inter_latency, cluster_.inter_bandwidth) = ring_of(mesh.group("dp"));
    else if (!has_peaks_)
      cluster_.inter_bandwidth = cluster_.intra_bandwidth, cluster_.inter_latency = cluster_.intra_latency;
    for (const char* field : {"inter_bandwidth", "inter_latency"})
      note(field,
           nodes > 1 ? "all-gather over " + std::to_string(nodes) + " nodes" : "not measured: one node");
  }

  // A training step takes longer than its kernels by themselves, which find their operands in the cache.
  void measure_step() {
    // Ranks measure their own, and have to agree on the size of a step.
    const double gflops = comm::all_reduce(
        world_.communicator(), 1e-9 * planner::peak_flops(cluster_, format_), comm::ReduceOp::max);
    const config::Config step = train::with_short_step(config_, gflops);
    const double seconds = train::measure_step(step, world_, gflops, std::max(2.0, 20 * seconds_)).seconds;
    cluster_.other_fraction = 0;
    const double kernels = planner::step_time(planner::run_shape(step), cluster_).seconds;
    cluster_.other_fraction = rounded(std::clamp(seconds / kernels - 1, 0.0, 1.0));
    const std::string ranks = world_.size() > 1 ? " on " + counted(world_.size(), "rank") : "";
    note("other_fraction", "a training step of " + config_.name + ranks + ": " + significant(seconds, 3) +
                               " s, its kernels " + significant(kernels, 3) + " s by these figures");
  }

  const config::Config& config_;
  comm::World& world_;
  const double seconds_;
  const train::DeviceBackend& backend_;
  std::unique_ptr<Device> device_;
  // Of the step's GEMMs.
  const DType type_;
  const GemmFormat format_ = type_ == DType::f32 ? GemmFormat::fp32 : GemmFormat::bf16;
  const bool accelerator_ = !backend_.lies_in_host_memory;
  bool has_peaks_ = false;
  planner::Cluster cluster_;
  std::map<std::string, std::string> sources_;
};

}  // namespace

std::string measured_cluster(const config::Config& config, comm::World& world, double seconds) {
  return ClusterMeasurement(config, world, seconds).text();
}

}  // namespace capstan::cli
