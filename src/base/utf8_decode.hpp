// The UTF-8 decoder, inline for loops over many characters; utf8.hpp has the functions for everything else.
#pragma once

#include <cstdint>

namespace capstan {

struct CodePoint {
  // U+FFFD for an invalid sequence.
  char32_t value;
  // Number of bytes, 1 to 4. An invalid sequence counts as one byte.
  uint8_t bytes;
};
// Decodes the character at p < end, whose first byte is not ASCII. An invalid sequence is U+FFFD of one byte.
inline CodePoint decode_multibyte(const char* p, const char* end) {
  const auto byte = [p](int i) { return static_cast<unsigned char>(p[i]); };
  const auto follows = [&](int i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned first = byte(0);
  if (first < 0xC2) return {0xFFFD, 1};
  if (first < 0xE0) {
    if (end - p < 2 || !follows(1)) return {0xFFFD, 1};
    return {(first & 0x1F) << 6 | (byte(1) & 0x3Fu), 2};
  }
  if (first < 0xF0) {
    if (end - p < 3 || !follows(1) || !follows(2)) return {0xFFFD, 1};
    const char32_t c = (first & 0x0F) << 12 | (byte(1) & 0x3Fu) << 6 | (byte(2) & 0x3Fu);
    if (c < 0x800 || (c >= 0xD800 && c < 0xE000)) return {0xFFFD, 1};
    return {c, 3};
  }
  if (first > 0xF4 || end - p < 4 || !follows(1) || !follows(2) || !follows(3)) return {0xFFFD, 1};
  const char32_t c =
      (first & 0x07) << 18 | (byte(1) & 0x3Fu) << 12 | (byte(2) & 0x3Fu) << 6 | (byte(3) & 0x3Fu);
  if (c < 0x10000 || c > 0x10FFFF) return {0xFFFD, 1};
  return {c, 4};
}
inline CodePoint decode_character(const char* p, const char* end) {
  const auto first = static_cast<unsigned char>(*p);
  if (first < 0x80) return {first, 1};
  return decode_multibyte(p, end);
}

}  // namespace capstan
