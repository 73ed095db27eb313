// The plan of a run: whether it fits, how fast it is, and what limits it.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "planner/cluster.hpp"
#include "planner/run_shape.hpp"
#include "planner/step_time.hpp"
#include "tensor/device.hpp"

namespace capstan::planner {

// How memory is found. exact: by the trainer's own step on the meta device, for the kernels of CUDA; formula:
// in microseconds (memory.hpp); automatic: exact for the fullest ranks, as many as take about a second.
enum class MemoryChoice : uint8_t { automatic, exact, formula };

// Memory of the ranks of one pipeline stage: each has as much.
struct RankMemory {
  bool exact = false;
  std::array<double, kMemoryCategories> bytes{};  // at the time of the peak
  double cached = 0;                              // kept by the allocator
  double host = 0;                                // of the host, for one rank
  double total() const;
};

// A part of the time of a step, the largest first.
struct TimePart {
  // "gemm", "attention", "memory_bound", "recomputation", "tensor_parallel", "context_parallel",
  // "expert_parallel", "activation_offload", "pipeline_transfers", "pipeline_bubble", "data_parallel",
  // "optimizer", "other".
  std::string name;
  double exposed = 0, hidden = 0;  // seconds
};

struct Plan {
  RunShape shape;
  Cluster cluster;
  // Of each pipeline rank.
  std::vector<RankMemory> memory;
  size_t fullest = 0;
  // Of the host, for the ranks of one node.
  double host_bytes = 0;
  // Passes through layers that are left of those that exact memory may take (exact_fullest()).
  int64_t passes = 0;
  // Whether the fullest rank fits its GPU, and the ranks of a node their host.
  bool fits = false;
  StepTime time;
  // All parts; their exposed seconds add up to time.seconds.
  std::vector<TimePart> parts;
  double tokens_per_second = 0, tflops_per_gpu = 0, mfu = 0;
  // What limits the run, one sentence each.
  std::vector<std::string> limits;
  // Warnings: a tensor-parallel group that leaves the fast domain, and the like.
  std::vector<std::string> warnings;
};

// Throws ErrorCode::unsupported for a recipe that the trainer refuses, also for formats that the GPU does not
// have; config for a format that the cluster has no figure for.
Plan make_plan(const config::Config& config, const Cluster& cluster,
               MemoryChoice memory = MemoryChoice::automatic);

// Throws ErrorCode::unsupported for number formats that the GPU does not have, as the trainer does when it
// starts on such a GPU; nothing where its compute capability is not known.
void refuse_missing_formats(const config::Config& config, const Cluster& cluster);

// The cluster with no more memory than resilience.memory_limit and memory_limit_host allow.
Cluster with_memory_limits(const config::Config& config, Cluster cluster);

// Whether bytes of a rank fit its GPU, and those of the host, for one rank, the host of a node.
bool fits_memory(const RunShape& shape, const Cluster& cluster, double bytes, double host_bytes);
// Whether the bytes of all ranks of a node are more than its host has; false where that is not known.
bool exceeds_host(const Cluster& cluster, double node_bytes);
// Ranks that share a host.
int64_t ranks_of_node(const RunShape& shape, const Cluster& cluster);

// Memory of the rank that the formula finds the fullest; its host memory is the most of all ranks.
RankMemory fullest_by_formula(const RunShape& shape);
// Bytes by which the memory of the trainer's step may be more than that by formula (docs/planning.md): with
// sharded gradients those of a block too, which may be there at the time of the peak or not. A layout without
// exact memory fits where it leaves as many.
double formula_reserve(const RunShape& shape, const Cluster& cluster);

// Memory of the fullest rank by the trainer's step: of the ranks that may be the fullest, by the error of the
// formula, up to the first that does not fit.
// passes: layers that the steps may pass through, from which those that they take are subtracted (a thousand
// take about 0.1 s); nullopt where they are too few.
inline constexpr int64_t kAffordablePasses = 4000;
std::optional<RankMemory> exact_fullest(config::Config config, const Cluster& cluster, int64_t& passes);

}  // namespace capstan::planner
