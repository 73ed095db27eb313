#include "nn/embedding.hpp"

#include "ops/embedding.hpp"

namespace capstan::nn {

Embedding::Embedding(ParamList& parameters, const std::string& prefix, const Options& options)
    : dropout_(options.dropout) {
  ParamSpec words = Place{prefix + ".word_embeddings", -1, "embedding"}.spec(
      "weight", {options.vocab, options.hidden}, options.init);
  words.sharding = {MeshAxis::tensor, 0, 1};
  words.places = options.places;
  words_ = &parameters.add(std::move(words));
  if (options.positions > 0)
    positions_ = &parameters.add(Place{prefix + ".position_embeddings", -1, "embedding"}.spec(
        "weight", {options.positions, options.hidden}, options.init));
}

Var Embedding::forward(Tape& tape, const Tensor& tokens, const TokenContext& context) const {
  Var x = ops::embedding(tape, tokens, *words_, positions_, context.positions);
  const ops::Dropout dropout = context.dropout(dropout_, purpose::embedding_dropout, 0);
  if (dropout.p > 0) x = ops::bias_dropout_add(tape, std::move(x), nullptr, {}, dropout);
  return x;
}

}  // namespace capstan::nn
