// Search of the fastest layout of a recipe that fits: tensor, pipeline, context and expert parallelism,
// tensor parallelism of experts, virtual stages and schedule, sharding, micro-batch and recomputation.
#pragma once

#include <string>
#include <utility>
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
  // Whether no other layout of the list is as fast with less memory, or faster with as much, by half a
  // percent: the Pareto front of memory and time.
  bool on_front = false;
  // Whether it is the recipe as it is.
  bool is_recipe() const { return overrides.empty(); }
};

struct SearchResult {
  // Layouts whose sizes divide, and those of them that fit by formula.
  int64_t tried = 0, fitting = 0;
  // Where no sizes divide: the nearest smaller and larger global batch that a layout divides, if there are.
  std::vector<int64_t> batches;
  // Legal recipes that fit, the fastest first: the fastest of all, those with less memory that are on the
  // Pareto front of all, and the recipe as it is.
  std::vector<Layout> layouts;
};

// Searches on dist.world_size GPUs. The batch, the model and number formats are those of the recipe. All
// layouts are ranked with a lower bound of the pipeline's time; the pipelines of the best are then simulated,
// until none that is left can be faster. Lists the `most` fastest, of those that differ in recomputation only
// the fastest, at most kFrontLayouts more of the front, and the recipe as it is, however fast.
inline constexpr size_t kFrontLayouts = 6;
SearchResult search_layouts(const config::Config& config, const Cluster& cluster, const Resolver& resolve,
                            size_t most = 5);

// Sets Layout::on_front of each.
void mark_front(std::vector<Layout>& layouts);

// Why `other` is slower than the best: seconds of each part that it takes more, or less (negative), the
// largest first.
std::vector<std::pair<std::string, double>> differences(const Layout& best, const Layout& other);

}  // namespace capstan::planner
