// UTF-8 without a library: validation and counting for diagnostics, decoding one code point at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace capstan {

// Byte offset of the first invalid sequence (overlong, surrogate, above U+10FFFF, truncated), nullopt when
// all is well.
std::optional<size_t> first_invalid_utf8(std::string_view text);

struct CodePoint {
  char32_t value;  // U+FFFD for an invalid sequence
  int bytes;       // 1..4; an invalid sequence counts 1
};
CodePoint decode_utf8(std::string_view text, size_t offset);  // offset < text.size()
void append_utf8(std::string& out, char32_t code_point);

size_t count_code_points(std::string_view text);  // characters, for columns
// "line:column" of a byte in the text, both from 1; the column counts characters.
std::string line_and_column(std::string_view text, size_t offset);

}  // namespace capstan
