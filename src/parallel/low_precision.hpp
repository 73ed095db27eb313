// The weights of linear layers whose GEMMs are in 8 or 4 bits (ops/low_precision.hpp): their codes and
// scales, kept until the parameters change, and the state of the scales of all three tensors of a layer.
//
// The scale of a weight comes from its maximum over all ranks that hold parts of it, so that the codes do not
// depend on the layout. These are the ranks of `tensor` and, if the tensor-parallel shard is sharded further,
// those of `shard` and `replica`. Scales of blocks come from this rank's shard; they do not depend on the
// layout if the shards consist of full blocks. Delayed scaling takes maxima of weights, inputs and gradients
// over `tensor`, `shard` and `replica` (the ranks of all three in Megatron: TP, CP and DP), once after each
// optimizer step: the history has one element for a step, however many micro-batches it had.
//
// Weights whose scale is known before their values are gathered can be gathered as codes (FlatStore): each
// rank quantizes the elements that it owns with encode(), and operand_of_codes() returns what operand() would
// return for the gathered values, bit by bit.
//
// For a weight of n elements the codes take n bytes for each role (n / 2 with 4 bits), and the scales less.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "ops/low_precision.hpp"
#include "ops/parameter.hpp"

namespace capstan::parallel {

struct LowPrecisionOptions {
  LowPrecision format;
  // Delayed scaling.
  int64_t history_length = 1;
  bool maximum_of_history = false;
  int64_t margin = 0;
  // Seed of stochastic rounding.
  uint64_t seed = 0;
  // The weights whose GEMMs are in low precision; null: none.
  std::function<bool(const Parameter&)> covers;
};

class LowPrecisionWeights {
 public:
  // `groups`: the groups over which maxima are taken.
  LowPrecisionWeights(Device& device, std::span<const std::unique_ptr<Parameter>> parameters,
                      std::vector<comm::Communicator*> groups, const LowPrecisionOptions& options);
  LowPrecisionWeights(const LowPrecisionWeights&) = delete;
  LowPrecisionWeights& operator=(const LowPrecisionWeights&) = delete;

  // Null: not covered.
  const LayerScaling* scaling(const Parameter& parameter) const;
  const std::vector<const Parameter*>& parameters() const { return covered_; }
  // Whether weights can be gathered as codes: the format has one scale for a tensor.
  static bool has_codes_of_shards(ScalingRecipe recipe) {
    return recipe == ScalingRecipe::delayed || recipe == ScalingRecipe::tensorwise;
  }

  // The operand for a role; quantizes `values` [out, in] where it is not kept. Of experts [experts, out, in]
  // that of each follows the one before; the format has one scale for all of them. scaling() is not null.
  GemmOperand operand(const Parameter& parameter, WeightRole role, const Tensor& values);
  // Weights gathered as codes, of formats with one scale for a tensor: the codes of elements of the weight,
  // `codes` [n] from `values` [n].
  void encode(const Parameter& parameter, const Tensor& values, const Tensor& codes);
  // The operand for a role from all codes of the weight, [out, in]; keeps its transpose, not `codes`.
  GemmOperand operand_of_codes(const Parameter& parameter, WeightRole role, const Tensor& codes);
  // Drops the operands, because the parameters change or leave the memory.
  void drop(const Parameter& parameter);
  void drop_all();

  // After parameters changed: drops their operands, and sets the scales of the weights from `held`, which
  // returns the elements of a parameter that this rank holds (undefined: none). `changed`: the parameters
  // that may have changed. Collective.
  void measure_weights(const std::function<bool(const Parameter&)>& changed,
                       const std::function<Tensor(const Parameter&)>& held);
  // Call before a step. Selects its random numbers; with delayed scaling also resets the maxima, so that
  // weights are quantized again. `held` returns the elements of a weight that this rank holds if it is
  // gathered as codes, whose maximum is taken here; else an undefined tensor.
  void begin_step(int64_t step, const std::function<Tensor(const Parameter&)>& held);
  // Call after a step. With delayed scaling, updates the scales of all tensors from their maxima, unless
  // `control` skips the update (FlatStore::after_update). Collective.
  void advance(const Tensor& control);

  // Delayed scaling: the state of a parameter's layer, fp32 [3, history_length] and [3, 2]; undefined with
  // other recipes.
  Tensor history(const Parameter& parameter) const;
  Tensor scale(const Parameter& parameter) const;

 private:
  struct Layer {
    LayerScaling scaling;
    // Operand of the weight for each WeightRole.
    GemmOperand operands[2];
  };
  bool delayed() const { return options_.format.recipe == ScalingRecipe::delayed; }
  // W^T of codes of a weight, or of each expert.
  Tensor transposed(const Tensor& codes) const;
  Layer& layer(const Parameter& parameter);
  const Layer& layer(const Parameter& parameter) const;
  // Raises the maximum of the weight of covered_[i].
  void raise_maximum(size_t i, const Tensor& values);
  void reduce_over_ranks(const Tensor& amax) const;

  Device& device_;
  std::vector<comm::Communicator*> groups_;
  LowPrecisionOptions options_;
  std::vector<const Parameter*> covered_;
  // Index in `covered_` of each parameter, by Parameter::index(); -1: not covered.
  std::vector<int> index_;
  std::vector<Layer> layers_;
  // fp32 [layers, 3], [layers, 3, history_length], [layers, 3, 2].
  Tensor amax_, history_, scale_;
  // Counter of stochastic roundings in this step. Each rank starts at another value.
  uint64_t rounding_calls_ = 0;
};

}  // namespace capstan::parallel
