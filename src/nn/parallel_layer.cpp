#include "nn/parallel_layer.hpp"

namespace capstan::nn {

// Parameters are declared in the order of the forward pass.
ParallelLayer::ParallelLayer(ParamList& parameters, const ModulePath& path, const Options& options)
    : DecoderLayer(path, options) {
  input_norm_.emplace(parameters, path.inside("input_layernorm"), options.hidden, options.norm);
  attention_ = options.attention(parameters, path.inside("self_attention"));
  mlp_norm_.emplace(parameters, path.inside("pre_mlp_layernorm"), options.hidden, options.norm);
  feed_forward_ = options.feed_forward(parameters, path.inside("mlp"));
}

HiddenStates ParallelLayer::forward(Tape& tape, HiddenStates hidden_states, const TokenContext& context,
                                    const LayerCache& cache) const {
  ops::NormResult normed =
      normalize(tape, *input_norm_, std::move(hidden_states), attention_->input_reader());
  Var attended = attention_->forward(tape, normed.y, context, cache);
  if (recompute_norms_) tape.drop_output(normed.y);
  const Var x = std::move(normed.sum);
  Var input = mlp_norm_->forward(tape, x, {}, feed_forward_reader()).y;
  Var transformed = run_feed_forward(tape, input, context);
  if (recompute_norms_) tape.drop_output(input);
  normed = {}, input = {};

  HiddenStates sum = add_branch(tape, x, std::move(attended), attention_->output_bias(), context, 0);
  return add_branch(tape, materialize(tape, std::move(sum)), std::move(transformed),
                    feed_forward_->output_bias(), context, 1);
}

}  // namespace capstan::nn
