#include "text/tokenizer/unicode.hpp"

#include <utf8proc.h>

#include <memory>

#include "base/utf8.hpp"

namespace capstan::text {

namespace {

// Code points assigned in Unicode 15.1 and 16.0, for utf8proc with Unicode 15.0 (Debian 12). With a newer
// version they have no effect.
struct Range {
  char32_t first, last;
  uint8_t bits;
};
constexpr Range kUnicode16[] = {
    {0x897, 0x897, kMark},       {0x1C89, 0x1C8A, kLetter},   {0xA7CB, 0xA7CD, kLetter},
    {0xA7DA, 0xA7DC, kLetter},   {0x105C0, 0x105F3, kLetter}, {0x10D40, 0x10D49, kNumber},
    {0x10D4A, 0x10D65, kLetter}, {0x10D69, 0x10D6D, kMark},   {0x10D6F, 0x10D85, kLetter},
    {0x10EC2, 0x10EC4, kLetter}, {0x10EFC, 0x10EFC, kMark},   {0x11380, 0x11389, kLetter},
    {0x1138B, 0x1138B, kLetter}, {0x1138E, 0x1138E, kLetter}, {0x11390, 0x113B5, kLetter},
    {0x113B7, 0x113B7, kLetter}, {0x113B8, 0x113C0, kMark},   {0x113C2, 0x113C2, kMark},
    {0x113C5, 0x113C5, kMark},   {0x113C7, 0x113CA, kMark},   {0x113CC, 0x113D0, kMark},
    {0x113D1, 0x113D1, kLetter}, {0x113D2, 0x113D2, kMark},   {0x113D3, 0x113D3, kLetter},
    {0x113E1, 0x113E2, kMark},   {0x116D0, 0x116E3, kNumber}, {0x11BC0, 0x11BE0, kLetter},
    {0x11BF0, 0x11BF9, kNumber}, {0x11F5A, 0x11F5A, kMark},   {0x13460, 0x143FA, kLetter},
    {0x16100, 0x1611D, kLetter}, {0x1611E, 0x1612F, kMark},   {0x16130, 0x16139, kNumber},
    {0x16D40, 0x16D6C, kLetter}, {0x16D70, 0x16D79, kNumber}, {0x18CFF, 0x18CFF, kLetter},
    {0x1CCF0, 0x1CCF9, kNumber}, {0x1E5D0, 0x1E5ED, kLetter}, {0x1E5EE, 0x1E5EF, kMark},
    {0x1E5F0, 0x1E5F0, kLetter}, {0x1E5F1, 0x1E5FA, kNumber}, {0x2EBF0, 0x2EE5D, kLetter},
};

uint8_t bits_of(char32_t c) {
  if (c == '\n' || c == '\r') return kSpace | kNewline;
  if ((c >= 9 && c <= 13) || c == 0x85) return kSpace;
  // In utf8proc the categories of one class have consecutive numbers.
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  const auto between = [&](utf8proc_category_t first, utf8proc_category_t last) {
    return category >= first && category <= last;
  };
  if (between(UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LO)) return kLetter;
  if (between(UTF8PROC_CATEGORY_ND, UTF8PROC_CATEGORY_NO)) return kNumber;
  if (between(UTF8PROC_CATEGORY_MN, UTF8PROC_CATEGORY_ME)) return kMark;
  return between(UTF8PROC_CATEGORY_ZS, UTF8PROC_CATEGORY_ZP) ? kSpace : 0;
}

std::unique_ptr<UnicodeClasses> make_classes() {
  auto result = std::make_unique<UnicodeClasses>();
  for (char32_t c = 0; c < UnicodeClasses::kSize; ++c) result->bits[c] = bits_of(c);
  for (const Range& range : kUnicode16)
    for (char32_t c = range.first; c <= range.last; ++c) result->bits[c] = range.bits;
  return result;
}

}  // namespace

const UnicodeClasses& unicode_classes() {
  static const std::unique_ptr<UnicodeClasses> classes = make_classes();
  return *classes;
}

bool is_word_character(char32_t c) {
  if (c < 0x80) return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  const uint8_t bits = unicode_classes().of(c);
  if (bits & (kLetter | kMark)) return true;
  if (c == 0x200C || c == 0x200D) return true;
  // The alphabetic symbols: circled and squared letters.
  if ((c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
      (c >= 0x1F170 && c <= 0x1F189))
    return true;
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  if (bits & kNumber)
    // Numbers that are unassigned in utf8proc are the decimal digits of Unicode 16.
    return category != UTF8PROC_CATEGORY_NO;
  return category == UTF8PROC_CATEGORY_PC;
}

CodePoint character_before(std::string_view text, size_t offset) {
  const char* const end = text.data() + offset;
  for (size_t back = 1; back <= 4 && back <= offset; ++back) {
    if (is_continuation(end[-static_cast<ptrdiff_t>(back)])) continue;
    const CodePoint c = decode_character(end - back, end);
    if (c.bytes == back) return c;
    break;
  }
  return {0xFFFD, 1};
}

}  // namespace capstan::text
