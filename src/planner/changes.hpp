// Changes of a recipe with their price: those after which it fits, and those that make it faster.
#pragma once

#include <string>
#include <vector>

#include "planner/overrides.hpp"
#include "planner/plan.hpp"

namespace capstan::planner {

struct Change {
  // What it does: "recompute norms, micro-batch 1". Empty for changes that make a plan faster.
  std::string name;
  std::vector<std::string> overrides;
  double seconds = 0;                // of a step
  double bytes = 0, host_bytes = 0;  // of the fullest rank
  // Whether the bytes are those of the trainer's step. If not, they come from the formula, scaled by what the
  // exact figure of the plan is of it.
  bool exact = false;
};

// The smallest changes after which a plan that does not fit does, the cheapest in time first: sharding,
// recomputation, the micro-batch, tensor, pipeline, context and expert parallelism, and offload to host
// memory. A change of several kinds is listed only where it is faster than every change of fewer kinds that
// fits. The model, the global batch size and the number of GPUs stay. Memory is exact where that of the plan
// is, and where it takes little time; host memory is limited where the cluster says how much there is. At
// most `most`; empty for a plan that fits.
std::vector<Change> ways_to_fit(const Plan& plan, const Resolver& resolve, size_t most = 6);

// At most `most` single changes that make a plan that fits faster by 2 % and fit too, the fastest first.
std::vector<Change> faster_changes(const Plan& plan, const Resolver& resolve, size_t most = 3);

}  // namespace capstan::planner
