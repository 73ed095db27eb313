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
  // Factor of the adapter's update.
  double scale = 1;
  // Dropout probability of the adapter's input.
  double dropout = 0;
  // Separate adapters for q, k, v, gate and up instead of one for the fused layer.
  bool split_fused = false;
  // Whether each row of a weight has a magnitude (DoRA).
  bool magnitudes = false;
  enum class InitialValues : uint8_t { xavier, kaiming, normal, zero };
  InitialValues a = InitialValues::xavier, b = InitialValues::zero;
};

// A slice of a fused layer's outputs with its own adapter: q of linear_qkv.
struct OutputSlice {
  // "linear_q".
  std::string name;
  // Columns of the output on this rank.
  ops::ColumnSegments segments;
  // Features, over all ranks.
  int64_t out = 0;
  // Sharding of the rows of B.
  Sharding sharding;
};

// How a linear layer is sharded over tensor-parallel ranks: not at all (each rank computes all features of
// its rows), by its outputs (column: each rank computes some of the features) or by its inputs (row: each
// rank computes a partial sum). ops/tensor_parallel.hpp says which rows a rank has.
enum class LinearSharding : uint8_t { none, column, row };

// The rows of experts, which follow one another.
struct RowsOfExperts {
  // Rows of each expert here, i64 [experts].
  Tensor sizes;
  // TokenContext::hidden_dropout_rows of each row's token, i64 [rows]; only with dropout of adapters.
  Tensor dropout_rows;
  // See ops::grouped_linear.
  int64_t expected_rows = 0;
};

// The adapters of one linear layer; empty if AdapterOptions::adapts() is false for its path. A layer of
// experts, whose weight is [experts, out, in], has one adapter for each expert: A [experts, rank, in],
// B [experts, out, rank] on the ranks of the weight.
class Adapter {
 public:
  // `weight`, `sharding`: the layer's; of experts the sharding of each one's width. `slices`: used with
  // AdapterOptions::split_fused. The update is in the parallel state of the layer's output, to which it is
  // added: replicated, sharded or a partial sum.
  Adapter(ParamList& parameters, const ModulePath& path, const Parameter& weight, LinearSharding sharding,
          const std::vector<OutputSlice>& slices);

  bool empty() const { return branches_.empty(); }
  // Adds the update to `base` = x W^T, x[N, in], and returns the sum, without the bias. With sequence
  // parallelism x of a column-parallel layer has this rank's rows: the product with A is gathered, not x.
  // experts: where the layer is one of experts.
  Var apply(Tape& tape, Var base, const Var& x, const TokenContext& context,
            const RowsOfExperts* experts = nullptr) const;

 private:
  struct Branch {
    const Parameter *a, *b;
    ops::ColumnSegments segments;
    // Random sequence of the adapter's dropout, see random_sequence_of().
    uint64_t dropout_sequence;
    // The magnitudes of the rows of the weight (DoRA); null: none.
    const Parameter* magnitude = nullptr;
  };
  void add_branch(ParamList& parameters, const ModulePath& path, const OutputSlice& slice);
  const AdapterOptions* options_;
  const Parameter& weight_;
  ops::TensorParallel parallel_;
  bool of_experts_;
  // The ranks over which the layer's width is sharded.
  ShardRanks::AxisRank width_;
  LinearSharding sharding_;
  std::vector<Branch> branches_;
};

}  // namespace capstan::nn
