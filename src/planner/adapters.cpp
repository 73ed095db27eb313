#include "planner/adapters.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "config/sections/adapter_targets.hpp"
#include "planner/linear_layers.hpp"

namespace capstan::planner {

namespace {

// The layer with this path inside a layer of the model. Adapters of parts have a factor for each of queries,
// keys and values, and for each input of a gated activation.
LinearLayer linear_of(const RunShape& s, bool expert_layer, std::string_view path) {
  const auto find = [&](std::string_view whole) {
    LinearLayers layers = dense_layers(s, expert_layer);
    if (whole.starts_with("mlp.experts.")) layers = routed_layers(s);
    return *std::ranges::find(layers, whole, &LinearLayer::path);
  };
  if (const size_t part = path.rfind("_fc1_"); part != std::string_view::npos) {
    LinearLayer half = find(path.substr(0, part + 4));
    half.out /= 2;
    return half;
  }
  for (const std::string_view part : {"linear_q", "linear_k", "linear_v"}) {
    if (!path.ends_with(part)) continue;
    LinearLayer projection = find("self_attention.linear_qkv");
    projection.out = part == "linear_q" ? s.query_width() : s.kv_width();
    return projection;
  }
  return find(path);
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
    const double fraction = real(count) / real(kind.first ? of_experts : dense);
    (kind.first ? adapters.expert_layer : adapters.dense_layer)
        .push_back({linear_of(s, kind.first, kind.second), fraction});
  }
  return adapters;
}

AdapterParameters adapter_parameters(const RunShape& s, bool expert_layer) {
  AdapterParameters sum;
  const AdapterShape& adapters = *s.adapters;
  for (const auto& [layer, fraction] : adapters.of_layer(expert_layer)) {
    const int64_t ranks = layer.of_experts() ? s.etp : s.tp;
    const double out = layer.outputs(ranks),
                 count = fraction * (real(adapters.rank) * (layer.inputs(ranks) + out) +
                                     (adapters.magnitudes ? out : 0));
    if (layer.of_experts())
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

double saves_input(const RunShape& s, bool expert_layer, LinearLayer::Input input) {
  double most = 0;
  for (const AdaptedLinear& linear : s.adapters->of_layer(expert_layer))
    if (linear.layer.input == input) most = std::max(most, linear.fraction);
  return most;
}

double adapter_activations(const RunShape& s, bool expert_layer) {
  double bytes = 0;
  const AdapterShape& adapters = *s.adapters;
  for (const auto& [layer, fraction] : adapters.of_layer(expert_layer)) {
    // The product with A of all rows, and the outputs before they are scaled.
    const double rows = layer.of_experts() ? s.expert_rows() / s.tokens() : 1,
                 out = layer.outputs(layer.of_experts() ? s.etp : s.tp);
    bytes += fraction * rows * s.activation_bytes * (real(adapters.rank) + (adapters.magnitudes ? out : 0));
  }
  return bytes;
}

}  // namespace capstan::planner
