#include "nn/embedding.hpp"

#include "ops/embedding.hpp"
#include "ops/scale.hpp"

namespace capstan::nn {

Embedding::Embedding(ParamList& parameters, const std::string& prefix, const Options& options)
    : parallel_(parameters.parallel().tensor), dropout_(options.dropout), multiplier_(options.multiplier) {
  ParamSpec words = ModulePath{prefix + ".word_embeddings", -1, "embedding"}.spec(
      "weight", {options.vocab, options.hidden}, options.init);
  words.sharding = {ShardingAxis::tensor, 0};
  words.other_uses = options.other_uses;
  words.tied = options.tied;
  words_ = &parameters.add(std::move(words));
  if (options.positions == 0) return;
  ParamSpec positions = ModulePath{prefix + ".position_embeddings", -1, "embedding"}.spec(
      "weight", {options.positions, options.hidden}, options.init);
  positions.partial_over_tensor = parallel_.shards_rows();
  positions.tied = options.positions_tied;
  positions.holders = ParamSpec::Holders::position_embedding;
  positions_ = &parameters.add(std::move(positions));
}

Var Embedding::forward(Tape& tape, const Tensor& tokens, const TokenContext& context, uint64_t use) const {
  Var x;
  if (parallel_.is_single() && multiplier_ == 1) {
    x = ops::embedding(tape, tokens, *words_, positions_, context.positions);
  } else {
    const int64_t first = parallel_.rank() * words_->shape()[0];
    x = ops::reduce_from_tensor_parallel(tape, ops::embedding(tape, tokens, *words_, nullptr, {}, first),
                                         parallel_, "word embeddings");
    if (multiplier_ != 1) x = ops::scale(tape, std::move(x), multiplier_);
    if (positions_)
      x = ops::add(
          tape, ops::embedding(tape, ops::local_rows(context.positions, parallel_), *positions_, nullptr, {}),
          x);
  }
  const ops::Dropout dropout = context.hidden_dropout(dropout_, purpose::embedding_dropout, use);
  if (dropout.p > 0) x = ops::bias_dropout_add(tape, std::move(x), nullptr, {}, dropout);
  return x;
}

}  // namespace capstan::nn
