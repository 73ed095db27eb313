// UTF-8 without a library: validation and counting for diagnostics, decoding one code point at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/utf8_decode.hpp"

namespace capstan {

// U+FEFF, with which some programs begin a text file.
inline constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

// Byte offset of the first invalid sequence (overlong, surrogate, above U+10FFFF, truncated); nullopt for
// valid text.
std::optional<size_t> first_invalid_utf8(std::string_view text);

// Decodes the character at `offset` < text.size().
CodePoint decode_utf8(std::string_view text, size_t offset);
void append_utf8(std::string& out, char32_t code_point);

// Whether the byte continues a character, that is, does not begin one.
inline bool is_continuation(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}
// Offset of the first byte of the character that contains the byte `offset` < text.size().
inline size_t character_start(std::string_view text, size_t offset) {
  while (offset > 0 && is_continuation(text[offset])) --offset;
  return offset;
}

// Number of characters, for column numbers.
size_t count_code_points(std::string_view text);
// "line:column" of a byte in the text, both from 1; the column counts characters.
std::string line_and_column(std::string_view text, size_t offset);

}  // namespace capstan
