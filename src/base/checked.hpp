// 64-bit arithmetic that reports overflow instead of wrapping. Every size that comes from a file goes through
// it.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "base/division.hpp"
#include "base/error.hpp"

namespace capstan {

inline std::optional<int64_t> try_mul(int64_t a, int64_t b) {
  int64_t r;
  if (__builtin_mul_overflow(a, b, &r)) return std::nullopt;
  return r;
}
inline std::optional<int64_t> try_add(int64_t a, int64_t b) {
  int64_t r;
  if (__builtin_add_overflow(a, b, &r)) return std::nullopt;
  return r;
}
inline int64_t checked_mul(int64_t a, int64_t b) {
  if (auto r = try_mul(a, b)) return *r;
  fail(ErrorCode::format, "size overflow: " + std::to_string(a) + " * " + std::to_string(b));
}
inline int64_t checked_add(int64_t a, int64_t b) {
  if (auto r = try_add(a, b)) return *r;
  fail(ErrorCode::format, "size overflow: " + std::to_string(a) + " + " + std::to_string(b));
}
// Narrowing that must not lose the value.
template <class To, class From>
To checked_cast(From value) {
  const To result = static_cast<To>(value);
  if (static_cast<From>(result) != value || ((result < To{}) != (value < From{})))
    fail(ErrorCode::format, "value " + std::to_string(value) + " does not fit its field");
  return result;
}

}  // namespace capstan
