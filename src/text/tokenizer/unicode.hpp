// Unicode classes of code points as the regular expressions of tokenizers see them: Unicode 16.0, the version
// of Oniguruma in Hugging Face tokenizers 0.21 and later. Reference: tests/text/tokenizer_unicode.cpp holds
// the counts and edges.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace capstan::data {

inline constexpr uint8_t kLetter = 1;    // \p{L}
inline constexpr uint8_t kNumber = 2;    // \p{N}
inline constexpr uint8_t kSpace = 4;     // \s, the property White_Space
inline constexpr uint8_t kMark = 8;      // \p{M}
inline constexpr uint8_t kNewline = 16;  // \r and \n (also kSpace)

struct UnicodeClasses {
  static constexpr char32_t kSize = 0x34000;  // no letter, number or space is assigned beyond it
  std::array<uint8_t, kSize> bits;

  uint8_t of(char32_t c) const {
    if (c < kSize) return bits[c];
    return c >= 0xE0100 && c <= 0xE01EF ? kMark : 0;
  }
};
const UnicodeClasses& unicode_classes();

// \w of Rust's regex: alphabetic, marks, decimal digits, connector punctuation, joiners.
bool is_word_character(char32_t c);

struct Character {
  char32_t value;
  uint8_t bytes;
};
// Decodes the character at p < end, whose first byte is not ASCII. An invalid sequence is U+FFFD of one byte.
inline Character decode_multibyte(const char* p, const char* end) {
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
inline Character decode_character(const char* p, const char* end) {
  const auto first = static_cast<unsigned char>(*p);
  if (first < 0x80) return {first, 1};
  return decode_multibyte(p, end);
}
// The character that ends at `offset` > 0 (one byte where the text before it is not valid UTF-8).
Character character_before(std::string_view text, size_t offset);

}  // namespace capstan::data
