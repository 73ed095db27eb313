// Recipes of layouts: the overrides that turn a recipe into another shape.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "planner/run_shape.hpp"

namespace capstan::planner {

// The recipe with further overrides; nullopt where that is no legal recipe.
using Resolver = std::function<std::optional<config::Config>(const std::vector<std::string>& overrides)>;

// Whether heads, MLP and vocabulary can be divided by a tensor-parallel size.
bool divides_tensors(const RunShape& shape, int64_t tp);

// Divides the layers over the PP * VPP stages: evenly; else layers, embedding and output layer together;
// else, with VPP 1, with fewer layers in the last stage. Returns false where none is possible.
bool divide_layers(RunShape& shape);

// The schedule that the trainer takes where the recipe says none.
config::PipelineSchedule default_schedule(int64_t vpp);

// Layers of the largest stage.
int64_t largest_stage(const RunShape& shape);

// Forms of selective recomputation that save memory of this model, each with the parts of `least` too.
std::vector<RecomputeShape> selective_recomputations(const RunShape& shape, const RecomputeShape& least = {});
// Full recomputation of a quarter, half and three quarters of the layers of the largest stage, as far as
// these are different numbers.
std::vector<RecomputeShape> partial_recomputations(const RunShape& shape);
// "none", "full", "8 layers" of each stage, or the modules: "mlp,layernorm".
std::string recomputation_text(const RunShape& shape);

// Overrides that turn the recipe of `base` into `shape`: layout, batch, sharding, recomputation and offload.
std::vector<std::string> overrides_of(const RunShape& base, const RunShape& shape);

// The recipe with the overrides, which get more where the recipe writes down a split of its layers, or where
// its global batch size would change. nullopt: it is not legal.
std::optional<config::Config> legal_recipe(const Resolver& resolve, std::vector<std::string>& overrides,
                                           int64_t global_batch);

}  // namespace capstan::planner
