// A cluster: what one GPU computes and holds, how GPUs are joined, and which fractions of the peaks are
// attained. configs/cluster/NAME.yaml are presets with the source of each figure; a user's file has the same
// fields.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/core/field.hpp"
#include "config/core/library.hpp"
#include "config/sections/train.hpp"

namespace capstan::planner {

// Where the attained fractions come from. It decides how wide the range of an estimated time is.
enum class Calibration : uint8_t { none, published, measured };

// GB/s by the number of nodes, as a cluster file has them.
using BandwidthByNodes = std::vector<std::pair<std::string, double>>;

struct Cluster {
  // Name of the preset, or path of the file; not a field.
  std::string name;

  std::string gpu;
  std::optional<std::string> device_name;  // of one GPU, as its driver says it
  // CUDA's, such as 9.0, by which the trainer decides which formats the GPU has. 0: it is no GPU of CUDA.
  std::optional<double> compute_capability;
  config::DeviceKind device = config::DeviceKind::cuda;
  config::Bytes memory, usable_memory;
  // Dense peaks in TFLOP/s.
  double bf16_tflops = 0;
  std::optional<double> fp8_tflops, fp4_tflops, tf32_tflops, fp32_tflops;
  double memory_bandwidth = 0;  // GB/s
  int64_t multiprocessors = 1;
  int64_t gemm_tile_rows = 128, gemm_tile_columns = 256;

  int64_t gpus_per_node = 8;
  std::optional<int64_t> fast_domain_size;
  double intra_bandwidth = 0, inter_bandwidth = 0;  // GB/s of one GPU in one direction
  std::optional<double> intra_peer_bandwidth;       // GB/s
  double intra_latency = 0, inter_latency = 0;      // microseconds
  // GB/s of an all-reduce by the number of nodes; of an all-gather or reduce-scatter, as the first unless
  // given.
  BandwidthByNodes bus_bandwidth_by_nodes, gather_bandwidth_by_nodes;

  // Of one node, for offload. nullopt: it is not known, and not limited.
  std::optional<config::Bytes> host_memory;
  // GB/s of one GPU in one direction, and of the host's memory for each GPU, as attained; both assumed unless
  // given.
  double host_bandwidth = 25, host_memory_bandwidth = 40;

  double gemm_efficiency = 0.8;
  // At an inner dimension of this length a GEMM attains half of its rate.
  double gemm_fill_length = 256;
  std::optional<double> fp8_gemm_efficiency, fp4_gemm_efficiency;
  // Rate of the grouped GEMMs of experts by that of one GEMM with the same tiles. SimuMax measured 0.65 of
  // the peak on A100 PCIe, where other GEMMs had 0.73.
  double grouped_gemm_efficiency = 0.89;
  // At 4096 tokens.
  double attention_forward_efficiency = 0.5, attention_backward_efficiency = 0.4;
  // At this many tokens attention attains half of its rate for endless sequences. 0: the same at all lengths.
  double attention_fill_length = 0;
  double memory_efficiency = 0.8;
  double intra_efficiency = 0.7, inter_efficiency = 0.9;
  double kernel_latency = 4;  // microseconds
  double other_fraction = 0.05;
  Calibration calibration = Calibration::none;

  std::optional<double> power;           // W of one GPU
  std::optional<double> price_per_hour;  // of one GPU, in any currency
  // Energy of the building by that of its computers. Assumed.
  double power_usage_effectiveness = 1.2;

  // Of one GPU and its part of the node and the network. Llama 3 (arXiv 2407.21783): 419 unexpected
  // interruptions in 54 days of 16384 H100, 16384 * 54 * 24 / 419.
  double gpu_hours_between_failures = 50'676;
  double restart_time = 600;  // seconds from a failure to the next step; assumed
  // GB/s of storage for each GPU. Llama 3: 2 TB/s sustained, here for 16384 GPUs; not re-read.
  double storage_bandwidth = 0.122;

  // GPUs that share the fast network: a node, or a rack such as NVL72.
  int64_t fast_domain() const { return fast_domain_size.value_or(gpus_per_node); }
  // Half the width of the range of an estimated time, as a fraction: 0.1 with measured fractions, else 0.2.
  // These are the accuracies that published planners reach (docs/planning.md).
  double uncertainty() const { return calibration == Calibration::measured ? 0.1 : 0.2; }
};

// A cluster file: every field that has no default value, and each with the text given for it as a comment.
std::string cluster_text(const Cluster& cluster, const std::map<std::string, std::string>& comments);

// The fields of a cluster, with doc, unit and range.
const config::RecordInfo& cluster_fields();

// Reads a preset by name, or a file (a word with "/" or ending in .yaml or .yml). Throws ErrorCode::not_found
// with similar names, io or format for a file that cannot be read, and config for wrong fields, all of them
// at once with their locations.
Cluster read_cluster(const std::string& name_or_file,
                     const config::Library& library = config::Library::standard());

// A cluster from the text of a file, which errors call `name`.
Cluster parse_cluster(std::string text, const std::string& name);

// The preset of a GPU with that name, as its driver says it; nullopt: there is none.
std::optional<Cluster> cluster_of_gpu(const std::string& device_name,
                                      const config::Library& library = config::Library::standard());

}  // namespace capstan::planner

template <>
struct capstan::config::EnumNames<capstan::planner::Calibration> {
  static constexpr EnumEntry<capstan::planner::Calibration> list[] = {
      {capstan::planner::Calibration::none, "none", "assumed"},
      {capstan::planner::Calibration::published, "published",
       "published measurements of kernels and collectives on such GPUs"},
      {capstan::planner::Calibration::measured, "measured", "measured on this cluster"},
  };
};
