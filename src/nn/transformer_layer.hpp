#pragma once

#include <optional>

#include "nn/attention.hpp"
#include "nn/mlp.hpp"

namespace capstan::nn {

// The residual stream between sublayers. A branch's output waits in `pending` until the next norm adds it in
// the same pass; the stream's value is residual + pending.
struct HiddenStates {
  Var residual;
  Var pending;  // an undefined value: nothing waits
  bool has_pending() const { return pending.value.defined(); }
};

// The value as one tensor: at a boundary of recomputed regions or stages.
Var closed(Tape& tape, HiddenStates hidden_states);

// sum and norm of the stream's value.
ops::NormResult normalize(Tape& tape, const Norm& norm, HiddenStates hidden_states);

// Transformer layer: x + post(attention(pre(x))), then x + post(mlp(pre(x))). The norms before (`input_layernorm`,
// `pre_mlp_layernorm`), after (`post_attention_layernorm`, `post_feedforward_layernorm`) or both are there.
class TransformerLayer {
 public:
  struct Options {
    NormKind norm;
    bool input_norms = true, output_norms = false;
    SelfAttention::Options attention;
    Mlp::Options mlp;
    double hidden_dropout = 0;
    bool residual_from_norm = false;  // the residual is the input norm's output instead of its input
    bool recompute_mlp = false;       // keep only the MLP's input
  };
  TransformerLayer(ParamList& parameters, const ModulePath& path, const Options& options);

  HiddenStates forward(Tape& tape, HiddenStates hidden_states, const TokenContext& context,
                       const LayerCache& cache = {}) const;

 private:
  // What a branch adds to, and what it reads.
  struct Entry {
    Var residual, input;
  };
  Entry enter_branch(Tape& tape, const std::optional<Norm>& norm, HiddenStates hidden_states) const;
  HiddenStates leave_branch(Tape& tape, Var residual, Var branch, const Parameter* bias,
                            const std::optional<Norm>& norm, const TokenContext& context,
                            uint64_t sublayer) const;
  Options options_;
  uint64_t layer_;
  std::optional<Norm> input_norm_;
  SelfAttention attention_;
  std::optional<Norm> attention_output_norm_, mlp_norm_;
  Mlp mlp_;
  std::optional<Norm> mlp_output_norm_;
};

}  // namespace capstan::nn
