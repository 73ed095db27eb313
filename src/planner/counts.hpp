// FLOPs and parameters of a model by formula (docs/planning.md gives the sources). A multiply and an add are
// two FLOPs.
#pragma once

#include "planner/run_shape.hpp"

namespace capstan::planner {

// What counts as a FLOP of the model. The same run is quoted 4 to 13 % apart at 4k to 8k tokens, so a figure
// is printed with the name of its convention.
enum class FlopConvention : uint8_t {
  // Megatron-LM's and Megatron-Bridge's: causal attention, the output layer, neither embedding nor router.
  causal,
  // Full attention, the output layer, no embedding: NeMo until 2024, Llama 3, Megatron-LM's first README.
  full,
  // PaLM's, and llm-foundry's and nanotron's form of it: 6 N + 12 L q s with full attention, where N includes
  // embedding tables, norms and biases.
  six_n,
  // As `full`, with one more forward pass of all layers for full recomputation (Narayanan et al. 2021).
  hardware
};

// FLOPs of forward and backward pass for one token. Weights that are frozen beside adapters take four
// of six in `causal` and `full`.
double flops_per_token(const RunShape& shape, FlopConvention convention = FlopConvention::causal);

// Multiply-adds of the scores and the weighted sum of one token in one layer with full attention.
double score_macs(const RunShape& shape);
// The fraction of those that causal attention computes: 1/2, less with a sliding window, as the mean over the
// layers.
double causal_fraction(const RunShape& shape);

// Parameters of one layer: `sharded` are divided over tensor parallelism, `replicated` are not, `experts` are
// those of routed experts.
struct LayerParameters {
  double sharded = 0, replicated = 0, experts = 0;
  double total() const { return sharded + replicated + experts; }
};
LayerParameters layer_parameters(const RunShape& shape, bool expert_layer);
// Parameters of one depth of multi-token prediction, without embedding and output layer.
LayerParameters mtp_parameters(const RunShape& shape);

// All parameters, the padded vocabulary and adapters included.
double total_parameters(const RunShape& shape);
// Parameters that compute one token: topk experts in place of all.
double active_parameters(const RunShape& shape);

}  // namespace capstan::planner
