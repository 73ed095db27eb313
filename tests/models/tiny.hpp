// The tiny models of the golden fixtures, and batches for them.
#pragma once

#include <cmath>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "config/sections/model.hpp"
#include "models/model.hpp"

namespace capstan::test {

inline config::ModelConfig tiny_base() {
  config::ModelConfig c;
  c.seq_length = 23;
  c.vocab_size = 131;
  c.padded_vocab_size = 256;
  c.max_position_embeddings = 64;
  c.hidden_dropout = c.attention_dropout = 0;
  c.add_attention_output_bias = c.add_mlp_bias = true;
  c.embedding_init_method_std = c.init_method_std;
  c.num_attention_heads = 6;
  return c;
}
inline config::ModelConfig with_head(config::ModelConfig c, int64_t groups, int64_t head_dim) {
  c.num_query_groups = groups;
  c.kv_channels = head_dim;
  c.softmax_scale = 1 / std::sqrt(static_cast<double>(head_dim));
  return c;
}
inline config::ModelConfig tiny_gpt2() {
  config::ModelConfig c = with_head(tiny_base(), 6, 8);
  c.num_layers = 2;
  c.hidden_size = 48;
  c.ffn_hidden_size = 116;
  c.max_position_embeddings = 29;
  c.activation_func = config::Activation::gelu_tanh;
  return c;
}
inline config::ModelConfig tiny_llama() {
  config::ModelConfig c = with_head(tiny_base(), 2, 8);
  c.num_layers = 3;
  c.hidden_size = 42;
  c.ffn_hidden_size = 72;
  c.position_embedding_type = config::PositionEmbedding::rope;
  c.normalization = config::Normalization::rms_norm;
  c.layernorm_epsilon = 1e-6;
  c.gated_linear_unit = true;
  c.activation_func = config::Activation::silu;
  c.add_bias_linear = false;
  c.add_attention_output_bias = c.add_mlp_bias = false;
  c.share_embeddings_and_output_weights = false;
  return c;
}
// QKV bias, normalized queries and keys, a sliding window, Llama-3.1's frequencies, tied head.
inline config::ModelConfig tiny_llama_variant() {
  config::ModelConfig c = with_head(tiny_llama(), 3, 10);
  c.num_layers = 2;
  c.hidden_size = 48;
  c.ffn_hidden_size = 56;
  c.layernorm_epsilon = 1e-5;
  c.share_embeddings_and_output_weights = true;
  c.add_qkv_bias = true;
  c.qk_layernorm = true;
  c.window_size = 7;
  c.rotary_base = 100;
  c.rope_scaling = true;
  c.rope_scaling_factor = 8;
  c.rope_scaling_low_freq_factor = 1;
  c.rope_scaling_high_freq_factor = 4;
  c.rope_scaling_original_max_position_embeddings = 16;
  return c;
}

// The further features of the families of Hugging Face, each in small sizes.
inline config::ModelConfig tiny_family(int64_t heads, int64_t groups, int64_t head_dim) {
  config::ModelConfig c = with_head(tiny_llama(), groups, head_dim);
  c.num_attention_heads = heads;
  c.num_layers = 2;
  c.hidden_size = 20;
  c.ffn_hidden_size = 28;
  c.vocab_size = 71;
  c.padded_vocab_size = 96;
  c.layernorm_epsilon = 1e-5;
  return c;
}
inline void add_yarn(config::ModelConfig& c) {
  c.rotary_base = 50;
  c.rope_scaling = true;
  c.rope_scaling_type = config::RopeScaling::yarn;
  c.rope_scaling_factor = 4;
  c.rope_scaling_original_max_position_embeddings = 16;
  c.rope_scaling_beta_fast = 1.5;
  c.rope_scaling_beta_slow = 0.3;
  c.rope_scaling_attention_factor = 0.1 * std::log(4.0) + 1;
}
// Biases of attention and MLP, YaRN.
inline config::ModelConfig tiny_llama_biases() {
  config::ModelConfig c = tiny_family(4, 2, 6);
  c.share_embeddings_and_output_weights = true;
  c.add_qkv_bias = true;
  c.add_attention_output_bias = c.add_mlp_bias = true;
  add_yarn(c);
  return c;
}
// Attention sinks, a window in layer 0.
inline config::ModelConfig tiny_sinks() {
  config::ModelConfig c = tiny_family(4, 2, 6);
  c.softmax_type = config::SoftmaxType::learnable;
  c.window_size = 5;
  c.window_attn_skip_freq = 2;
  return c;
}
// Norms of outputs, QK norm across heads, linearly scaled positions.
inline config::ModelConfig tiny_olmo2() {
  config::ModelConfig c = tiny_family(6, 3, 6);
  c.layernorm_epsilon = 1e-6;
  c.norm_placement = config::NormPlacement::output;
  c.qk_layernorm = c.qk_layernorm_across_heads = true;
  c.rotary_base = 500;
  c.rope_scaling = true;
  c.rope_scaling_type = config::RopeScaling::linear;
  c.rope_scaling_factor = 2.5;
  return c;
}
// Four norms of gamma - 1, multiplied embeddings, both soft caps, a window in layers 0 and 2.
inline config::ModelConfig tiny_gemma2() {
  config::ModelConfig c = tiny_family(4, 2, 6);
  c.num_layers = 3;
  c.layernorm_epsilon = 1e-6;
  c.norm_placement = config::NormPlacement::both;
  c.layernorm_zero_centered_gamma = true;
  c.activation_func = config::Activation::gelu_tanh;
  c.share_embeddings_and_output_weights = true;
  c.embedding_multiplier = std::sqrt(20.0);
  c.softmax_scale = 1 / 3.0;
  c.attn_logit_softcapping = 1.5;
  c.final_logit_softcapping = 2.5;
  c.window_size = 5;
  c.window_attn_skip_freq = 2;
  return c;
}
// A part of each head turns, and a window.
inline config::ModelConfig tiny_phi3() {
  config::ModelConfig c = tiny_family(4, 2, 5);
  c.rotary_percent = 0.8;
  c.window_size = 6;
  return c;
}
// Parallel attention and MLP with LayerNorm, biases, and RoPE on a part of each head.
inline config::ModelConfig tiny_gpt_neox() {
  config::ModelConfig c = with_head(tiny_base(), 4, 6);
  c.architecture = config::Architecture::gpt_neox;
  c.num_attention_heads = 4;
  c.num_layers = 2;
  c.hidden_size = 24;
  c.ffn_hidden_size = 36;
  c.vocab_size = 71;
  c.padded_vocab_size = 96;
  c.position_embedding_type = config::PositionEmbedding::rope;
  c.rotary_base = 500;
  c.rotary_percent = 4 / 6.0;
  c.activation_func = config::Activation::gelu;
  c.share_embeddings_and_output_weights = false;
  return c;
}
// Latent attention: compressed queries, keys and values; YaRN with a factor of the softmax scale.
inline config::ModelConfig tiny_deepseek() {
  config::ModelConfig c = tiny_family(4, 4, 9);
  c.multi_latent_attention = true;
  c.q_lora_rank = 11;
  c.kv_lora_rank = 10;
  c.qk_head_dim = 5;
  c.qk_pos_emb_head_dim = 4;
  c.v_head_dim = 7;
  c.qk_layernorm = true;
  c.latent_layernorm_epsilon = 1e-6;
  c.rotary_base = 50;
  c.rope_scaling = true;
  c.rope_scaling_type = config::RopeScaling::yarn;
  c.rope_scaling_factor = 4;
  c.rope_scaling_original_max_position_embeddings = 16;
  c.rope_scaling_beta_fast = 1.5;
  c.rope_scaling_beta_slow = 0.3;
  const double all = 0.1 * 0.8 * std::log(4.0) + 1;
  c.rope_scaling_attention_factor = (0.1 * std::log(4.0) + 1) / all;
  c.softmax_scale = all * all / 3.0;
  return c;
}
// Latent attention with queries that are not compressed.
inline config::ModelConfig tiny_deepseek_lite() {
  config::ModelConfig c = tiny_family(4, 4, 10);
  c.layernorm_epsilon = 1e-6;
  c.multi_latent_attention = true;
  c.kv_lora_rank = 8;
  c.qk_head_dim = 4;
  c.qk_pos_emb_head_dim = 6;
  c.v_head_dim = 3;
  c.qk_layernorm = true;
  c.latent_layernorm_epsilon = 1e-6;
  return c;
}
// Latent attention with sinks that have no parameters.
inline config::ModelConfig tiny_off_by_one() {
  config::ModelConfig c = tiny_deepseek_lite();
  c.softmax_type = config::SoftmaxType::off_by_one;
  return c;
}
// A factor for each wavelength, others above 16 tokens.
inline config::ModelConfig tiny_phi3_long() {
  config::ModelConfig c = tiny_family(5, 5, 4);
  c.rotary_base = 100;
  c.rope_scaling = true;
  c.rope_scaling_type = config::RopeScaling::longrope;
  c.rope_scaling_factor = 4;
  c.rope_scaling_original_max_position_embeddings = 16;
  c.rope_scaling_attention_factor = std::sqrt(1 + std::log(4.0) / std::log(16.0));
  c.rope_scaling_short_factors = {1, 1.25};
  c.rope_scaling_long_factors = {1.5, 7};
  return c;
}

// The families with experts. num_moe_experts, topk, width of an expert.
inline config::ModelConfig with_experts(config::ModelConfig c, int64_t experts, int64_t topk, int64_t ffn) {
  c.num_moe_experts = experts;
  c.moe_router_topk = topk;
  c.moe_ffn_hidden_size = ffn;
  return c;
}
inline config::ModelConfig tiny_mixtral() {
  config::ModelConfig c = with_experts(tiny_family(4, 2, 6), 5, 2, 14);
  c.moe_aux_loss_coeff = 0.05;
  return c;
}
// A shared expert with a gate, probabilities of the softmax over all experts, a z-loss.
inline config::ModelConfig tiny_qwen2_moe() {
  config::ModelConfig c = with_experts(tiny_family(4, 2, 6), 4, 2, 10);
  c.hidden_size = 24;
  c.layernorm_epsilon = 1e-6;
  c.add_qkv_bias = true;
  c.moe_router_pre_softmax = true;
  c.moe_shared_expert_intermediate_size = 18;
  c.moe_shared_expert_gate = true;
  c.moe_z_loss_coeff = 0.01;
  return c;
}
// A dense layer before those with experts; both losses of the router.
inline config::ModelConfig tiny_qwen3_moe() {
  config::ModelConfig c = with_experts(tiny_family(4, 2, 6), 6, 3, 10);
  c.num_layers = 3;
  c.layernorm_epsilon = 1e-6;
  c.qk_layernorm = true;
  c.moe_first_dense_layers = 1;
  c.moe_aux_loss_coeff = 0.02;
  c.moe_z_loss_coeff = 0.003;
  return c;
}
// DeepSeek-V3: a bias of the choice, groups, sigmoids, a shared expert without a gate.
inline config::ModelConfig tiny_deepseek_moe() {
  config::ModelConfig c = with_experts(tiny_deepseek(), 8, 3, 10);
  c.rope_scaling = false;
  c.rotary_base = 10000;
  c.softmax_scale = 1.0 / 3.0;
  c.moe_first_dense_layers = 1;
  c.moe_router_score_function = config::RouterScore::sigmoid;
  c.moe_router_enable_expert_bias = true;
  c.moe_router_num_groups = 4;
  c.moe_router_group_topk = 2;
  c.moe_router_group_score_topk = 2;
  c.moe_router_topk_scaling_factor = 2.5;
  c.moe_shared_expert_intermediate_size = 10;
  c.moe_aux_loss_coeff = 0.02;
  return c;
}
inline config::ModelConfig tiny_olmoe() {
  config::ModelConfig c = with_experts(tiny_family(4, 4, 6), 7, 3, 10);
  c.hidden_size = 24;
  c.qk_layernorm = c.qk_layernorm_across_heads = true;
  c.moe_router_pre_softmax = true;
  return c;
}

// gpt-oss: attention sinks, a window in layers 0 and 2, experts with biases and a limited activation.
inline config::ModelConfig tiny_gpt_oss() {
  config::ModelConfig c = with_experts(tiny_family(4, 2, 6), 5, 2, 10);
  c.num_layers = 3;
  c.ffn_hidden_size = 10;
  c.add_qkv_bias = true;
  c.add_attention_output_bias = c.add_mlp_bias = true;
  c.softmax_type = config::SoftmaxType::learnable;
  c.activation_func = config::Activation::quick_gelu;
  c.activation_func_clamp_value = 1.5;
  c.glu_linear_offset = 1;
  c.window_size = 5;
  c.window_attn_skip_freq = 2;
  add_yarn(c);
  c.rope_scaling_truncate = false;
  return c;
}

// Multi-token prediction. A large factor: its gradients weigh as much as those of the loss.
inline config::ModelConfig with_mtp(config::ModelConfig c, int64_t depths, double factor) {
  c.mtp_num_layers = depths;
  c.mtp_loss_scaling_factor = factor;
  return c;
}
inline config::ModelConfig tiny_gpt2_mtp() {
  config::ModelConfig c = with_mtp(with_head(tiny_gpt2(), 4, 6), 2, 0.4);
  c.hidden_size = 24;
  c.num_attention_heads = 4;
  c.ffn_hidden_size = 36;
  c.vocab_size = 71;
  c.padded_vocab_size = 128;
  return c;
}
inline config::ModelConfig tiny_llama_mtp() {
  return with_mtp(tiny_family(4, 2, 6), 1, 0.3);
}
inline config::ModelConfig tiny_deepseek_mtp() {
  return with_mtp(tiny_deepseek_moe(), 1, 0.2);
}

inline models::Batch make_batch(Device& device, int64_t batch, int64_t seq, std::span<const int32_t> tokens,
                                std::span<const int32_t> labels, std::span<const float> weights) {
  models::Batch b;
  b.batch = batch;
  b.seq = seq;
  b.tokens = Tensor::from_host<int32_t>(device, {batch * seq}, tokens);
  b.labels = Tensor::from_host<int32_t>(device, {batch * seq}, labels);
  b.loss_mask = Tensor::from_host<float>(device, {batch * seq}, weights);
  return b;
}

// Adds what multi-token prediction reads: tokens, labels and weights `depth` places further on in each
// sequence. A sequence weighs as much as in the loss of the batch.
inline void add_later_tokens(Device& device, const config::ModelConfig& config, models::Batch& b,
                             std::span<const int32_t> tokens, std::span<const int32_t> labels,
                             std::span<const float> weights) {
  const int64_t rows = b.batch * b.seq, depths = config.mtp_num_layers.value_or(0);
  for (int64_t depth = 1; depth <= depths; ++depth) {
    std::vector<int32_t> ids, targets, positions;
    std::vector<float> mask;
    for (int64_t row = 0; row < b.batch; ++row) {
      double before = 0, after = 0;
      for (int64_t s = 0; s < b.seq; ++s) {
        const auto here = static_cast<size_t>(row * b.seq + s), later = here + static_cast<size_t>(depth);
        before += weights[here];
        if (s + depth < b.seq) after += weights[later];
      }
      for (int64_t s = 0; s < b.seq; ++s) {
        const bool exists = s + depth < b.seq;
        const auto later = static_cast<size_t>(row * b.seq + s + depth);
        ids.push_back(exists ? tokens[later] : 0);
        targets.push_back(exists ? labels[later] : 0);
        positions.push_back(exists ? static_cast<int32_t>(s + depth) : 0);
        mask.push_back(exists
                           ? static_cast<float>(weights[later] * (before / after) *
                                                config.mtp_loss_scaling_factor / static_cast<double>(depths))
                           : 0.0f);
      }
    }
    b.later.push_back({Tensor::from_host<int32_t>(device, {rows}, ids),
                       Tensor::from_host<int32_t>(device, {rows}, targets),
                       Tensor::from_host<float>(device, {rows}, mask),
                       Tensor::from_host<int32_t>(device, {rows}, positions)});
  }
}

// The gradients with which the backward pass of a forward pass with this result begins.
inline std::map<std::string, Tensor> gradients_of_losses(Device& device, const models::Loss& loss) {
  const Tensor one = Tensor::from_host<float>(device, {1}, std::vector<float>{1});
  std::map<std::string, Tensor> gradients{{"loss", one}};
  for (size_t depth = 1; depth <= loss.mtp_sums.size(); ++depth)
    gradients.emplace(models::mtp_loss_name(depth), one);
  return gradients;
}

}  // namespace capstan::test
