// Unicode classes of code points as the regular expressions of tokenizers see them: Unicode 16.0, the version
// of Oniguruma in Hugging Face tokenizers 0.21 and later. Reference: tests/text/tokenizer_unicode.cpp holds
// the counts and edges.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/utf8_decode.hpp"

namespace capstan::text {

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

// The character that ends at `offset` > 0 (one byte where the text before it is not valid UTF-8).
Character character_before(std::string_view text, size_t offset);

}  // namespace capstan::text
