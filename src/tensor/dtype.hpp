// Element types, and the value types bf16 and f16.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

namespace capstan {

// f8e4m3, f8e5m2, f8e8m0: codes of 8 bits (float8.hpp). f4e2m1x2: two codes of 4 bits in a byte, the first in
// the lower half; an element is the pair.
enum class DType : uint8_t {
  f32,
  bf16,
  f16,
  f64,
  u8,
  i8,
  u16,
  i16,
  i32,
  i64,
  f8e4m3,
  f8e5m2,
  f8e8m0,
  f4e2m1x2
};

int64_t size_of(DType type);  // bytes
// For example "fp32", "bf16" or "i32".
std::string_view name_of(DType type);
// Reads the names of name_of(), and "float32", "bfloat16", "F32", "BF16" … The floating-point types below 16
// bits have no names here, because files do not hold the scales that they need.
std::optional<DType> dtype_from_name(std::string_view name);

// Brain float: the upper half of an fp32. Arithmetic happens in fp32; storing rounds to nearest even and
// keeps NaNs.
struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
      bits = static_cast<uint16_t>((u >> 16) | 0x40u);
    else
      bits = static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
static_assert(sizeof(bf16) == 2);

// IEEE binary16. Arithmetic happens in fp32; storing rounds to nearest even: from 65520 on to infinity, below
// 2^-14 to multiples of 2^-24. NaNs become quiet and keep the upper bits of their payload. These are the bits
// of the processor's conversions (F16C), which kernels use.
struct f16 {
  uint16_t bits = 0;
  f16() = default;
  explicit f16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value), sign = u >> 16 & 0x8000u, size = u & 0x7FFFFFFFu;
    uint32_t rounded = 0x7C00u;
    if (size > 0x7F800000u)
      rounded = 0x7E00u | (size >> 13 & 0x3FFu);
    else if (size < 0x38800000u)
      // Subnormal: adding 0.5 rounds to a multiple of 2^-24.
      rounded = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3F000000u;
    else if (size < 0x47800000u)
      rounded = (size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13;
    bits = static_cast<uint16_t>(sign | rounded);
  }
  explicit operator float() const {
    const uint32_t sign = (bits & 0x8000u) << 16, size = (bits & 0x7FFFu) << 13;
    // The product corrects the exponent's bias, also of subnormal numbers.
    uint32_t u = std::bit_cast<uint32_t>(std::bit_cast<float>(size) * 0x1p112f);
    if (size >= 0x0F800000u) u |= size > 0x0F800000u ? 0x7FC00000u : 0x7F800000u;
    return std::bit_cast<float>(sign | u);
  }
};
static_assert(sizeof(f16) == 2);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct DTypeOf<uint16_t> {
  static constexpr DType value = DType::u16;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::i64;
};

}  // namespace capstan
