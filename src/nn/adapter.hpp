// Adapters of linear layers: which layers have one, and the update that it adds to their output.
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

// The adapters of a model.
struct AdapterOptions {
  // True for the paths of adapted layers: "decoder.layers.0.mlp.linear_fc1".
  std::function<bool(std::string_view path)> adapts;
  int64_t rank = 0;
  double scale = 1;    // of the update
  double dropout = 0;  // of the adapter's input
  // Separate adapters for q, k, v, gate and up instead of one for the fused layer.
  bool split_fused = false;
  bool magnitudes = false;  // DoRA
  enum class InitialValues : uint8_t { xavier, kaiming, normal, zero };
  InitialValues a = InitialValues::xavier, b = InitialValues::zero;
};

// A slice of a fused layer's outputs with its own adapter: q of linear_qkv.
struct OutputSlice {
  std::string name;              // "linear_q"
  ops::ColumnSegments segments;  // of this rank's columns
  // Features, over all ranks.
  int64_t out = 0;
  Sharding sharding;  // of its weight's rows
};

// The adapters of one linear layer; empty where its path is no target.
class Adapter {
 public:
  // `weight`: the layer's weight. `column`: the layer is sharded by outputs. `slices`: used with
  // AdapterOptions::split_fused.
  Adapter(ParamList& parameters, const ModulePath& path, const Parameter& weight, bool column,
          const std::vector<OutputSlice>& slices);

  bool empty() const { return branches_.empty(); }
  // Adds the update to `base` = x W^T of this rank's rows, x[N, in], and returns the sum, without the bias.
  Var apply(Tape& tape, Var base, const Var& x, const TokenContext& context) const;

 private:
  struct Branch {
    const Parameter *a, *b;
    ops::ColumnSegments segments;
    uint64_t dropout_sequence;             // random_sequence_of()
    const Parameter* magnitude = nullptr;  // DoRA
  };
  void add_branch(ParamList& parameters, const ModulePath& path, const OutputSlice& slice);
  const AdapterOptions* options_;
  const Parameter& weight_;
  ops::TensorParallel parallel_;
  bool column_;
  std::vector<Branch> branches_;
};

}  // namespace capstan::nn
