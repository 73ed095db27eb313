#include "text/tokenizer/byte_level.hpp"

#include "base/utf8.hpp"
#include "text/tokenizer/unicode.hpp"

namespace capstan::text {

const std::array<uint16_t, 256>& byte_to_character() {
  static const std::array<uint16_t, 256> table = [] {
    std::array<uint16_t, 256> result{};
    uint16_t next = 0x100;
    for (unsigned b = 0; b < 256; ++b) {
      const bool itself = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      result[b] = itself ? static_cast<uint16_t>(b) : next++;
    }
    return result;
  }();
  return table;
}

const std::array<int16_t, kByteAlphabetSize>& character_to_byte() {
  static const std::array<int16_t, kByteAlphabetSize> table = [] {
    std::array<int16_t, kByteAlphabetSize> result;
    result.fill(-1);
    for (int b = 0; b < 256; ++b)
      result[byte_to_character()[static_cast<size_t>(b)]] = static_cast<int16_t>(b);
    return result;
  }();
  return table;
}

void append_byte_text(std::string& out, std::string_view bytes) {
  const auto& table = byte_to_character();
  for (const char b : bytes) append_utf8(out, table[static_cast<unsigned char>(b)]);
}

std::string byte_text(int byte) {
  std::string text;
  append_utf8(text, byte_to_character()[static_cast<size_t>(byte)]);
  return text;
}

bool append_text_bytes(std::string& out, std::string_view text) {
  const auto& table = character_to_byte();
  const size_t before = out.size();
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    const CodePoint c = decode_character(p, end);
    if (c.value >= kByteAlphabetSize || table[c.value] < 0) {
      out.resize(before);
      return false;
    }
    out += static_cast<char>(table[c.value]);
    p += c.bytes;
  }
  return true;
}

}  // namespace capstan::text
