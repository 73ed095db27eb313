#pragma once

#include <optional>

#include "nn/linear.hpp"
#include "nn/norm.hpp"
#include "nn/rope_table.hpp"
#include "nn/token_context.hpp"
#include "ops/attention.hpp"

namespace capstan::nn {

// The cache of one layer during generation (allocated at the first step, for the local heads) and its fill
// level.
struct LayerCache {
  ops::LayerKvCache* keys_values = nullptr;
  Tensor past;  // i32 [1], tokens
  int64_t capacity = 0;
};

// Causal self-attention with grouped key/value heads: linear_qkv, optional QK norm, RoPE, attention,
// linear_proj.
class SelfAttention {
 public:
  struct Options {
    int64_t hidden = 0, heads = 0, groups = 0, head_dim = 0;
    bool qkv_bias = false, output_bias = false;
    std::optional<NormKind> qk_norm;
    // RMSNorm over all query heads as one vector, and all key heads.
    bool qk_norm_across_heads = false;
    std::optional<RopeOptions> rope;
    double scale = 1;
    // c > 0: scores become c tanh(score / c).
    double softcap = 0;
    // Keys visible to a query, its own included; 0: all earlier keys.
    int64_t window = 0;
    // Dropout probability of the attention probabilities.
    double dropout = 0;
    Init init, output_init;
  };
  SelfAttention(ParamList& parameters, const ModulePath& path, const Options& options);

  // x[N, hidden] -> [N, hidden], without the output bias, which is fused with the residual addition. With a
  // cache, the tokens follow the cached tokens.
  Var forward(Tape& tape, const Var& x, const TokenContext& context, const LayerCache& cache = {}) const;
  // See Linear::input_reader.
  const Parameter* input_reader() const { return qkv_.input_reader(); }
  const Parameter* output_bias() const { return output_.bias(); }

 private:
  Options options_;
  ops::TensorParallel parallel_;
  ops::ContextParallel context_parallel_;
  uint64_t layer_;
  Linear qkv_, output_;
  std::optional<Norm> q_norm_, k_norm_;
};

}  // namespace capstan::nn
