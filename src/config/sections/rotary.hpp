// Values of RoPE that follow from the model section.
#pragma once

#include <cmath>
#include <cstdint>

#include "config/sections/model.hpp"

namespace capstan::config {

// Elements of a head that RoPE rotates: 88 * (60 / 88.) is 59.999…, and means 60. kv_channels is set.
inline int64_t rotary_width(const ModelConfig& model) {
  if (model.multi_latent_attention) return model.qk_pos_emb_head_dim;
  return std::llround(static_cast<double>(*model.kv_channels) * model.rotary_percent);
}

// YaRN's mscale(factor, m) = 0.1 m ln(factor) + 1; 1 up to a factor of 1.
inline double yarn_mscale(double factor, double m) {
  return factor > 1 ? 0.1 * m * std::log(factor) + 1 : 1;
}

}  // namespace capstan::config
