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

// Base class of the kinds of attention: attention of packed QKV, then linear_proj. `forward` computes the
// projections before it.
class Attention {
 public:
  struct Options {
    int64_t hidden = 0, heads = 0;
    // Key/value heads and the dimension of a head; not read by latent attention.
    int64_t groups = 0, head_dim = 0;
    bool qkv_bias = false, output_bias = false;
    // Norm of each query head and key head; latent attention: of compressed queries, keys and values.
    std::optional<NormKind> qk_norm;
    // RMSNorm over all query heads as one vector, and all key heads.
    bool qk_norm_across_heads = false;
    std::optional<RopeOptions> rope;
    double scale = 1;
    // c > 0: scores become c tanh(score / c).
    double softcap = 0;
    // Keys visible to a query, its own included; 0: all earlier keys.
    int64_t window = 0;
    // A further logit of each head in the denominator of its softmax, without a value (attention sink): none,
    // 0, or the parameter core_attention.softmax_offset [heads].
    enum class Sink : uint8_t { none, zero, learned } sink = Sink::none;
    // Dropout probability of the attention probabilities.
    double dropout = 0;
    Init init, output_init;
  };
  virtual ~Attention() = default;

  // x[N, hidden] -> [N, hidden], without the output bias, which is fused with the residual addition. With a
  // cache, the tokens follow the cached tokens.
  virtual Var forward(Tape& tape, const Var& x, const TokenContext& context,
                      const LayerCache& cache = {}) const = 0;
  // See Linear::input_reader.
  virtual const Parameter* input_reader() const = 0;
  virtual const Parameter* output_bias() const = 0;

 protected:
  Attention(ParamList& parameters, const ModulePath& path, const Options& options);

  // Attention of this rank's heads in packed QKV, with the mask, dropout and scale of the module's options:
  // [N, heads * v_dim]. `attention`: heads, their widths, norm and rotation.
  Var attend(Tape& tape, Var qkv, ops::AttentionOptions attention, const TokenContext& context,
             const LayerCache& cache) const;

  Options options_;
  ops::TensorParallel parallel_;

 private:
  ops::ContextParallel context_parallel_;
  ops::AttentionSink sink_;
  uint64_t layer_;
};

// Causal self-attention with grouped key/value heads: linear_qkv, optional QK norm, RoPE, attention,
// linear_proj.
class SelfAttention final : public Attention {
 public:
  SelfAttention(ParamList& parameters, const ModulePath& path, const Options& options);

  Var forward(Tape& tape, const Var& x, const TokenContext& context,
              const LayerCache& cache = {}) const override;
  const Parameter* input_reader() const override { return qkv_.input_reader(); }
  const Parameter* output_bias() const override { return output_.bias(); }

 private:
  Linear qkv_, output_;
  std::optional<Norm> q_norm_, k_norm_;
};

}  // namespace capstan::nn
