#include "config/core/override.hpp"

#include <filesystem>
#include <utility>

#include "base/text.hpp"
#include "base/utf8.hpp"
#include "config/core/list_expression.hpp"

namespace capstan::config {

namespace {

Diagnostic& report(std::vector<Diagnostic>& diagnostics, SourceLocation location, std::string message,
                   std::string label = {}) {
  Diagnostic diagnostic;
  diagnostic.code = "C0103";
  diagnostic.message = std::move(message);
  diagnostic.location = location;
  diagnostic.label = std::move(label);
  diagnostics.push_back(std::move(diagnostic));
  return diagnostics.back();
}

// The location of bytes [begin, end) of `text`, which starts at `token`.
SourceLocation part(const SourceLocation& token, std::string_view text, size_t begin, size_t end) {
  SourceLocation location = token;
  location.column += static_cast<int>(count_code_points(text.substr(0, begin)));
  location.length = std::max(1, static_cast<int>(count_code_points(text.substr(begin, end - begin))));
  return location;
}

bool ident_start(char c) {
  return is_letter(c) || c == '_';
}
bool ident(char c) {
  return ident_start(c) || is_digit(c) || c == '-';
}

// Returns the byte offset of the first typographic quotation mark, which a text processor may have inserted.
std::optional<size_t> smart_quote(std::string_view text) {
  for (const std::string_view quote : {"\u201c", "\u201d", "\u2018", "\u2019", "\u00ab", "\u00bb"})
    if (const size_t at = text.find(quote); at != std::string_view::npos) return at;
  return std::nullopt;
}

// Values: a small flow syntax of our own. A top-level scalar is taken as it stands, to its end.
class ValueParser {
 public:
  ValueParser(std::string_view text, SourceLocation token, std::vector<Diagnostic>& diagnostics)
      : text_(text), token_(token), diagnostics_(diagnostics) {}

  std::optional<Node> run() {
    skip();
    if (at_ == text_.size()) {
      Node node;
      node.empty = true;
      node.location = token_;
      return node;
    }
    const char first = text_[at_];
    if (first != '[' && first != '{' && first != '"' && first != '\'') return bare_top();
    if (first == '"' || first == '\'') {
      // Quotes around the complete value; quotes inside a text belong to it.
      const size_t begin = at_;
      auto node = quoted_text();
      if (!node) return std::nullopt;
      skip();
      if (at_ == text_.size()) return node;
      at_ = begin;
      return failed(at_, text_.size(), "text after the closing quote", "");
    }
    auto node = value(0);
    if (!node) return std::nullopt;
    skip();
    if (at_ == text_.size()) return node;
    const std::string full = list_in_full(text_);
    return failed(at_, text_.size(), "text after the end of the value",
                  full.empty() ? "" : "write the list in full: " + full);
  }

 private:
  std::nullopt_t failed(size_t begin, size_t end, std::string message, std::string help) {
    report(diagnostics_, part(token_, text_, begin, end), std::move(message)).help(std::move(help));
    return std::nullopt;
  }
  void skip() {
    while (at_ < text_.size() && (is_space_or_tab(text_[at_]) || text_[at_] == '\n')) ++at_;
  }
  static Node scalar_node(std::string text, SourceLocation location, bool quoted) {
    Node node = Node::scalar(std::move(text), location, quoted);
    if (!quoted && (node.text == "null" || node.text == "Null" || node.text == "NULL" || node.text == "~"))
      node.kind = Node::Kind::null;
    return node;
  }
  Node bare_top() {
    size_t end = text_.size();
    while (end > at_ && is_space_or_tab(text_[end - 1])) --end;
    return scalar_node(std::string(text_.substr(at_, end - at_)), part(token_, text_, at_, end), false);
  }

  std::optional<Node> quoted_text() {
    const char quote = text_[at_];
    const size_t begin = at_++;
    std::string out;
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == quote) {
        if (quote == '\'' && at_ + 1 < text_.size() && text_[at_ + 1] == '\'') {
          out += '\'';
          ++at_;
          continue;
        }
        ++at_;
        return Node::scalar(std::move(out), part(token_, text_, begin, at_), true);
      }
      if (c == '\\' && quote == '"' && at_ + 1 < text_.size()) {
        const char next = text_[++at_];
        switch (next) {
          case 'n':
            out += '\n';
            break;
          case 't':
            out += '\t';
            break;
          case '"':
          case '\\':
            out += next;
            break;
          default:
            out += '\\', out += next;
        }
        continue;
      }
      out += c;
    }
    return failed(begin, begin + 1, std::string("the quote `") + quote + "` is never closed", "");
  }

  // Inside brackets a bare scalar ends at `,`, `]`, `}` or, as a map key, at `:`; `${…}` is never divided.
  std::optional<Node> bare(bool key) {
    const size_t begin = at_;
    int braces = 0;
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '$' && at_ + 1 < text_.size() && text_[at_ + 1] == '{') {
        ++braces;
        ++at_;
        continue;
      }
      if (braces > 0) {
        if (c == '}') --braces;
        continue;
      }
      if (c == ',' || c == ']' || c == '}' || (key && c == ':')) break;
      if (c == ':' && at_ + 1 < text_.size() && is_space_or_tab(text_[at_ + 1]))
        return failed(at_, at_ + 1, "a `:` is not allowed here",
                      "a comma is missing in front of the key, or the text needs quotes");
    }
    size_t end = at_;
    while (end > begin && is_space_or_tab(text_[end - 1])) --end;
    if (end == begin)
      return failed(begin, begin + 1, key ? "a key is missing here" : "a value is missing here", "");
    return scalar_node(std::string(text_.substr(begin, end - begin)), part(token_, text_, begin, end), false);
  }

  std::optional<Node> value(int depth) {
    if (depth > TreeLimits::kMaxDepth) return failed(at_, at_ + 1, "nested more than 64 levels deep", "");
    if (++nodes_ > TreeLimits::kNodes) return failed(at_, at_ + 1, "more than 10000 values", "");
    skip();
    if (at_ == text_.size()) return failed(at_ ? at_ - 1 : 0, at_, "a value is missing here", "");
    if (text_[at_] == '[' || text_[at_] == '{') return collection(depth);
    if (text_[at_] == '"' || text_[at_] == '\'') return quoted_text();
    return bare(false);
  }

  std::optional<Node> collection(int depth) {
    const size_t begin = at_;
    const bool list = text_[at_++] == '[';
    const char close = list ? ']' : '}';
    Node node;
    node.kind = list ? Node::Kind::list : Node::Kind::map;
    for (bool first = true;; first = false) {
      skip();
      if (at_ == text_.size())
        return failed(begin, begin + 1, std::string("`") + close + "` is missing",
                      "quote the full override if the shell splits it");
      if (text_[at_] == close) {
        ++at_;
        break;
      }
      if (!first) {
        if (text_[at_] != ',')
          return failed(at_, at_ + 1, std::string("expected `,` or `") + close + "` here", "");
        ++at_;
        skip();
        // The list ends with a trailing comma.
        if (at_ < text_.size() && text_[at_] == close) {
          ++at_;
          break;
        }
      }
      if (list) {
        auto item = value(depth + 1);
        if (!item) return std::nullopt;
        node.items.push_back(std::move(*item));
        continue;
      }
      auto key = at_ < text_.size() && (text_[at_] == '"' || text_[at_] == '\'') ? quoted_text() : bare(true);
      if (!key) return std::nullopt;
      skip();
      if (at_ == text_.size() || text_[at_] != ':')
        return failed(at_ < text_.size() ? at_ : begin, at_ + 1,
                      "expected `:` after the key `" + key->text + "`", "");
      ++at_;
      if (const Node* before = node.find(key->text)) {
        (void)before;
        report(diagnostics_, key->location, "duplicate key `" + key->text + "`");
        return std::nullopt;
      }
      auto item = value(depth + 1);
      if (!item) return std::nullopt;
      node.add(key->text, key->location, std::move(*item));
    }
    node.location = part(token_, text_, begin, at_);
    return node;
  }

  std::string_view text_;
  SourceLocation token_;
  std::vector<Diagnostic>& diagnostics_;
  size_t at_ = 0;
  int64_t nodes_ = 0;
};

// The first `=` outside brackets and quotes; npos when there is none.
size_t split_at(std::string_view text) {
  int depth = 0;
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote) {
      if (c == quote) quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '[') {
      ++depth;
    } else if (c == ']') {
      --depth;
    } else if (c == '=' && depth <= 0) {
      return i;
    }
  }
  return std::string_view::npos;
}

}  // namespace

std::string token_text(const Override& override) {
  const std::string& text = override.text;
  switch (override.kind) {
    case Override::Kind::append: {
      const size_t equal = split_at(text);
      if (equal == std::string::npos || (equal > 0 && text[equal - 1] == '+')) return text;
      return text.substr(0, equal) + "+" + text.substr(equal);
    }
    case Override::Kind::unset:
      return "~" + text;
    case Override::Kind::file:
      return "@" + text;
    case Override::Kind::token:
    case Override::Kind::set:
      break;
  }
  return text;
}

std::string ParsedPath::text() const {
  std::string out;
  for (const auto& segment : segments) {
    switch (segment.kind) {
      case Segment::Kind::name: {
        bool plain = !segment.name.empty() && ident_start(segment.name[0]);
        for (const char c : segment.name) plain = plain && ident(c);
        if (!out.empty()) out += '.';
        out += plain ? segment.name : in_quotes(segment.name);
        break;
      }
      case Segment::Kind::index:
        out += "[" + std::to_string(segment.index) + "]";
        break;
      case Segment::Kind::id:
        out += "[" + segment.name + "=" + segment.text + "]";
        break;
    }
  }
  return out;
}

std::optional<Node> parse_value(std::string_view text, SourceLocation location,
                                std::vector<Diagnostic>& diagnostics) {
  return ValueParser(text, location, diagnostics).run();
}

std::optional<ParsedPath> parse_path(std::string_view text, SourceLocation location,
                                     std::vector<Diagnostic>& diagnostics) {
  ParsedPath path;
  path.location = location;
  const auto failed = [&](size_t begin, size_t end, std::string message, std::string help) {
    report(diagnostics, part(location, text, begin, end), std::move(message)).help(std::move(help));
    return std::nullopt;
  };
  const char* const quoting = "in a shell, quote the full override: 'list[0]=x'";
  size_t at = 0;
  for (bool expect_name = true; at < text.size() || expect_name;) {
    if (path.segments.size() > 64) return failed(0, text.size(), "a path of more than 64 parts", "");
    if (expect_name) {
      expect_name = false;
      if (at == text.size())
        return failed(at ? at - 1 : 0, at, text.empty() ? "the path is empty" : "the path ends with `.`", "");
      Segment segment;
      if (text[at] == '"' || text[at] == '\'') {
        const size_t end = text.find(text[at], at + 1);
        if (end == std::string_view::npos) return failed(at, at + 1, "the quote is never closed", "");
        segment.name = text.substr(at + 1, end - at - 1);
        at = end + 1;
      } else if (is_digit(text[at])) {
        size_t end = at;
        while (end < text.size() && is_digit(text[end])) ++end;
        const auto number = parse_int(text.substr(at, end - at));
        if (!number) return failed(at, end, "an index that is too large", "");
        segment.kind = Segment::Kind::index;
        segment.index = *number;
        segment.name = text.substr(at, end - at);
        at = end;
      } else if (ident_start(text[at])) {
        size_t end = at;
        while (end < text.size() && ident(text[end])) ++end;
        segment.name = text.substr(at, end - at);
        at = end;
      } else {
        const size_t bytes = static_cast<size_t>(decode_utf8(text, at).bytes);
        return failed(at, at + bytes,
                      "`" + std::string(text.substr(at, bytes)) + "` is not allowed in a path",
                      "a path is names joined by dots; a key with other characters goes in quotes");
      }
      path.segments.push_back(std::move(segment));
      continue;
    }
    if (text[at] == '.') {
      ++at;
      expect_name = true;
      continue;
    }
    if (text[at] == '[') {
      const size_t end = text.find(']', at);
      if (end == std::string_view::npos) return failed(at, at + 1, "`]` is missing", quoting);
      const std::string_view inside = text.substr(at + 1, end - at - 1);
      Segment segment;
      if (const auto index = parse_int(inside)) {
        segment.kind = Segment::Kind::index;
        segment.index = *index;
      } else if (const size_t equal = inside.find('='); equal != std::string_view::npos && equal > 0) {
        segment.kind = Segment::Kind::id;
        segment.name = inside.substr(0, equal);
        segment.text = inside.substr(equal + 1);
      } else {
        return failed(at, end + 1, "`" + std::string(text.substr(at, end + 1 - at)) + "` is not an index",
                      "write a number (`[0]`, `[-1]`) or the item's id (`[name=code]`)");
      }
      path.segments.push_back(std::move(segment));
      at = end + 1;
      continue;
    }
    const size_t bytes = static_cast<size_t>(decode_utf8(text, at).bytes);
    return failed(at, at + bytes, "`" + std::string(text.substr(at, bytes)) + "` is not allowed in a path",
                  "a path is names joined by dots; a key with other characters goes in quotes");
  }
  return path;
}

namespace {

// Reports a word of the command line that is no override at all.
bool refuse_token(std::string_view text, const std::string* next_token, const SourceLocation& location,
                  std::vector<Diagnostic>& diagnostics) {
  if (text.empty()) {
    report(diagnostics, location, "an empty override").help("write `section.field=value`");
    return true;
  }
  if (text[0] == '-') {
    const size_t name = text.find_first_not_of('-');
    const size_t equal = split_at(text);
    std::string fixed(name == std::string_view::npos ? "" : text.substr(name));
    if (equal == std::string_view::npos)
      fixed += "=" + (next_token && next_token->find('=') == std::string::npos ? *next_token : "value");
    report(diagnostics, location, "`" + std::string(text) + "` is not a flag")
        .help("overrides have no dashes: write `" + fixed + "`");
    return true;
  }
  if (text == "=" || text[0] == '=') {
    report(diagnostics, location, "blank around `=`", "the shell split the override here")
        .help("write `name=value` without blanks, or quote the full override");
    return true;
  }
  return false;
}

void report_missing_equal(const Override& given, const std::string* next_token,
                          const SourceLocation& location, std::vector<Diagnostic>& diagnostics) {
  const std::string& shown = given.text;
  auto& problem = report(diagnostics, location, "`" + shown + "` is not an override: `=` is missing");
  std::error_code ignored;
  if (next_token && next_token->starts_with("=")) {
    problem.message = "blank around `=`";
    problem.help("write `" + shown + "=value` without blanks, or quote the full override");
  } else if (given.kind == Override::Kind::token && std::filesystem::exists(shown, ignored)) {
    problem.help("to merge this file into the recipe write `@" + shown + "`");
  } else {
    problem.help("write `" + shown + "=value`");
  }
}

}  // namespace

std::optional<ParsedOverride> parse_override(const Override& given, const std::string* next_token, int source,
                                             int line, std::vector<Diagnostic>& diagnostics) {
  const std::string_view text = given.text;
  ParsedOverride result;
  result.location = {source, line, 1, std::max(1, static_cast<int>(count_code_points(text)))};
  const auto here = [&](size_t begin, size_t end) { return part(result.location, text, begin, end); };
  using Op = ParsedOverride::Op;

  if (const auto invalid = first_invalid_utf8(text)) {
    report(diagnostics, result.location, "invalid UTF-8 in an override");
    return std::nullopt;
  }
  if (given.kind == Override::Kind::file) {
    result.op = Op::include;
    result.file = text;
    return result;
  }
  if (given.kind == Override::Kind::token) {
    if (refuse_token(text, next_token, result.location, diagnostics)) return std::nullopt;
    if (text[0] == '@') {
      result.op = Op::include;
      result.file = text.substr(1);
      if (!result.file.empty()) return result;
      report(diagnostics, result.location, "the file name is missing after `@`");
      return std::nullopt;
    }
  }
  const size_t first_equal = split_at(text);
  const std::string_view left = text.substr(0, first_equal);
  if (const auto quote = smart_quote(left)) {
    report(diagnostics, here(*quote, *quote + 3), "typographic quotes",
           "not a quote that a shell or a recipe knows")
        .help("use straight quotes: ' or \"");
    return std::nullopt;
  }

  size_t path_begin = 0, path_end = text.size();
  size_t equal = std::string_view::npos;
  switch (given.kind) {
    case Override::Kind::unset:
      result.op = Op::unset;
      break;
    case Override::Kind::append:
      result.op = Op::append;
      break;
    default:
      result.op = Op::set;
  }
  if (given.kind == Override::Kind::token) {
    if (text.starts_with("++"))
      result.op = Op::force, path_begin = 2;
    else if (text.starts_with("+"))
      result.op = Op::add, path_begin = 1;
    else if (text.starts_with("~"))
      result.op = Op::unset, path_begin = 1;
  }
  const size_t found = split_at(text.substr(path_begin));
  if (found != std::string_view::npos) {
    equal = path_begin + found;
    path_end = equal;
    if (equal > path_begin && text[equal - 1] == '+' && result.op != Op::unset) {
      result.op = Op::append;
      path_end = equal - 1;
    }
  } else if (result.op != Op::unset) {
    report_missing_equal(given, next_token, result.location, diagnostics);
    return std::nullopt;
  }
  if (path_end > path_begin && is_space_or_tab(text[path_end - 1])) {
    report(diagnostics, here(path_begin, equal + 1), "blank around `=`")
        .help("write `name=value` without blanks");
    return std::nullopt;
  }
  auto path =
      parse_path(text.substr(path_begin, path_end - path_begin), here(path_begin, path_end), diagnostics);
  if (!path) return std::nullopt;
  result.path = std::move(*path);
  if (equal == std::string_view::npos) return result;

  const std::string_view right = text.substr(equal + 1);
  result.value_location = right.empty() ? here(equal, equal + 1) : here(equal + 1, text.size());
  if (right.starts_with("@") && result.op == Op::set) {
    result.op = Op::include;
    result.file = right.substr(1);
    if (!result.file.empty()) return result;
    report(diagnostics, result.value_location, "the file name is missing after `@`");
    return std::nullopt;
  }
  if (right.starts_with("\u201c") || right.starts_with("\u2018") || right.starts_with("\u00ab")) {
    report(diagnostics, result.value_location, "typographic quotes",
           "not a quote that a shell or a recipe knows")
        .help("use straight quotes: ' or \"");
    return std::nullopt;
  }
  result.value = parse_value(right, result.value_location, diagnostics);
  if (!result.value) return std::nullopt;
  return result;
}

}  // namespace capstan::config
