#pragma once

#include "nn/decoder_layer.hpp"

namespace capstan::nn {

// Parallel layer (GPT-J, GPT-NeoX): x + attention(input_layernorm(x)) + feed_forward(pre_mlp_layernorm(x)).
// Both branches read the layer's input, each through a norm of its own.
class ParallelLayer final : public DecoderLayer {
 public:
  ParallelLayer(ParamList& parameters, const ModulePath& path, const Options& options);

  HiddenStates forward(Tape& tape, HiddenStates hidden_states, const TokenContext& context,
                       const LayerCache& cache = {}) const override;

 private:
  std::optional<Norm> input_norm_, mlp_norm_;
};

}  // namespace capstan::nn
