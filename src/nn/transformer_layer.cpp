#include "nn/transformer_layer.hpp"

namespace capstan::nn {

Var materialize(Tape& tape, HiddenStates hidden_states) {
  if (!hidden_states.has_pending()) return std::move(hidden_states.residual);
  return ops::add(tape, std::move(hidden_states.pending), hidden_states.residual);
}

ops::NormResult normalize(Tape& tape, const Norm& norm, HiddenStates hidden_states, const Parameter* reader) {
  if (!hidden_states.has_pending()) return norm.forward(tape, std::move(hidden_states.residual), {}, reader);
  return norm.forward(tape, std::move(hidden_states.pending), hidden_states.residual, reader);
}

namespace {
std::optional<NormKind> kind_if(bool has_norm, const NormKind& kind) {
  return has_norm ? std::optional(kind) : std::nullopt;
}
std::unique_ptr<Attention> attention_of(ParamList& parameters, const ModulePath& path,
                                        const TransformerLayer::Options& o) {
  if (o.latent) return std::make_unique<LatentAttention>(parameters, path, o.attention, *o.latent);
  return std::make_unique<SelfAttention>(parameters, path, o.attention);
}
}  // namespace

TransformerLayer::TransformerLayer(ParamList& parameters, const ModulePath& path, const Options& options)
    : options_(options),
      layer_(static_cast<uint64_t>(path.layer)),
      input_norm_(optional_norm(parameters, path.inside("input_layernorm"), options.attention.hidden,
                                kind_if(options.input_norms, options.norm))),
      attention_(attention_of(parameters, path.inside("self_attention"), options)),
      attention_output_norm_(optional_norm(parameters, path.inside("post_attention_layernorm"),
                                           options.attention.hidden,
                                           kind_if(options.output_norms, options.norm))),
      mlp_norm_(optional_norm(parameters, path.inside("pre_mlp_layernorm"), options.mlp.hidden,
                              kind_if(options.input_norms, options.norm))) {
  if (options.moe)
    moe_.emplace(parameters, path.inside("mlp"), *options.moe);
  else
    mlp_.emplace(parameters, path.inside("mlp"), options.mlp);
  if (options.output_norms)
    mlp_output_norm_.emplace(parameters, path.inside("post_feedforward_layernorm"), options.mlp.hidden,
                             options.norm);
}

TransformerLayer::BranchInput TransformerLayer::enter_branch(Tape& tape, const std::optional<Norm>& norm,
                                                             HiddenStates hidden_states,
                                                             const Parameter* reader) const {
  if (!norm) {
    const Var x = materialize(tape, std::move(hidden_states));
    return {x, x};
  }
  ops::NormResult normed = normalize(tape, *norm, std::move(hidden_states), reader);
  if (options_.residual_post_layernorm) return {normed.y, normed.y};
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
  const ops::Dropout dropout =
      context.hidden_dropout(options_.hidden_dropout, purpose::hidden_dropout, 2 * layer_ + sublayer);
  if (!bias && dropout.p == 0) return {std::move(residual), std::move(branch)};
  return {ops::bias_dropout_add(tape, std::move(branch), bias, residual, dropout), {}};
}

Var TransformerLayer::feed_forward(Tape& tape, const Var& x, const TokenContext& context) const {
  return moe_ ? moe_->forward(tape, x, context) : mlp_->forward(tape, x, context);
}

HiddenStates TransformerLayer::forward(Tape& tape, HiddenStates hidden_states, const TokenContext& context,
                                       const LayerCache& cache) const {
  BranchInput entry = enter_branch(tape, input_norm_, std::move(hidden_states), attention_->input_reader());
  Var branch = attention_->forward(tape, entry.input, context, cache);
  if (options_.recompute_norms) tape.drop_output(entry.input);
  entry.input = {};
  hidden_states = leave_branch(tape, std::move(entry.residual), std::move(branch), attention_->output_bias(),
                               attention_output_norm_, context, 0);

  // A recomputed region begins with its input in the compute type and quantizes it itself.
  const Parameter* reader = moe_ || options_.recompute_mlp ? nullptr : mlp_->input_reader();
  entry = enter_branch(tape, mlp_norm_, std::move(hidden_states), reader);
  if (options_.recompute_mlp)
    branch = tape.recompute(moe_ ? "moe" : "mlp", {entry.input},
                            [this, context](Tape& region, std::span<const Var> inputs) {
                              return std::vector<Var>{feed_forward(region, inputs[0], context)};
                            })[0];
  else
    branch = feed_forward(tape, entry.input, context);
  if (options_.recompute_norms) tape.drop_output(entry.input);
  entry.input = {};
  const Parameter* bias = moe_ ? nullptr : mlp_->output_bias();
  return leave_branch(tape, std::move(entry.residual), std::move(branch), bias, mlp_output_norm_, context, 1);
}

}  // namespace capstan::nn
