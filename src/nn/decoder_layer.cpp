#include "nn/decoder_layer.hpp"

namespace capstan::nn {

Var materialize(Tape& tape, HiddenStates hidden_states) {
  if (!hidden_states.has_pending()) return std::move(hidden_states.residual);
  return ops::add(tape, std::move(hidden_states.pending), hidden_states.residual);
}

ops::NormResult normalize(Tape& tape, const Norm& norm, HiddenStates hidden_states, const Parameter* reader) {
  if (!hidden_states.has_pending()) return norm.forward(tape, std::move(hidden_states.residual), {}, reader);
  return norm.forward(tape, std::move(hidden_states.pending), hidden_states.residual, reader);
}

DecoderLayer::DecoderLayer(const ModulePath& path, const Options& options)
    : recompute_norms_(options.recompute_norms),
      hidden_dropout_(options.hidden_dropout),
      recompute_feed_forward_(options.recompute_feed_forward),
      layer_(static_cast<uint64_t>(path.layer)) {}

// A recomputed region begins with its input in the compute type and quantizes it itself.
const Parameter* DecoderLayer::feed_forward_reader() const {
  return recompute_feed_forward_ ? nullptr : feed_forward_->input_reader();
}

Var DecoderLayer::run_feed_forward(Tape& tape, const Var& x, const TokenContext& context) const {
  if (!recompute_feed_forward_) return feed_forward_->forward(tape, x, context);
  return tape.recompute(feed_forward_->name(), {x},
                        [this, context](Tape& region, std::span<const Var> inputs) {
                          return std::vector<Var>{feed_forward_->forward(region, inputs[0], context)};
                        })[0];
}

HiddenStates DecoderLayer::add_branch(Tape& tape, Var residual, Var branch, const Parameter* bias,
                                      const TokenContext& context, uint64_t sublayer) const {
  const ops::Dropout dropout =
      context.hidden_dropout(hidden_dropout_, purpose::hidden_dropout, 2 * layer_ + sublayer);
  if (!bias && dropout.p == 0) return {std::move(residual), std::move(branch)};
  return {ops::bias_dropout_add(tape, std::move(branch), bias, residual, dropout), {}};
}

}  // namespace capstan::nn
