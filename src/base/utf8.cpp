#include "base/utf8.hpp"

#include <algorithm>

namespace capstan {

CodePoint decode_utf8(std::string_view text, size_t offset) {
  return decode_character(text.data() + offset, text.data() + text.size());
}

std::optional<size_t> first_invalid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    if (static_cast<unsigned char>(text[i]) < 0x80) {
      ++i;
      continue;
    }
    const CodePoint point = decode_utf8(text, i);
    if (point.value == 0xFFFD && point.bytes == 1) return i;
    i += static_cast<size_t>(point.bytes);
  }
  return std::nullopt;
}

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&](char32_t byte) { out += static_cast<char>(byte); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F)), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  }
}

size_t count_code_points(std::string_view text) {
  size_t count = 0;
  for (const char c : text) count += !is_continuation(c);
  return count;
}

std::string line_and_column(std::string_view text, size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  // 0 without a line break.
  const size_t line_start = before.rfind('\n') + 1;
  return std::to_string(1 + std::count(before.begin(), before.end(), '\n')) + ":" +
         std::to_string(1 + count_code_points(before.substr(line_start)));
}

}  // namespace capstan
