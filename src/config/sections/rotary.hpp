// A size that follows from the model section.
#pragma once

#include <cmath>
#include <cstdint>

#include "config/sections/model.hpp"

namespace capstan::config {

// Elements of a head that RoPE rotates: 88 * (60 / 88.) is 59.999…, and means 60. kv_channels is set.
inline int64_t rotary_width(const ModelConfig& model) {
  return std::llround(static_cast<double>(*model.kv_channels) * model.rotary_percent);
}

}  // namespace capstan::config
