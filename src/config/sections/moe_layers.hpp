// Which layers of a model are mixture-of-experts layers, and the losses that balance the load of experts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "config/sections/model.hpp"

namespace capstan::config {

// As Megatron's integer moe_layer_freq: the layers whose index, from 0, is a multiple of it; none of the
// first moe_first_dense_layers.
inline bool is_moe_layer(const ModelConfig& model, int64_t layer) {
  return model.num_moe_experts && layer >= model.moe_first_dense_layers && layer % model.moe_layer_freq == 0;
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
