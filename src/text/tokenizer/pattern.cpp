#include "text/tokenizer/pattern.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "base/text.hpp"
#include "text/tokenizer/oniguruma.hpp"
#include "text/tokenizer/unicode.hpp"

namespace capstan::data {

namespace {

constexpr size_t kMaxPatternBytes = 16 << 10;
// Steps of backtracking in one match: enough to run through the whole text a few times, too few to do so for
// every character.
constexpr size_t kMatchLimit = 200'000, kMatchLimitPerByte = 8;
constexpr uint32_t kHeapLimitKib = 64 << 10;

std::string pcre_message(int code) {
  std::array<PCRE2_UCHAR, 200> buffer;
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

}  // namespace

struct Pattern::Code {
  pcre2_code* code = nullptr;
  ~Code() { pcre2_code_free(code); }
};

std::shared_ptr<Pattern> Pattern::make(std::string_view regex) {
  if (regex.size() > kMaxPatternBytes)
    fail(ErrorCode::format, "the regular expression has " + std::to_string(regex.size()) +
                                " bytes; the limit is " + std::to_string(kMaxPatternBytes));
  const std::string translated = pcre2_of_oniguruma(regex);
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto code = std::make_shared<Code>();
  // Text that is not valid UTF-8 is allowed: no character of a match crosses a stray byte.
  code->code = pcre2_compile(
      reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_MATCH_INVALID_UTF | PCRE2_NEVER_BACKSLASH_C, &error,
      &offset, nullptr);
  if (code->code == nullptr)
    fail(ErrorCode::format,
         "the regular expression " + quoted(regex) + " does not compile: " + pcre_message(error));
  // Interpreted: compiled to machine code, an expression from a stranger would be memory that is executed.
  auto result = std::shared_ptr<Pattern>(new Pattern);
  result->code_ = std::move(code);
  result->regex_ = regex;
  return result;
}

std::shared_ptr<const Pattern> Pattern::literal(std::string_view text) {
  std::string regex;
  for (const char c : text) {
    if (std::string_view("\\^$.[]|()?*+{}-#&~ \t\n\r\f\v").find(c) != std::string_view::npos) regex += '\\';
    regex += c;
  }
  const auto result = make(regex);
  result->literal_ = text;
  return result;
}

std::shared_ptr<const Pattern> Pattern::compile(std::string_view regex) {
  return make(regex);
}

void Pattern::find_all(std::string_view text, FunctionRef<void(size_t, size_t)> match) const {
  if (!literal_.empty()) {
    for (size_t at = text.find(literal_); at != std::string_view::npos;
         at = text.find(literal_, at + literal_.size()))
      match(at, at + literal_.size());
    return;
  }
  struct Match {
    pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
    pcre2_match_context* context = pcre2_match_context_create(nullptr);
    ~Match() {
      pcre2_match_context_free(context);
      pcre2_match_data_free(data);
    }
  };
  const Match found;
  if (found.data == nullptr || found.context == nullptr) throw std::bad_alloc();
  const size_t limit = kMatchLimit + kMatchLimitPerByte * std::min<size_t>(text.size(), 1 << 28);
  pcre2_set_match_limit(found.context, static_cast<uint32_t>(limit));
  pcre2_set_heap_limit(found.context, kHeapLimitKib);
  size_t position = 0, last_end = std::string_view::npos;
  while (position <= text.size()) {
    const int rc = pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), position,
                               0, found.data, found.context);
    if (rc == PCRE2_ERROR_NOMATCH) return;
    if (rc < 0)
      fail(ErrorCode::format, "the regular expression " + quoted(regex_) + " gave up at byte " +
                                  std::to_string(position) + " of a text of " + std::to_string(text.size()) +
                                  " bytes: " + pcre_message(rc));
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(found.data);
    const size_t begin = range[0], end = range[1];
    if (begin >= end) {  // empty, or turned around by \K
      if (end != last_end) match(end, end);
      if (end >= text.size()) return;
      position = end + decode_character(text.data() + end, text.data() + text.size()).bytes;
      last_end = std::string_view::npos;
      continue;
    }
    match(begin, end);
    position = last_end = end;
  }
}

}  // namespace capstan::data
