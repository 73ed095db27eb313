// Selects the layers that get an adapter from `peft`, and its scale.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/sections/config.hpp"

namespace capstan::config {

// Paths of the layers of a model that can have one, layer by layer:
// "decoder.layers.0.self_attention.linear_qkv" …; for canonical schemes q, k, v, gate and up are layers of
// their own. "decoder.layers.1.mlp.experts.linear_fc1" is the layer of all experts, each with an adapter of
// its own; it is left out for schemes with magnitudes, which experts do not have.
std::vector<std::string> adaptable_layers(const ModelConfig& model, PeftScheme scheme);
bool is_layer_of_experts(std::string_view path);

// A slice of a fused layer that canonical schemes adapt separately: rows [begin, begin + count) of each of
// `groups` equal groups of rows of its weight.
struct LayerSlice {
  std::string path;
  int64_t groups = 1, begin = 0, count = 0;
};
// Returns the slices of a layer; a layer that is not fused is its only slice. rows: number of rows of the
// weight (of experts: of each expert's), or of a tensor-parallel rank's shard of it.
std::vector<LayerSlice> layer_slices(const ModelConfig& model, const std::string& path, int64_t rows);

// The factor of the adapter's update.
double adapter_scale(const PeftConfig& peft);

// Whether a layer matches. A name is the last component of a path; a pattern with `*` is matched against the
// full path.
bool matches_layer(std::string_view name_or_pattern, std::string_view path);

// Whether the layer is a target and not excluded.
bool adapts(const PeftConfig& peft, std::string_view path);

}  // namespace capstan::config
