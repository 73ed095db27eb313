#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.hpp"
#include "text/tokenizer/pipeline.hpp"

namespace capstan::text {

namespace {

// A text with scripts, digits, contractions, white space, punctuation, line breaks and combining characters,
// which normalizers and pre-tokenizers treat differently. Changing one byte would change every recorded
// identity.
constexpr std::string_view kProbe =
    "The quick brown fox didn't jump; she'LL say \"we've 1234567 reasons\", I'M sure (or 3.14159e-10).\n"
    " leading space,  two,   three, trailing \t tab\r\n\r\n\n\n    indented = code[i++] != 0x7F; // comment\n"
    "\xC3\x89t\xC3\xA9 na\xC3\xAFve co\xC3\xB6perate Stra\xC3\x9F"
    "e \xC5\x81\xC3\xB3"
    "d\xC5\xBA e\xCC\x81 A\xCC\x8A \xEF\xAC\x81 \xC2\xBD\xC2\xB2 "
    "\xD0\x9F\xD1\x80\xD0\xB8\xD0\xB2\xD0\xB5\xD1\x82, \xCE\xBA\xCF\x8C\xCF\x83\xCE\xBC\xCE\xB5! "
    "\xE4\xBD\xA0\xE5\xA5\xBD\xEF\xBC\x8C\xE4\xB8\x96\xE7\x95\x8C\xE3\x80\x82 "
    "\xE3\x81\x93\xE3\x82\x93\xE3\x81\xAB\xE3\x81\xA1\xE3\x81\xAF \xEC\x95\x88\xEB\x85\x95 "
    "\xD8\xA7\xD9\x84\xD8\xB3\xD9\x84\xD8\xA7\xD9\x85 "
    "\xE0\xA4\xA8\xE0\xA4\xAE\xE0\xA4\xB8\xE0\xA5\x8D\xE0\xA4"
    "\xA4\xE0\xA5\x87 \xD9\xA1\xD9\xA2\xD9\xA3 "
    "\xF0\x9F\x98\x80\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x92\xBB \xE2\x80\x94 \xC2\xA0nbsp\xE2\x80\x83wide "
    "UPPER lower MiXeD snake_case kebab-case http://example.org/a?b=c&d=%20 $100,000.00 #tag @user ...!!!???";

// The concatenated texts of tokens, whose encoding depends on merges and scores.
constexpr int64_t kProbeTokens = 8192;

// Control tokens and bytes (`<s>`, `<0x41>`, `[CLS]`) are found in a text by one form of a tokenizer and not
// by another.
bool in_brackets(std::string_view text) {
  return (text.starts_with('<') && text.ends_with('>')) || (text.starts_with('[') && text.ends_with(']'));
}

template <class T>
void append(std::string& out, const T* data, size_t count) {
  out.append(reinterpret_cast<const char*>(data), count * sizeof(T));
}

}  // namespace

std::string Tokenizer::identity() const {
  const Vocabulary& vocabulary = pipeline_->vocabulary;
  std::string content = "capstan tokenizer 1";
  std::vector<int32_t> probed;
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    const std::string_view text = vocabulary.text(id);
    const std::array<uint32_t, 2> head = {static_cast<uint32_t>(id), static_cast<uint32_t>(text.size())};
    append(content, head.data(), head.size());
    content += text;
    const std::string_view bytes = bytes_of(id);
    if (!in_brackets(text) && !bytes.empty() && bytes.size() <= 64 && !first_invalid_utf8(bytes))
      probed.push_back(id);
  }
  std::string probe(kProbe);
  const auto count = static_cast<int64_t>(probed.size()), taken = std::min(count, kProbeTokens);
  for (int64_t i = 0; i < taken; ++i) probe += bytes_of(probed[static_cast<size_t>(i * count / taken)]);
  const std::vector<int32_t> ids = encode(probe, {.specials_as_text = true});
  append(content, ids.data(), ids.size());
  return hash_text(content);
}

}  // namespace capstan::text
