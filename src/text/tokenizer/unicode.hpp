// Unicode classes of code points as the regular expressions of tokenizers see them: Unicode 16.0, the version
// of Oniguruma in Hugging Face tokenizers 0.21 and later. Tested by
// tests/text/tokenizer_pieces.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/utf8_decode.hpp"

namespace capstan::text {

// Bits of the classes of a code point: \p{L}, \p{N}, \s (the property White_Space), \p{M}, and \r and
// \n, which are kSpace as well.
inline constexpr uint8_t kLetter = 1;
inline constexpr uint8_t kNumber = 2;
inline constexpr uint8_t kSpace = 4;
inline constexpr uint8_t kMark = 8;
inline constexpr uint8_t kNewline = 16;

struct UnicodeClasses {
  // No letter, number or space is assigned beyond it.
  static constexpr char32_t kSize = 0x34000;
  std::array<uint8_t, kSize> bits;

  uint8_t of(char32_t c) const {
    if (c < kSize) return bits[c];
    return c >= 0xE0100 && c <= 0xE01EF ? kMark : 0;
  }
};
const UnicodeClasses& unicode_classes();

// \s of Rust's regex: White_Space.
inline bool is_space(char32_t c) {
  return (unicode_classes().of(c) & kSpace) != 0;
}
// \w of Rust's regex: alphabetic, marks, decimal digits, connector punctuation, joiners.
bool is_word_character(char32_t c);

// Returns the character that ends at `offset` > 0, or a single byte where the text before it is not valid
// UTF-8.
CodePoint character_before(std::string_view text, size_t offset);

}  // namespace capstan::text
