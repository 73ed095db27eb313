#pragma once

#include "nn/adapter.hpp"
#include "nn/param_list.hpp"
#include "ops/tensor_parallel.hpp"

namespace capstan::nn {

class Linear {
 public:
  struct Options {
    // Numbers of features on all ranks together.
    int64_t in = 0, out = 0;
    bool bias = false;
    Init init;
    LinearSharding sharding = LinearSharding::none;
    // Number of equal blocks of output rows; gate and up are two.
    int64_t blocks = 1;
    // Groups of heads in the output, and key and value rows of each group.
    int64_t groups = 0, group_kv = 0;
    // Slices of the output with adapters of their own.
    std::vector<OutputSlice> slices;
  };
  Linear(ParamList& parameters, const ModulePath& path, const Options& options);

  // x W^T + the adapter's update, and the bias unless the caller adds it, fused with the next operation. The
  // caller adds it after the sum of a row-parallel layer.
  enum class Bias : uint8_t { added, by_caller };
  Var forward(Tape& tape, const Var& x, const TokenContext& context, Bias use = Bias::added) const;
  const Parameter& weight() const { return *weight_; }
  // The weight if one forward GEMM reads the layer's full input as it is, so that the operation that computes
  // the input can quantize it. Null where tensor-parallel ranks gather the input first or compute the output
  // in chunks.
  const Parameter* input_reader() const;
  // Null when there is none.
  const Parameter* bias() const { return bias_; }

 private:
  Var adapted_matmul(Tape& tape, const Var& x, const Parameter* bias, const TokenContext& context) const;
  ops::TensorParallel parallel_;
  LinearSharding sharding_;
  const Parameter* weight_;
  const Parameter* bias_ = nullptr;
  std::optional<Adapter> adapter_;
};

}  // namespace capstan::nn
