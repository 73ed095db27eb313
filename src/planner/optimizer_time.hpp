// Time of the optimizer's update by formula. Formulas: docs/planning.md.
#pragma once

#include "planner/cluster.hpp"
#include "planner/memory.hpp"
#include "planner/run_shape.hpp"

namespace capstan::planner {

// Seconds of the update of the state of a rank that trains these parameters, on the device or with offloaded
// state.
double update_seconds(const RunShape& shape, const Cluster& cluster, const RankParameters& trained);

// Seconds of Muon's Newton-Schulz iterations on a pipeline rank; 0 for other optimizers. A matrix is
// orthogonalized by one of the ranks over which the optimizer's state is sharded.
double orthogonalization_seconds(const RunShape& shape, const Cluster& cluster, int64_t pipeline_rank);

}  // namespace capstan::planner
