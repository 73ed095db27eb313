#include "nn/transformer_layer.hpp"

namespace capstan::nn {

Var closed(Tape& tape, ResidualStream stream) {
  if (!stream.has_pending()) return std::move(stream.residual);
  return ops::add(tape, std::move(stream.pending), stream.residual);
}

ops::NormResult normalise(Tape& tape, const Norm& norm, ResidualStream stream) {
  if (!stream.has_pending()) return norm.forward(tape, std::move(stream.residual), {});
  return norm.forward(tape, std::move(stream.pending), stream.residual);
}

TransformerLayer::TransformerLayer(ParamList& parameters, const Place& place, const Options& options)
    : options_(options),
      layer_(static_cast<uint64_t>(place.layer)),
      input_norm_(parameters, place.inside("input_layernorm"), options.attention.hidden, options.norm),
      attention_(parameters, place.inside("self_attention"), options.attention),
      mlp_norm_(parameters, place.inside("pre_mlp_layernorm"), options.mlp.hidden, options.norm),
      mlp_(parameters, place.inside("mlp"), options.mlp) {}

ResidualStream TransformerLayer::add_branch(Tape& tape, ops::NormResult before, Var branch,
                                            const Parameter* bias, const TokenContext& context,
                                            uint64_t sublayer) const {
  Var residual = options_.residual_from_norm ? std::move(before.y) : std::move(before.sum);
  before = {};
  const ops::Dropout dropout =
      context.stream_dropout(options_.hidden_dropout, purpose::hidden_dropout, 2 * layer_ + sublayer);
  if (!bias && dropout.p == 0) return {std::move(residual), std::move(branch)};
  return {ops::bias_dropout_add(tape, std::move(branch), bias, residual, dropout), {}};
}

ResidualStream TransformerLayer::forward(Tape& tape, ResidualStream stream, const TokenContext& context,
                                         const LayerCache& cache) const {
  ops::NormResult normed = normalise(tape, input_norm_, std::move(stream));
  Var branch = attention_.forward(tape, normed.y, context, cache);
  stream = add_branch(tape, std::move(normed), std::move(branch), attention_.output_bias(), context, 0);

  normed = normalise(tape, mlp_norm_, std::move(stream));
  if (options_.recompute_mlp)
    branch = tape.recompute("mlp", {normed.y}, [this](Tape& region, std::span<const Var> inputs) {
      return std::vector<Var>{mlp_.forward(region, inputs[0])};
    })[0];
  else
    branch = mlp_.forward(tape, normed.y);
  return add_branch(tape, std::move(normed), std::move(branch), mlp_.output_bias(), context, 1);
}

}  // namespace capstan::nn
