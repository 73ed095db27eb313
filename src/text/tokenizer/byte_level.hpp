// The byte-level alphabet of GPT-2: every byte is one printable character, so that a vocabulary of bytes can
// be written as text. 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF stand for themselves; the other 68 bytes, ascending,
// are U+0100, U+0101, …
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace capstan::text {

// All 256 characters are below this code point.
inline constexpr char32_t kByteAlphabetSize = 0x144;
// Maps a byte to its code point.
const std::array<uint16_t, 256>& byte_to_character();
// Maps a code point to its byte, or to -1.
const std::array<int16_t, kByteAlphabetSize>& character_to_byte();

// Appends the text that stands for the bytes.
void append_byte_text(std::string& out, std::string_view bytes);
std::string byte_text(int byte);
// Appends the bytes that a token's text stands for; false, and nothing appended, when a character is outside
// the alphabet.
bool append_text_bytes(std::string& out, std::string_view text);

}  // namespace capstan::text
