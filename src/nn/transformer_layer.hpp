#pragma once

#include <memory>
#include <optional>

#include "nn/latent_attention.hpp"
#include "nn/mlp.hpp"
#include "nn/moe.hpp"

namespace capstan::nn {

// The hidden states between sublayers: residual + pending. `pending` is the output of the previous branch,
// which the next norm adds in the same kernel.
struct HiddenStates {
  Var residual;
  // May be undefined.
  Var pending;
  bool has_pending() const { return pending.value.defined(); }
};

// residual + pending as one tensor, at the boundary of recomputed regions or stages.
Var materialize(Tape& tape, HiddenStates hidden_states);

// The sum residual + pending, and its norm.
ops::NormResult normalize(Tape& tape, const Norm& norm, HiddenStates hidden_states,
                          const Parameter* reader = nullptr);

// Transformer layer: x + post(attention(pre(x))), then x + post(mlp(pre(x))), where the MLP may be a mixture
// of experts. There are norms before (`input_layernorm`, `pre_mlp_layernorm`) or after the branches
// (`post_attention_layernorm`, `post_feedforward_layernorm`), or both.
class TransformerLayer {
 public:
  struct Options {
    NormKind norm;
    bool input_norms = true, output_norms = false;
    Attention::Options attention;
    // Sizes of latent attention; null: ordinary attention.
    std::optional<LatentAttention::Sizes> latent;
    Mlp::Options mlp;
    // The mixture of experts that replaces the MLP; null: the MLP.
    std::optional<Moe::Options> moe;
    double hidden_dropout = 0;
    // The residual is the input norm's output instead of its input.
    bool residual_post_layernorm = false;
    // Saves only the input of the MLP, or of the mixture of experts.
    bool recompute_mlp = false;
    // Frees the outputs of the input norms after their last reader, and recomputes them from the residual.
    bool recompute_norms = false;
  };
  TransformerLayer(ParamList& parameters, const ModulePath& path, const Options& options);

  HiddenStates forward(Tape& tape, HiddenStates hidden_states, const TokenContext& context,
                       const LayerCache& cache = {}) const;

 private:
  // The residual that a branch adds to, and the input that it reads.
  struct BranchInput {
    Var residual, input;
  };
  BranchInput enter_branch(Tape& tape, const std::optional<Norm>& norm, HiddenStates hidden_states,
                           const Parameter* reader) const;
  HiddenStates leave_branch(Tape& tape, Var residual, Var branch, const Parameter* bias,
                            const std::optional<Norm>& norm, const TokenContext& context,
                            uint64_t sublayer) const;
  Var feed_forward(Tape& tape, const Var& x, const TokenContext& context) const;
  Options options_;
  uint64_t layer_;
  std::optional<Norm> input_norm_;
  std::unique_ptr<Attention> attention_;
  std::optional<Norm> attention_output_norm_, mlp_norm_;
  // Exactly one of mlp_ and moe_ is set.
  std::optional<Mlp> mlp_;
  std::optional<Moe> moe_;
  std::optional<Norm> mlp_output_norm_;
};

}  // namespace capstan::nn
