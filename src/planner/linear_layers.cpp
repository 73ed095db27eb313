#include "planner/linear_layers.hpp"

namespace capstan::planner {

LinearLayers attention_layers(const RunShape& s) {
  using enum LinearLayer::Input;
  using enum LinearLayer::Sharding;
  const int64_t h = s.hidden, queries = s.query_width();
  if (!s.latent)
    return {{"self_attention.linear_qkv", attention, outputs, h, queries + 2 * s.kv_width()},
            {"self_attention.linear_proj", other, inputs, s.output_width(), h}};
  const LatentShape& l = *s.latent;
  LinearLayers layers;
  if (l.q_rank > 0)
    layers = {{"self_attention.linear_q_down_proj", attention, none, h, l.q_rank},
              {"self_attention.linear_q_up_proj", other, outputs, l.q_rank, queries}};
  else
    layers = {{"self_attention.linear_q_proj", attention, outputs, h, queries}};
  layers.push_back({"self_attention.linear_kv_down_proj", attention, none, h, l.kv_rank + l.rope_dim});
  layers.push_back({"self_attention.linear_kv_up_proj", other, outputs, l.kv_rank,
                    s.heads * l.nope_dim + s.value_width()});
  layers.push_back({"self_attention.linear_proj", other, inputs, s.output_width(), h});
  return layers;
}

LinearLayers mlp_layers(const RunShape& s, bool expert_layer) {
  using enum LinearLayer::Input;
  using enum LinearLayer::Sharding;
  const int64_t h = s.hidden, width = expert_layer ? s.experts->shared_ffn : s.ffn, parts = s.gated ? 2 : 1;
  if (width == 0) return {};
  return {{expert_layer ? "mlp.shared_experts.linear_fc1" : "mlp.linear_fc1", mlp, outputs, h, parts * width},
          {expert_layer ? "mlp.shared_experts.linear_fc2" : "mlp.linear_fc2", mlp_hidden, inputs, width, h}};
}

LinearLayers dense_layers(const RunShape& s, bool expert_layer) {
  LinearLayers layers = attention_layers(s);
  const LinearLayers mlp = mlp_layers(s, expert_layer);
  layers.insert(layers.end(), mlp.begin(), mlp.end());
  return layers;
}

LinearLayers routed_layers(const RunShape& s) {
  using enum LinearLayer::Input;
  using enum LinearLayer::Sharding;
  const int64_t h = s.hidden, width = s.experts->ffn, parts = s.gated ? 2 : 1;
  return {{"mlp.experts.linear_fc1", experts, outputs, h, parts * width},
          {"mlp.experts.linear_fc2", experts_hidden, inputs, width, h}};
}

double weights_of(const LinearLayers& layers) {
  double sum = 0;
  for (const LinearLayer& layer : layers) sum += layer.weights();
  return sum;
}

}  // namespace capstan::planner
