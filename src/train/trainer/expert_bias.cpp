#include "train/trainer/expert_bias.hpp"

#include <algorithm>

#include "config/sections/moe_layers.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::train {

ExpertBiases::ExpertBiases(const config::Config& config, const models::Model& model,
                           parallel::FlatStore& store)
    : store_(store) {
  const config::ModelConfig& m = config.model;
  if (!m.num_moe_experts || !m.moe_router_enable_expert_bias || config.peft) return;
  experts_ = *m.num_moe_experts;
  rate_ = static_cast<float>(m.moe_router_bias_update_rate);
  const std::vector<int64_t> layers = config::router_layers(m);
  rows_ = std::ssize(layers);
  for (const auto& parameter : model.parameters()) {
    if (!parameter->spec().buffer) continue;
    const auto layer = std::find(layers.begin(), layers.end(), parameter->spec().layer);
    CAPSTAN_ASSERT(layer != layers.end() && parameter->shape() == Shape{experts_},
                   "the buffer `" + parameter->name() + "` is not the bias of a layer's experts");
    layers_.push_back({parameter.get(), layer - layers.begin()});
  }
}

void ExpertBiases::update(const Tensor& router_sums, const Tensor& control) {
  Device& device = store_.device();
  const int64_t width = layers_.empty() ? 0 : router_sums.elements() / rows_;
  for (const LayerBias& layer : layers_) {
    const ParamPin bias(store_, layer.bias);
    launch(device, device.table().router->update_bias,
           router_sums.flat_range(layer.row * width, experts_, {experts_}), experts_, rate_, control, *bias);
  }
}

}  // namespace capstan::train
