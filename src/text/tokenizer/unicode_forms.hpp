// Unicode's normal forms, with the origin of each character, which offsets need.
#pragma once

#include <cstdint>
#include <string_view>

#include "text/tokenizer/text_pieces.hpp"

namespace capstan::text {

enum class UnicodeForm : uint8_t { nfc, nfd, nfkc, nfkd };

// Fills `changes` with the normal form of the text; returns false, with an empty list, if a quick check finds
// that the text is in that form already. Takes linear time, except for sorting consecutive marks.
bool normal_form(UnicodeForm form, std::string_view text, Changes& changes);

}  // namespace capstan::text
