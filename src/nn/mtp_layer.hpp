#pragma once

#include "nn/decoder_layer.hpp"

namespace capstan::nn {

// One depth of multi-token prediction (DeepSeek-V3, 2024): combines the hidden states of the previous depth
// with the embedding of a later token of each position. Parameters, as in Megatron:
//   enorm, hnorm: norms of the embedding and of the hidden states
//   eh_proj.weight [hidden, 2 hidden], first the columns of the embedding; every tensor-parallel rank holds
//     all of it, and with sequence parallelism computes its own rows
//   transformer_layer, a layer of the model's kind; final_layernorm
// Embedding and output layer are the model's.
class MtpLayer {
 public:
  // Makes the layer at the path that it is given.
  using LayerFactory = std::function<std::unique_ptr<DecoderLayer>(const ModulePath&)>;
  struct Options {
    int64_t hidden = 0;
    NormKind norm;
    Init init;
    LayerFactory layer;
  };
  MtpLayer(ParamList& parameters, const ModulePath& path, const Options& options);

  // hidden_states, embedding and result: [rows, hidden], rows of the hidden states. The input of the first
  // depth is the output of the model's final norm, and the result is normalized too.
  Var forward(Tape& tape, const Var& hidden_states, const Var& embedding, const TokenContext& context) const;
  // See FeedForward::adds_losses.
  bool adds_losses() const { return layer_->adds_losses(); }

 private:
  Norm embedding_norm_, hidden_norm_;
  Linear projection_;
  std::unique_ptr<DecoderLayer> layer_;
  Norm final_norm_;
};

}  // namespace capstan::nn
