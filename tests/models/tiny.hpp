// The tiny models of the golden fixtures, and batches for them.
#pragma once

#include <cmath>
#include <span>
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
  c.share_embeddings_and_output_weights = false;
  return c;
}
// QKV bias, normalised queries and keys, a sliding window, Llama-3.1's frequencies, tied head.
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

}  // namespace capstan::test
