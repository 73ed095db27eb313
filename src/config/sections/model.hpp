// The architecture of the model. Its distribution over ranks belongs to `dist`, its number formats to
// `mixed_precision`.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "config/core/types.hpp"

namespace capstan::config {

enum class Architecture : uint8_t { gpt, moe, deepseek, gpt_neox };
enum class PositionEmbedding : uint8_t { learned_absolute, rope, none };
// Spelled LayerNorm, RMSNorm.
enum class Normalization : uint8_t { layer_norm, rms_norm };
enum class NormPlacement : uint8_t { input, output, both };
enum class RopeScaling : uint8_t { llama3, linear, yarn, longrope };
enum class Activation : uint8_t { gelu, gelu_tanh, quick_gelu, silu, relu, squared_relu };
// Spelled off-by-one.
enum class SoftmaxType : uint8_t { vanilla, off_by_one, learnable };
enum class RecomputeGranularity : uint8_t { full, selective };
enum class RecomputeMethod : uint8_t { uniform, block };
enum class RecomputeModule : uint8_t { core_attn, layernorm, mlp, moe, moe_act, shared_experts, mla_up_proj };
enum class RouterScore : uint8_t { softmax, sigmoid };
enum class RouterBalancing : uint8_t { aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, none };
enum class CudaGraphImpl : uint8_t { none, local };
enum class RouterDtype : uint8_t { fp32, fp64 };
enum class TokenDropPolicy : uint8_t { probs, position };
enum class TokenDispatcher : uint8_t { allgather, alltoall };

template <>
struct EnumNames<Architecture> {
  static constexpr EnumEntry<Architecture> list[] = {
      {Architecture::gpt, "gpt", "attention and an MLP in every layer (GPT-2, Llama, Mistral, Qwen, Gemma)"},
      {Architecture::moe, "moe",
       "attention and a mixture of experts, in some layers an MLP (Mixtral, OLMoE, gpt-oss)"},
      {Architecture::deepseek, "deepseek",
       "latent attention and a mixture of experts or an MLP (DeepSeek, Kimi K2)"},
      {Architecture::gpt_neox, "gpt_neox",
       "attention and an MLP that both read the layer's input (GPT-NeoX, Pythia)"},
  };
};

template <>
struct EnumNames<PositionEmbedding> {
  static constexpr EnumEntry<PositionEmbedding> list[] = {
      {PositionEmbedding::learned_absolute, "learned_absolute", "a learned embedding per position"},
      {PositionEmbedding::rope, "rope", "rotary position embedding (RoPE)"},
      {PositionEmbedding::none, "none",
       "no position embedding (NoPE): order enters through the causal mask only"},
  };
};

template <>
struct EnumNames<Normalization> {
  static constexpr EnumEntry<Normalization> list[] = {
      {Normalization::layer_norm, "LayerNorm",
       "subtract the mean, divide by the standard deviation, scale and shift", "layernorm layer_norm"},
      {Normalization::rms_norm, "RMSNorm", "divide by the root mean square and scale", "rmsnorm rms_norm"},
  };
};

template <>
struct EnumNames<NormPlacement> {
  static constexpr EnumEntry<NormPlacement> list[] = {
      {NormPlacement::input, "input", "before attention and before the feed-forward network (pre-norm)"},
      {NormPlacement::output, "output",
       "after attention and after the feed-forward network, before the residual addition (OLMo 2)"},
      {NormPlacement::both, "both", "before and after each of them (Gemma 2)"},
  };
};

template <>
struct EnumNames<RopeScaling> {
  static constexpr EnumEntry<RopeScaling> list[] = {
      {RopeScaling::llama3, "llama3", "low frequencies are scaled, high frequencies kept (Llama 3.1)"},
      {RopeScaling::linear, "linear", "position interpolation: all frequencies are scaled"},
      {RopeScaling::yarn, "yarn", "YaRN: interpolation by frequency, with attention scaling"},
      {RopeScaling::longrope, "longrope",
       "LongRoPE: a rescale factor per frequency, one set for short and one for long sequences (Phi-3)"},
  };
};

template <>
struct EnumNames<Activation> {
  static constexpr EnumEntry<Activation> list[] = {
      {Activation::gelu, "gelu", "x * Phi(x), with the error function"},
      {Activation::gelu_tanh, "gelu_tanh", "the tanh approximation of GELU, as in GPT-2",
       "gelu_new gelu_pytorch_tanh"},
      {Activation::quick_gelu, "quick_gelu",
       "x * sigmoid(1.702 x); with gated_linear_unit: quick GEGLU (gpt-oss)"},
      {Activation::silu, "silu", "x * sigmoid(x); with gated_linear_unit: SwiGLU", "swish"},
      {Activation::relu, "relu", "max(x, 0)"},
      {Activation::squared_relu, "squared_relu", "max(x, 0) squared"},
  };
};

template <>
struct EnumNames<SoftmaxType> {
  static constexpr EnumEntry<SoftmaxType> list[] = {
      {SoftmaxType::vanilla, "vanilla", "the plain softmax"},
      {SoftmaxType::off_by_one, "off-by-one",
       "1 is added to its denominator: attention may sum to less than 1", "off_by_one"},
      {SoftmaxType::learnable, "learnable",
       "the exponential of a learned logit of each head is added to its denominator (attention sink; "
       "gpt-oss)"},
  };
};

template <>
struct EnumNames<RecomputeGranularity> {
  static constexpr EnumEntry<RecomputeGranularity> list[] = {
      {RecomputeGranularity::full, "full",
       "save only the input of each group of layers and recompute its forward pass in the backward pass"},
      {RecomputeGranularity::selective, "selective", "recompute only the modules of recompute_modules"},
  };
};

template <>
struct EnumNames<RecomputeMethod> {
  static constexpr EnumEntry<RecomputeMethod> list[] = {
      {RecomputeMethod::uniform, "uniform", "all layers, in groups of recompute_num_layers"},
      {RecomputeMethod::block, "block",
       "the first recompute_num_layers layers of each pipeline stage, one by one"},
  };
};

template <>
struct EnumNames<RecomputeModule> {
  static constexpr EnumEntry<RecomputeModule> list[] = {
      {RecomputeModule::core_attn, "core_attn", "scores, softmax and weighted sum"},
      {RecomputeModule::layernorm, "layernorm", "the norms of the inputs of attention and MLP or experts"},
      {RecomputeModule::mlp, "mlp", "the dense feed-forward network"},
      {RecomputeModule::moe, "moe", "router and experts"},
      {RecomputeModule::moe_act, "moe_act", "the activation inside the experts"},
      {RecomputeModule::shared_experts, "shared_experts", "the shared expert"},
      {RecomputeModule::mla_up_proj, "mla_up_proj",
       "up-projections of latent attention, RoPE, and the attention that reads them"},
  };
};

template <>
struct EnumNames<RouterScore> {
  static constexpr EnumEntry<RouterScore> list[] = {
      {RouterScore::softmax, "softmax",
       "softmax of the logits: over the selected experts, or over all with moe_router_pre_softmax"},
      {RouterScore::sigmoid, "sigmoid", "sigmoid of each expert's logit"},
  };
};

template <>
struct EnumNames<RouterBalancing> {
  static constexpr EnumEntry<RouterBalancing> list[] = {
      {RouterBalancing::aux_loss, "aux_loss", "load-balancing loss over a micro-batch"},
      {RouterBalancing::seq_aux_loss, "seq_aux_loss", "load-balancing loss over each sequence"},
      {RouterBalancing::global_aux_loss, "global_aux_loss",
       "load-balancing loss of a micro-batch by the load of all ranks in the global batch so far"},
      {RouterBalancing::sinkhorn, "sinkhorn", "balanced assignment by Sinkhorn iterations"},
      {RouterBalancing::none, "none", "no balancing"},
  };
};

template <>
struct EnumNames<CudaGraphImpl> {
  static constexpr EnumEntry<CudaGraphImpl> list[] = {
      {CudaGraphImpl::none, "none", "one launch for each kernel"},
      {CudaGraphImpl::local, "local",
       "one launch for the kernels of a layer, forward and backward, between two transfers"},
  };
};
template <>
struct EnumNames<RouterDtype> {
  static constexpr EnumEntry<RouterDtype> list[] = {
      {RouterDtype::fp32, "fp32", "32-bit"},
      {RouterDtype::fp64, "fp64", "64-bit"},
  };
};

template <>
struct EnumNames<TokenDropPolicy> {
  static constexpr EnumEntry<TokenDropPolicy> list[] = {
      {TokenDropPolicy::probs, "probs", "drop the least probable tokens"},
      {TokenDropPolicy::position, "position", "drop the last tokens"},
  };
};

template <>
struct EnumNames<TokenDispatcher> {
  static constexpr EnumEntry<TokenDispatcher> list[] = {
      {TokenDispatcher::allgather, "allgather", "all-gather: every rank gathers all tokens"},
      {TokenDispatcher::alltoall, "alltoall", "all-to-all: tokens are sent to the ranks of their experts"},
  };
};

struct ModelConfig {
  // Derived: by multi_latent_attention and num_moe_experts.
  std::optional<Architecture> architecture;

  // ---- size ----
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  // Derived: num_attention_heads.
  std::optional<int64_t> num_query_groups;
  // Derived: hidden_size / num_attention_heads; with latent attention qk_head_dim + qk_pos_emb_head_dim.
  std::optional<int64_t> kv_channels;
  // Derived: 4h, gated: floor(8h/3 / 64) * 64.
  std::optional<int64_t> ffn_hidden_size;
  int64_t seq_length = 1024;
  // Derived: seq_length.
  std::optional<int64_t> max_position_embeddings;
  int64_t vocab_size = 0;
  int64_t make_vocab_size_divisible_by = 128;
  // Derived: vocab_size rounded up.
  std::optional<int64_t> padded_vocab_size;

  // ---- positions ----
  PositionEmbedding position_embedding_type = PositionEmbedding::learned_absolute;
  double rotary_base = 10000.0;
  double rotary_percent = 1.0;
  bool rotary_interleaved = false;
  bool rope_scaling = false;
  RopeScaling rope_scaling_type = RopeScaling::llama3;
  double rope_scaling_factor = 8.0;
  double rope_scaling_low_freq_factor = 1.0;
  double rope_scaling_high_freq_factor = 4.0;
  int64_t rope_scaling_original_max_position_embeddings = 8192;
  double rope_scaling_beta_fast = 32.0;
  double rope_scaling_beta_slow = 1.0;
  bool rope_scaling_truncate = true;
  std::optional<double> rope_scaling_mscale;
  std::optional<double> rope_scaling_mscale_all_dim;
  // Derived: by the type's formula.
  std::optional<double> rope_scaling_attention_factor;
  std::vector<double> rope_scaling_short_factors;
  std::vector<double> rope_scaling_long_factors;

  // ---- blocks ----
  Normalization normalization = Normalization::layer_norm;
  NormPlacement norm_placement = NormPlacement::input;
  double layernorm_epsilon = 1e-5;
  bool layernorm_zero_centered_gamma = false;
  bool gated_linear_unit = false;
  Activation activation_func = Activation::gelu;
  std::optional<double> activation_func_clamp_value;
  double glu_linear_offset = 0.0;
  bool add_bias_linear = true;
  bool add_qkv_bias = false;
  // Derived: add_bias_linear.
  std::optional<bool> add_attention_output_bias;
  // Derived: add_bias_linear.
  std::optional<bool> add_mlp_bias;
  bool qk_layernorm = false;
  bool qk_layernorm_across_heads = false;
  std::optional<double> embedding_multiplier;
  bool apply_residual_connection_post_layernorm = false;
  bool fp32_residual_connection = false;
  bool share_embeddings_and_output_weights = true;
  bool cross_entropy_loss_fusion = true;

  // ---- attention ----
  // Derived: 1 / sqrt(kv_channels), for latent attention with YaRN times a factor.
  std::optional<double> softmax_scale;
  std::optional<double> attn_logit_softcapping;
  std::optional<double> final_logit_softcapping;
  SoftmaxType softmax_type = SoftmaxType::vanilla;
  bool attention_softmax_in_fp32 = true;
  std::optional<int64_t> window_size;
  std::optional<int64_t> window_attn_skip_freq;

  // ---- dropout and initialization ----
  double hidden_dropout = 0.1;
  double attention_dropout = 0.1;
  double init_method_std = 0.02;
  // Derived: init_method_std.
  std::optional<double> embedding_init_method_std;

  // ---- recomputation and offload of activations ----
  std::optional<RecomputeGranularity> recompute_granularity;
  std::optional<RecomputeMethod> recompute_method;
  std::optional<int64_t> recompute_num_layers;
  std::vector<RecomputeModule> recompute_modules;
  bool distribute_saved_activations = false;
  bool cpu_offloading = false;
  int64_t cpu_offloading_num_layers = 0;

  // ---- launches on a GPU ----
  CudaGraphImpl cuda_graph_impl = CudaGraphImpl::none;
  int64_t cuda_graph_warmup_steps = 3;

  // ---- mixture of experts ----
  std::optional<int64_t> num_moe_experts;
  // One number, or a 0 or 1 for each layer.
  OneOrMore<int64_t> moe_layer_freq = 1;
  int64_t moe_first_dense_layers = 0;
  // Derived: ffn_hidden_size.
  std::optional<int64_t> moe_ffn_hidden_size;
  int64_t moe_router_topk = 2;
  RouterScore moe_router_score_function = RouterScore::softmax;
  bool moe_router_pre_softmax = false;
  std::optional<int64_t> moe_router_num_groups;
  std::optional<int64_t> moe_router_group_topk;
  // Derived: moe_router_topk / moe_router_group_topk.
  std::optional<int64_t> moe_router_group_score_topk;
  std::optional<double> moe_router_topk_scaling_factor;
  RouterDtype moe_router_dtype = RouterDtype::fp32;
  bool moe_router_enable_expert_bias = false;
  double moe_router_bias_update_rate = 1e-3;
  OneOrMore<RouterBalancing> moe_router_load_balancing_type = RouterBalancing::aux_loss;
  // One for each of moe_router_load_balancing_type.
  OneOrMore<double> moe_aux_loss_coeff = 0.0;
  std::optional<double> moe_z_loss_coeff;
  std::optional<double> moe_input_jitter_eps;
  std::optional<double> moe_expert_capacity_factor;
  bool moe_pad_expert_input_to_capacity = false;
  TokenDropPolicy moe_token_drop_policy = TokenDropPolicy::probs;
  TokenDispatcher moe_token_dispatcher_type = TokenDispatcher::alltoall;
  bool moe_grouped_gemm = true;
  bool moe_permute_fusion = true;
  std::optional<int64_t> moe_shared_expert_intermediate_size;
  bool moe_shared_expert_overlap = false;
  bool moe_shared_expert_gate = false;

  // ---- multi-latent attention ----
  bool multi_latent_attention = false;
  std::optional<int64_t> q_lora_rank;
  int64_t kv_lora_rank = 512;
  int64_t qk_head_dim = 128;
  int64_t qk_pos_emb_head_dim = 64;
  int64_t v_head_dim = 128;
  // Derived: layernorm_epsilon.
  std::optional<double> latent_layernorm_epsilon;

  // ---- multi-token prediction ----
  std::optional<int64_t> mtp_num_layers;
  double mtp_loss_scaling_factor = 0.1;
};

inline bool has_mlp_biases(const ModelConfig& model) {
  return model.add_mlp_bias.value_or(model.add_bias_linear);
}

}  // namespace capstan::config
