// Search of the fastest layout of a recipe that fits: tensor, pipeline, context and expert parallelism,
// virtual stages, sharding, micro-batch and recomputation.
#pragma once

#include <string>
#include <vector>

#include "planner/overrides.hpp"
#include "planner/plan.hpp"

namespace capstan::planner {

struct Layout {
  // Of the recipe, only those that change it.
  std::vector<std::string> overrides;
  RunShape shape;
  StepTime time;
  double bytes = 0;  // of the fullest rank
  // Whether the bytes are those of the trainer's step, or by formula.
  bool exact = false;
};

struct SearchResult {
  // Layouts whose sizes divide, and those of them that fit by formula.
  int64_t tried = 0, fitting = 0;
  // The fastest that are legal recipes and fit, best first.
  std::vector<Layout> layouts;
};

// Searches on dist.world_size GPUs. The batch, the model and number formats are those of the recipe. All
// layouts are ranked with a formula of the pipeline; the pipelines of the best are then simulated.
SearchResult search_layouts(const config::Config& config, const Cluster& cluster, const Resolver& resolve,
                            size_t most = 5);

// Why `other` is slower: the part of the step that grows the most, "pipeline bubble: 1.20 s more".
std::string slower_by(const Layout& best, const Layout& other);

}  // namespace capstan::planner
