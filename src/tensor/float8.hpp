// Floating-point formats of 8 and 4 bits (OCP 8-bit Floating Point Specification 1.0 and Microscaling Formats
// 1.0): conversion from and to fp32. Devices share these functions.
//
//            exponent, mantissa   largest   smallest normal, subnormal   special values
//   e4m3     4, 3                 448       2^-6, 2^-9                   NaN
//   e5m2     5, 2                 57344     2^-14, 2^-16                 infinities, NaN
//   e2m1     2, 1                 6         1, 0.5                       none
//   e8m0     8, 0                 2^127     2^-127, none                 NaN; powers of two without a sign
//
// Conversion rounds to nearest, ties to even, and saturates: values beyond the largest become the largest, as
// the conversion instructions of GPUs do with `satfinite`.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "base/host_device.hpp"
#include "tensor/dtype.hpp"

namespace capstan {

struct SmallFloat {
  uint32_t exponent_bits, mantissa_bits, largest_code, nan_code;

  CAPSTAN_HOST_DEVICE constexpr uint32_t bias() const { return (1u << (exponent_bits - 1)) - 1; }
  CAPSTAN_HOST_DEVICE constexpr uint32_t sign() const { return 1u << (exponent_bits + mantissa_bits); }
  // fp32 of a normal code.
  CAPSTAN_HOST_DEVICE constexpr float normal(uint32_t code) const {
    return std::bit_cast<float>((code + ((127 - bias()) << mantissa_bits)) << (23 - mantissa_bits));
  }
  CAPSTAN_HOST_DEVICE constexpr float largest() const { return normal(largest_code); }
  bool operator==(const SmallFloat&) const = default;
};
inline constexpr SmallFloat kE4m3{4, 3, 0x7E, 0x7F};
inline constexpr SmallFloat kE5m2{5, 2, 0x7B, 0x7F};
// NaN becomes the largest value.
inline constexpr SmallFloat kE2m1{2, 1, 0x7, 0x7};

// The code of `value`, rounded to nearest: the addition of a power of two whose last mantissa bit is the step
// of the format rounds to that step.
template <SmallFloat F>
CAPSTAN_HOST_DEVICE inline uint32_t encode(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = (bits >> 31) * F.sign();
  const float size = std::bit_cast<float>(std::min(magnitude, std::bit_cast<uint32_t>(F.largest())));
  const uint32_t exponent = std::max(std::bit_cast<uint32_t>(size) >> 23, 128 - F.bias());
  const uint32_t step = (exponent + 23 - F.mantissa_bits) << 23;
  const uint32_t steps = std::bit_cast<uint32_t>(size + std::bit_cast<float>(step)) - step;
  const uint32_t code = ((exponent - (128 - F.bias())) << F.mantissa_bits) + steps;
  return sign | (magnitude > 0x7F800000u ? F.nan_code : code);
}

// The code of `value` with stochastic rounding: up with a probability equal to the distance from the lower
// neighbor, in steps of the format. It uses 20 bits of `random`; values of the format do not change.
template <SmallFloat F>
CAPSTAN_HOST_DEVICE inline uint32_t encode_stochastic(float value, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = (bits >> 31) * F.sign();
  const float size = std::bit_cast<float>(std::min(magnitude, std::bit_cast<uint32_t>(F.largest())));
  const uint32_t exponent = std::max(std::bit_cast<uint32_t>(size) >> 23, 128 - F.bias());
  // 2^-(exponent - 127 - mantissa bits)
  const float per_step = std::bit_cast<float>((254 - exponent + F.mantissa_bits) << 23);
  const float steps = size * per_step + static_cast<float>(random >> 12) * 0x1p-20f;
  const uint32_t code = ((exponent - (128 - F.bias())) << F.mantissa_bits) + static_cast<uint32_t>(steps);
  return sign | (magnitude > 0x7F800000u ? F.nan_code : code);
}

template <SmallFloat F>
CAPSTAN_HOST_DEVICE inline float decode(uint32_t code) {
  const uint32_t magnitude = code & (F.sign() - 1), smallest_normal = 1u << F.mantissa_bits;
  float value = F.normal(magnitude);
  if (magnitude < smallest_normal)
    value = static_cast<float>(magnitude) * F.normal(smallest_normal) / static_cast<float>(smallest_normal);
  // e5m2 has infinities, as IEEE formats do.
  if (magnitude > F.largest_code) value = magnitude == 0x7C ? INFINITY : NAN;
  return (code & F.sign()) != 0 ? -value : value;
}

// e8m0: 2^(code - 127).
CAPSTAN_HOST_DEVICE inline float decode_e8m0(uint32_t code) {
  return code == 255 ? NAN : code == 0 ? 0x1p-127f : std::bit_cast<float>(code << 23);
}
// The smallest power of two that is not below the positive `value`; 2^-127 for zero, 2^127 for values beyond
// it.
CAPSTAN_HOST_DEVICE inline uint32_t encode_e8m0_up(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (bits > 0x7F800000u) return 255;
  const uint32_t exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
  if (exponent == 0) return mantissa > 0x400000u ? 1 : 0;
  return std::min<uint32_t>(exponent + (mantissa != 0 ? 1 : 0), 254);
}

// The largest finite value of a type of 8 or 4 bits.
CAPSTAN_HOST_DEVICE inline float largest_of(DType type) {
  return type == DType::f8e4m3 ? kE4m3.largest() : type == DType::f8e5m2 ? kE5m2.largest() : kE2m1.largest();
}

}  // namespace capstan
