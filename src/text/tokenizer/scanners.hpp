// Scanners for the patterns of GPT-2, Llama 3 (also cl100k) and Qwen 2: each returns the end of the piece
// that begins at p < end. They equal the regular expressions (kGpt2Pattern, …) on every text;
// tests/text/tokenizer_pieces.cpp compares them with Oniguruma.
#pragma once

#include <cstdint>

#include "text/tokenizer/unicode.hpp"

namespace capstan::text::scan {

struct Context {
  const UnicodeClasses& classes;
  const char* end;

  struct Class {
    uint8_t bits, bytes;
  };
  Class at(const char* p) const {
    const auto first = static_cast<unsigned char>(*p);
    if (first < 0x80) return {classes.bits[first], 1};
    const CodePoint c = decode_multibyte(p, end);
    return {classes.of(c.value), c.bytes};
  }
  template <class Accept>
  const char* skip(const char* p, Accept accept) const {
    while (p < end) {
      const Class c = at(p);
      if (!accept(c.bits)) break;
      p += c.bytes;
    }
    return p;
  }
  const char* skip_letters(const char* p) const {
    return skip(p, [](uint8_t bits) { return bits & kLetter; });
  }
  // [^\s\p{L}\p{N}]*
  const char* skip_others(const char* p) const {
    return skip(p, [](uint8_t bits) { return !(bits & (kLetter | kNumber | kSpace)); });
  }
};

inline bool is_other(uint8_t bits) {
  return !(bits & (kLetter | kNumber | kSpace));
}

// (\s*[\r\n]+|)\s+(?!\S)|\s+ where p is a space: the alternative with newlines only where the pattern has it.
template <bool with_newlines>
const char* space_run(const Context& text, const char* p) {
  const char* after_newline = nullptr;
  // Start of the last white space character.
  const char* last = p;
  const char* q = p;
  while (q < text.end) {
    const Context::Class c = text.at(q);
    if (!(c.bits & kSpace)) break;
    last = q;
    q += c.bytes;
    if (c.bits & kNewline) after_newline = q;
  }
  if (with_newlines && after_newline) return after_newline;
  if (q == text.end || last == p) return q;
  // The last space belongs to the next piece.
  return last;
}

// Returns the end of 's|'t|'re|'ve|'m|'ll|'d at the apostrophe p, or nullptr. With any_case, matches (?i:…),
// in which case folding maps U+017F to s.
template <bool any_case>
const char* contraction(const char* p, const char* end) {
  const auto left = end - p;
  if (left < 2) return nullptr;
  const auto lower = [p](int i) { return any_case ? p[i] | 0x20 : p[i]; };
  switch (lower(1)) {
    case 's':
    case 't':
    case 'm':
    case 'd':
      return p + 2;
    case 'r':
    case 'v':
      return left >= 3 && lower(2) == 'e' ? p + 3 : nullptr;
    case 'l':
      return left >= 3 && lower(2) == 'l' ? p + 3 : nullptr;
    default:
      break;
  }
  if (any_case && left >= 3 && p[1] == '\xC5' && p[2] == '\xBF') return p + 3;
  return nullptr;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
inline const char* gpt2(const Context& text, const char* p) {
  const char* const end = text.end;
  if (*p == '\'')
    if (const char* q = contraction<false>(p, end)) return q;
  const char* q = p;
  Context::Class c = text.at(p);
  if (*p == ' ' && end - p >= 2) {
    const Context::Class next = text.at(p + 1);
    if (!(next.bits & kSpace)) {
      ++q;
      c = next;
    }
  }
  if (c.bits & kLetter) return text.skip_letters(q + c.bytes);
  if (c.bits & kNumber) return text.skip(q + c.bytes, [](uint8_t bits) { return bits & kNumber; });
  if (!(c.bits & kSpace)) return text.skip_others(q + c.bytes);
  return space_run<false>(text, p);
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}|
// ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
template <int digits>
const char* llama3(const Context& text, const char* p) {
  const char* const end = text.end;
  if (*p == '\'')
    if (const char* q = contraction<true>(p, end)) return q;
  const Context::Class c = text.at(p);
  const char* q = p + c.bytes;
  if (c.bits & kLetter) return text.skip_letters(q);
  if (c.bits & kNumber) {
    for (int i = 1; i < digits && q < end; ++i) {
      const Context::Class next = text.at(q);
      if (!(next.bits & kNumber)) break;
      q += next.bytes;
    }
    return q;
  }
  Context::Class next{kSpace, 0};
  if (q < end) {
    next = text.at(q);
    if ((next.bits & kLetter) && !(c.bits & kNewline)) return text.skip_letters(q + next.bytes);
  }
  if (is_other(c.bits) || (*p == ' ' && is_other(next.bits))) {
    q = text.skip_others(q);
    while (q < end && (*q == '\r' || *q == '\n')) ++q;
    return q;
  }
  return space_run<true>(text, p);
}

}  // namespace capstan::text::scan
