// Which layers of a model are mixture-of-experts layers, and the losses that balance the load of experts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "config/sections/model.hpp"

namespace capstan::config {

// As Megatron's moe_layer_freq: one number, the layers whose index, from 0, is a multiple of it, but none of
// the first moe_first_dense_layers; a list, the layers for which it has a 1.
inline bool is_moe_layer(const ModelConfig& model, int64_t layer) {
  if (!model.num_moe_experts) return false;
  const std::vector<int64_t>& freq = model.moe_layer_freq.items;
  if (freq.size() > 1) return layer < std::ssize(freq) && freq[static_cast<size_t>(layer)] == 1;
  return layer >= model.moe_first_dense_layers && freq[0] > 0 && layer % freq[0] == 0;
}

// The values of both fields: a list only for layers that two numbers do not describe. layers: 1 for each
// layer with experts, 0 for the others.
struct MoeLayerPattern {
  OneOrMore<int64_t> layer_freq = 1;
  int64_t first_dense = 0;
};
inline MoeLayerPattern moe_layer_pattern(const std::vector<int64_t>& layers) {
  const int64_t count = std::ssize(layers), dense = std::ranges::find(layers, 1) - layers.begin();
  for (int64_t freq = 1; dense < count && freq <= count; ++freq) {
    bool same = true;
    for (int64_t i = 0; i < count; ++i)
      same = same && (layers[static_cast<size_t>(i)] == 1) == (i >= dense && i % freq == 0);
    if (same) return {freq, dense};
  }
  return {OneOrMore<int64_t>(layers), 0};
}

// The indices of all MoE layers.
inline std::vector<int64_t> moe_layers(const ModelConfig& model) {
  std::vector<int64_t> layers;
  if (!model.num_moe_experts) return layers;
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    if (is_moe_layer(model, layer)) layers.push_back(layer);
  return layers;
}

// The indices of all layers with a router: the MoE layers, and after the last layer those of multi-token
// prediction, which are of the last layer's kind.
inline std::vector<int64_t> router_layers(const ModelConfig& model) {
  std::vector<int64_t> layers = moe_layers(model);
  if (layers.empty() || layers.back() != model.num_layers - 1) return layers;
  for (int64_t depth = 0; depth < model.mtp_num_layers.value_or(0); ++depth)
    layers.push_back(model.num_layers + depth);
  return layers;
}

inline bool every_layer_has_experts(const ModelConfig& model) {
  return std::ssize(moe_layers(model)) == model.num_layers;
}

inline bool has_aux_loss(RouterBalancing type) {
  return type == RouterBalancing::aux_loss || type == RouterBalancing::seq_aux_loss ||
         type == RouterBalancing::global_aux_loss;
}

// The load-balancing losses with a coefficient above 0.
struct BalanceLoss {
  RouterBalancing type;
  double coefficient;
};
inline std::vector<BalanceLoss> balance_losses(const ModelConfig& model) {
  std::vector<BalanceLoss> losses;
  if (!model.num_moe_experts) return losses;
  const auto& types = model.moe_router_load_balancing_type.items;
  const auto& coefficients = model.moe_aux_loss_coeff.items;
  for (size_t i = 0; i < std::min(types.size(), coefficients.size()); ++i)
    if (has_aux_loss(types[i]) && coefficients[i] > 0) losses.push_back({types[i], coefficients[i]});
  return losses;
}

}  // namespace capstan::config
