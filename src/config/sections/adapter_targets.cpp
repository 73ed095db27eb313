#include "config/sections/adapter_targets.hpp"

#include <algorithm>
#include <cmath>

#include "config/sections/moe_layers.hpp"

namespace capstan::config {

bool is_layer_of_experts(std::string_view path) {
  return path.find(".mlp.experts.") != std::string_view::npos;
}

std::vector<std::string> adaptable_layers(const ModelConfig& model, PeftScheme scheme) {
  const bool parts = adapts_parts(scheme);
  std::vector<std::string> names;
  if (model.multi_latent_attention && model.q_lora_rank)
    names = {"self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj"};
  else if (model.multi_latent_attention)
    names = {"self_attention.linear_q_proj"};
  if (model.multi_latent_attention)
    names.insert(names.end(), {"self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj"});
  else if (parts)
    names = {"self_attention.linear_q", "self_attention.linear_k", "self_attention.linear_v"};
  else
    names = {"self_attention.linear_qkv"};
  names.emplace_back("self_attention.linear_proj");
  std::vector<std::string> dense = names, sparse = names;
  const auto add_mlp = [&](std::vector<std::string>& layers, const std::string& mlp) {
    if (parts && model.gated_linear_unit)
      layers.insert(layers.end(), {mlp + "linear_fc1_gate", mlp + "linear_fc1_up"});
    else
      layers.push_back(mlp + "linear_fc1");
    layers.push_back(mlp + "linear_fc2");
  };
  add_mlp(dense, "mlp.");
  if (!has_magnitudes(scheme)) add_mlp(sparse, "mlp.experts.");
  if (model.moe_shared_expert_intermediate_size.value_or(0) > 0) add_mlp(sparse, "mlp.shared_experts.");
  std::vector<std::string> paths;
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    for (const std::string& name : is_moe_layer(model, layer) ? sparse : dense)
      paths.push_back("decoder.layers." + std::to_string(layer) + "." + name);
  return paths;
}

std::vector<LayerSlice> layer_slices(const ModelConfig& m, const std::string& path, int64_t rows) {
  const std::string around = path.substr(0, path.rfind('.') + 1);
  if (path.ends_with(".linear_qkv")) {
    const int64_t d = *m.kv_channels, of_group = (m.num_attention_heads / *m.num_query_groups + 2) * d;
    // Less than a group where there are more tensor-parallel ranks than groups.
    const int64_t groups = std::max<int64_t>(1, rows / of_group), queries = rows / groups - 2 * d;
    return {{around + "linear_q", groups, 0, queries},
            {around + "linear_k", groups, queries, d},
            {around + "linear_v", groups, queries + d, d}};
  }
  if (path.ends_with(".linear_fc1") && m.gated_linear_unit)
    return {{around + "linear_fc1_gate", 1, 0, rows / 2}, {around + "linear_fc1_up", 1, rows / 2, rows / 2}};
  return {{path, 1, 0, rows}};
}

double adapter_scale(const PeftConfig& peft) {
  const auto rank = static_cast<double>(peft.dim);
  return peft.alpha / (peft.use_rslora ? std::sqrt(rank) : rank);
}

// Greedy matching that returns to the last `*` only; at most pattern × path steps.
static bool matches_pattern(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, back = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      back = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p, ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++back;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

bool matches_layer(std::string_view name_or_pattern, std::string_view path) {
  if (name_or_pattern.find('*') != std::string_view::npos) return matches_pattern(name_or_pattern, path);
  return path == name_or_pattern || path.substr(path.rfind('.') + 1) == name_or_pattern;
}

bool adapts(const PeftConfig& peft, std::string_view path) {
  const auto matches = [&](const std::string& name) { return matches_layer(name, path); };
  return !(has_magnitudes(peft.scheme) && is_layer_of_experts(path)) &&
         std::any_of(peft.target_modules.begin(), peft.target_modules.end(), matches) &&
         std::none_of(peft.exclude_modules.begin(), peft.exclude_modules.end(), matches);
}

}  // namespace capstan::config
