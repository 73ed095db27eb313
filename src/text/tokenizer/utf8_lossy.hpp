// Converts bytes to valid UTF-8, for text that a model generated.
#pragma once

#include <string>
#include <string_view>

namespace capstan::text {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

// Appends the complete characters of `bytes`, with U+FFFD for each maximal part of a broken sequence (as Rust
// and the web do it). Returns the number of bytes used; the rest is the beginning of a character that may
// still be completed (all is used if `last`).
size_t append_lossy(std::string& out, std::string_view bytes, bool last);

}  // namespace capstan::text
