#pragma once

#include "nn/adapter.hpp"
#include "nn/param_list.hpp"
#include "ops/tensor_parallel.hpp"

namespace capstan::nn {

// How a linear layer is cut over tensor-parallel ranks: by its outputs (column: each rank makes part of the
// features) or by its inputs (row: each rank makes a part of a sum). See ops/tensor_parallel.hpp for the rows.
enum class Cut : uint8_t { none, column, row };

class Linear {
 public:
  struct Options {
    int64_t in = 0, out = 0;  // global
    bool bias = false;
    Init init;
    Cut cut = Cut::none;
    int64_t blocks = 1;  // of the output: gate and up are two
    int64_t groups = 0,
            group_kv = 0;           // of the output: groups of heads, and the rows of keys and values in each
    std::vector<OutputPart> parts;  // of the output, for adapters of their own
  };
  Linear(ParamList& parameters, const ModulePath& path, const Options& options);

  // x W^T + bias, and what an adapter adds; not for a row cut.
  Var forward(Tape& tape, const Var& x, const TokenContext& context) const;
  // For a bias that is fused with what follows.
  Var forward_without_bias(Tape& tape, const Var& x, const TokenContext& context) const;
  const Parameter& weight() const { return *weight_; }
  const Parameter* bias() const { return bias_; }  // null when there is none

 private:
  Var product(Tape& tape, const Var& x, const Parameter* bias, const TokenContext& context) const;
  Var adapted_product(Tape& tape, const Var& x, const Parameter* bias, const TokenContext& context) const;
  ops::TensorParallel parallel_;
  Cut cut_;
  const Parameter* weight_;
  const Parameter* bias_ = nullptr;
  std::optional<Adapter> adapter_;
};

}  // namespace capstan::nn
