// Moments of an optimizer in fp8: E4M3 codes, and one fp32 scale for each block of kMomentBlock elements, at
// which the largest magnitude of the block is the largest code (448). Of the second moment the square root is
// stored, whose range is half that of the moment in powers of two.
//
// A scale has 20 significant bits and a code 4, so that their product is exact in fp32. Encoding decoded
// values gives the same codes and scales again: a checkpoint stores the values, in any layout.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace capstan::kernels {

inline constexpr float kLargestFp8 = 448;
inline constexpr uint8_t kLargestFp8Code = 0x7E;

inline float fp8_value(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = (code & 7) + (exponent ? 8 : 0);
  const float magnitude = static_cast<float>(mantissa) *
                          std::bit_cast<float>(static_cast<uint32_t>(std::max(exponent, 1) - 10 + 127) << 23);
  return code & 0x80 ? -magnitude : magnitude;
}

// `noise` in [0, 1): what is added before rounding down, in units of the last place. Negative: to nearest
// even. Saturates; x is finite.
inline uint8_t fp8_code(float x, float noise) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float magnitude = std::bit_cast<float>(bits & 0x7FFFFFFFu);
  const int exponent = std::max(static_cast<int>(bits >> 23 & 255) - 127, -6);
  if (exponent > 8) return static_cast<uint8_t>(kLargestFp8Code | (bits >> 31 << 7));
  // In units of the last place: below 16.
  const float units = magnitude * std::bit_cast<float>(static_cast<uint32_t>(3 - exponent + 127) << 23);
  const auto rounded = static_cast<int>(noise < 0 ? std::nearbyint(units) : std::floor(units + noise));
  const int code = std::min(((exponent + 6) << 3) + rounded, static_cast<int>(kLargestFp8Code));
  return static_cast<uint8_t>(code | static_cast<int>(bits >> 31 << 7));
}

// The scale of a block; 0 where its values are too small for one, NaN where one is not finite.
inline float fp8_scale(float largest) {
  if (!(largest <= 3.4028234e38f)) return std::bit_cast<float>(0x7FC00000u);
  const float scale = largest / kLargestFp8;
  if (scale < 1.1754944e-38f) return 0;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(scale) + 8u) & ~15u);
}

}  // namespace capstan::kernels
