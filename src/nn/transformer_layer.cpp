#include "nn/transformer_layer.hpp"

namespace capstan::nn {

TransformerLayer::TransformerLayer(ParamList& parameters, const ModulePath& path, const Options& options)
    : DecoderLayer(path, options), residual_post_layernorm_(options.residual_post_layernorm) {
  const auto norm_if = [&](bool has_norm, const char* name) {
    return optional_norm(parameters, path.inside(name), options.hidden,
                         has_norm ? std::optional(options.norm) : std::nullopt);
  };
  input_norm_ = norm_if(options.input_norms, "input_layernorm");
  attention_ = options.attention(parameters, path.inside("self_attention"));
  attention_output_norm_ = norm_if(options.output_norms, "post_attention_layernorm");
  mlp_norm_ = norm_if(options.input_norms, "pre_mlp_layernorm");
  feed_forward_ = options.feed_forward(parameters, path.inside("mlp"));
  mlp_output_norm_ = norm_if(options.output_norms, "post_feedforward_layernorm");
}

TransformerLayer::BranchInput TransformerLayer::enter_branch(Tape& tape, const std::optional<Norm>& norm,
                                                             HiddenStates hidden_states,
                                                             const Parameter* reader) const {
  if (!norm) {
    const Var x = materialize(tape, std::move(hidden_states));
    return {x, x};
  }
  ops::NormResult normed = normalize(tape, *norm, std::move(hidden_states), reader);
  if (residual_post_layernorm_) return {normed.y, normed.y};
  return {std::move(normed.sum), std::move(normed.y)};
}

HiddenStates TransformerLayer::leave_branch(Tape& tape, Var residual, Var branch, const Parameter* bias,
                                            const std::optional<Norm>& norm, const TokenContext& context,
                                            uint64_t sublayer) const {
  if (norm) {
    if (bias) branch = ops::bias_dropout_add(tape, std::move(branch), bias, {}, {});
    branch = norm->forward(tape, std::move(branch), {}).y;
    bias = nullptr;
  }
  return add_branch(tape, std::move(residual), std::move(branch), bias, context, sublayer);
}

HiddenStates TransformerLayer::forward(Tape& tape, HiddenStates hidden_states, const TokenContext& context,
                                       const LayerCache& cache) const {
  BranchInput entry = enter_branch(tape, input_norm_, std::move(hidden_states), attention_->input_reader());
  Var branch = attention_->forward(tape, entry.input, context, cache);
  if (recompute_norms_) tape.drop_output(entry.input);
  entry.input = {};
  hidden_states = leave_branch(tape, std::move(entry.residual), std::move(branch), attention_->output_bias(),
                               attention_output_norm_, context, 0);

  entry = enter_branch(tape, mlp_norm_, std::move(hidden_states), feed_forward_reader());
  branch = run_feed_forward(tape, entry.input, context);
  if (recompute_norms_) tape.drop_output(entry.input);
  entry.input = {};
  return leave_branch(tape, std::move(entry.residual), std::move(branch), feed_forward_->output_bias(),
                      mlp_output_norm_, context, 1);
}

}  // namespace capstan::nn
