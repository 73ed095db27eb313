#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool uses_rope(const Config& c) {
  return c.model.position_embedding_type == PositionEmbedding::rope;
}
bool scales_rope(const Config& c) {
  return uses_rope(c) && c.model.rope_scaling;
}
bool scales_as_llama3(const Config& c) {
  return scales_rope(c) && c.model.rope_scaling_type == RopeScaling::llama3;
}
bool scales_as_yarn(const Config& c) {
  return scales_rope(c) && c.model.rope_scaling_type == RopeScaling::yarn;
}
bool scales_as_longrope(const Config& c) {
  return scales_rope(c) && c.model.rope_scaling_type == RopeScaling::longrope;
}
bool has_experts(const Config& c) {
  return c.model.num_moe_experts.has_value();
}
bool has_shared_expert(const Config& c) {
  return has_experts(c) && c.model.moe_shared_expert_intermediate_size.has_value();
}
bool has_latent_attention(const Config& c) {
  return c.model.multi_latent_attention;
}
bool has_multi_token_prediction(const Config& c) {
  return c.model.mtp_num_layers.has_value();
}
bool recomputes(const Config& c) {
  return c.model.recompute_granularity.has_value();
}
bool has_layer_norm(const Config& c) {
  return c.model.normalization == Normalization::layer_norm;
}

// The modules whose recomputation the layers know; attention never keeps its scores.
bool names_other_modules(const Value& v) {
  for (const Value& module : v.items)
    if (module.text != "core_attn" && module.text != "mlp") return true;
  return false;
}

void size_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  s.field("num_layers", &M::num_layers)
      .doc("transformer blocks")
      .unit("layers")
      .range(1, 1 << 20)
      .required()
      .alias("n_layers")
      .known_as("n_layer")
      .known_as("num_hidden_layers");
  s.field("hidden_size", &M::hidden_size)
      .doc("width of the residual stream")
      .unit("elements")
      .range(1, 1 << 24)
      .required()
      .known_as("d_model")
      .known_as("n_embd");
  s.field("num_attention_heads", &M::num_attention_heads)
      .doc("query heads of one layer")
      .unit("heads")
      .range(1, 1 << 20)
      .required()
      .known_as("n_head");
  s.field("num_query_groups", &M::num_query_groups)
      .doc(
          "key/value heads of one layer; fewer than query heads is grouped-query attention, 1 multi-query "
          "attention")
      .unit("heads")
      .min(1)
      .known_as("num_key_value_heads");
  s.field("kv_channels", &M::kv_channels)
      .doc("width of one attention head")
      .unit("elements")
      .range(1, 1 << 24)
      .alias("head_dim");
  s.field("ffn_hidden_size", &M::ffn_hidden_size)
      .doc("width of the feed-forward network between its two projections")
      .unit("elements")
      .range(1, 1 << 24)
      .known_as("intermediate_size");
  s.field("seq_length", &M::seq_length)
      .doc("tokens of one training sample")
      .unit("tokens")
      .tokens()
      .range(1, int64_t{1} << 32)
      .alias("dataset.seq_length")
      .known_as("sequence_length")
      .known_as("block_size")
      .known_as("max_seq_len");
  s.field("max_position_embeddings", &M::max_position_embeddings)
      .doc("longest sequence the model is made for; rows of a learned position table")
      .unit("tokens")
      .tokens()
      .min(1);
  s.field("vocab_size", &M::vocab_size)
      .doc("token ids that the tokenizer can produce")
      .unit("ids")
      .range(1, 1 << 30)
      .required();
  s.field("make_vocab_size_divisible_by", &M::make_vocab_size_divisible_by)
      .doc("the embedding's rows are padded to a multiple of this; padded rows never enter the softmax")
      .unit("ids")
      .min(1)
      .effect(Effect::memory);
  s.field("padded_vocab_size", &M::padded_vocab_size)
      .doc("rows of the embedding")
      .unit("ids")
      .range(1, 1 << 30)
      .effect(Effect::memory);
}

void position_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  const char* rope = "`model.position_embedding_type` is rope";
  const char* scaled = "`model.rope_scaling` is true";
  s.field("position_embedding_type", &M::position_embedding_type)
      .doc("how the model learns the order of tokens");
  s.field("rotary_base", &M::rotary_base)
      .doc("theta: wavelengths of RoPE grow up to 2 pi theta tokens")
      .above(1)
      .used_when<Config>(rope, uses_rope)
      .known_as("rope_theta");
  s.field("rotary_percent", &M::rotary_percent)
      .doc("share of a head's width that is rotated, from its front")
      .fraction()
      .above(0)
      .max(1)
      .used_when<Config>(rope, uses_rope);
  s.field("rotary_interleaved", &M::rotary_interleaved)
      .doc("rotate neighbouring elements (0,1)(2,3)… instead of the two halves of a head")
      .used_when<Config>(rope, uses_rope);
  s.field("rope_scaling", &M::rope_scaling)
      .doc("stretch RoPE's wavelengths, for contexts longer than those first trained on")
      .used_when<Config>(rope, uses_rope)
      .alias("use_rope_scaling");
  s.field("rope_scaling_type", &M::rope_scaling_type)
      .doc("how wavelengths are stretched")
      .used_when<Config>(scaled, scales_rope)
      .known_as("rope_type");
  s.field("rope_scaling_factor", &M::rope_scaling_factor)
      .doc("how far the longest wavelengths are stretched")
      .min(1)
      .used_when<Config>(scaled, scales_rope);
  const char* llama3 = "`model.rope_scaling_type` is llama3";
  s.field("rope_scaling_low_freq_factor", &M::rope_scaling_low_freq_factor)
      .doc("wavelengths above original length / this are stretched fully")
      .above(0)
      .used_when<Config>(llama3, scales_as_llama3);
  s.field("rope_scaling_high_freq_factor", &M::rope_scaling_high_freq_factor)
      .doc("wavelengths below original length / this are left alone")
      .above(0)
      .used_when<Config>(llama3, scales_as_llama3);
  s.field("rope_scaling_original_max_position_embeddings", &M::rope_scaling_original_max_position_embeddings)
      .doc("context length of the training before scaling")
      .unit("tokens")
      .tokens()
      .range(1, int64_t{1} << 32)
      .alias("rope_scaling_old_context_len")
      .used_when<Config>(scaled, scales_rope);
  const char* yarn = "`model.rope_scaling_type` is yarn";
  s.field("rope_scaling_beta_fast", &M::rope_scaling_beta_fast)
      .doc("pairs that turn more often within the original length are left alone")
      .unit("turns")
      .above(0)
      .used_when<Config>(yarn, scales_as_yarn);
  s.field("rope_scaling_beta_slow", &M::rope_scaling_beta_slow)
      .doc("pairs that turn less often within the original length are stretched fully")
      .unit("turns")
      .above(0)
      .used_when<Config>(yarn, scales_as_yarn);
  s.field("rope_scaling_truncate", &M::rope_scaling_truncate)
      .doc("the range between beta_fast and beta_slow begins and ends at whole pairs")
      .used_when<Config>(yarn, scales_as_yarn);
  s.field("rope_scaling_attention_factor", &M::rope_scaling_attention_factor)
      .doc("cos and sin are multiplied by this; null: the formula of rope_scaling_type")
      .above(0)
      .used_when<Config>("`model.rope_scaling_type` is yarn or longrope",
                         [](const Config& c) { return scales_as_yarn(c) || scales_as_longrope(c); });
  const char* longrope = "`model.rope_scaling_type` is longrope";
  s.field("rope_scaling_short_factors", &M::rope_scaling_short_factors)
      .doc("factor of each pair's wavelength for sequences up to the original length")
      .used_when<Config>(longrope, scales_as_longrope)
      .known_as("short_factor");
  s.field("rope_scaling_long_factors", &M::rope_scaling_long_factors)
      .doc(
          "factor of each pair's wavelength for longer sequences: by seq_length in training, by the tokens "
          "so "
          "far in generation")
      .used_when<Config>(longrope, scales_as_longrope)
      .known_as("long_factor");
}

void block_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  s.field("normalization", &M::normalization).doc("the norm of the blocks and before the head");
  s.field("norm_placement", &M::norm_placement).doc("where the norms of a block stand");
  s.field("layernorm_epsilon", &M::layernorm_epsilon)
      .doc("added to the variance under the square root")
      .above(0)
      .alias("norm_epsilon")
      .known_as("rms_norm_eps")
      .known_as("layer_norm_epsilon");
  s.field("layernorm_zero_centered_gamma", &M::layernorm_zero_centered_gamma)
      .doc("store gamma - 1, so that weight decay pulls gamma towards 1 (layernorm1p)");
  s.field("gated_linear_unit", &M::gated_linear_unit)
      .doc("feed-forward network act(x W_gate) * (x W_up); SwiGLU is this with silu")
      .known_as("swiglu");
  s.field("activation_func", &M::activation_func)
      .doc("activation of the feed-forward network")
      .known_as("hidden_act");
  s.field("add_bias_linear", &M::add_bias_linear).doc("a bias on every linear layer of a block");
  s.field("add_qkv_bias", &M::add_qkv_bias)
      .doc("a bias on the QKV projection, whatever add_bias_linear says");
  s.field("add_attention_output_bias", &M::add_attention_output_bias)
      .doc("a bias on the attention's output projection");
  s.field("add_mlp_bias", &M::add_mlp_bias).doc("biases of the feed-forward network").known_as("mlp_bias");
  s.field("qk_layernorm", &M::qk_layernorm).doc("normalise queries and keys before RoPE");
  s.field("qk_layernorm_across_heads", &M::qk_layernorm_across_heads)
      .doc("the heads of the queries as one vector, and those of the keys; false: each head by itself")
      .used_when<Config>("`model.qk_layernorm` is true",
                         [](const Config& c) { return c.model.qk_layernorm; });
  s.field("embedding_multiplier", &M::embedding_multiplier)
      .doc(
          "embeddings are multiplied by this, rounded to the compute type (Gemma: sqrt(hidden_size)); null: "
          "not")
      .above(0);
  s.field("apply_residual_connection_post_layernorm", &M::apply_residual_connection_post_layernorm)
      .doc("the residual branches off after the norm, as in the first BERT")
      .used_when<Config>("`model.normalization` is LayerNorm", has_layer_norm);
  s.field("fp32_residual_connection", &M::fp32_residual_connection)
      .doc("keep the residual stream in fp32")
      .not_yet("an fp32 residual stream");
  s.field("share_embeddings_and_output_weights", &M::share_embeddings_and_output_weights)
      .doc("the head uses the embedding's weights (tied)")
      .known_as("tie_word_embeddings");
  s.field("softmax_scale", &M::softmax_scale).doc("attention scores are multiplied by this").above(0);
  s.field("attn_logit_softcapping", &M::attn_logit_softcapping)
      .doc("attention scores become c * tanh(score / c); null: as they are")
      .above(0);
  s.field("final_logit_softcapping", &M::final_logit_softcapping)
      .doc("the head's logits become c * tanh(logit / c); null: as they are")
      .above(0);
  s.field("attention_softmax_in_fp32", &M::attention_softmax_in_fp32)
      .doc("attention's softmax in fp32")
      .not_yet("a softmax below fp32");
  s.field("window_size", &M::window_size)
      .doc("tokens a query sees, itself included; null: all earlier ones")
      .unit("tokens")
      .tokens()
      .min(1)
      .alias("sliding_window");
  s.field("window_attn_skip_freq", &M::window_attn_skip_freq)
      .doc("every n-th layer (the n-th, the 2n-th, …) sees all earlier tokens in spite of window_size")
      .unit("layers")
      .range(1, 1 << 20)
      .used_when<Config>("`model.window_size` is set",
                         [](const Config& c) { return c.model.window_size.has_value(); });
  s.field("hidden_dropout", &M::hidden_dropout)
      .doc("share of a block's outputs and of embeddings set to zero")
      .fraction()
      .min(0)
      .below(1);
  s.field("attention_dropout", &M::attention_dropout)
      .doc("share of attention weights set to zero")
      .fraction()
      .min(0)
      .below(1);
  s.field("init_method_std", &M::init_method_std)
      .doc("standard deviation of initial weights; output layers of a block: this / sqrt(2 num_layers)")
      .above(0)
      .known_as("initializer_range");
  s.field("embedding_init_method_std", &M::embedding_init_method_std)
      .doc("standard deviation of the initial embeddings")
      .above(0);
}

void recompute_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  const char* set = "`model.recompute_granularity` is set";
  s.field("recompute_granularity", &M::recompute_granularity)
      .doc("activations that backward computes again instead of keeping them; null: none")
      .effect(Effect::memory);
  s.field("recompute_method", &M::recompute_method)
      .doc("which layers full recomputation covers")
      .effect(Effect::memory)
      .used_when<Config>(set, recomputes);
  s.field("recompute_num_layers", &M::recompute_num_layers)
      .doc(
          "uniform: layers of one group; block: layers of each stage that are recomputed; a number above the "
          "layers of a stage means all of "
          "them")
      .unit("layers")
      .min(1)
      .effect(Effect::memory)
      .used_when<Config>(set, recomputes);
  s.field("recompute_modules", &M::recompute_modules)
      .doc("what selective recomputation runs again")
      .scalar_ok()
      .effect(Effect::memory)
      .used_when<Config>(set, recomputes)
      .not_yet(
          "recomputation of modules other than core_attn and mlp; model.recompute_granularity=full covers "
          "the norms",
          names_other_modules);
  s.field("distribute_saved_activations", &M::distribute_saved_activations)
      .doc("split the kept inputs of full recomputation over the tensor-parallel ranks")
      .effect(Effect::memory)
      .not_yet("distributed saved activations")
      .used_when<Config>(set, recomputes);
  s.field("cpu_offloading", &M::cpu_offloading)
      .doc("move activations to host memory between forward and backward")
      .effect(Effect::memory)
      .not_yet("activation offload");
  s.field("cpu_offloading_num_layers", &M::cpu_offloading_num_layers)
      .doc("layers whose activations are moved")
      .unit("layers")
      .range(0, 1 << 20)
      .effect(Effect::memory)
      .used_when<Config>("`model.cpu_offloading` is true",
                         [](const Config& c) { return c.model.cpu_offloading; });
}

void expert_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  s.field("num_moe_experts", &M::num_moe_experts)
      .doc("experts of a layer; null: a dense model")
      .unit("experts")
      .min(1)
      .not_yet("mixture of experts");
  const auto moe = [](Field field) -> Field {
    return field.used_when<Config>("`model.num_moe_experts` is set", has_experts);
  };
  moe(s.field("moe_layer_freq", &M::moe_layer_freq))
      .doc("every n-th layer has experts, the others are dense")
      .unit("layers")
      .range(1, 1 << 20);
  moe(s.field("moe_first_dense_layers", &M::moe_first_dense_layers))
      .doc("dense layers before the first with experts")
      .unit("layers")
      .range(0, 1 << 20)
      .known_as("first_k_dense_replace");
  moe(s.field("moe_ffn_hidden_size", &M::moe_ffn_hidden_size))
      .doc("width of one expert")
      .unit("elements")
      .range(1, 1 << 24);
  moe(s.field("moe_router_topk", &M::moe_router_topk))
      .doc("experts for each token")
      .unit("experts")
      .range(1, 1 << 20)
      .known_as("num_experts_per_tok");
  moe(s.field("moe_router_score_function", &M::moe_router_score_function))
      .doc("scores from the router's logits");
  moe(s.field("moe_router_pre_softmax", &M::moe_router_pre_softmax))
      .doc("softmax before the choice of experts, not after");
  moe(s.field("moe_router_num_groups", &M::moe_router_num_groups))
      .doc("groups of experts, of which some are chosen first")
      .unit("groups")
      .range(1, 1 << 20);
  moe(s.field("moe_router_group_topk", &M::moe_router_group_topk))
      .doc("groups chosen for each token")
      .unit("groups")
      .range(1, 1 << 20);
  moe(s.field("moe_router_topk_scaling_factor", &M::moe_router_topk_scaling_factor))
      .doc("the chosen experts' weights are multiplied by this")
      .above(0);
  moe(s.field("moe_router_dtype", &M::moe_router_dtype)).doc("number format of the router");
  moe(s.field("moe_router_enable_expert_bias", &M::moe_router_enable_expert_bias))
      .doc("balance by a bias on the choice, adjusted after each step (no auxiliary loss)");
  moe(s.field("moe_router_bias_update_rate", &M::moe_router_bias_update_rate))
      .doc("step of that bias")
      .above(0);
  moe(s.field("moe_router_load_balancing_type", &M::moe_router_load_balancing_type))
      .doc("how the load of experts is balanced");
  moe(s.field("moe_aux_loss_coeff", &M::moe_aux_loss_coeff)).doc("weight of the balancing loss").min(0);
  moe(s.field("moe_z_loss_coeff", &M::moe_z_loss_coeff))
      .doc("weight of the loss on large router logits; null: none")
      .above(0);
  moe(s.field("moe_input_jitter_eps", &M::moe_input_jitter_eps))
      .doc("the router's input is multiplied by uniform noise in 1 - eps … 1 + eps; null: none")
      .above(0)
      .below(1);
  moe(s.field("moe_expert_capacity_factor", &M::moe_expert_capacity_factor))
      .doc("tokens an expert takes, as a multiple of an even share; more are dropped; null: none is dropped")
      .above(0);
  moe(s.field("moe_pad_expert_input_to_capacity", &M::moe_pad_expert_input_to_capacity))
      .doc("pad each expert's input to its capacity: fixed shapes")
      .effect(Effect::perf);
  moe(s.field("moe_token_drop_policy", &M::moe_token_drop_policy))
      .doc("which tokens are dropped above capacity");
  moe(s.field("moe_token_dispatcher_type", &M::moe_token_dispatcher_type))
      .doc("how tokens reach their experts")
      .effect(Effect::perf);
  moe(s.field("moe_grouped_gemm", &M::moe_grouped_gemm))
      .doc("one matrix product for all local experts")
      .effect(Effect::perf);
  moe(s.field("moe_permute_fusion", &M::moe_permute_fusion))
      .doc("one kernel sorts tokens by expert")
      .effect(Effect::perf);
  moe(s.field("moe_shared_expert_intermediate_size", &M::moe_shared_expert_intermediate_size))
      .doc("width of the expert that every token passes; null: none")
      .unit("elements")
      .min(1);
  s.field("moe_shared_expert_overlap", &M::moe_shared_expert_overlap)
      .doc("compute the shared expert while tokens travel")
      .effect(Effect::perf)
      .used_when<Config>("`model.moe_shared_expert_intermediate_size` is set", has_shared_expert);
  s.field("moe_shared_expert_gate", &M::moe_shared_expert_gate)
      .doc("a learned gate on the shared expert")
      .used_when<Config>("`model.moe_shared_expert_intermediate_size` is set", has_shared_expert);
}

void latent_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  const char* latent = "`model.multi_latent_attention` is true";
  s.field("multi_latent_attention", &M::multi_latent_attention)
      .doc("keys and values are kept as one compressed vector for each token (DeepSeek)")
      .not_yet("multi-latent attention");
  s.field("q_lora_rank", &M::q_lora_rank)
      .doc("width of the compressed queries; null: not compressed")
      .unit("elements")
      .min(1)
      .used_when<Config>(latent, has_latent_attention);
  s.field("kv_lora_rank", &M::kv_lora_rank)
      .doc("width of the compressed keys and values")
      .unit("elements")
      .range(1, 1 << 24)
      .used_when<Config>(latent, has_latent_attention);
  s.field("qk_head_dim", &M::qk_head_dim)
      .doc("width of a head's part without positions")
      .unit("elements")
      .range(1, 1 << 24)
      .used_when<Config>(latent, has_latent_attention);
  s.field("qk_pos_emb_head_dim", &M::qk_pos_emb_head_dim)
      .doc("width of a head's rotated part")
      .unit("elements")
      .min(2)
      .multiple_of(2)
      .used_when<Config>(latent, has_latent_attention);
  s.field("v_head_dim", &M::v_head_dim)
      .doc("width of a value head")
      .unit("elements")
      .range(1, 1 << 24)
      .used_when<Config>(latent, has_latent_attention);
  s.field("mtp_num_layers", &M::mtp_num_layers)
      .doc("further tokens that extra layers predict; null: none")
      .unit("layers")
      .min(1)
      .not_yet("multi-token prediction");
  s.field("mtp_loss_scaling_factor", &M::mtp_loss_scaling_factor)
      .doc("weight of the loss of those predictions")
      .min(0)
      .used_when<Config>("`model.mtp_num_layers` is set", has_multi_token_prediction);
}
}  // namespace

void describe(Section<ModelConfig>& s) {
  s.doc("the model's architecture");
  size_fields(s);
  position_fields(s);
  block_fields(s);
  recompute_fields(s);
  expert_fields(s);
  latent_fields(s);
}

}  // namespace capstan::config
