// Shared by the families with experts. Included only by .cpp files.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/text.hpp"
#include "config/sections/moe_layers.hpp"
#include "formats/family.hpp"

namespace capstan::formats {

inline void read_topk(ConfigJson& c, config::ModelConfig& m, std::optional<int64_t> topk) {
  m.moe_router_topk = c.integer("num_experts_per_tok", topk, kMaxExperts);
  if (m.moe_router_topk > *m.num_moe_experts)
    c.refuse("`num_experts_per_tok` is " + std::to_string(m.moe_router_topk) + ", of " +
             std::to_string(*m.num_moe_experts) + " experts");
}
inline void read_balance_coefficient(ConfigJson& c, config::ModelConfig& m, const char* key,
                                     double otherwise) {
  const double coefficient = c.number(key, otherwise);
  if (coefficient < 0) c.refuse("`" + std::string(key) + "` is " + to_text(coefficient) + ", below 0");
  m.moe_aux_loss_coeff = coefficient;
  if (coefficient == 0) m.moe_router_load_balancing_type = config::RouterBalancing::none;
}
// The coefficient of Transformers' one loss: the sum of those of several, which are all 1 at balanced load.
inline double balance_coefficient(const config::ModelConfig& m) {
  const std::vector<double>& all = m.moe_aux_loss_coeff.items;
  return std::accumulate(all.begin(), all.end(), 0.0);
}

// Number of experts, top-k, and the coefficient of the load-balancing loss: the same number, although
// Transformers multiplies its loss by the top-k.
inline void read_experts(ConfigJson& c, config::ModelConfig& m, int64_t count, int64_t topk,
                         double coefficient) {
  // Transformers 5 writes num_local_experts for classes whose files have num_experts.
  m.num_moe_experts =
      c.integer("num_local_experts", c.integer("num_experts", count, kMaxExperts), kMaxExperts);
  if (c.has("num_experts") && c.integer("num_experts") != *m.num_moe_experts)
    c.refuse("`num_experts` and `num_local_experts` differ");
  read_topk(c, m, topk);
  read_balance_coefficient(c, m, "router_aux_loss_coef", coefficient);
  c.changes_nothing({"output_router_logits"});
}

// The classes without a dense layer have the width of an expert as `intermediate_size`.
inline void write_expert_width(const config::ModelConfig& m, OrderedJson& j) {
  if (m.moe_ffn_hidden_size) j["intermediate_size"] = *m.moe_ffn_hidden_size;
}

inline void write_experts(const config::ModelConfig& m, OrderedJson& j, const char* experts) {
  if (!m.num_moe_experts) return;
  j[experts] = *m.num_moe_experts;
  j["num_experts_per_tok"] = m.moe_router_topk;
  j["router_aux_loss_coef"] = balance_coefficient(m);
  j["output_router_logits"] = false;
}

// The probabilities of the chosen experts sum to 1 or are those of the softmax over all experts.
inline void read_norm_topk(ConfigJson& c, config::ModelConfig& m) {
  m.moe_router_pre_softmax = !c.boolean("norm_topk_prob", false);
}
inline void write_norm_topk(const config::ModelConfig& m, OrderedJson& j) {
  j["norm_topk_prob"] = !m.moe_router_pre_softmax;
}

// The dense layers of Qwen: those that `mlp_only_layers` lists, and those whose number, from 1, is no
// multiple of `decoder_sparse_step`.
inline void read_dense_layers(ConfigJson& c, config::ModelConfig& m) {
  const int64_t step = c.integer("decoder_sparse_step", 1);
  std::vector<int64_t> layers;
  for (int64_t layer = 1; layer <= m.num_layers; ++layer) layers.push_back(layer % step == 0);
  const Json& dense = c.value("mlp_only_layers");
  if (!dense.is_null() && !dense.is_array()) return c.refuse("`mlp_only_layers` is not a list of layers");
  for (const Json& layer : dense) {
    if (!layer.is_number_integer()) return c.refuse("`mlp_only_layers` is not a list of layers");
    // The class looks its layers up in the list: other numbers change nothing.
    if (layer >= 0 && layer < m.num_layers) layers[layer.get<size_t>()] = 0;
  }
  if (std::ranges::count(layers, 1) == 0)
    return c.refuse("no layer has experts: `mlp_only_layers` and `decoder_sparse_step` leave none");
  const config::MoeLayerPattern pattern = config::moe_layer_pattern(layers);
  m.moe_layer_freq = pattern.layer_freq;
  m.moe_first_dense_layers = pattern.first_dense;
}
// Also writes the width of the experts.
inline void write_dense_layers(const config::ModelConfig& m, OrderedJson& j) {
  if (m.moe_ffn_hidden_size) j["moe_intermediate_size"] = *m.moe_ffn_hidden_size;
  j["decoder_sparse_step"] = 1;
  std::vector<int64_t> dense;
  for (int64_t layer = 0; layer < m.num_layers; ++layer)
    if (m.num_moe_experts && !config::is_moe_layer(m, layer)) dense.push_back(layer);
  j["mlp_only_layers"] = dense;
}

// The names of Qwen 3 MoE and OLMoE.
inline TensorNames moe_names() {
  TensorNames n = llama_names();
  n.q_norm = "self_attn.q_norm";
  n.k_norm = "self_attn.k_norm";
  n.router = "mlp.gate";
  n.expert_gate = "mlp.experts.{}.gate_proj";
  n.expert_up = "mlp.experts.{}.up_proj";
  n.expert_down = "mlp.experts.{}.down_proj";
  return n;
}

}  // namespace capstan::formats
