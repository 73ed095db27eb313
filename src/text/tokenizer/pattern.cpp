#include "text/tokenizer/pattern.hpp"

#include <oniguruma.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::text {

namespace {

constexpr size_t kMaxPatternBytes = 16 << 10;
constexpr unsigned kParseDepthLimit = 250;
// Limit of backtracking steps from one start position: enough to pass over the text a few times, but not once
// for every character.
constexpr size_t kMatchLimit = 200'000, kMatchLimitPerByte = 8;
// Limit of backtracking steps from all start positions until the next match.
constexpr size_t kSearchLimitPerByte = 64;
// Limit of entries of the backtracking stack, about 40 bytes each.
constexpr size_t kStackLimit = 1 << 20, kStackLimitPerByte = 2;

const UChar* bytes_of(std::string_view text) {
  return reinterpret_cast<const UChar*>(text.data());
}

void initialize_oniguruma() {
  static const int status = [] {
    OnigEncoding encodings[] = {ONIG_ENCODING_UTF8};
    onig_set_parse_depth_limit(kParseDepthLimit);
    return onig_initialize(encodings, 1);
  }();
  if (status != ONIG_NORMAL)
    fail(ErrorCode::internal, "the regular expression library cannot be initialized");
}

// The name of a Unicode property as Oniguruma compares it: lower case, without blanks, `_` and `-`.
std::string normalized_property(std::string_view name) {
  std::string result;
  for (const char c : name)
    if (c != ' ' && c != '_' && c != '-') result += lower_case(c);
  return result;
}

// \p{…} or \P{…} as the newer Oniguruma of Hugging Face tokenizers reads it.
std::string newer_property(std::string_view property) {
  std::string name = normalized_property(property.substr(3, property.size() - 4));
  bool complement = property[1] == 'P';
  if (name.starts_with('^')) {
    complement = !complement;
    name.erase(0, 1);
  }
  if (name == "word") return complement ? "\\W" : "\\w";
  if (name.starts_with("in") && name != "inherited" && !name.starts_with("inscriptional"))
    fail(ErrorCode::unsupported, "regular expressions with Unicode blocks (" + in_quotes(property) +
                                     ") are not supported: versions of Oniguruma differ in them");
  return std::string(property);
}

// Spells out the sets that Oniguruma 6.9.8 and the newer version in Hugging Face tokenizers define
// differently: there [[:punct:]] is \p{P} and \p{S}, and \p{Word} is \w. Refuses what is not supported.
std::string with_newer_sets(std::string_view regex) {
  std::string result;
  // Depth of nested character sets.
  int depth = 0;
  const auto copy = [&](size_t count) {
    result += regex.substr(0, count);
    regex.remove_prefix(std::min(count, regex.size()));
  };
  while (!regex.empty()) {
    if (regex.starts_with("\\p{") || regex.starts_with("\\P{")) {
      const size_t close = regex.find('}');
      if (close == std::string_view::npos) break;
      result += newer_property(regex.substr(0, close + 1));
      regex.remove_prefix(close + 1);
    } else if (regex.starts_with("\\g<") || regex.starts_with("\\g'")) {
      fail(ErrorCode::unsupported,
           "regular expressions with calls of groups (`\\g<name>`) are not supported: they can take "
           "exponential "
           "time to compile");
    } else if (regex[0] == '\\') {
      copy(2);
    } else if (depth > 0 && (regex.starts_with("[:punct:]") || regex.starts_with("[:^punct:]"))) {
      result += regex[2] == '^' ? "[^\\p{P}\\p{S}]" : "[\\p{P}\\p{S}]";
      regex.remove_prefix(regex.find(":]") + 2);
    } else if (depth > 0 && regex.starts_with("[:") && regex.find(":]") != std::string_view::npos) {
      copy(regex.find(":]") + 2);
    } else if (regex[0] == '[') {
      ++depth;
      copy(regex.starts_with("[^") ? 2 : 1);
      // A literal at the beginning of a set.
      if (regex.starts_with("]")) copy(1);
    } else {
      if (regex[0] == ']' && depth > 0) --depth;
      copy(1);
    }
  }
  return result += regex;
}

std::string error_text(int code, OnigErrorInfo* details = nullptr) {
  std::array<UChar, ONIG_MAX_ERROR_MESSAGE_LEN> buffer;
  const int length = details ? onig_error_code_to_str(buffer.data(), code, details)
                             : onig_error_code_to_str(buffer.data(), code);
  return {reinterpret_cast<const char*>(buffer.data()), static_cast<size_t>(length)};
}

// The limits and the match of the searches in one text.
class Search {
 public:
  explicit Search(size_t text_bytes) : limits_(onig_new_match_param()) {
    if (limits_ == nullptr) throw std::bad_alloc();
    onig_initialize_match_param(limits_);
    text_bytes = std::min<size_t>(text_bytes, 1 << 28);
    const auto stack = static_cast<unsigned>(kStackLimit + kStackLimitPerByte * text_bytes);
    onig_set_match_stack_limit_size_of_match_param(limits_, stack);
    onig_set_retry_limit_in_match_of_match_param(limits_, kMatchLimit + kMatchLimitPerByte * text_bytes);
    onig_set_retry_limit_in_search_of_match_param(limits_, kMatchLimit + kSearchLimitPerByte * text_bytes);
  }
  ~Search() {
    onig_region_free(&match_, 0);
    onig_free_match_param(limits_);
  }
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

  // Returns a position or Oniguruma's (negative) status.
  int run(regex_t* code, std::string_view text, size_t position, OnigOptionType options) {
    const UChar *begin = bytes_of(text), *end = begin + text.size();
    return onig_search_with_param(code, begin, end, begin + position, end, &match_, options, limits_);
  }
  size_t begin() const { return static_cast<size_t>(match_.beg[0]); }
  size_t end() const { return static_cast<size_t>(match_.end[0]); }

 private:
  OnigMatchParam* limits_;
  OnigRegion match_{};
};

}  // namespace

struct Pattern::Code {
  regex_t* regex = nullptr;
  ~Code() { onig_free(regex); }

  // Finds the matches in `valid`, the valid UTF-8 at byte `offset` of a text.
  void find_all(Search& search, std::string_view valid, size_t offset, OnigOptionType options,
                FunctionRef<void(size_t, size_t)> match, FunctionRef<void(size_t, int)> failed) const {
    size_t position = 0, last_end = std::string_view::npos;
    while (position <= valid.size()) {
      const int status = search.run(regex, valid, position, options);
      if (status == ONIG_MISMATCH) return;
      if (status < 0) failed(offset + position, status);
      const size_t begin = search.begin(), end = search.end();
      if (begin < end) {
        match(offset + begin, offset + end);
        position = last_end = end;
        continue;
      }
      // The match is empty, or \K has moved its beginning past its end.
      if (end != last_end) match(offset + end, offset + end);
      if (end >= valid.size()) return;
      position = end + decode_utf8(valid, end).bytes;
      last_end = std::string_view::npos;
    }
  }
};

std::shared_ptr<const Pattern> Pattern::compile(std::string_view regex) {
  if (regex.size() > kMaxPatternBytes)
    fail(ErrorCode::format, "the regular expression has " + std::to_string(regex.size()) +
                                " bytes; the limit is " + std::to_string(kMaxPatternBytes));
  initialize_oniguruma();
  const std::string source = with_newer_sets(regex);
  auto code = std::make_shared<Code>();
  OnigErrorInfo details{};
  const int status = onig_new(&code->regex, bytes_of(source), bytes_of(source) + source.size(),
                              ONIG_OPTION_NONE, ONIG_ENCODING_UTF8, ONIG_SYNTAX_DEFAULT, &details);
  if (status != ONIG_NORMAL) {
    code->regex = nullptr;
    fail(ErrorCode::format,
         "the regular expression " + in_quotes(regex) + " does not compile: " + error_text(status, &details));
  }
  auto result = std::shared_ptr<Pattern>(new Pattern);
  result->code_ = std::move(code);
  result->regex_ = regex;
  return result;
}

std::shared_ptr<const Pattern> Pattern::literal(std::string_view text) {
  if (text.empty()) return compile(text);
  auto result = std::shared_ptr<Pattern>(new Pattern);
  result->literal_ = text;
  return result;
}

void Pattern::find_all(std::string_view text, FunctionRef<void(size_t, size_t)> match) const {
  if (!code_) {
    for (size_t at = text.find(literal_); at != std::string_view::npos;
         at = text.find(literal_, at + literal_.size()))
      match(at, at + literal_.size());
    return;
  }
  const auto failed = [&](size_t position, int status) {
    fail(ErrorCode::format, "the regular expression " + in_quotes(regex_) + " gave up at byte " +
                                std::to_string(position) + " of a text of " + std::to_string(text.size()) +
                                " bytes: " + error_text(status));
  };
  Search search(text.size());
  // Oniguruma reads valid UTF-8 only, so each valid part between stray bytes is searched separately.
  for (size_t begin = 0; begin <= text.size();) {
    const std::string_view rest = text.substr(begin);
    const std::string_view valid = rest.substr(0, first_invalid_utf8(rest).value_or(rest.size()));
    OnigOptionType options = ONIG_OPTION_NONE;
    if (begin > 0) options |= ONIG_OPTION_NOTBOL | ONIG_OPTION_NOT_BEGIN_STRING;
    if (valid.size() < rest.size()) options |= ONIG_OPTION_NOTEOL | ONIG_OPTION_NOT_END_STRING;
    if (!valid.empty() || text.empty()) code_->find_all(search, valid, begin, options, match, failed);
    begin += valid.size() + 1;
  }
}

}  // namespace capstan::text
