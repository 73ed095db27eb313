// The model's architecture: what is computed. How it is spread over ranks belongs to `dist`, in which number
// formats to `mixed_precision`.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "config/core/types.hpp"

namespace capstan::config {

enum class PositionEmbedding : uint8_t { learned_absolute, rope, none };
enum class Normalization : uint8_t { layer_norm, rms_norm };  // spelled LayerNorm, RMSNorm
enum class NormPlacement : uint8_t { input, output, both };
enum class RopeScaling : uint8_t { llama3, linear, yarn, longrope };
enum class Activation : uint8_t { gelu, gelu_tanh, silu, relu, squared_relu };
enum class RecomputeGranularity : uint8_t { full, selective };
enum class RecomputeMethod : uint8_t { uniform, block };
enum class RecomputeModule : uint8_t { core_attn, layernorm, mlp, moe, moe_act, shared_experts, mla_up_proj };
enum class RouterScore : uint8_t { softmax, sigmoid };
enum class RouterBalancing : uint8_t { aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, none };
enum class RouterDtype : uint8_t { fp32, fp64 };
enum class TokenDropPolicy : uint8_t { probs, position };
enum class TokenDispatcher : uint8_t { allgather, alltoall };

template <>
struct EnumNames<PositionEmbedding> {
  static constexpr EnumEntry<PositionEmbedding> list[] = {
      {PositionEmbedding::learned_absolute, "learned_absolute", "a trained vector for each position"},
      {PositionEmbedding::rope, "rope",
       "queries and keys are rotated by an angle that grows with the position"},
      {PositionEmbedding::none, "none", "no positions: attention sees order only through the causal mask"},
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
      {RopeScaling::llama3, "llama3", "long wavelengths are stretched, short ones left alone (Llama 3.1)"},
      {RopeScaling::linear, "linear", "all wavelengths are stretched: position interpolation"},
      {RopeScaling::yarn, "yarn",
       "interpolated between stretched and left alone by wavelength; queries and keys are scaled"},
      {RopeScaling::longrope, "longrope",
       "each wavelength has a factor of its own, one set for short and one for long sequences (Phi-3)"},
  };
};

template <>
struct EnumNames<Activation> {
  static constexpr EnumEntry<Activation> list[] = {
      {Activation::gelu, "gelu", "x * Phi(x), with the error function"},
      {Activation::gelu_tanh, "gelu_tanh", "the tanh approximation of GELU, as in GPT-2",
       "gelu_new gelu_pytorch_tanh"},
      {Activation::silu, "silu", "x * sigmoid(x); with gated_linear_unit: SwiGLU", "swish"},
      {Activation::relu, "relu", "max(x, 0)"},
      {Activation::squared_relu, "squared_relu", "max(x, 0) squared"},
  };
};

template <>
struct EnumNames<RecomputeGranularity> {
  static constexpr EnumEntry<RecomputeGranularity> list[] = {
      {RecomputeGranularity::full, "full",
       "keep only the input of a group of layers, run its forward again in backward"},
      {RecomputeGranularity::selective, "selective", "run only the modules of recompute_modules again"},
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
      {RecomputeModule::layernorm, "layernorm", "both norms of a layer"},
      {RecomputeModule::mlp, "mlp", "the dense feed-forward network"},
      {RecomputeModule::moe, "moe", "router and experts"},
      {RecomputeModule::moe_act, "moe_act", "activation inside the experts"},
      {RecomputeModule::shared_experts, "shared_experts", "the shared experts"},
      {RecomputeModule::mla_up_proj, "mla_up_proj", "up-projection of latent attention"},
  };
};

template <>
struct EnumNames<RouterScore> {
  static constexpr EnumEntry<RouterScore> list[] = {
      {RouterScore::softmax, "softmax", "probabilities over all experts"},
      {RouterScore::sigmoid, "sigmoid", "each expert on its own"},
  };
};

template <>
struct EnumNames<RouterBalancing> {
  static constexpr EnumEntry<RouterBalancing> list[] = {
      {RouterBalancing::aux_loss, "aux_loss", "load-balancing loss over a micro-batch"},
      {RouterBalancing::seq_aux_loss, "seq_aux_loss", "load-balancing loss over each sequence"},
      {RouterBalancing::global_aux_loss, "global_aux_loss", "load-balancing loss over the global batch"},
      {RouterBalancing::sinkhorn, "sinkhorn", "balanced assignment by Sinkhorn iterations"},
      {RouterBalancing::none, "none", "no balancing"},
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
      {TokenDispatcher::allgather, "allgather", "every rank gathers all tokens"},
      {TokenDispatcher::alltoall, "alltoall", "tokens travel to the ranks of their experts"},
  };
};

struct ModelConfig {
  // ---- size ----
  int64_t num_layers = 0;                   // transformer blocks; 0: not given
  int64_t hidden_size = 0;                  // h, width of the residual stream; 0: not given
  int64_t num_attention_heads = 0;          // query heads; 0: not given
  std::optional<int64_t> num_query_groups;  // key/value heads; derived: num_attention_heads
  std::optional<int64_t> kv_channels;       // width of one head; derived: hidden_size / num_attention_heads
  std::optional<int64_t> ffn_hidden_size;   // derived: 4h, gated: floor(8h/3 / 64) * 64
  int64_t seq_length = 1024;                // tokens of one training sample
  std::optional<int64_t> max_position_embeddings;  // rows of the position table; derived: seq_length
  int64_t vocab_size = 0;                          // ids the tokenizer can produce; 0: not given
  int64_t make_vocab_size_divisible_by = 128;
  std::optional<int64_t> padded_vocab_size;  // rows of the embedding; derived: vocab_size rounded up

  // ---- positions ----
  PositionEmbedding position_embedding_type = PositionEmbedding::learned_absolute;
  double rotary_base = 10000.0;
  double rotary_percent = 1.0;      // share of a head's width that is rotated, from its front
  bool rotary_interleaved = false;  // pairs (0,1)(2,3)… instead of (0,d/2)(1,d/2+1)…
  bool rope_scaling = false;  // wavelengths are stretched, as rope_scaling_type and the values below say
  RopeScaling rope_scaling_type = RopeScaling::llama3;
  double rope_scaling_factor = 8.0;
  double rope_scaling_low_freq_factor = 1.0;
  double rope_scaling_high_freq_factor = 4.0;
  int64_t rope_scaling_original_max_position_embeddings = 8192;
  double rope_scaling_beta_fast =
      32.0;  // yarn: turns within the original length above which nothing is stretched
  double rope_scaling_beta_slow = 1.0;  // yarn: turns below which all is
  bool rope_scaling_truncate = true;    // yarn: the range between them in whole pairs
  std::optional<double>
      rope_scaling_attention_factor;  // yarn, longrope: of cos and sin; derived by the type's formula
  std::vector<double> rope_scaling_short_factors;  // longrope: one for each pair
  std::vector<double> rope_scaling_long_factors;   // longrope: for sequences above the original length

  // ---- blocks ----
  Normalization normalization = Normalization::layer_norm;
  NormPlacement norm_placement = NormPlacement::input;
  double layernorm_epsilon = 1e-5;
  bool layernorm_zero_centered_gamma = false;  // gamma is stored as gamma - 1 (layernorm1p)
  bool gated_linear_unit = false;              // act(x W_gate) * (x W_up); SwiGLU is this with silu
  Activation activation_func = Activation::gelu;
  bool add_bias_linear = true;                    // biases of all linear layers of a block
  bool add_qkv_bias = false;                      // bias of the QKV projection alone (Qwen2)
  std::optional<bool> add_attention_output_bias;  // derived: add_bias_linear
  std::optional<bool> add_mlp_bias;               // derived: add_bias_linear
  bool qk_layernorm = false;               // normalize queries and keys before RoPE, each head by itself
  bool qk_layernorm_across_heads = false;  // all query heads as one vector, and all key heads (OLMo 2)
  std::optional<double>
      embedding_multiplier;  // embeddings times this, rounded to the compute type (Gemma: sqrt(h))
  bool apply_residual_connection_post_layernorm = false;
  bool fp32_residual_connection = false;
  bool share_embeddings_and_output_weights = true;  // tied head

  // ---- attention ----
  std::optional<double> softmax_scale;            // derived: 1 / sqrt(kv_channels)
  std::optional<double> attn_logit_softcapping;   // scores become c tanh(score / c); null: not
  std::optional<double> final_logit_softcapping;  // the same of the head's logits
  bool attention_softmax_in_fp32 = true;
  std::optional<int64_t> window_size;  // tokens a query sees, itself included; null: all earlier ones
  std::optional<int64_t> window_attn_skip_freq;  // every n-th layer (n, 2n, …) sees all earlier tokens

  // ---- dropout and initialization ----
  double hidden_dropout = 0.1;
  double attention_dropout = 0.1;
  double init_method_std = 0.02;                    // output layers of a block: std / sqrt(2 num_layers)
  std::optional<double> embedding_init_method_std;  // derived: init_method_std

  // ---- recomputation and offload of activations ----
  std::optional<RecomputeGranularity> recompute_granularity;  // null: keep every activation
  std::optional<RecomputeMethod> recompute_method;
  std::optional<int64_t> recompute_num_layers;
  std::vector<RecomputeModule> recompute_modules;  // derived for selective: [core_attn]
  bool distribute_saved_activations = false;
  bool cpu_offloading = false;
  int64_t cpu_offloading_num_layers = 0;

  // ---- mixture of experts ----
  std::optional<int64_t> num_moe_experts;      // null: dense
  int64_t moe_layer_freq = 1;                  // every n-th layer has experts, the rest are dense
  int64_t moe_first_dense_layers = 0;          // layers before the first one with experts
  std::optional<int64_t> moe_ffn_hidden_size;  // derived: ffn_hidden_size
  int64_t moe_router_topk = 2;
  RouterScore moe_router_score_function = RouterScore::softmax;
  bool moe_router_pre_softmax = false;
  std::optional<int64_t> moe_router_num_groups;
  std::optional<int64_t> moe_router_group_topk;
  std::optional<double> moe_router_topk_scaling_factor;
  RouterDtype moe_router_dtype = RouterDtype::fp32;
  bool moe_router_enable_expert_bias = false;
  double moe_router_bias_update_rate = 1e-3;
  RouterBalancing moe_router_load_balancing_type = RouterBalancing::aux_loss;
  double moe_aux_loss_coeff = 0.0;
  std::optional<double> moe_z_loss_coeff;
  std::optional<double> moe_input_jitter_eps;
  std::optional<double> moe_expert_capacity_factor;  // null: no token is dropped
  bool moe_pad_expert_input_to_capacity = false;
  TokenDropPolicy moe_token_drop_policy = TokenDropPolicy::probs;
  TokenDispatcher moe_token_dispatcher_type = TokenDispatcher::alltoall;
  bool moe_grouped_gemm = true;
  bool moe_permute_fusion = true;
  std::optional<int64_t> moe_shared_expert_intermediate_size;  // null: no shared expert
  bool moe_shared_expert_overlap = false;
  bool moe_shared_expert_gate = false;

  // ---- multi-latent attention ----
  bool multi_latent_attention = false;
  std::optional<int64_t> q_lora_rank;  // null: queries are not compressed
  int64_t kv_lora_rank = 512;
  int64_t qk_head_dim = 128;
  int64_t qk_pos_emb_head_dim = 64;
  int64_t v_head_dim = 128;

  // ---- multi-token prediction ----
  std::optional<int64_t> mtp_num_layers;  // null: none
  double mtp_loss_scaling_factor = 0.1;
};

}  // namespace capstan::config
