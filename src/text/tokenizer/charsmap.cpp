#include "text/tokenizer/charsmap.hpp"

#include "base/error.hpp"
#include "base/utf8.hpp"

namespace capstan::text {

// A unit of the double array: bit 8 marks the end of an entry, bits 0-7 and 31 are the label, the rest
// is the offset of the next unit.
static bool has_leaf(uint32_t unit) {
  return (unit >> 8 & 1) != 0;
}
static uint32_t label(uint32_t unit) {
  return unit & (uint32_t{1} << 31 | 0xFF);
}
static uint32_t offset(uint32_t unit) {
  return (unit >> 10) << ((unit & (uint32_t{1} << 9)) >> 6);
}
static uint32_t value(uint32_t unit) {
  return unit & ((uint32_t{1} << 31) - 1);
}

Charsmap::Charsmap(std::string_view blob, const std::string& location) {
  const auto wrong = [&](const std::string& what) {
    fail(ErrorCode::format, location + ": the table of characters is broken: " + what);
  };
  const auto word = [&](size_t at) {
    uint32_t result = 0;
    for (size_t i = 4; i-- > 0;) result = result << 8 | static_cast<unsigned char>(blob[at + i]);
    return result;
  };
  if (blob.size() < 4) wrong("it has " + std::to_string(blob.size()) + " bytes");
  const size_t size = word(0);
  if (size > blob.size() - 4) wrong("its trie of " + std::to_string(size) + " bytes is larger than it is");
  if (size % 4 != 0 || size == 0) wrong("a trie of " + std::to_string(size) + " bytes");
  for (size_t at = 4; at < 4 + size; at += 4) units_.push_back(word(at));
  texts_ = blob.substr(4 + size);
  if (texts_.empty() || texts_.back() != '\0') wrong("the last text has no end");
  if (first_invalid_utf8(texts_)) wrong("its texts are not UTF-8");
}

std::optional<Charsmap::Match> Charsmap::match(std::string_view text, bool longest) const {
  std::optional<Match> result;
  size_t at = offset(units_[0]);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte == 0) break;
    at ^= byte;
    if (at >= units_.size() || label(units_[at]) != byte) break;
    const uint32_t unit = units_[at];
    at ^= offset(unit);
    if (!has_leaf(unit)) continue;
    // A link or text outside of the table ends the search, so that malformed tables match nothing there.
    if (at >= units_.size() || value(units_[at]) >= texts_.size()) break;
    const size_t begin = value(units_[at]);
    const size_t end = texts_.find('\0', begin);
    if (end - begin > kMaxBytes) break;
    result = {i + 1, std::string_view(texts_).substr(begin, end - begin)};
    if (!longest) break;
  }
  return result;
}

}  // namespace capstan::text
