// Element types and the bf16 value type.
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
// Also "float32", "bfloat16", "F32", "BF16" … Not the floating-point types below 16 bits: no file holds them,
// since their scales would be missing.
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
