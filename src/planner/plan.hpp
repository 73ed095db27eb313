// The plan of a run: whether it fits, how fast it is, what limits it, and what to change.
#pragma once

#include <array>
#include <functional>
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
  double host = 0;                                // of the host, for one rank; exact only
  double total() const;
};

// A part of the time of a step, the largest first.
struct TimePart {
  // "gemm", "attention", "memory_bound", "recomputation", "tensor_parallel", "context_parallel",
  // "expert_parallel", "pipeline_transfers", "pipeline_bubble", "data_parallel", "optimizer", "other".
  std::string name;
  double exposed = 0, hidden = 0;  // seconds
};

struct Plan {
  RunShape shape;
  Cluster cluster;
  // Of each pipeline rank.
  std::vector<RankMemory> memory;
  size_t fullest = 0;
  bool fits = false;
  StepTime time;
  // All twelve parts; their exposed seconds add up to time.seconds.
  std::vector<TimePart> parts;
  double tokens_per_second = 0, tflops_per_gpu = 0, mfu = 0;
  // What limits the run, one sentence each.
  std::vector<std::string> limits;
  // Warnings: a tensor-parallel group that leaves the fast domain, and the like.
  std::vector<std::string> warnings;
};

// Throws ErrorCode::unsupported for a recipe that the trainer refuses, config for a format that the cluster
// has no figure for.
Plan make_plan(const config::Config& config, const Cluster& cluster,
               MemoryChoice memory = MemoryChoice::automatic);

// Bytes of the rank that the formula finds the fullest: by formula; and those of the trainer's step.
// passes: layers that the step may pass through, from which those that it takes are subtracted (a thousand
// take a quarter of a second); nullopt where they are too few.
double fullest_by_formula(const RunShape& shape);
inline constexpr int64_t kAffordablePasses = 4000;
std::optional<double> exact_fullest(config::Config config, const Cluster& cluster, int64_t& passes);

// Overrides that make the run fit or make it faster.
struct Change {
  std::vector<std::string> overrides;
  double seconds = 0;  // of a step
  double bytes = 0;    // of the fullest rank
  // Whether the bytes are those of the trainer's step. If not, they come from the formula, scaled by what the
  // exact figure of the plan is of it.
  bool exact = false;
};
// The recipe with further overrides; nullopt where that is no legal recipe.
using Resolver = std::function<std::optional<config::Config>(const std::vector<std::string>& overrides)>;
// At most `most` changes, the fastest first. Of a plan that fits: those that are faster by 2 % and fit too;
// else those that fit. Their memory is exact where that of the plan is, and where it takes little time.
std::vector<Change> find_changes(const Plan& plan, const Resolver& resolve, size_t most = 3);

}  // namespace capstan::planner
