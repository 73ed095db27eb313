#include <algorithm>

#include "config/sections/conditions.hpp"
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
bool has_shared_expert(const Config& c) {
  return has_experts(c) && c.model.moe_shared_expert_intermediate_size.has_value();
}
bool has_latent_attention(const Config& c) {
  return c.model.multi_latent_attention;
}
// One width of queries, keys and values, with RoPE on a fraction of it.
bool has_own_heads(const Config& c) {
  return !has_latent_attention(c);
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

bool above_64(const Value& v) {
  return !v.is_null() && v.integer > 64;
}
bool is_false(const Value& v) {
  return !v.boolean;
}

void size_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  s.field("architecture", &M::architecture)
      .doc("the kinds of layers of the model and their arrangement; null: follows from the other fields");
  s.field("num_layers", &M::num_layers)
      .doc("number of transformer layers")
      .unit("layers")
      .range(1, 1 << 20)
      .required()
      .alias("n_layers")
      .known_as("n_layer")
      .known_as("num_hidden_layers");
  s.field("hidden_size", &M::hidden_size)
      .doc("dimension of the hidden states (d_model)")
      .unit("elements")
      .range(1, 1 << 24)
      .required()
      .known_as("d_model")
      .known_as("hidden_dim")
      .known_as("n_embd");
  s.field("num_attention_heads", &M::num_attention_heads)
      .doc("number of attention (query) heads per layer")
      .unit("heads")
      .range(1, 1 << 20)
      .required()
      .known_as("n_head")
      .known_as("n_heads");
  s.field("num_query_groups", &M::num_query_groups)
      .doc(
          "number of key/value heads per layer; fewer than num_attention_heads: grouped-query attention "
          "(GQA); 1: multi-query attention (MQA)")
      .unit("heads")
      .min(1)
      .known_as("num_key_value_heads");
  s.field("kv_channels", &M::kv_channels)
      .doc("dimension of one attention head")
      .unit("elements")
      .range(1, 1 << 24)
      .alias("head_dim")
      .used_when<Config>("`model.multi_latent_attention` is false", has_own_heads);
  s.field("ffn_hidden_size", &M::ffn_hidden_size)
      .doc("inner dimension of the feed-forward network")
      .unit("elements")
      .range(1, 1 << 24)
      .known_as("intermediate_size");
  s.field("seq_length", &M::seq_length)
      .doc("sequence length of the training samples")
      .unit("tokens")
      .tokens()
      .range(1, int64_t{1} << 32)
      .alias("dataset.seq_length")
      .known_as("sequence_length")
      .known_as("block_size")
      .known_as("context_length")
      .known_as("max_seq_length")
      .known_as("max_seq_len");
  s.field("max_position_embeddings", &M::max_position_embeddings)
      .doc("maximum sequence length that the model supports; number of learned position embeddings")
      .unit("tokens")
      .tokens()
      .min(1);
  s.field("vocab_size", &M::vocab_size)
      .doc("vocabulary size of the model; at least that of the tokenizer")
      .unit("ids")
      .range(2, 1 << 30)
      .required();
  s.field("make_vocab_size_divisible_by", &M::make_vocab_size_divisible_by)
      .doc("pad the vocabulary to a multiple of this; padding entries are excluded from the softmax")
      .unit("ids")
      .min(1)
      .effect(Effect::memory);
  s.field("padded_vocab_size", &M::padded_vocab_size)
      .doc("rows of the embedding matrix after padding")
      .unit("ids")
      .range(1, 1 << 30)
      .effect(Effect::memory);
}

void position_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  const char* rope = "`model.position_embedding_type` is rope";
  const char* scaled = "`model.rope_scaling` is true";
  s.field("position_embedding_type", &M::position_embedding_type).doc("type of position embedding");
  s.field("rotary_base", &M::rotary_base)
      .doc("base period (theta) of RoPE; typical: 10000, larger for long contexts (Llama 3: 500000)")
      .above(1)
      .used_when<Config>(rope, uses_rope)
      .known_as("rope_theta");
  s.field("rotary_percent", &M::rotary_percent)
      .doc("fraction of the head dimension to which RoPE is applied, from its first element")
      .fraction()
      .above(0)
      .max(1)
      .used_when<Config>(rope, uses_rope)
      .used_when<Config>("`model.multi_latent_attention` is false", has_own_heads);
  s.field("rotary_interleaved", &M::rotary_interleaved)
      .doc(
          "RoPE rotates adjacent elements (0,1)(2,3)… (GPT-J style) instead of the two halves of a head "
          "(GPT-NeoX style)")
      .used_when<Config>(rope, uses_rope);
  s.field("rope_scaling", &M::rope_scaling)
      .doc("scale the RoPE frequencies to extend the context beyond the pretraining length")
      .used_when<Config>(rope, uses_rope)
      .alias("use_rope_scaling");
  s.field("rope_scaling_type", &M::rope_scaling_type)
      .doc("RoPE scaling method")
      .used_when<Config>(scaled, scales_rope)
      .known_as("rope_type");
  s.field("rope_scaling_factor", &M::rope_scaling_factor)
      .doc("context extension factor by which the lowest RoPE frequencies are divided")
      .min(1)
      .used_when<Config>(scaled, scales_rope)
      .known_as("rotary_scaling_factor");
  const char* llama3 = "`model.rope_scaling_type` is llama3";
  s.field("rope_scaling_low_freq_factor", &M::rope_scaling_low_freq_factor)
      .doc("wavelengths above original length / this are scaled by the full factor")
      .above(0)
      .used_when<Config>(llama3, scales_as_llama3);
  s.field("rope_scaling_high_freq_factor", &M::rope_scaling_high_freq_factor)
      .doc("wavelengths below original length / this are not scaled")
      .above(0)
      .used_when<Config>(llama3, scales_as_llama3);
  s.field("rope_scaling_original_max_position_embeddings", &M::rope_scaling_original_max_position_embeddings)
      .doc("context length of pretraining, before scaling")
      .unit("tokens")
      .tokens()
      .range(1, int64_t{1} << 32)
      .alias("rope_scaling_old_context_len")
      .used_when<Config>(scaled, scales_rope)
      .used_when<Config>("`model.rope_scaling_type` is not linear",
                         [](const Config& c) { return c.model.rope_scaling_type != RopeScaling::linear; });
  const char* yarn = "`model.rope_scaling_type` is yarn";
  s.field("rope_scaling_beta_fast", &M::rope_scaling_beta_fast)
      .doc(
          "dimensions with more rotations than this within the original length are not scaled (extrapolation "
          "boundary of YaRN)")
      .unit("rotations")
      .above(0)
      .used_when<Config>(yarn, scales_as_yarn);
  s.field("rope_scaling_beta_slow", &M::rope_scaling_beta_slow)
      .doc(
          "dimensions with fewer rotations than this within the original length are scaled by the full "
          "factor (interpolation boundary of YaRN)")
      .unit("rotations")
      .above(0)
      .used_when<Config>(yarn, scales_as_yarn);
  s.field("rope_scaling_truncate", &M::rope_scaling_truncate)
      .doc("round the boundaries of the range between beta_fast and beta_slow to integer dimensions")
      .used_when<Config>(yarn, scales_as_yarn);
  s.field("rope_scaling_mscale", &M::rope_scaling_mscale)
      .doc(
          "YaRN's mscale of cos and sin, relative to rope_scaling_mscale_all_dim (DeepSeek); null: the "
          "factor of the YaRN paper")
      .above(0)
      .used_when<Config>(yarn, scales_as_yarn)
      .known_as("mscale");
  s.field("rope_scaling_mscale_all_dim", &M::rope_scaling_mscale_all_dim)
      .doc(
          "YaRN's mscale of all elements of queries and keys, which latent attention applies to the softmax "
          "scale; null: none")
      .above(0)
      .used_when<Config>(yarn, scales_as_yarn)
      .known_as("mscale_all_dim");
  s.field("rope_scaling_attention_factor", &M::rope_scaling_attention_factor)
      .doc(
          "attention scaling factor (mscale) that multiplies cos and sin; null: by the formula of "
          "rope_scaling_type")
      .above(0)
      .used_when<Config>("`model.rope_scaling_type` is yarn or longrope",
                         [](const Config& c) { return scales_as_yarn(c) || scales_as_longrope(c); });
  const char* longrope = "`model.rope_scaling_type` is longrope";
  s.field("rope_scaling_short_factors", &M::rope_scaling_short_factors)
      .doc("LongRoPE rescale factors per frequency for sequences up to the original length")
      .used_when<Config>(longrope, scales_as_longrope)
      .known_as("short_factor");
  s.field("rope_scaling_long_factors", &M::rope_scaling_long_factors)
      .doc(
          "LongRoPE rescale factors per frequency for longer sequences: selected by seq_length in training "
          "and by the current length in generation")
      .used_when<Config>(longrope, scales_as_longrope)
      .known_as("long_factor");
}

void block_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  const char* gated = "`model.gated_linear_unit` is true";
  const auto has_gate = [](const Config& c) { return c.model.gated_linear_unit; };
  s.field("normalization", &M::normalization)
      .doc("normalization layer of the transformer blocks and before the output layer");
  s.field("norm_placement", &M::norm_placement).doc("placement of the normalization layers in a block");
  s.field("layernorm_epsilon", &M::layernorm_epsilon)
      .doc("epsilon added to the variance for numerical stability; typical: 1e-5 or 1e-6")
      .above(0)
      .alias("norm_epsilon")
      .known_as("rms_norm_eps")
      .known_as("layer_norm_epsilon");
  s.field("layernorm_zero_centered_gamma", &M::layernorm_zero_centered_gamma)
      .doc(
          "store the norm weight gamma as gamma - 1, so that weight decay pulls gamma toward 1 "
          "(layernorm1p)");
  s.field("gated_linear_unit", &M::gated_linear_unit)
      .doc("gated feed-forward network act(x W_gate) * (x W_up); with silu: SwiGLU")
      .known_as("swiglu");
  s.field("activation_func", &M::activation_func)
      .doc("activation function of the feed-forward network")
      .known_as("hidden_act");
  s.field("activation_func_clamp_value", &M::activation_func_clamp_value)
      .doc(
          "limit c of a gated network: gate at most c, up between -c and c, before the activation (gpt-oss: "
          "7)")
      .above(0)
      .used_when<Config>(gated, has_gate)
      .known_as("swiglu_limit");
  s.field("glu_linear_offset", &M::glu_linear_offset)
      .doc("offset of the linear branch of a gated network: act(gate) * (up + offset) (gpt-oss: 1)")
      .used_when<Config>(gated, has_gate);
  s.field("add_bias_linear", &M::add_bias_linear).doc("add biases to all linear layers of a block");
  s.field("add_qkv_bias", &M::add_qkv_bias)
      .doc("add a bias to the QKV projection, regardless of add_bias_linear (Qwen2)");
  s.field("add_attention_output_bias", &M::add_attention_output_bias)
      .doc("add a bias to the attention output projection");
  s.field("add_mlp_bias", &M::add_mlp_bias)
      .doc("add biases to the feed-forward network; with experts: to each of them and to the router")
      .known_as("mlp_bias");
  s.field("qk_layernorm", &M::qk_layernorm)
      .doc(
          "normalize queries and keys before RoPE (QK-norm); latent attention: compressed queries, keys and "
          "values");
  s.field("qk_layernorm_across_heads", &M::qk_layernorm_across_heads)
      .doc("QK-norm over all heads together (OLMo 2); false: over each head separately")
      .used_when<Config>("`model.qk_layernorm` is true",
                         [](const Config& c) { return c.model.qk_layernorm; });
  s.field("embedding_multiplier", &M::embedding_multiplier)
      .doc(
          "factor by which embeddings are multiplied, rounded to the compute type (Gemma: "
          "sqrt(hidden_size)); null: 1")
      .above(0);
  s.field("apply_residual_connection_post_layernorm", &M::apply_residual_connection_post_layernorm)
      .doc("take the residual connection from the output of the norm, as in the original BERT")
      .used_when<Config>("`model.normalization` is LayerNorm", has_layer_norm);
  s.field("fp32_residual_connection", &M::fp32_residual_connection)
      .doc("keep the residual connection in fp32")
      .unsupported("an fp32 residual connection");
  s.field("share_embeddings_and_output_weights", &M::share_embeddings_and_output_weights)
      .doc("share the weights of embedding and output layer (tied embeddings)")
      .known_as("tie_word_embeddings");
  s.field("cross_entropy_loss_fusion", &M::cross_entropy_loss_fusion)
      .doc("compute output layer and loss together, a part of the rows at a time: all logits exist nowhere")
      .effect(Effect::memory)
      .unsupported("a tensor of all logits", is_false);
  s.field("softmax_scale", &M::softmax_scale)
      .doc("scaling factor of the attention scores before the softmax")
      .above(0);
  s.field("attn_logit_softcapping", &M::attn_logit_softcapping)
      .doc("soft cap c of the attention scores: c * tanh(score / c) (Gemma 2: 50); null: none")
      .above(0);
  s.field("final_logit_softcapping", &M::final_logit_softcapping)
      .doc("soft cap c of the output logits: c * tanh(logit / c) (Gemma 2: 30); null: none")
      .above(0);
  s.field("softmax_type", &M::softmax_type).doc("softmax of the attention scores");
  s.field("attention_softmax_in_fp32", &M::attention_softmax_in_fp32)
      .doc("compute the attention softmax in fp32")
      .unsupported("a softmax below fp32");
  s.field("window_size", &M::window_size)
      .doc(
          "sliding-window attention: tokens that a query attends to, itself included; null: full causal "
          "attention")
      .unit("tokens")
      .tokens()
      .min(1)
      .alias("sliding_window");
  s.field("window_attn_skip_freq", &M::window_attn_skip_freq)
      .doc("every n-th layer (the n-th, the 2n-th, …) uses full attention instead of the sliding window")
      .unit("layers")
      .range(1, 1 << 20)
      .used_when<Config>("`model.window_size` is set",
                         [](const Config& c) { return c.model.window_size.has_value(); });
  s.field("hidden_dropout", &M::hidden_dropout)
      .doc("dropout probability of embeddings and block outputs; typical: 0 for pretraining of large models")
      .fraction()
      .min(0)
      .below(1);
  s.field("attention_dropout", &M::attention_dropout)
      .doc("dropout probability of the attention weights; typical: 0 for pretraining of large models")
      .fraction()
      .min(0)
      .below(1);
  s.field("init_method_std", &M::init_method_std)
      .doc(
          "standard deviation of initial weights; output projections: this / sqrt(2 num_layers); exports "
          "record it as initializer_range")
      .above(0)
      .known_as("initializer_range");
  s.field("embedding_init_method_std", &M::embedding_init_method_std)
      .doc("standard deviation of the embedding initialization")
      .above(0)
      .used_when<Config>("`checkpoint.pretrained_checkpoint` is not set",
                         [](const Config& c) { return !c.checkpoint.pretrained_checkpoint; });
}

void recompute_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  const char* set = "`model.recompute_granularity` is set";
  s.field("recompute_granularity", &M::recompute_granularity)
      .doc("activation recomputation (checkpointing): trades computation for activation memory; null: off")
      .effect(Effect::memory);
  s.field("recompute_method", &M::recompute_method)
      .doc("selection of the layers for full recomputation")
      .effect(Effect::memory)
      .used_when<Config>(set, recomputes);
  s.field("recompute_num_layers", &M::recompute_num_layers)
      .doc(
          "uniform: layers per recomputed group; block: recomputed layers per pipeline stage; values above "
          "the layers of a stage mean all")
      .unit("layers")
      .min(1)
      .effect(Effect::memory)
      .used_when<Config>(set, recomputes);
  s.field("recompute_modules", &M::recompute_modules)
      .doc("modules that selective recomputation recomputes")
      .scalar_ok()
      .effect(Effect::memory)
      .used_when<Config>(set, recomputes);
  s.field("distribute_saved_activations", &M::distribute_saved_activations)
      .doc("shard the saved inputs of full recomputation over the tensor-parallel ranks")
      .effect(Effect::memory)
      .unsupported("distributed saved activations")
      .used_when<Config>(set, recomputes);
  s.field("cpu_offloading", &M::cpu_offloading)
      .doc(
          "keep saved activations in host memory between the forward and the backward pass; no effect on the "
          "CPU")
      .effect(Effect::memory);
  s.field("cpu_offloading_num_layers", &M::cpu_offloading_num_layers)
      .doc("first layers of each pipeline stage whose saved activations are offloaded")
      .unit("layers")
      .range(0, 1 << 20)
      .effect(Effect::memory)
      .used_when<Config>("`model.cpu_offloading` is true",
                         [](const Config& c) { return c.model.cpu_offloading; });
}

void launch_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  s.field("cuda_graph_impl", &M::cuda_graph_impl)
      .doc(
          "CUDA graphs: how the kernels of a layer, or of a generated token, are launched on a GPU; "
          "results do not change; traced steps have none")
      .effect(Effect::perf);
  s.field("cuda_graph_warmup_steps", &M::cuda_graph_warmup_steps)
      .doc("steps, and passes of generation, that launch each kernel alone, which loads the kernels")
      .unit("steps")
      .range(0, 1 << 20)
      .effect(Effect::perf)
      .used_when<Config>("`model.cuda_graph_impl` is local",
                         [](const Config& c) { return c.model.cuda_graph_impl == CudaGraphImpl::local; });
}

void expert_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  s.field("num_moe_experts", &M::num_moe_experts)
      .doc("number of experts per MoE layer; null: dense model")
      .unit("experts")
      .min(1)
      .unsupported("more than 1024 experts", [](const Value& v) { return !v.is_null() && v.integer > 1024; });
  const auto moe = [](Field field) -> Field {
    return field.used_when<Config>("`model.num_moe_experts` is set", has_experts);
  };
  moe(s.field("moe_layer_freq", &M::moe_layer_freq))
      .doc(
          "layers whose index, from 0, is a multiple of this are MoE layers, the others dense; or a list "
          "with 1 (MoE) or 0 for each layer")
      .unit("layers")
      .range(0, 1 << 20);
  moe(s.field("moe_first_dense_layers", &M::moe_first_dense_layers))
      .doc("dense layers before the first MoE layer")
      .unit("layers")
      .range(0, 1 << 20)
      .known_as("first_k_dense_replace");
  moe(s.field("moe_ffn_hidden_size", &M::moe_ffn_hidden_size))
      .doc("inner dimension of one expert")
      .unit("elements")
      .range(1, 1 << 24);
  moe(s.field("moe_router_topk", &M::moe_router_topk))
      .doc("number of experts that each token is routed to (top-k)")
      .unit("experts")
      .range(1, 1 << 20)
      .known_as("num_experts_per_tok");
  moe(s.field("moe_router_score_function", &M::moe_router_score_function))
      .doc("score function of the router logits");
  moe(s.field("moe_router_pre_softmax", &M::moe_router_pre_softmax))
      .doc("apply the softmax before top-k selection instead of after it")
      .used_when<Config>("`model.moe_router_score_function` is softmax", [](const Config& c) {
        return has_experts(c) && c.model.moe_router_score_function == RouterScore::softmax;
      });
  moe(s.field("moe_router_num_groups", &M::moe_router_num_groups))
      .doc("expert groups for group-limited routing")
      .unit("groups")
      .range(1, 1 << 20)
      .unsupported("more than 64 groups", above_64);
  moe(s.field("moe_router_group_topk", &M::moe_router_group_topk))
      .doc("groups selected for each token")
      .unit("groups")
      .range(1, 1 << 20);
  s.field("moe_router_group_score_topk", &M::moe_router_group_score_topk)
      .doc("highest scores of a group whose sum is the score of the group: DeepSeek-V2 1, DeepSeek-V3 2")
      .unit("experts")
      .range(1, 1 << 20)
      .used_when<Config>("`model.moe_router_num_groups` is set", [](const Config& c) {
        return has_experts(c) && c.model.moe_router_num_groups.has_value();
      });
  moe(s.field("moe_router_topk_scaling_factor", &M::moe_router_topk_scaling_factor))
      .doc("scaling factor of the routing weights of the selected experts")
      .above(0);
  moe(s.field("moe_router_dtype", &M::moe_router_dtype))
      .doc(
          "number format of the router's logits, scores and losses; fp64 needs `train.device` cpu or "
          "checked");
  moe(s.field("moe_router_enable_expert_bias", &M::moe_router_enable_expert_bias))
      .doc(
          "balance the load by an expert bias on the top-k selection, updated after each step "
          "(auxiliary-loss-free); constant with `peft`");
  s.field("moe_router_bias_update_rate", &M::moe_router_bias_update_rate)
      .doc("update rate of the expert bias; typical: 1e-3")
      .above(0)
      .used_when<Config>(
          "`model.moe_router_enable_expert_bias` is true",
          [](const Config& c) { return has_experts(c) && c.model.moe_router_enable_expert_bias; })
      .used_when<Config>("`peft` is null", trains_all_layers);
  moe(s.field("moe_router_load_balancing_type", &M::moe_router_load_balancing_type))
      .doc("load balancing of the router: one kind, or a list of losses, which are added")
      .unsupported("balancing by Sinkhorn iterations", [](const Value& v) {
        return v.text == "sinkhorn" || std::ranges::count(v.items, "sinkhorn", &Value::text) > 0;
      });
  moe(s.field("moe_aux_loss_coeff", &M::moe_aux_loss_coeff))
      .doc(
          "coefficient of the load-balancing loss (1 at balanced load; mean over micro-batches), or one for "
          "each; typical: 1e-2")
      .min(0);
  moe(s.field("moe_z_loss_coeff", &M::moe_z_loss_coeff))
      .doc("coefficient of the router z-loss, which penalizes large logits; typical: 1e-3; null: none")
      .above(0);
  moe(s.field("moe_input_jitter_eps", &M::moe_input_jitter_eps))
      .doc("multiply the router input by uniform noise in [1 - eps, 1 + eps] in training; null: none")
      .above(0)
      .below(1);
  moe(s.field("moe_expert_capacity_factor", &M::moe_expert_capacity_factor))
      .doc(
          "expert capacity relative to the balanced load (alltoall: of a rank's own tokens); tokens above "
          "it are dropped; typical: 1 to 2; null: none")
      .above(0)
      .max(1e6);
  const auto dropping = [](Field field) -> Field {
    return field.used_when<Config>("`model.moe_expert_capacity_factor` is set", [](const Config& c) {
      return has_experts(c) && c.model.moe_expert_capacity_factor.has_value();
    });
  };
  moe(s.field("moe_pad_expert_input_to_capacity", &M::moe_pad_expert_input_to_capacity))
      .doc("pad the input of each expert to its capacity, for fixed shapes")
      .effect(Effect::perf);
  dropping(s.field("moe_token_drop_policy", &M::moe_token_drop_policy))
      .doc("choice of the tokens that are dropped above the capacity");
  s.field("moe_token_dispatcher_type", &M::moe_token_dispatcher_type)
      .doc(
          "communication that dispatches tokens to their experts; the memory estimate of alltoall assumes an "
          "equal load unless padded")
      .effect(Effect::perf)
      .used_when<Config>("`dist.expert_model_parallel_size` is above 1",
                         [](const Config& c) { return c.dist.expert_model_parallel_size > 1; });
  moe(s.field("moe_grouped_gemm", &M::moe_grouped_gemm))
      .doc("run all local experts in one grouped GEMM")
      .effect(Effect::perf)
      .unsupported("a GEMM for each expert", is_false);
  moe(s.field("moe_permute_fusion", &M::moe_permute_fusion))
      .doc("use a fused kernel to permute tokens by expert")
      .effect(Effect::perf)
      .unsupported("permutation in several kernels", is_false);
  moe(s.field("moe_shared_expert_intermediate_size", &M::moe_shared_expert_intermediate_size))
      .doc("inner dimension of the shared expert, which processes every token; null: none")
      .unit("elements")
      .min(1);
  s.field("moe_shared_expert_overlap", &M::moe_shared_expert_overlap)
      .doc("overlap the computation of the shared expert with the token dispatch")
      .effect(Effect::perf)
      .used_when<Config>(
          "`model.moe_shared_expert_intermediate_size` is set and `dist.expert_model_parallel_size` is above "
          "1",
          [](const Config& c) { return has_shared_expert(c) && c.dist.expert_model_parallel_size > 1; });
  s.field("moe_shared_expert_gate", &M::moe_shared_expert_gate)
      .doc("multiply the output of the shared expert by a learned gate")
      .used_when<Config>("`model.moe_shared_expert_intermediate_size` is set", has_shared_expert);
}

void latent_fields(Section<ModelConfig>& s) {
  using M = ModelConfig;
  const char* latent = "`model.multi_latent_attention` is true";
  s.field("multi_latent_attention", &M::multi_latent_attention)
      .doc(
          "multi-head latent attention (MLA, DeepSeek): keys and values of all heads are projections of one "
          "compressed vector per token");
  s.field("q_lora_rank", &M::q_lora_rank)
      .doc("rank of the query compression; null: queries are not compressed")
      .unit("elements")
      .min(1)
      .used_when<Config>(latent, has_latent_attention);
  s.field("kv_lora_rank", &M::kv_lora_rank)
      .doc("rank of the key/value compression")
      .unit("elements")
      .range(1, 1 << 24)
      .used_when<Config>(latent, has_latent_attention);
  s.field("qk_head_dim", &M::qk_head_dim)
      .doc("dimension of the part of a query/key head without RoPE")
      .unit("elements")
      .range(1, 1 << 24)
      .used_when<Config>(latent, has_latent_attention);
  s.field("qk_pos_emb_head_dim", &M::qk_pos_emb_head_dim)
      .doc("dimension of the part of a query/key head with RoPE")
      .unit("elements")
      .min(2)
      .multiple_of(2)
      .used_when<Config>(latent, has_latent_attention);
  s.field("v_head_dim", &M::v_head_dim)
      .doc("dimension of a value head")
      .unit("elements")
      .range(1, 1 << 24)
      .used_when<Config>(latent, has_latent_attention);
  s.field("latent_layernorm_epsilon", &M::latent_layernorm_epsilon)
      .doc(
          "epsilon of the norms of compressed queries, keys and values (qk_layernorm); DeepSeek's classes "
          "fix it at 1e-6")
      .above(0)
      .used_when<Config>(latent, has_latent_attention)
      .used_when<Config>("`model.qk_layernorm` is true",
                         [](const Config& c) { return c.model.qk_layernorm; });
  s.field("mtp_num_layers", &M::mtp_num_layers)
      .doc("multi-token prediction (MTP): layers that predict one token further each; null: none")
      .unit("layers")
      .range(1, 64);
  s.field("mtp_loss_scaling_factor", &M::mtp_loss_scaling_factor)
      .doc("coefficient of the mean loss of the MTP layers, which is added to the loss in training")
      .above(0)
      .used_when<Config>("`model.mtp_num_layers` is set", has_multi_token_prediction);
}
}  // namespace

void describe(Section<ModelConfig>& s) {
  s.doc("architecture of the model");
  size_fields(s);
  position_fields(s);
  block_fields(s);
  recompute_fields(s);
  launch_fields(s);
  expert_fields(s);
  latent_fields(s);
}

}  // namespace capstan::config
