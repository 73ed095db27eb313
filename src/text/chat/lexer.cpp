#include "text/chat/lexer.hpp"

#include <cctype>

#include "base/text.hpp"
#include "base/utf8.hpp"
#include "text/chat/value.hpp"

namespace capstan::text::chat {

namespace {

bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || static_cast<unsigned char>(c) >= 0x80;
}

class Lexer {
 public:
  explicit Lexer(const Source& source) : source_(source), text_(source.text()) {}

  std::vector<Token> run() {
    while (at_ < text_.size()) {
      const size_t tag = next_tag(at_);
      if (tag == std::string_view::npos) {
        add_data(text_.substr(at_));
        break;
      }
      const char sign = tag + 2 < text_.size() ? text_[tag + 2] : '\0';
      add_data(before_tag(text_.substr(at_, tag - at_), text_[tag + 1], sign));
      const size_t after = tag + 2 + (sign == '-' || sign == '+' ? 1 : 0);
      if (text_[tag + 1] == '#')
        comment(tag, after);
      else if (size_t raw = raw_begin(tag))
        raw_text(tag, raw);
      else
        inside(tag, after);
      line_starting_ = at_ > 0 && text_[at_ - 1] == '\n';
    }
    tokens_.push_back({TokenKind::end, text_.size(), {}});
    return std::move(tokens_);
  }

 private:
  size_t next_tag(size_t from) const {
    for (size_t i = text_.find('{', from); i != std::string_view::npos; i = text_.find('{', i + 1))
      if (i + 1 < text_.size() && (text_[i + 1] == '{' || text_[i + 1] == '%' || text_[i + 1] == '#'))
        return i;
    return std::string_view::npos;
  }

  // The text before a tag after stripping.
  std::string_view before_tag(std::string_view text, char kind, char sign) const {
    if (sign == '-') return strip_back(text);
    if (sign == '+' || kind == '{') return text;
    const size_t line = text.rfind('\n') + 1;
    if (line == 0 && !line_starting_) return text;
    return line < text.size() && strip_front(text.substr(line)).empty() ? text.substr(0, line) : text;
  }

  void add_data(std::string_view text) {
    if (!text.empty()) tokens_.push_back({TokenKind::data, at_, std::string(text)});
  }

  void skip_blanks() {
    while (at_ < text_.size()) {
      const size_t blank = blank_at(text_, at_);
      if (blank == 0) return;
      at_ += blank;
    }
  }
  // Skips blanks or a line break after a closing tag with this sign before it.
  void close(char sign, bool trims) {
    if (sign == '-')
      skip_blanks();
    else if (sign != '+' && trims && at_ < text_.size() && text_[at_] == '\n')
      ++at_;
  }

  void comment(size_t tag, size_t after) {
    const size_t end = text_.find("#}", after);
    if (end == std::string_view::npos) source_.fail_at(tag, "this comment does not end");
    at_ = end + 2;
    close(end > after ? text_[end - 1] : '\0', true);
  }

  // The offset after `{% WORD %}` at `tag`, with the sign before its end; 0 if it is not one.
  size_t word_tag(size_t tag, std::string_view word, char& sign) const {
    size_t i = tag + 2;
    if (text_.substr(tag, 2) != "{%") return 0;
    if (i < text_.size() && (text_[i] == '-' || text_[i] == '+')) ++i;
    const auto blanks = [&] {
      while (i < text_.size() && blank_at(text_, i) > 0) i += blank_at(text_, i);
    };
    blanks();
    if (text_.substr(i, word.size()) != word) return 0;
    i += word.size();
    blanks();
    sign = i < text_.size() && (text_[i] == '-' || text_[i] == '+') ? text_[i++] : '\0';
    return text_.substr(i, 2) == "%}" ? i + 2 : 0;
  }
  size_t raw_begin(size_t tag) {
    char sign = '\0';
    const size_t end = word_tag(tag, "raw", sign);
    if (end == 0 || sign == '+') return 0;
    at_ = end;
    close(sign, false);
    return at_;
  }
  void raw_text(size_t tag, size_t begin) {
    for (size_t end = text_.find("{%", begin); end != std::string_view::npos;
         end = text_.find("{%", end + 1)) {
      char sign = '\0';
      const size_t after = word_tag(end, "endraw", sign);
      if (after == 0) continue;
      line_starting_ = text_[begin - 1] == '\n';
      at_ = begin;
      add_data(
          before_tag(text_.substr(begin, end - begin), '%', end + 2 < text_.size() ? text_[end + 2] : '\0'));
      at_ = after;
      close(sign, true);
      return;
    }
    source_.fail_at(tag, "`{% raw %}` without `{% endraw %}`");
  }

  // Reads the closing delimiter of a tag; returns false if there is none at the current offset.
  bool take_end(bool block) {
    const std::string_view mark = block ? "%}" : "}}";
    char sign = '\0';
    size_t i = at_;
    if (text_[i] == '-' || (block && text_[i] == '+')) sign = text_[i++];
    if (text_.substr(i, 2) != mark) return false;
    tokens_.push_back({block ? TokenKind::block_end : TokenKind::variable_end, at_, std::string(mark)});
    at_ = i + 2;
    close(sign, block);
    return true;
  }

  void inside(size_t tag, size_t after) {
    const bool block = text_[tag + 1] == '%';
    tokens_.push_back(
        {block ? TokenKind::block_begin : TokenKind::variable_begin, tag, std::string(text_.substr(tag, 2))});
    at_ = after;
    std::string brackets;
    for (;;) {
      skip_blanks();
      if (at_ >= text_.size()) source_.fail_at(tag, block ? "this tag has no `%}`" : "this tag has no `}}`");
      if (brackets.empty() && take_end(block)) return;
      const char c = text_[at_];
      if (is_digit(c))
        number();
      else if (is_name(c))
        name();
      else if (c == '\'' || c == '"')
        quoted_text(c);
      else
        op(brackets);
    }
  }

  void name() {
    const size_t begin = at_;
    while (at_ < text_.size() && is_name(text_[at_])) ++at_;
    tokens_.push_back({TokenKind::name, begin, std::string(text_.substr(begin, at_ - begin))});
  }

  void number() {
    const size_t begin = at_;
    const auto digits = [&] {
      while (at_ < text_.size() && (is_digit(text_[at_]) || text_[at_] == '_')) ++at_;
    };
    bool real = false;
    digits();
    const bool after_dot =
        !tokens_.empty() && tokens_.back().text == "." && tokens_.back().kind == TokenKind::op;
    if (!after_dot && at_ + 1 < text_.size() && text_[at_] == '.' && is_digit(text_[at_ + 1])) {
      real = true;
      ++at_;
      digits();
    }
    if (!after_dot && at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      size_t i = at_ + 1;
      if (i < text_.size() && (text_[i] == '+' || text_[i] == '-')) ++i;
      if (i < text_.size() && is_digit(text_[i])) {
        real = true;
        at_ = i;
        digits();
      }
    }
    if (at_ < text_.size() && is_name(text_[at_])) source_.fail_at(begin, "not a number");
    std::string written;
    for (const char c : text_.substr(begin, at_ - begin))
      if (c != '_') written += c;
    tokens_.push_back({real ? TokenKind::real : TokenKind::integer, begin, std::move(written)});
  }

  // Reads a string literal with Python's escapes.
  void quoted_text(char quote) {
    const size_t begin = at_++;
    std::string value;
    for (;; ++at_) {
      if (at_ >= text_.size()) source_.fail_at(begin, "this text has no closing quote");
      const char c = text_[at_];
      if (c == quote) break;
      if (c != '\\') {
        value += c;
        continue;
      }
      if (++at_ >= text_.size()) source_.fail_at(begin, "this text has no closing quote");
      escape(begin, value);
    }
    ++at_;
    tokens_.push_back({TokenKind::text, begin, std::move(value)});
  }

  void escape(size_t begin, std::string& value) {
    const char c = text_[at_];
    const auto code = [&](int base, size_t least, size_t most) {
      char32_t point = 0;
      size_t count = 0;
      for (; count < most && at_ + 1 < text_.size(); ++count, ++at_) {
        const char d = text_[at_ + 1];
        const int digit = is_digit(d)                                    ? d - '0'
                          : std::isxdigit(static_cast<unsigned char>(d)) ? (d | 32) - 'a' + 10
                                                                         : 99;
        if (digit >= base) break;
        point = point * static_cast<char32_t>(base) + static_cast<char32_t>(digit);
      }
      if (count < least || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000))
        source_.fail_at(begin, "a bad escape in this text");
      append_utf8(value, point);
    };
    constexpr std::string_view kNames = "ntr\\'\"abfv", kValues = "\n\t\r\\'\"\a\b\f\v";
    if (const size_t plain = kNames.find(c); plain != std::string_view::npos)
      value += kValues[plain];
    else if (c == '\n')
      // Skips an escaped line break.
      ;
    else if (c >= '0' && c <= '7')
      --at_, code(8, 1, 3);
    else if (c == 'x')
      code(16, 2, 2);
    else if (c == 'u')
      code(16, 4, 4);
    else if (c == 'U')
      code(16, 8, 8);
    else if (c == 'N')
      source_.fail_at(begin, "an escape \\N{…} in this text", ErrorCode::unsupported);
    else
      (value += '\\') += c;
  }

  void op(std::string& brackets) {
    constexpr std::string_view kDouble[] = {"//", "**", "==", "!=", ">=", "<="};
    constexpr std::string_view kSingle = "+-/*%~[](){}<>=.:|,;";
    std::string_view found;
    for (const std::string_view candidate : kDouble)
      if (text_.substr(at_, 2) == candidate) found = candidate;
    if (found.empty()) {
      if (kSingle.find(text_[at_]) == std::string_view::npos)
        source_.fail_at(at_, "a character that no expression has");
      found = text_.substr(at_, 1);
    }
    const char c = found[0];
    if (c == '(' || c == '[' || c == '{') brackets += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c == ')' || c == ']' || c == '}') {
      if (brackets.empty() || brackets.back() != c)
        source_.fail_at(at_, "`" + std::string(1, c) + "` closes nothing here");
      brackets.pop_back();
    }
    tokens_.push_back({TokenKind::op, at_, std::string(found)});
    at_ += found.size();
  }

  const Source& source_;
  std::string_view text_;
  size_t at_ = 0;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(const Source& source) {
  return Lexer(source).run();
}

}  // namespace capstan::text::chat
