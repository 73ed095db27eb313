#include "importers/shell_reader.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::importers {

namespace {

// Limit of the bytes of all words and called functions together, with variables expanded.
constexpr size_t kMaxExpanded = size_t{4} << 20;
// Limit of the nesting of expansions such as ${A:-${B:-…}}.
constexpr int kMaxDepth = 32;
constexpr const char* kNotExecuted = "commands are not executed";

}  // namespace

bool ShellReader::name_start(char c) {
  return is_letter(c) || c == '_';
}
bool ShellReader::name_rest(char c) {
  return name_start(c) || is_digit(c);
}
bool ShellReader::ends_command(char c) {
  return c == '\n' || c == ';' || c == '&' || c == '|' || c == '(' || c == ')';
}

ShellReader::ShellReader(std::string_view text, const std::map<std::string, std::string>& variables)
    : text_(text) {
  for (const auto& [name, value] : variables) {
    ShellWord word;
    word.text = value;
    word.offsets.assign(value.size(), 0);
    word.marks.assign(value.size(), 0);
    variables_[name] = {std::move(word)};
  }
}

bool ShellReader::at_end_of_command() const {
  return ends_command(text_[at_]) && !(text_[at_] == '&' && peek(1) == '>');
}

// The lookup is by offset, so that other words of the same variable do not count as unknown.
std::string ShellReader::why_unread(const ShellWord& word) const {
  for (const uint32_t offset : word.offsets) {
    auto range = unknown_ranges_.upper_bound(offset);
    if (range == unknown_ranges_.begin()) continue;
    --range;
    if (offset < range->second.first) return range->second.second;
  }
  return {};
}

void ShellReader::unclosed(char what, size_t opened) const {
  size_t line = 1;
  for (size_t i = 0; i < opened; ++i) line += text_[i] == '\n';
  fail(ErrorCode::format, std::string("`") + what + "` of line " + std::to_string(line) + " is never closed");
}

void ShellReader::skip_blanks() {
  while (at_ < text_.size()) {
    if (is_space_or_tab(text_[at_]))
      ++at_;
    else if (text_[at_] == '\\' && peek(1) == '\n')
      at_ += 2;
    else if (text_[at_] == '#')
      while (at_ < text_.size() && text_[at_] != '\n') ++at_;
    else
      return;
  }
}

void ShellReader::grow(size_t bytes) {
  if ((expanded_ += bytes) > kMaxExpanded)
    fail(ErrorCode::format, "the script's variables and functions grow beyond " +
                                std::to_string(kMaxExpanded >> 20) + " MiB when they are filled in");
}

void ShellReader::put(Builder& b, char c, size_t offset, uint16_t mark) {
  if (!b.started) b.word.begin = static_cast<uint32_t>(offset);
  b.started = true;
  b.word.text += c;
  b.word.offsets.push_back(static_cast<uint32_t>(offset));
  b.word.marks.push_back(mark);
}

void ShellReader::start(Builder& b, size_t offset) {
  if (!b.started) b.word.begin = static_cast<uint32_t>(offset);
  b.started = true;
}

void ShellReader::finish(Builder& b) {
  if (b.started) b.finished.push_back(std::move(b.word));
  b.word = {};
  b.started = false;
}

void ShellReader::add_names(std::vector<std::string>& names, const std::vector<std::string>& more) {
  for (const std::string& name : more)
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

void ShellReader::put_unknown(Builder& b, size_t from, size_t to, std::string why) {
  substituted_ = substituted_ || why == kNotExecuted;
  start(b, from);
  for (size_t i = from; i < to; ++i) put(b, text_[i] == '\n' ? ' ' : text_[i], i);
  unknown_ranges_[static_cast<uint32_t>(from)] = {static_cast<uint32_t>(to), std::move(why)};
}

void ShellReader::skip_nested(char open, char close, size_t opened) {
  int depth = 1;
  while (depth > 0) {
    if (at_ >= text_.size()) unclosed(open, opened);
    const char c = text_[at_++];
    if (c == '\\') {
      ++at_;
    } else if (c == '\'' || c == '"') {
      const size_t quote = at_ - 1;
      while (at_ < text_.size() && text_[at_] != c) at_ += text_[at_] == '\\' && c == '"' ? 2 : 1;
      if (at_ >= text_.size()) unclosed(c, quote);
      ++at_;
    } else if (c == open) {
      ++depth;
    } else if (c == close) {
      --depth;
    }
  }
}

void ShellReader::put_variable(Builder& b, const Words& value, bool quoted, bool as_list) {
  for (size_t i = 0; i < value.size(); ++i) {
    const ShellWord& part = value[i];
    grow(part.text.size() + 1);
    if (i > 0) {
      if (quoted && !as_list)
        put(b, ' ', part.begin);
      else
        finish(b);
    }
    add_names(b.word.defaulted, part.defaulted);
    if (quoted) start(b, part.begin);
    for (size_t k = 0; k < part.text.size(); ++k) {
      const char c = part.text[k];
      if (!quoted && (is_space_or_tab(c) || c == '\n')) {
        finish(b);
        add_names(b.word.defaulted, part.defaulted);
      } else {
        put(b, c, part.offsets[k], part.marks[k]);
      }
    }
  }
}

void ShellReader::expand(Builder& b, bool quoted, int depth) {
  const size_t dollar = at_++;
  const char c = peek();
  if (c == '(') {
    const bool arithmetic = peek(1) == '(';
    ++at_;
    skip_nested('(', ')', dollar);
    put_unknown(b, dollar, at_, arithmetic ? "arithmetic is not computed" : kNotExecuted);
    return;
  }
  if (c == '{') {
    expand_braces(b, quoted, dollar, depth);
    return;
  }
  if (name_start(c)) {
    const size_t from = at_;
    while (name_rest(peek())) ++at_;
    lookup(b, std::string(text_.substr(from, at_ - from)), quoted, Items::first, dollar);
    return;
  }
  if (is_digit(c) && variables_.contains(std::string(1, c))) {
    ++at_;
    lookup(b, std::string(1, c), quoted, Items::first, dollar);
    return;
  }
  if (is_digit(c) || c == '@' || c == '*' || c == '#' || c == '?' || c == '$' || c == '!') {
    ++at_;
    put_unknown(b, dollar, at_, "it is an argument or a state of the shell");
    return;
  }
  put(b, '$', dollar);
}

void ShellReader::lookup(Builder& b, const std::string& name, bool quoted, Items items, size_t dollar) {
  const auto found = variables_.find(name);
  const bool unset = found == variables_.end() && unset_.contains(name);
  no_items_ = items == Items::each && (unset || (found != variables_.end() && found->second.empty()));
  if (unset) return;
  if (found == variables_.end())
    put_unknown(b, dollar, at_, "the script does not set `" + name + "`");
  else if (items == Items::first && found->second.size() > 1)
    put_variable(b, {found->second.front()}, quoted, false);
  else
    put_variable(b, found->second, quoted, items == Items::each);
}

void ShellReader::expand_braces(Builder& b, bool quoted, size_t dollar, int depth) {
  const size_t inside = ++at_;
  size_t end = inside;
  while (end < text_.size() && name_rest(text_[end])) ++end;
  const std::string name(text_.substr(inside, end - inside));
  const auto rest = [&](std::string_view what) { return text_.substr(end).starts_with(what); };
  if (!name.empty() && (rest("}") || rest("[@]}") || rest("[*]}"))) {
    const bool list = text_[end] == '[';
    at_ = end + (list ? 4 : 1);
    lookup(b, name, quoted,
           !list                   ? Items::first
           : text_[end + 1] == '@' ? Items::each
                                   : Items::joined,
           dollar);
    return;
  }
  const bool colon = rest(":-") || rest(":=");
  if (!name.empty() && (colon || rest("-") || rest("=")) && depth < kMaxDepth) {
    at_ = end + (colon ? 2 : 1);
    const auto found = variables_.find(name);
    const bool use = found != variables_.end() &&
                     !(colon && (found->second.empty() || found->second.front().text.empty()));
    Builder other;
    read_until_brace(other, quoted, dollar, depth + 1);
    finish(other);
    if (found == variables_.end() && !unset_.contains(name)) {
      defaults_.emplace(name, other.finished.empty() ? std::string() : other.finished.front().text);
      add_names(b.word.defaulted, {name});
      for (ShellWord& word : other.finished) add_names(word.defaulted, {name});
    }
    put_variable(b, use ? found->second : other.finished, quoted, false);
    return;
  }
  skip_nested('{', '}', dollar);
  put_unknown(b, dollar, at_, "this form of expansion is not read");
}

void ShellReader::read_until_brace(Builder& b, bool quoted, size_t opened, int depth) {
  while (true) {
    if (at_ >= text_.size()) unclosed('{', opened);
    const char c = text_[at_];
    if (c == '}') {
      ++at_;
      return;
    }
    if (c == '"' || c == '\'') {
      if (!quoted && c == '\'') single_quotes(b);
      // Quotes inside quotes only group words.
      else
        ++at_;
    } else if (c == '\\' && at_ + 1 < text_.size()) {
      if (text_[at_ + 1] != '\n') put(b, text_[at_ + 1], at_ + 1);
      at_ += 2;
    } else if (c == '$') {
      expand(b, true, depth);
    } else if (c == '`') {
      backticks(b);
    } else {
      put(b, c, at_++);
    }
  }
}

void ShellReader::single_quotes(Builder& b) {
  const size_t quote = at_++;
  start(b, quote);
  while (at_ < text_.size() && text_[at_] != '\'') put(b, text_[at_], at_), ++at_;
  if (at_ >= text_.size()) unclosed('\'', quote);
  ++at_;
}

void ShellReader::double_quotes(Builder& b) {
  const size_t quote = at_++;
  const bool started = b.started;
  const size_t done = b.finished.size();
  no_items_ = false;
  start(b, quote);
  while (at_ < text_.size() && text_[at_] != '"') {
    const char c = text_[at_];
    if (c == '\\' && at_ + 1 < text_.size()) {
      const char next = text_[at_ + 1];
      if (next == '\n') {
        // a continued line
      } else {
        if (next != '"' && next != '\\' && next != '$' && next != '`') put(b, c, at_);
        put(b, next, at_ + 1);
      }
      at_ += 2;
    } else if (c == '$') {
      expand(b, true, 0);
    } else if (c == '`') {
      backticks(b);
    } else {
      put(b, c, at_++);
    }
  }
  if (at_ >= text_.size()) unclosed('"', quote);
  ++at_;
  // "${LIST[@]}" is no word if the list is empty.
  if (no_items_ && b.finished.size() == done && b.word.text.empty()) b.started = started;
}

void ShellReader::backticks(Builder& b) {
  const size_t tick = at_++;
  while (at_ < text_.size() && text_[at_] != '`') ++at_;
  if (at_ >= text_.size()) unclosed('`', tick);
  ++at_;
  put_unknown(b, tick, at_, kNotExecuted);
}

Words ShellReader::read_word() {
  Builder b;
  while (at_ < text_.size() && !is_space_or_tab(text_[at_]) && !at_end_of_command()) {
    const char c = text_[at_];
    if (c == '\\') {
      if (peek(1) == '\n') {
        at_ += 2;
      } else if (at_ + 1 < text_.size()) {
        put(b, text_[at_ + 1], at_ + 1);
        at_ += 2;
      } else {
        ++at_;
      }
    } else if (c == '\'') {
      single_quotes(b);
    } else if (c == '"') {
      double_quotes(b);
    } else if (c == '`') {
      backticks(b);
    } else if (c == '$') {
      expand(b, false, 0);
    } else if (c == '<' && peek(1) == '<' && peek(2) != '<') {
      here_document();
    } else if ((c == '<' || c == '>') && peek(1) == '(') {
      const size_t opened = at_;
      at_ += 2;
      skip_nested('(', ')', opened + 1);
      put_unknown(b, opened, at_, kNotExecuted);
    } else if (c == '<' || c == '>') {
      put(b, c, at_++);
      // For example 2>&1.
      if (peek() == '&') ++at_;
    } else {
      put(b, c, at_++);
    }
  }
  vanished_.clear();
  if (!b.started) vanished_ = b.word.defaulted;
  finish(b);
  return std::move(b.finished);
}

void ShellReader::here_document() {
  at_ += 2;
  if (peek() == '-') ++at_;
  while (is_space_or_tab(peek())) ++at_;
  std::string end;
  while (at_ < text_.size() && !is_space_or_tab(text_[at_]) && !ends_command(text_[at_])) {
    if (text_[at_] != '\'' && text_[at_] != '"' && text_[at_] != '\\') end += text_[at_];
    ++at_;
  }
  if (!end.empty()) documents_.push_back(std::move(end));
}

void ShellReader::skip_documents() {
  for (const std::string& end : std::exchange(documents_, {})) {
    while (at_ < text_.size()) {
      const size_t stop = std::min(text_.find('\n', at_), text_.size());
      std::string_view line = text_.substr(at_, stop - at_);
      at_ = std::min(stop + 1, text_.size());
      while (line.starts_with('\t')) line.remove_prefix(1);
      if (line == end) break;
    }
  }
}

void ShellReader::append_to(ShellWord& to, const ShellWord& more) {
  to.text += more.text;
  to.offsets.insert(to.offsets.end(), more.offsets.begin(), more.offsets.end());
  to.marks.insert(to.marks.end(), more.marks.begin(), more.marks.end());
  add_names(to.defaulted, more.defaulted);
}

std::optional<std::pair<std::string, bool>> ShellReader::assignment() {
  size_t end = at_;
  if (end >= text_.size() || !name_start(text_[end])) return std::nullopt;
  while (end < text_.size() && name_rest(text_[end])) ++end;
  const std::string name(text_.substr(at_, end - at_));
  const bool append = text_.substr(end).starts_with("+=");
  if (!append && !text_.substr(end).starts_with("=")) return std::nullopt;
  at_ = end + (append ? 2 : 1);
  return std::pair(name, append);
}

}  // namespace capstan::importers
