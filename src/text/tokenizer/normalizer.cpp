#include "text/tokenizer/normalizer.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <memory>
#include <vector>

#include "base/utf8.hpp"
#include "text/tokenizer/unicode.hpp"

namespace capstan::text {

namespace {

// NFC does not change characters below this one unless a character from this one on follows.
constexpr char32_t kFirst = 0x300;
// Compatibility ideographs end before this code point, and no character beyond it composes.
constexpr char32_t kLimit = 0x30000;

// The set of characters that are not their own NFC, or that may combine with a preceding character: those
// with a combining class other than 0, and the second characters of compositions. Text without them is in
// NFC.
using Unsafe = std::bitset<kLimit>;

std::unique_ptr<Unsafe> make_unsafe() {
  auto result = std::make_unique<Unsafe>();
  for (char32_t c = 0xC0; c < kLimit; ++c) {
    const auto point = static_cast<utf8proc_int32_t>(c);
    const utf8proc_property_t* property = utf8proc_get_property(point);
    if (property->combining_class != 0) result->set(c);
    if (property->decomp_seqindex == UINT16_MAX) continue;
    std::array<utf8proc_int32_t, 64> full;
    int last_boundary = 0;
    const auto count = utf8proc_decompose_char(
        point, full.data(), static_cast<utf8proc_ssize_t>(full.size()),
        static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), &last_boundary);
    if (count < 1 || count > static_cast<utf8proc_ssize_t>(full.size())) continue;
    // The full decomposition ends with the second half of every step, and so do the ones in the middle.
    for (utf8proc_ssize_t i = 1; i < count; ++i)
      if (full[static_cast<size_t>(i)] >= static_cast<utf8proc_int32_t>(kFirst))
        result->set(static_cast<size_t>(full[static_cast<size_t>(i)]));
    auto composed = full;
    const auto left = utf8proc_normalize_utf32(
        composed.data(), count, static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    if (left != 1 || composed[0] != point) result->set(c);
  }
  // Conjoining Hangul vowels and final consonants.
  for (char32_t c = 0x1160; c <= 0x11FF; ++c) result->set(c);
  return result;
}

class Nfc {
 public:
  Nfc() : unsafe_(make_unsafe()) {}

  bool safe(char32_t c) const { return c < kFirst || c >= kLimit || !unsafe_->test(c); }

  // Appends the NFC of a sequence of valid characters.
  void append(std::string& out, std::string_view text, std::vector<utf8proc_int32_t>& points) const {
    points.clear();
    const char* const end = text.data() + text.size();
    for (const char* p = text.data(); p < end;) {
      const CodePoint c = decode_character(p, end);
      p += c.bytes;
      std::array<utf8proc_int32_t, 64> part;
      int boundary = 0;
      const auto count = utf8proc_decompose_char(
          static_cast<utf8proc_int32_t>(c.value), part.data(), 64,
          static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), &boundary);
      points.insert(points.end(), part.begin(), part.begin() + std::clamp<utf8proc_ssize_t>(count, 0, 64));
    }
    // Sorts marks into canonical order here, because utf8proc takes quadratic time for many consecutive
    // marks.
    const auto rank = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
    for (auto first = points.begin(); first != points.end();) {
      if (rank(*first) == 0) {
        ++first;
        continue;
      }
      const auto last = std::find_if(first, points.end(), [&](utf8proc_int32_t c) { return rank(c) == 0; });
      std::stable_sort(first, last,
                       [&](utf8proc_int32_t a, utf8proc_int32_t b) { return rank(a) < rank(b); });
      first = last;
    }
    const auto count =
        utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()),
                                 static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    for (utf8proc_ssize_t i = 0; i < count; ++i)
      append_utf8(out, static_cast<char32_t>(points[static_cast<size_t>(i)]));
  }

 private:
  std::unique_ptr<Unsafe> unsafe_;
};

const Nfc& nfc_tables() {
  static const Nfc tables;
  return tables;
}

std::string_view apply_nfc(std::string_view text, std::string& buffer) {
  const Nfc& nfc = nfc_tables();
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  // The text before this position is in the buffer.
  const char* copied = begin;
  // Start of the character before p, with which the next one may combine.
  const char* previous = begin;
  std::vector<utf8proc_int32_t> points;
  buffer.clear();
  for (const char* p = begin; p < end;) {
    // A byte below 0xCC begins a character below U+0300, or is a stray continuation byte.
    if (static_cast<unsigned char>(*p) < 0xCC) {
      const int bytes = static_cast<unsigned char>(*p) < 0x80 ? 1 : decode_multibyte(p, end).bytes;
      previous = p;
      p += bytes;
      continue;
    }
    const CodePoint c = decode_multibyte(p, end);
    if (nfc.safe(c.value)) {
      previous = p;
      p += c.bytes;
      continue;
    }
    // A sequence from the character before up to the next one that cannot combine. A stray byte is a
    // character of its own.
    const char* first = previous;
    if (first < p) {
      const CodePoint before = decode_character(first, end);
      if (before.value == 0xFFFD && before.bytes == 1) first = p;
    }
    const char* last = p + c.bytes;
    while (last < end) {
      const CodePoint next = decode_character(last, end);
      if (nfc.safe(next.value)) break;
      last += next.bytes;
    }
    buffer.append(copied, first);
    nfc.append(buffer, {first, static_cast<size_t>(last - first)}, points);
    copied = previous = p = last;
  }
  if (copied == begin) return text;
  buffer.append(copied, end);
  return buffer;
}

}  // namespace

std::string_view Normalizer::apply(std::string_view text, std::string& buffer) const {
  return nfc ? apply_nfc(text, buffer) : text;
}

}  // namespace capstan::text
