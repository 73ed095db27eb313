// Which layers `peft` gives an adapter, and of which scale.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/core/config.hpp"

namespace capstan::config {

// Paths of the layers of a model that can have one, layer by layer:
// "decoder.layers.0.self_attention.linear_qkv" …; for canonical schemes q, k, v, gate and up are layers of
// their own.
std::vector<std::string> adaptable_layers(const ModelConfig& model, PeftScheme scheme);

// Parts of a fused layer that canonical schemes adapt apart: rows [begin, begin + count) of each of `groups`
// equal parts of its weight. A layer that is not fused is its own part. rows: of the weight, or of a tensor
// rank's share of it.
struct LayerPart {
  std::string path;
  int64_t groups = 1, begin = 0, count = 0;
};
std::vector<LayerPart> layer_parts(const ModelConfig& model, const std::string& path, int64_t rows);

// What the update is multiplied by.
double adapter_scale(const PeftConfig& peft);

// A name is the last part of a path; a pattern with `*` is matched against the full path.
bool matches_layer(std::string_view name_or_pattern, std::string_view path);

// A target and not excluded.
bool adapts(const PeftConfig& peft, std::string_view path);

}  // namespace capstan::config
