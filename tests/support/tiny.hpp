// A resolved recipe of a model that trains in milliseconds, for tests below the recipe.
#pragma once

#include <cmath>

#include "config/sections/config.hpp"

namespace capstan::testing {

// Llama-like when `llama`, else like GPT-2. All derived fields hold values.
inline config::Config tiny_config(bool llama, int64_t ranks = 1) {
  config::Config c;
  c.name = "tiny";
  auto& m = c.model;
  m.num_layers = 2, m.hidden_size = 48, m.num_attention_heads = 6, m.num_query_groups = llama ? 2 : 6,
  m.kv_channels = 8;
  m.ffn_hidden_size = llama ? 96 : 192, m.seq_length = 24, m.max_position_embeddings = 24, m.vocab_size = 61;
  m.make_vocab_size_divisible_by = 32, m.padded_vocab_size = 64, m.softmax_scale = 1.0 / std::sqrt(8.0),
  m.embedding_init_method_std = 0.02;
  m.hidden_dropout = m.attention_dropout = 0;
  m.add_attention_output_bias = m.add_mlp_bias = !llama;
  if (llama) {
    m.position_embedding_type = config::PositionEmbedding::rope;
    m.normalization = config::Normalization::rms_norm;
    m.gated_linear_unit = true, m.activation_func = config::Activation::silu, m.add_bias_linear = false;
    m.share_embeddings_and_output_weights = false;
  }
  c.optimizer.lr = 1e-2, c.optimizer.min_lr = 1e-3, c.optimizer.weight_decay = 0.1,
  c.optimizer.adam_beta2 = 0.95;
  c.scheduler.lr_decay_style = config::LrDecayStyle::cosine;
  c.train.micro_batch_size = 2, c.train.global_batch_size = 4, c.train.train_iters = 30, c.train.threads = 1;
  c.scheduler.lr_warmup_iters = 3;
  c.dist.world_size = ranks, c.dist.data_parallel_size = ranks;
  c.dataset.kind = config::DatasetKind::mock;
  c.validation.eval_iters = 2;
  return c;
}

// Llama-like with experts in every layer, which are divided over `ranks`, and a shared expert.
inline config::Config tiny_experts_config(int64_t ranks = 1) {
  config::Config c = tiny_config(true, ranks);
  auto& m = c.model;
  m.num_moe_experts = 4, m.moe_ffn_hidden_size = 16, m.moe_shared_expert_intermediate_size = 32,
  m.moe_aux_loss_coeff = 0.01;
  c.dist.expert_model_parallel_size = ranks;
  c.dist.expert_tensor_parallel_size = c.dist.expert_data_parallel_size = 1;
  return c;
}

}  // namespace capstan::testing
