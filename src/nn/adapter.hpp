// Adapters of linear layers: which layers get one, and what it adds to their product.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "nn/param_list.hpp"
#include "nn/token_context.hpp"
#include "ops/adapter.hpp"
#include "ops/tensor_parallel.hpp"

namespace capstan::nn {

// The adapters of a model, as its layers ask for them.
struct AdapterOptions {
  std::function<bool(std::string_view path)>
      adapts;  // by the layer's path: "decoder.layers.0.mlp.linear_fc1"
  int64_t rank = 0;
  double scale = 1;         // of the update
  double dropout = 0;       // of the adapter's input
  bool parts = false;       // an adapter for each of q, k, v, gate and up instead of one for the fused layer
  bool magnitudes = false;  // DoRA
  enum class First : uint8_t { xavier, kaiming, normal, zero } a = First::xavier, b = First::zero;
};

// A part of a fused layer's outputs with a name of its own: q of linear_qkv.
struct OutputPart {
  std::string name;      // of the layer that it would be: "linear_q"
  ops::ColumnRuns runs;  // of this rank's columns
  int64_t out = 0;       // features, over all ranks
  Sharding sharding;     // of its weight's rows
};

// The adapters of one linear layer; none where its path is no target.
class Adapter {
 public:
  // `weight`: the layer's, as its spec says. `column`: cut by outputs, else by inputs where it is cut at all. `parts` are taken
  // where the options ask for adapters of parts.
  Adapter(ParamList& parameters, const ModulePath& path, const Parameter& weight, bool column,
          const std::vector<OutputPart>& parts);

  bool empty() const { return branches_.empty(); }
  // The whole layer's product without its bias, x[N, in] -> base + update: `base` is x W^T of the same rows, on this rank.
  Var apply(Tape& tape, Var base, const Var& x, const TokenContext& context) const;

 private:
  struct Branch {
    const Parameter *a, *b;
    ops::ColumnRuns runs;
    uint64_t hidden_states;                // of its dropout
    const Parameter* magnitude = nullptr;  // DoRA
  };
  void add_branch(ParamList& parameters, const ModulePath& path, const OutputPart& part);
  const AdapterOptions* options_;
  const Parameter& weight_;
  ops::TensorParallel parallel_;
  bool column_;
  std::vector<Branch> branches_;
};

}  // namespace capstan::nn
