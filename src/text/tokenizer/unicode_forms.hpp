// Unicode's normal forms, with the account of each character's origin that offsets need.
#pragma once

#include <cstdint>
#include <string_view>

#include "text/tokenizer/text_pieces.hpp"

namespace capstan::text {

enum class UnicodeForm : uint8_t { nfc, nfd, nfkc, nfkd };

// Fills `changes` with the normal form of the text; false when the text is surely in that form already (then
// the list is left empty). Linear but for the sorting of runs of marks.
bool normal_form(UnicodeForm form, std::string_view text, Changes& changes);

}  // namespace capstan::text
