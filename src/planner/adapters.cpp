#include "planner/adapters.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "config/sections/adapter_targets.hpp"

namespace capstan::planner {

namespace {

using Input = AdaptedLinear::Input;
using Sharding = AdaptedLinear::Sharding;

// The layer with this path inside a layer of the model, such as "mlp.experts.linear_fc1".
AdaptedLinear linear_of(const RunShape& s, std::string_view path) {
  const int64_t h = s.hidden, query = s.query_width(), kv = s.kv_width();
  const auto by_inputs = [&](Input input, int64_t in) {
    return AdaptedLinear{input, Sharding::inputs, in, h};
  };
  const auto by_outputs = [&](Input input, int64_t in, int64_t out) {
    return AdaptedLinear{input, Sharding::outputs, in, out};
  };
  if (path.starts_with("mlp.")) {
    const bool experts = path.starts_with("mlp.experts."), shared = path.starts_with("mlp.shared_experts.");
    const int64_t width = experts ? s.experts->ffn : shared ? s.experts->shared_ffn : s.ffn;
    if (path.ends_with("fc2")) return by_inputs(experts ? Input::experts_hidden : Input::mlp_hidden, width);
    const int64_t parts = path.ends_with("fc1") && s.gated ? 2 : 1;
    return by_outputs(experts ? Input::experts : Input::mlp, h, parts * width);
  }
  if (!s.latent) {
    if (path.ends_with("proj")) return by_inputs(Input::other, query);
    const int64_t out = path.ends_with("qkv") ? query + 2 * kv : path.ends_with("linear_q") ? query : kv;
    return by_outputs(Input::attention, h, out);
  }
  const LatentShape& l = *s.latent;
  const int64_t queries = s.heads * (l.nope_dim + l.rope_dim), down = l.kv_rank + l.rope_dim;
  if (path.ends_with("linear_proj")) return by_inputs(Input::other, s.heads * l.v_dim);
  if (path.ends_with("q_down_proj")) return {Input::attention, Sharding::none, h, l.q_rank};
  if (path.ends_with("kv_down_proj")) return {Input::attention, Sharding::none, h, down};
  if (path.ends_with("q_proj")) return by_outputs(Input::attention, h, queries);
  if (path.ends_with("q_up_proj")) return by_outputs(Input::other, l.q_rank, queries);
  return by_outputs(Input::other, l.kv_rank, s.heads * (l.nope_dim + l.v_dim));
}

}  // namespace

AdapterShape adapter_shape(const RunShape& s, const config::ModelConfig& model,
                           const config::PeftConfig& peft) {
  AdapterShape adapters{.rank = peft.dim, .magnitudes = config::has_magnitudes(peft.scheme)};
  const int64_t of_experts = s.experts ? std::ssize(s.experts->layers) : 0, dense = s.layers - of_experts;
  // Layers with the adapter, of those with experts and of the others.
  std::map<std::pair<bool, std::string>, int64_t> counts;
  for (const std::string& path : config::adaptable_layers(model, peft.scheme)) {
    if (!config::adapts(peft, path)) continue;
    constexpr std::string_view kLayers = "decoder.layers.";
    const size_t end = path.find('.', kLayers.size());
    const int64_t layer = std::stoll(path.substr(kLayers.size(), end - kLayers.size()));
    ++counts[{s.is_expert_layer(layer), path.substr(end + 1)}];
  }
  for (const auto& [kind, count] : counts) {
    AdaptedLinear linear = linear_of(s, kind.second);
    linear.fraction = real(count) / real(kind.first ? of_experts : dense);
    (kind.first ? adapters.expert_layer : adapters.dense_layer).push_back(linear);
  }
  return adapters;
}

AdapterParameters adapter_parameters(const RunShape& s, bool expert_layer) {
  AdapterParameters sum;
  const AdapterShape& adapters = *s.adapters;
  for (const AdaptedLinear& linear : adapters.of_layer(expert_layer)) {
    const double t = real(linear.of_experts() ? s.etp : s.tp),
                 in = real(linear.in) / (linear.sharding == Sharding::inputs ? t : 1),
                 out = real(linear.out) / (linear.sharding == Sharding::outputs ? t : 1);
    const double count =
        linear.fraction * (real(adapters.rank) * (in + out) + (adapters.magnitudes ? out : 0));
    if (linear.of_experts())
      sum.experts += count * real(s.experts->count) / real(s.ep);
    else
      sum.dense += count;
  }
  return sum;
}

AdapterParameters all_adapters(const RunShape& shape) {
  if (!shape.adapters) return {};
  RunShape one = shape;
  one.tp = one.etp = one.ep = 1;
  const double of_experts = shape.experts ? real(std::ssize(shape.experts->layers)) : 0;
  const AdapterParameters dense = adapter_parameters(one, false), experts = adapter_parameters(one, true);
  return {(real(shape.layers) - of_experts) * dense.dense + of_experts * experts.dense,
          of_experts * experts.experts};
}

double saves_input(const RunShape& s, bool expert_layer, Input input) {
  double most = 0;
  for (const AdaptedLinear& linear : s.adapters->of_layer(expert_layer))
    if (linear.input == input) most = std::max(most, linear.fraction);
  return most;
}

double adapter_activations(const RunShape& s, bool expert_layer) {
  double bytes = 0;
  const AdapterShape& adapters = *s.adapters;
  for (const AdaptedLinear& linear : adapters.of_layer(expert_layer)) {
    // The product with A of all rows, and the outputs before they are scaled.
    const double rows = linear.of_experts() ? s.expert_rows() / s.tokens() : 1,
                 t = real(linear.of_experts() ? s.etp : s.tp),
                 out = real(linear.out) / (linear.sharding == Sharding::outputs ? t : 1);
    bytes +=
        linear.fraction * rows * s.activation_bytes * (real(adapters.rank) + (adapters.magnitudes ? out : 0));
  }
  return bytes;
}

}  // namespace capstan::planner
