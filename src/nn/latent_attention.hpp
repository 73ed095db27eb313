#pragma once

#include "nn/attention.hpp"
#include "ops/latent_qkv.hpp"

namespace capstan::nn {

// Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434). Keys and values of a token are the
// up-projection of one compressed vector; queries too, or a projection of the hidden states:
//
//   q        = linear_q_up_proj(q_layernorm(linear_q_down_proj(x)))    or linear_q_proj(x)
//   [c; r]   = linear_kv_down_proj(x)                                  kv_rank and rope_dim elements
//   [k; v]   = linear_kv_up_proj(kv_layernorm(c))                      of each head
//   out      = linear_proj(attention([q_nope; RoPE(q_rope)], [k; RoPE(r)], v))
//
// All heads share r. Every tensor-parallel rank has the down-projections, of its rows with sequence
// parallelism; the up-projections are sharded over heads, linear_proj over its inputs. Generation caches the
// keys and values of each head, not the compressed vector.
class LatentAttention final : public Attention {
 public:
  struct Sizes {
    // Rank of the compressed queries; nullopt: they are not compressed.
    std::optional<int64_t> q_rank;
    // Rank of the compressed keys and values.
    int64_t kv_rank = 0;
    // Elements of a query or key head without RoPE (RopeOptions::rotary_dim: those with RoPE), and of a value
    // head.
    int64_t nope_dim = 0, value_dim = 0;
    // Saves the compressed vectors instead of the heads, and recomputes up-projections and attention.
    bool recompute_up_projections = false;
  };
  // options.rope must be set.
  LatentAttention(ParamList& parameters, const ModulePath& path, const Options& options, const Sizes& sizes);

  Var forward(Tape& tape, const Var& x, const TokenContext& context,
              const LayerCache& cache = {}) const override;
  // Null: two layers read the input.
  const Parameter* input_reader() const override { return nullptr; }
  const Parameter* output_bias() const override { return output_.bias(); }

 private:
  // The inputs of the up-projections.
  struct Compressed {
    // [rows, q_rank], or x; [rows, kv_rank]; [N, rope_dim]. Rows may be sharded.
    Var q, kv, k_rope;
  };
  Compressed compress(Tape& tape, const Var& x, const TokenContext& context) const;
  // The attention of the up-projected heads, [N, heads * value_dim].
  Var attend_compressed(Tape& tape, const Compressed& compressed, const TokenContext& context,
                        const LayerCache& cache) const;
  Var normalized(Tape& tape, const std::optional<Norm>& norm, Var x, const Linear& reader) const;

  Sizes sizes_;
  ops::LatentHeads heads_;
  // nullopt: queries are not compressed.
  std::optional<Linear> q_down_;
  std::optional<Norm> q_norm_;
  // linear_q_up_proj or linear_q_proj.
  Linear q_up_, kv_down_;
  std::optional<Norm> kv_norm_;
  Linear kv_up_, output_;
};

}  // namespace capstan::nn
