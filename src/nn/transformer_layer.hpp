#pragma once

#include <optional>

#include "nn/decoder_layer.hpp"

namespace capstan::nn {

// Sequential layer: x + post(attention(pre(x))), then x + post(feed_forward(pre(x))). There are norms before
// (`input_layernorm`, `pre_mlp_layernorm`) or after the branches (`post_attention_layernorm`,
// `post_feedforward_layernorm`), or both.
class TransformerLayer final : public DecoderLayer {
 public:
  struct Options : DecoderLayer::Options {
    bool input_norms = true, output_norms = false;
    // The residual is the input norm's output instead of its input.
    bool residual_post_layernorm = false;
  };
  TransformerLayer(ParamList& parameters, const ModulePath& path, const Options& options);

  HiddenStates forward(Tape& tape, HiddenStates hidden_states, const TokenContext& context,
                       const LayerCache& cache = {}) const override;

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
  bool residual_post_layernorm_;
  std::optional<Norm> input_norm_, attention_output_norm_, mlp_norm_, mlp_output_norm_;
};

}  // namespace capstan::nn
