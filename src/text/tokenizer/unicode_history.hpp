// Classes of characters in the components of Hugging Face tokenizers, which use different versions of
// Unicode: punctuation in its pre-tokenizers and marks in its normalizers. (Its regular expressions use the
// newest version, see unicode.hpp.) The classes were compared with tokenizers 0.23.3 on every code point.
#pragma once

namespace capstan::text {

// Punctuation for the pre-tokenizers Punctuation and BertPreTokenizer.
bool is_punctuation(char32_t c);
// A control character for BertNormalizer, which excludes tab, newline and carriage return.
bool is_control(char32_t c);
// A nonspacing mark for BertNormalizer.
bool is_nonspacing_mark(char32_t c);
// A mark for StripAccents.
bool is_mark(char32_t c);
// A mark that the normal forms do not know, so that its combining class is 0.
bool is_later_mark(char32_t c);
// A character whose decomposition the normal forms do not know, so that it is kept.
bool has_later_decomposition(char32_t c);
// The lower-case form in Unicode 17. U+0130, whose form has two characters, is handled by the caller.
char32_t small_letter(char32_t c);

}  // namespace capstan::text
