// V8: whether the fastest measured layout is among the first three that the formula names, over a published
// sweep. 14 of 14 pairs of model and number of nodes were wanted; docs/planning.md says why it is 6.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "planner/published_rows.hpp"
#include "planner/step_time.hpp"

using namespace capstan;
using namespace capstan::planner;
using namespace capstan::planner::test;

namespace {

struct Measured {
  std::string layout;
  double predicted = 0, seconds = 0;
};

// The cluster of the sweep, with the medians of the bandwidths that its authors measured on it.
Cluster sweep_cluster() {
  Cluster cluster = read_cluster("h100");
  cluster.bus_bandwidth_by_nodes = {{"2", 362},   {"4", 160},   {"8", 99.6},
                                    {"16", 84.7}, {"32", 64.9}, {"64", 32.9}};
  cluster.gather_bandwidth_by_nodes = {{"2", 185}, {"4", 119}, {"8", 69}, {"16", 55}, {"32", 28}, {"64", 11}};
  cluster.intra_efficiency = 250.0 / cluster.intra_bandwidth;
  return cluster;
}

RunShape swept_shape(const PublishedRow& row) {
  RunShape s = shape_of(row, true);
  s.tied = row.text("model") == "Llama-like 1B";
  s.sharding = row.text("notes").starts_with("ZeRO-1") ? config::ShardingStrategy::optim
                                                       : config::ShardingStrategy::no_shard;
  // nanotron reduces gradients during the last backward pass.
  s.overlap_grad_reduce = true;
  return s;
}

}  // namespace

TEST_CASE("the fastest layout of a published sweep is among the first three in six pairs of fourteen") {
  const Cluster cluster = sweep_cluster();
  std::map<std::string, std::vector<Measured>> sweeps;
  for (const PublishedRow& row : published_rows("ultrascale.csv")) {
    if (!row.has("iter_time_s") || row.size("pp") > row.size("layers")) continue;
    sweeps[row.text("model") + ", " + row.text("ngpu") + " GPUs"].push_back(
        {"tp " + row.text("tp") + ", pp " + row.text("pp") + ", micro-batch " + row.text("mbs"),
         step_time(swept_shape(row), cluster).seconds, row.number("iter_time_s")});
  }
  int found = 0;
  for (auto& [name, layouts] : sweeps) {
    std::ranges::sort(layouts, {}, &Measured::predicted);
    const auto best = std::ranges::min_element(layouts, {}, &Measured::seconds);
    const auto place = best - layouts.begin() + 1;
    MESSAGE(name, ": ", best->layout, " is at place ", place, " of ", layouts.size(), "; ",
            layouts.front().layout, " was named and took ", layouts.front().seconds / best->seconds,
            " times as long");
    if (place <= 3) ++found;
  }
  MESSAGE("V8: ", found, " of ", sweeps.size());
  CHECK(sweeps.size() == 14);
  CHECK(found >= 6);
}
