#include "planner/linear_layers.hpp"

namespace capstan::planner {

using Input = LinearLayer::Input;
using Sharding = LinearLayer::Sharding;

LinearLayers attention_layers(const RunShape& s) {
  const int64_t h = s.hidden, queries = s.query_width();
  if (!s.latent)
    return {{"self_attention.linear_qkv", Input::attention, Sharding::outputs, h, queries + 2 * s.kv_width()},
            {"self_attention.linear_proj", Input::other, Sharding::inputs, s.output_width(), h}};
  const LatentShape& l = *s.latent;
  LinearLayers layers;
  if (l.q_rank > 0)
    layers = {{"self_attention.linear_q_down_proj", Input::attention, Sharding::none, h, l.q_rank},
              {"self_attention.linear_q_up_proj", Input::other, Sharding::outputs, l.q_rank, queries}};
  else
    layers = {{"self_attention.linear_q_proj", Input::attention, Sharding::outputs, h, queries}};
  layers.push_back(
      {"self_attention.linear_kv_down_proj", Input::attention, Sharding::none, h, l.kv_rank + l.rope_dim});
  layers.push_back({"self_attention.linear_kv_up_proj", Input::other, Sharding::outputs, l.kv_rank,
                    s.heads * l.nope_dim + s.value_width()});
  layers.push_back({"self_attention.linear_proj", Input::other, Sharding::inputs, s.output_width(), h});
  return layers;
}

LinearLayers mlp_layers(const RunShape& s, bool expert_layer) {
  const int64_t h = s.hidden, width = expert_layer ? s.experts->shared_ffn : s.ffn, parts = s.gated ? 2 : 1;
  if (width == 0) return {};
  return {{expert_layer ? "mlp.shared_experts.linear_fc1" : "mlp.linear_fc1", Input::mlp, Sharding::outputs,
           h, parts * width},
          {expert_layer ? "mlp.shared_experts.linear_fc2" : "mlp.linear_fc2", Input::mlp_hidden,
           Sharding::inputs, width, h}};
}

LinearLayers dense_layers(const RunShape& s, bool expert_layer) {
  LinearLayers layers = attention_layers(s);
  const LinearLayers mlp = mlp_layers(s, expert_layer);
  layers.insert(layers.end(), mlp.begin(), mlp.end());
  return layers;
}

LinearLayers routed_layers(const RunShape& s) {
  const int64_t h = s.hidden, width = s.experts->ffn, parts = s.gated ? 2 : 1;
  return {{"mlp.experts.linear_fc1", Input::experts, Sharding::outputs, h, parts * width},
          {"mlp.experts.linear_fc2", Input::experts_hidden, Sharding::inputs, width, h}};
}

double weights_of(const LinearLayers& layers) {
  double sum = 0;
  for (const LinearLayer& layer : layers) sum += layer.weights();
  return sum;
}

}  // namespace capstan::planner
