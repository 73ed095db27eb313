// Memory of one rank by formula, for searches and for shapes that are no recipe. The memory of a recipe is
// better taken from train::estimate_step(), which runs the step on the meta device. Formulas:
// docs/planning.md, Memory.
#pragma once

#include <vector>

#include "planner/run_shape.hpp"

namespace capstan::planner {

// Bytes by category, as the trainer counts them.
struct MemoryShape {
  double parameters = 0, gradients = 0, main_parameters = 0, moments = 0;
  double activations = 0;  // of all micro-batches in flight
  double workspace = 0;    // logits, gathered inputs, gradients of a layer and of its largest weight, buffers
  double host = 0;         // of the host, for one rank; not part of the total
  double total() const {
    return parameters + gradients + main_parameters + moments + activations + workspace;
  }
};

// Parameters of one rank of a pipeline rank: those reduced over data and context parallelism, and those of
// routed experts, which have fewer replicas.
struct RankParameters {
  double dense = 0, experts = 0;
  double total() const { return dense + experts; }
};
RankParameters rank_parameters(const RunShape& shape, int64_t pipeline_rank);
// The trained ones: these, or beside frozen weights those of adapters.
RankParameters trained_parameters(const RunShape& shape, int64_t pipeline_rank);

// Those of which a rank updates the optimizer's state: all, or its part of sharded ones.
double updated_parameters(const RunShape& shape, const RankParameters& trained);

// Bytes that a layer keeps of one micro-batch for its backward pass, on one rank.
double layer_activations(const RunShape& shape, bool expert_layer);

// Pairs of micro-batch and chunk that a pipeline rank keeps: those whose backward pass is to come, and those
// of which only weight gradients are.
struct ChunksInFlight {
  int64_t activations = 0, weight_gradients = 0;
};
// At each time of a step at which the rank may keep the most.
std::vector<ChunksInFlight> chunks_in_flight(const RunShape& shape, int64_t pipeline_rank);

// Parameters of the layer that has the most of them, or of the vocabulary, on one rank.
double largest_block(const RunShape& shape);

// Memory of each pipeline rank.
std::vector<MemoryShape> memory_by_rank(const RunShape& shape);

}  // namespace capstan::planner
