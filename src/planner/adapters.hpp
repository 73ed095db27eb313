// Adapters beside frozen weights: which linear layers have one, its parameters, and what it saves
// (docs/planning.md).
#pragma once

#include "config/sections/config.hpp"
#include "planner/run_shape.hpp"

namespace capstan::planner {

// shape: with the sizes of the model.
AdapterShape adapter_shape(const RunShape& shape, const config::ModelConfig& model,
                           const config::PeftConfig& peft);

// Parameters of adapters: of experts, and of other layers.
struct AdapterParameters {
  double dense = 0, experts = 0;
  double total() const { return dense + experts; }
};
// Of one layer on one rank.
AdapterParameters adapter_parameters(const RunShape& shape, bool expert_layer);
// Of the model; none without adapters.
AdapterParameters all_adapters(const RunShape& shape);

// Fraction of the layers in which an adapter saves this input. Frozen weights do not save it.
double saves_input(const RunShape& shape, bool expert_layer, LinearLayer::Input input);

// Bytes of one token that the adapters of a layer save beside their inputs, on one rank.
double adapter_activations(const RunShape& shape, bool expert_layer);

}  // namespace capstan::planner
