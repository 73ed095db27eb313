// What several architectures read from the model section: norms, activation, positions, attention, MLP.
#pragma once

#include <optional>
#include <string>

#include "base/error.hpp"
#include "config/sections/model.hpp"
#include "nn/mlp.hpp"
#include "nn/transformer_layer.hpp"

namespace capstan::models {

// The value of a field that resolution has set.
template <class T>
T resolved(const std::optional<T>& value, const char* field) {
  CAPSTAN_ASSERT(value.has_value(), std::string("model.") + field + " has not been resolved");
  return *value;
}

// Throws ErrorCode::config unless the condition holds.
inline void require(bool condition, const std::string& message) {
  if (!condition) fail(ErrorCode::config, message);
}

// Whether selective recomputation names the module.
bool recomputes(const config::ModelConfig& config, config::RecomputeModule module);

nn::NormKind norm_kind(const config::ModelConfig& config);
// nullopt: no rotary positions.
std::optional<nn::RopeOptions> rope_of(const config::ModelConfig& config);

nn::Attention::Options attention_options(const config::ModelConfig& config, int64_t layer);
// Makes nn::SelfAttention.
decltype(nn::DecoderLayer::Options::attention) self_attention(const config::ModelConfig& config,
                                                              int64_t layer);
nn::Mlp::Options mlp_options(const config::ModelConfig& config);

// With the MLP and without attention.
nn::DecoderLayer::Options decoder_layer_options(const config::ModelConfig& config);
nn::TransformerLayer::Options transformer_layer_options(const config::ModelConfig& config);

}  // namespace capstan::models
