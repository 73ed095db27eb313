// Gradient clipping, the decision at the end of a step, and the hash of a fingerprint, for all devices.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/host_device.hpp"
#include "kernels/step_control.hpp"

namespace capstan::kernels {

// Returns the factor that scales gradients of this norm down to `clip`; 1 if the norm is not larger or `clip`
// is 0.
CAPSTAN_HOST_DEVICE inline double clip_factor(double norm, double clip) {
  return clip > 0 && norm > clip ? clip / (norm + 1e-6) : 1.0;
}

// Computes loss, norm and control of the step from its sums (StepControlKernels::control).
CAPSTAN_HOST_DEVICE inline void control_step(const StepLimits& limits, StepValues& v) {
  const double scale = v.loss_tokens > 0 ? 1.0 / v.loss_tokens : 0.0, unscale = 1.0 / limits.loss_scale;
  v.loss = v.loss_sum * scale * unscale;
  v.norm = std::sqrt(v.gradient_squares) * scale * unscale;
  const bool finite_loss = std::isfinite(v.loss), finite_norm = std::isfinite(v.norm);
  const bool skip = (limits.require_finite != 0 && !(finite_loss && finite_norm)) ||
                    (finite_loss && v.loss > limits.loss_spike) ||
                    (finite_norm && v.norm > limits.norm_spike) || v.norm > limits.largest_norm;
  v.control.gradient = static_cast<float>(scale * clip_factor(v.norm, limits.clip) * unscale);
  v.control.skip = skip ? 1 : 0;
}

inline constexpr int64_t kFingerprintWord = 4;  // bytes
// Hash of word `index` of `data`: for given index and salt, different words have different hashes (the
// finalizer of SplitMix64, which is a bijection). Bytes after the end count as 0. `data` is aligned to words.
CAPSTAN_HOST_DEVICE inline uint64_t word_hash(const std::byte* data, int64_t bytes, int64_t index,
                                              int64_t salt) {
  const int64_t at = index * kFingerprintWord;
  uint32_t word = 0;
  if (at + kFingerprintWord <= bytes) {
    std::memcpy(&word, data + at, sizeof(word));
  } else {
    for (int64_t i = at; i < bytes; ++i) word |= static_cast<uint32_t>(data[i]) << 8 * (i - at);
  }
  uint64_t h = (static_cast<uint64_t>(salt) << 40) + static_cast<uint64_t>(index + 1);
  h = (h * 0x9E3779B97F4A7C15u) ^ (uint64_t{word} * 0xD1B54A32D192ED03u);
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
  return h ^ (h >> 31);
}

}  // namespace capstan::kernels
