// What the architectures with a mixture of experts read from the model section.
#pragma once

#include "config/sections/model.hpp"
#include "nn/decoder_layer.hpp"

namespace capstan::models {

// Errors: unsupported, naming the field.
void check_experts(const config::ModelConfig& config);
// Replaces the MLP by the mixture of experts if the layer has one.
void use_experts(nn::DecoderLayer::Options& options, const config::ModelConfig& config, int64_t layer);

}  // namespace capstan::models
