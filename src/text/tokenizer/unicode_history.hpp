// Classes of characters as the parts of Hugging Face tokenizers know them, which stopped at different
// versions of Unicode: what is punctuation to its pre-tokenizers and a mark to its normalizers. (Its regular
// expressions know the newest one: unicode.hpp.) Compared with tokenizers 0.23.3 on every code point.
#pragma once

namespace capstan::text {

bool is_punctuation(char32_t c);           // Punctuation, BertPreTokenizer
bool is_control(char32_t c);               // BertNormalizer; not tab, newline, carriage return
bool is_nonspacing_mark(char32_t c);       // BertNormalizer
bool is_mark(char32_t c);                  // StripAccents
bool is_later_mark(char32_t c);            // unknown to its normal forms: of combining class 0
bool has_later_decomposition(char32_t c);  // unknown to its normal forms: left as it is
// Unicode 17; U+0130, which has two characters, is not this function's.
char32_t small_letter(char32_t c);

}  // namespace capstan::text
