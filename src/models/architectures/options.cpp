#include "models/architectures/options.hpp"

#include <algorithm>
#include <cmath>

#include "base/text.hpp"
#include "config/sections/rotary.hpp"

namespace capstan::models {

using config::ModelConfig;

namespace {

kernels::ActivationKind activation_kind_of(config::Activation activation) {
  switch (activation) {
    case config::Activation::gelu:
      return kernels::ActivationKind::gelu;
    case config::Activation::gelu_tanh:
      return kernels::ActivationKind::gelu_tanh;
    case config::Activation::quick_gelu:
    case config::Activation::silu:
      return kernels::ActivationKind::silu;
    case config::Activation::relu:
      return kernels::ActivationKind::relu;
    case config::Activation::squared_relu:
      return kernels::ActivationKind::squared_relu;
  }
  fail(ErrorCode::internal, "unknown activation");
}
kernels::ActivationFunction activation_of(const ModelConfig& c) {
  kernels::ActivationFunction function{.kind = activation_kind_of(c.activation_func),
                                       .gated = c.gated_linear_unit};
  if (c.activation_func == config::Activation::quick_gelu) function.slope = 1.702f;
  if (!function.gated) return function;
  function.limit = static_cast<float>(c.activation_func_clamp_value.value_or(0));
  function.up_offset = static_cast<float>(c.glu_linear_offset);
  return function;
}

nn::Attention::Options::Sink sink_of(config::SoftmaxType type) {
  using Sink = nn::Attention::Options::Sink;
  switch (type) {
    case config::SoftmaxType::vanilla:
      return Sink::none;
    case config::SoftmaxType::off_by_one:
      return Sink::zero;
    case config::SoftmaxType::learnable:
      return Sink::learned;
  }
  fail(ErrorCode::internal, "unknown softmax");
}

nn::RopeScaling::Kind scaling_kind_of(config::RopeScaling type) {
  switch (type) {
    case config::RopeScaling::llama3:
      return nn::RopeScaling::Kind::llama3;
    case config::RopeScaling::linear:
      return nn::RopeScaling::Kind::linear;
    case config::RopeScaling::yarn:
      return nn::RopeScaling::Kind::yarn;
    case config::RopeScaling::longrope:
      return nn::RopeScaling::Kind::longrope;
  }
  fail(ErrorCode::internal, "unknown scaling of RoPE");
}

// Output projections begin smaller, because every layer adds two of them to the hidden states.
Init output_init_of(const ModelConfig& c) {
  return {Init::Kind::normal, c.init_method_std / std::sqrt(2.0 * static_cast<double>(c.num_layers))};
}

}  // namespace

bool recomputes(const ModelConfig& c, config::RecomputeModule module) {
  return c.recompute_granularity == config::RecomputeGranularity::selective &&
         std::count(c.recompute_modules.begin(), c.recompute_modules.end(), module) > 0;
}

nn::NormKind norm_kind(const ModelConfig& c) {
  return {c.normalization == config::Normalization::rms_norm, c.layernorm_epsilon,
          c.layernorm_zero_centered_gamma};
}

std::optional<nn::RopeOptions> rope_of(const ModelConfig& c) {
  const int64_t head_dim = resolved(c.kv_channels, "kv_channels");
  if (c.position_embedding_type != config::PositionEmbedding::rope) return std::nullopt;
  nn::RopeOptions rope;
  rope.rotary_dim = config::rotary_width(c);
  require(rope.rotary_dim > 0 && rope.rotary_dim % 2 == 0,
          c.multi_latent_attention
              ? "model.qk_pos_emb_head_dim=" + std::to_string(rope.rotary_dim) + " is an odd number"
              : "model.rotary_percent=" + to_text(c.rotary_percent) + " of a head of " +
                    std::to_string(head_dim) + " elements rotates " + std::to_string(rope.rotary_dim) +
                    " of them, an odd number");
  rope.base = c.rotary_base;
  rope.interleaved = c.rotary_interleaved;
  if (!c.rope_scaling) return rope;
  nn::RopeScaling& s = rope.scaling.emplace();
  s.kind = scaling_kind_of(c.rope_scaling_type);
  s.factor = c.rope_scaling_factor;
  s.original_positions = c.rope_scaling_original_max_position_embeddings;
  s.low_freq_factor = c.rope_scaling_low_freq_factor;
  s.high_freq_factor = c.rope_scaling_high_freq_factor;
  s.beta_fast = c.rope_scaling_beta_fast;
  s.beta_slow = c.rope_scaling_beta_slow;
  s.truncate = c.rope_scaling_truncate;
  s.short_factors = c.rope_scaling_short_factors;
  s.long_factors = c.rope_scaling_long_factors;
  if (s.kind == nn::RopeScaling::Kind::yarn || s.kind == nn::RopeScaling::Kind::longrope)
    s.attention_factor = resolved(c.rope_scaling_attention_factor, "rope_scaling_attention_factor");
  if (s.kind == nn::RopeScaling::Kind::longrope)
    for (const auto* factors : {&s.short_factors, &s.long_factors})
      require(static_cast<int64_t>(factors->size()) == rope.rotary_dim / 2,
              "model.rope_scaling_short_factors and model.rope_scaling_long_factors need " +
                  std::to_string(rope.rotary_dim / 2) + " values each, one for each rotated pair");
  return rope;
}

nn::Attention::Options attention_options(const ModelConfig& c, int64_t layer) {
  require(!c.qk_layernorm_across_heads || c.normalization == config::Normalization::rms_norm,
          "model.qk_layernorm_across_heads=true needs model.normalization=RMSNorm");
  nn::Attention::Options a;
  a.hidden = c.hidden_size;
  a.heads = c.num_attention_heads;
  a.groups = resolved(c.num_query_groups, "num_query_groups");
  a.head_dim = resolved(c.kv_channels, "kv_channels");
  a.qkv_bias = c.add_bias_linear || c.add_qkv_bias;
  a.output_bias = c.add_attention_output_bias.value_or(c.add_bias_linear);
  if (c.qk_layernorm) a.qk_norm = norm_kind(c);
  a.qk_norm_across_heads = c.qk_layernorm_across_heads;
  a.rope = rope_of(c);
  a.scale = resolved(c.softmax_scale, "softmax_scale");
  a.softcap = c.attn_logit_softcapping.value_or(0);
  const bool full_attention =
      c.window_attn_skip_freq && *c.window_attn_skip_freq > 0 && (layer + 1) % *c.window_attn_skip_freq == 0;
  if (c.window_size && !full_attention) a.window = *c.window_size;
  a.sink = sink_of(c.softmax_type);
  a.dropout = c.attention_dropout;
  a.init = {Init::Kind::normal, c.init_method_std};
  a.output_init = output_init_of(c);
  return a;
}

decltype(nn::DecoderLayer::Options::attention) self_attention(const ModelConfig& c, int64_t layer) {
  return [options = attention_options(c, layer)](nn::ParamList& parameters, const nn::ModulePath& path) {
    return std::make_unique<nn::SelfAttention>(parameters, path, options);
  };
}

nn::Mlp::Options mlp_options(const ModelConfig& c) {
  nn::Mlp::Options m;
  m.hidden = c.hidden_size;
  m.ffn = resolved(c.ffn_hidden_size, "ffn_hidden_size");
  m.bias = config::has_mlp_biases(c);
  m.activation = activation_of(c);
  m.init = {Init::Kind::normal, c.init_method_std};
  m.output_init = output_init_of(c);
  return m;
}

nn::DecoderLayer::Options decoder_layer_options(const ModelConfig& c) {
  nn::DecoderLayer::Options o;
  o.hidden = c.hidden_size;
  o.norm = norm_kind(c);
  o.hidden_dropout = c.hidden_dropout;
  o.feed_forward = [options = mlp_options(c)](nn::ParamList& parameters, const nn::ModulePath& path) {
    return std::make_unique<nn::Mlp>(parameters, path, options);
  };
  o.recompute_feed_forward = recomputes(c, config::RecomputeModule::mlp);
  o.recompute_norms = recomputes(c, config::RecomputeModule::layernorm);
  return o;
}

nn::TransformerLayer::Options transformer_layer_options(const ModelConfig& c) {
  require(!c.apply_residual_connection_post_layernorm || c.norm_placement == config::NormPlacement::input,
          "model.apply_residual_connection_post_layernorm=true needs model.norm_placement=input");
  nn::TransformerLayer::Options o;
  static_cast<nn::DecoderLayer::Options&>(o) = decoder_layer_options(c);
  o.input_norms = c.norm_placement != config::NormPlacement::output;
  o.output_norms = c.norm_placement != config::NormPlacement::input;
  o.residual_post_layernorm = c.apply_residual_connection_post_layernorm;
  return o;
}

}  // namespace capstan::models
