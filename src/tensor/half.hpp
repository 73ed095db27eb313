// IEEE half precision as bits. Only file formats use it; kernels do not compute in it.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace capstan {

inline float half_to_float(uint16_t bits) {
  const float sign = (bits & 0x8000u) ? -1.0f : 1.0f;
  const int exponent = (bits >> 10) & 31;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 31)
    return std::bit_cast<float>((uint32_t{bits & 0x8000u} << 16) | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return std::bit_cast<float>((uint32_t{bits & 0x8000u} << 16) | static_cast<uint32_t>(exponent + 112) << 23 |
                              (mantissa << 13));
}

// Rounds to nearest, ties to even; large values become infinite, NaNs stay NaN.
inline uint16_t float_to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = (bits >> 16) & 0x8000u,
                 size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  // From 65520 on.
  if (size >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  // Below 2^-14: steps of 2^-24.
  if (size < 0x38800000u)
    return static_cast<uint16_t>(sign |
                                 static_cast<uint32_t>(std::nearbyint(std::ldexp(std::abs(value), 24))));
  const uint32_t rounded = size - 0x38000000u + 0xFFFu + ((size >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

}  // namespace capstan
