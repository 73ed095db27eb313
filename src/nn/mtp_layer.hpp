#pragma once

#include "nn/transformer_layer.hpp"

namespace capstan::nn {

// One depth of multi-token prediction (DeepSeek-V3, 2024): combines the hidden states of the previous depth
// with the embedding of a later token of each position. Parameters, as in Megatron:
//   enorm, hnorm: norms of the embedding and of the hidden states
//   eh_proj.weight [hidden, 2 hidden], first the columns of the embedding; every tensor-parallel rank holds
//     all of it, and with sequence parallelism computes its own rows
//   transformer_layer, final_layernorm
// Embedding and output layer are the model's.
class MtpLayer {
 public:
  MtpLayer(ParamList& parameters, const ModulePath& path, const TransformerLayer::Options& options);

  // hidden_states, embedding and result: [rows, hidden], rows of the hidden states. The input of the first
  // depth is the output of the model's final norm, and the result is normalized too.
  Var forward(Tape& tape, const Var& hidden_states, const Var& embedding, const TokenContext& context) const;

 private:
  Norm embedding_norm_, hidden_norm_;
  Linear projection_;
  TransformerLayer layer_;
  Norm final_norm_;
};

}  // namespace capstan::nn
