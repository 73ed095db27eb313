#include "config/core/tree.hpp"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "base/error.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "config/core/prescan.hpp"
#include "config/core/text_lines.hpp"

namespace capstan::config {

Node Node::scalar(std::string text, SourceLocation location, bool quoted) {
  Node node;
  node.kind = Kind::scalar;
  node.text = std::move(text);
  node.location = location;
  node.quoted = quoted;
  return node;
}
const Node* Node::find(std::string_view key) const {
  for (size_t i = 0; i < keys.size(); ++i)
    if (keys[i] == key) return &items[i];
  return nullptr;
}
void Node::add(std::string key, SourceLocation key_location, Node value) {
  keys.push_back(std::move(key));
  key_locations.push_back(key_location);
  items.push_back(std::move(value));
}
int64_t Node::size() const {
  int64_t total = 1;
  for (const auto& item : items) total += item.size();
  return total;
}

std::string normalized(std::string text) {
  if (text.starts_with(kByteOrderMark)) text.erase(0, kByteOrderMark.size());
  if (text.find('\r') == std::string::npos) return text;
  size_t out = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\r') {
      if (i + 1 < text.size() && text[i + 1] == '\n') continue;
      text[out++] = '\n';
    } else {
      text[out++] = text[i];
    }
  }
  text.resize(out);
  return text;
}

namespace {

// The tree cannot be built; the reason is among the diagnostics.
struct Abort {};

// Returns the offset of a mark of yaml-cpp (line and byte column, counted from 0).
size_t offset_of(const TextLines& lines, const YAML::Mark& mark) {
  if (mark.line < 0) return 0;
  return lines.offset(static_cast<size_t>(mark.line), static_cast<size_t>(std::max(0, mark.column)));
}

std::string unclosed_text(bool list) {
  return list ? "the list is not closed: `]` is missing" : "the mapping is not closed: `}` is missing";
}

// Past `&anchor` and `!tag` in front of a value.
size_t skip_properties(std::string_view text, size_t at) {
  while (at < text.size() && (text[at] == '&' || text[at] == '!')) {
    while (at < text.size() && !is_blank(text[at])) ++at;
    while (at < text.size() && is_blank(text[at])) ++at;
  }
  return at;
}

// Bytes of the quoted scalar at `at`, quotes included; nullopt when it never ends.
std::optional<size_t> quoted_length(std::string_view text, size_t at) {
  const char quote = text[at];
  for (size_t i = at + 1; i < text.size(); ++i) {
    if (quote == '"' && text[i] == '\\') {
      ++i;
    } else if (text[i] == quote) {
      if (quote == '\'' && i + 1 < text.size() && text[i + 1] == '\'')
        ++i;
      else
        return i + 1 - at;
    }
  }
  return std::nullopt;
}

class Builder : public YAML::EventHandler {
 public:
  // unclosed: offset of the last bracket or brace that is never closed.
  Builder(const TextLines& lines, std::optional<size_t> unclosed, std::vector<Diagnostic>& diagnostics)
      : lines_(lines), unclosed_(unclosed), diagnostics_(diagnostics) {}

  std::optional<Node> root;

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ < 2) return;
    const size_t at = offset_of(lines_, mark);
    const std::string_view line = lines_.line(lines_.line_of(at));
    if (line.starts_with("---"))
      error("C0010", "more than one document", lines_.location(at, 3), "a second document starts here")
          .help("a recipe is one document; `extends` and `@FILE` combine files");
    else
      error("C0010", "text after the end of the document", lines_.location(at), "")
          .help("check the indentation of this line: keys of one mapping start in the same column");
    throw Abort{};
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const size_t at = skip_properties(lines_.text(), offset_of(lines_, mark));
    Node node;
    node.location = lines_.location(at);
    const std::string_view word = null_word(at);
    node.empty = word.empty();
    if (node.empty && !stack_.empty() && stack_.back().has_key) {
      node.location = stack_.back().key_location;
      if (offset_of(lines_, mark) == stack_.back().key_offset && !colon_follows()) {
        error("C0002", "missing `:` after `" + shortened(stack_.back().key) + "`", node.location, "");
        stack_.back().drop = true;
      }
    } else {
      node.location = lines_.location(at, std::max<size_t>(1, word.size()));
    }
    node.text = word;
    value(std::move(node), anchor, at);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const size_t at = offset_of(lines_, mark);
    size_t end = at + 1;
    while (end < lines_.text().size() && !is_blank(lines_.text()[end]) &&
           std::string_view(",[]{}").find(lines_.text()[end]) == std::string_view::npos)
      ++end;
    const SourceLocation location = lines_.location(at, end - at);
    const std::string name(lines_.text().substr(at, end - at));
    if (is_key()) {
      error("C0012", "a key must be plain text, not an alias", location, "");
      throw Abort{};
    }
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end()) {
      error("C0008", "the alias `" + name + "` contains itself", location, "");
      throw Abort{};
    }
    expanded_ += found->second.second;
    check_budget(location);
    Node node = found->second.first;
    node.anchor = node.location;
    node.location = location;
    value(std::move(node), 0, at, false);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& text) override {
    const size_t at = skip_properties(lines_.text(), offset_of(lines_, mark));
    bool quoted = check_tag(tag, mark) || tag == "!";
    size_t bytes = text.size();
    const char first = at < lines_.text().size() ? lines_.text()[at] : '\0';
    if (tag != "?" && (first == '"' || first == '\'')) {
      quoted = true;
      const auto length = quoted_length(lines_.text(), at);
      if (!length) {
        error("C0002", std::string("the quote `") + first + "` is never closed", lines_.location(at),
              "opened here");
        throw Abort{};
      }
      bytes = *length;
    } else if (first == '|' || first == '>') {
      bytes = 1;
    }
    Node node = Node::scalar(text, lines_.location(at, std::max<size_t>(1, bytes)), quoted);
    // yaml-cpp 0.7 turns \N and \_ into single bytes.
    if (first_invalid_utf8(text)) {
      error("C0004", "an escape that does not give valid text", node.location, "")
          .help("write the character itself, or \\uXXXX");
      node.text.clear();
    }
    value(std::move(node), anchor, at);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(Node::Kind::list, mark, tag, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(Node::Kind::map, mark, tag, anchor);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Frame {
    Node node;
    YAML::anchor_t anchor = 0;
    bool has_key = false;
    // The key is wrong and reported: leave its value out.
    bool drop = false;
    std::string key;
    SourceLocation key_location;
    size_t key_offset = 0;
    std::set<std::string> seen;
  };

  Diagnostic& error(std::string code, std::string message, SourceLocation location, std::string label) {
    Diagnostic diagnostic;
    diagnostic.code = std::move(code);
    diagnostic.message = std::move(message);
    diagnostic.location = location;
    diagnostic.label = std::move(label);
    diagnostics_.push_back(std::move(diagnostic));
    return diagnostics_.back();
  }

  bool is_key() const {
    return !stack_.empty() && stack_.back().node.kind == Node::Kind::map && !stack_.back().has_key;
  }

  // Whether the line of the last key has a colon after it; without one the parser took the line for a key
  // alone.
  bool colon_follows() const {
    const Frame& frame = stack_.back();
    const std::string_view line = lines_.line(lines_.line_of(frame.key_offset));
    const size_t end =
        frame.key_offset - lines_.begin_of(lines_.line_of(frame.key_offset)) + frame.key.size();
    return end < line.size() && line.find(':', end) != std::string_view::npos;
  }

  // The word that stands for null at `at`, empty when nothing was written (the mark is then the next
  // token's).
  std::string_view null_word(size_t at) const {
    const std::string_view rest = lines_.text().substr(std::min(at, lines_.text().size()));
    if (!stack_.empty() && stack_.back().has_key) {
      const Frame& frame = stack_.back();
      if (at == frame.key_offset) return {};
      const size_t key_line = lines_.line_of(frame.key_offset),
                   line = lines_.line_of(std::min(at, lines_.text().size()));
      if (line > key_line && at - lines_.begin_of(line) <= frame.key_offset - lines_.begin_of(key_line))
        return {};
    }
    for (const std::string_view word : {"null", "Null", "NULL", "~"})
      if (rest.starts_with(word) &&
          (rest.size() == word.size() || is_blank(rest[word.size()]) ||
           std::string_view(",]}:#").find(rest[word.size()]) != std::string_view::npos))
        return rest.substr(0, word.size());
    return {};
  }

  // True for `!!str`. Other standard tags have no effect: the type of the field decides.
  bool check_tag(const std::string& tag, const YAML::Mark& mark) {
    if (tag.empty() || tag == "?" || tag == "!") return false;
    constexpr std::string_view standard = "tag:yaml.org,2002:";
    if (tag.starts_with(standard)) {
      const std::string_view name = std::string_view(tag).substr(standard.size());
      if (name == "str") return true;
      for (const std::string_view known : {"int", "float", "bool", "null", "map", "seq"})
        if (name == known) return false;
    }
    size_t at = offset_of(lines_, mark);
    if (at < lines_.text().size() && lines_.text()[at] == '&') {
      while (at < lines_.text().size() && lines_.text()[at] != '!') ++at;
    }
    size_t end = at;
    while (end < lines_.text().size() && !is_blank(lines_.text()[end])) ++end;
    const std::string written(lines_.text().substr(at, std::min<size_t>(end - at, 60)));
    error("C0007", "the tag `" + written + "` is not accepted", lines_.location(at, end - at), "")
        .help(
            "values take their type from the field; write the value alone, in quotes if it starts with `!`");
    return false;
  }

  void check_budget(SourceLocation location) {
    if (expanded_ > TreeLimits::kNodes) {
      if (expanded_ > written_) {
        error("C0008", "aliases expand to more than " + std::to_string(TreeLimits::kNodes) + " values",
              location, "");
      } else {
        error("C0009", "more than " + std::to_string(TreeLimits::kNodes) + " values in one file", location,
              "");
      }
      throw Abort{};
    }
    if (expanded_ > TreeLimits::kAliasFloor && expanded_ > TreeLimits::kAliasRatio * written_) {
      error("C0008",
            "aliases expand the file more than " + std::to_string(TreeLimits::kAliasRatio) + " times",
            location, "");
      throw Abort{};
    }
  }

  void count(SourceLocation location) {
    ++written_;
    ++expanded_;
    check_budget(location);
  }

  void open(Node::Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    const size_t at = offset_of(lines_, mark);
    check_tag(tag, mark);
    if (is_key() && unclosed_ == at) {
      error("C0002", unclosed_text(kind == Node::Kind::list), lines_.location(at), "opened here");
      throw Abort{};
    }
    if (is_key()) {
      error("C0012",
            std::string("a key must be plain text, not a ") + (kind == Node::Kind::map ? "mapping" : "list"),
            lines_.location(at), "");
      throw Abort{};
    }
    if (stack_.size() >= static_cast<size_t>(TreeLimits::kMaxDepth)) {
      error("C0009", "nested more than " + std::to_string(TreeLimits::kMaxDepth) + " levels deep",
            lines_.location(at), "");
      throw Abort{};
    }
    Frame frame;
    frame.node.kind = kind;
    frame.node.location = lines_.location(at);
    frame.anchor = anchor;
    count(frame.node.location);
    stack_.push_back(std::move(frame));
  }

  void close() {
    Frame frame = std::move(stack_.back());
    stack_.pop_back();
    value(std::move(frame.node), frame.anchor, 0, false);
  }

  void key(const Node& node, size_t at) {
    Frame& frame = stack_.back();
    frame.has_key = true;
    frame.drop = true;
    frame.key = node.kind == Node::Kind::null ? "" : node.text;
    frame.key_location = node.location;
    frame.key_offset = at;
    if (node.kind == Node::Kind::null) {
      error("C0012", "a key must be plain text, not null", node.location, "");
    } else if (frame.key == "<<" && !node.quoted) {
      error("C0006", "merge keys (`<<`) are not accepted", node.location, "")
          .help(
              "to start from another recipe write `extends: name` at the top; to share a section, make it a "
              "preset");
    } else if (frame.key.size() > 1000) {
      error("C0012", "a key of more than 1000 bytes", node.location, "");
    } else {
      frame.drop = false;
    }
  }

  void value(Node node, YAML::anchor_t anchor, size_t at, bool counted = true) {
    if (counted) count(node.location);
    if (anchor) {
      const int64_t size = node.size();
      if ((anchored_ += size) > 2 * TreeLimits::kNodes) {
        error("C0008", "anchors of more than " + std::to_string(2 * TreeLimits::kNodes) + " values",
              node.location, "");
        throw Abort{};
      }
      anchors_[anchor] = {node, size};
    }
    if (stack_.empty()) {
      root = std::move(node);
      return;
    }
    Frame& frame = stack_.back();
    if (frame.node.kind == Node::Kind::list) {
      frame.node.items.push_back(std::move(node));
      return;
    }
    if (!frame.has_key) return key(node, at);
    frame.has_key = false;
    if (frame.drop) return;
    if (!frame.seen.insert(frame.key).second) {
      for (size_t i = 0; i < frame.node.keys.size(); ++i) {
        if (frame.node.keys[i] != frame.key) continue;
        error("C0005", "duplicate key `" + shortened(frame.key) + "`", frame.key_location,
              "written again here")
            .related(frame.node.key_locations[i], "first written here");
        break;
      }
      return;
    }
    frame.node.add(std::move(frame.key), frame.key_location, std::move(node));
  }

  const TextLines& lines_;
  const std::optional<size_t> unclosed_;
  std::vector<Diagnostic>& diagnostics_;
  std::vector<Frame> stack_;
  std::map<YAML::anchor_t, std::pair<Node, int64_t>> anchors_;
  int documents_ = 0;
  int64_t written_ = 0, expanded_ = 0, anchored_ = 0;
};

// `lr:1e-4` in this line: the byte range of "lr:1e-4", if the line is such.
std::optional<std::pair<size_t, size_t>> missing_space(std::string_view line) {
  size_t begin = line.find_first_not_of(" -");
  if (begin == std::string_view::npos) return std::nullopt;
  size_t end = begin;
  const auto word = [](char c) { return is_letter(c) || is_digit(c) || c == '_' || c == '.' || c == '-'; };
  while (end < line.size() && word(line[end])) ++end;
  if (end == begin || end + 1 >= line.size() || line[end] != ':' || is_blank(line[end + 1]) ||
      line[end + 1] == ':' || line[end + 1] == '/')
    return std::nullopt;
  return std::pair(begin, line.find_last_not_of(' ') + 1);
}

// yaml-cpp's message in our words, with the hints that the text around the error allows.
void explain_syntax(const YAML::Exception& problem, const TextLines& lines, const Prescan& scan,
                    std::vector<Diagnostic>& diagnostics) {
  Diagnostic diagnostic;
  diagnostic.code = "C0002";
  size_t at = std::min(offset_of(lines, problem.mark), lines.text().empty() ? 0 : lines.text().size() - 1);
  const char found = at < lines.text().size() ? lines.text()[at] : '\0';
  const std::string_view message = problem.msg;
  diagnostic.location = lines.location(at);
  if (message == YAML::ErrorMsg::UNKNOWN_ANCHOR) {
    size_t end = at;
    while (end < lines.text().size() && !is_blank(lines.text()[end]) &&
           std::string_view(",[]{}").find(lines.text()[end]) == std::string_view::npos)
      ++end;
    const std::string name(lines.text().substr(at, std::min<size_t>(end - at, 60)));
    diagnostic.code = "C0008";
    diagnostic.message = "the alias `" + name + "` has no anchor";
    diagnostic.location = lines.location(at, end - at);
    diagnostic.help("a pattern that starts with `*` needs quotes: \"" + name + "\"");
    diagnostic.replace(diagnostic.location, "\"" + name + "\"");
  } else if (message == YAML::ErrorMsg::END_OF_SEQ_FLOW || message == YAML::ErrorMsg::END_OF_MAP_FLOW) {
    if (scan.unclosed) at = *scan.unclosed;
    const bool list = scan.unclosed ? lines.text()[at] == '[' : message == YAML::ErrorMsg::END_OF_SEQ_FLOW;
    diagnostic.location = lines.location(at);
    diagnostic.message = unclosed_text(list);
    diagnostic.label = scan.unclosed ? "opened here" : "";
  } else if (message == YAML::ErrorMsg::UNKNOWN_TOKEN) {
    diagnostic.message = std::string("a value cannot start with `") + found + "`";
    diagnostic.help("put the value in quotes");
  } else if (message == YAML::ErrorMsg::FLOW_END) {
    diagnostic.message = std::string("`") + found + "` closes nothing";
  } else if (message == YAML::ErrorMsg::ALIAS_NOT_FOUND || message == YAML::ErrorMsg::CHAR_IN_ALIAS) {
    diagnostic.message = "`*` must be followed by the name of an anchor";
    diagnostic.help("a value that starts with `*` needs quotes");
  } else if (message == YAML::ErrorMsg::BAD_FILE) {
    diagnostic.code = "C0009";
    diagnostic.message = "nested more than " + std::to_string(TreeLimits::kMaxDepth) + " levels deep";
  } else if (message == YAML::ErrorMsg::MAP_VALUE) {
    diagnostic.message = "a `:` is not allowed here";
    diagnostic.help(
        "a value that contains `: ` needs quotes; a nested mapping starts on its own line, indented");
  } else if (message == YAML::ErrorMsg::MAP_KEY || message == YAML::ErrorMsg::BLOCK_ENTRY) {
    diagnostic.message = std::string("`") + found + "` is not allowed here";
  } else if (message == YAML::ErrorMsg::END_OF_MAP || message == YAML::ErrorMsg::END_OF_SEQ) {
    diagnostic.message =
        message == YAML::ErrorMsg::END_OF_MAP ? "expected a key here" : "expected a list item (`- …`) here";
    diagnostic.help(
        "check the indentation: keys of one mapping and dashes of one list start in the same column");
  } else if (message == YAML::ErrorMsg::TAB_IN_INDENTATION) {
    diagnostic.code = "C0003";
    diagnostic.message = "tab used for indentation";
    diagnostic.help("indent with spaces");
  } else {
    std::string text(message);
    for (size_t i = text.find("illegal"); i != std::string::npos; i = text.find("illegal"))
      text.replace(i, 7, "invalid");
    diagnostic.message = text;
    if (text.starts_with("unknown escape") && at >= 2) diagnostic.location = lines.location(at - 2, 2);
    if (text == "unknown escape character: $")
      diagnostic.help("in double quotes write `\\\\${`, or put the text in single quotes");
    else if (text.starts_with("unknown escape"))
      diagnostic.help("in double quotes a backslash is written `\\\\`; in single quotes it is plain text");
  }
  const size_t line = lines.line_of(at);
  for (size_t back = 0; back < 3 && back <= line; ++back) {
    const std::string_view candidate = lines.line(line - back);
    const auto range = missing_space(candidate);
    if (!range || message == YAML::ErrorMsg::UNKNOWN_ANCHOR) continue;
    const std::string_view pair = candidate.substr(range->first, range->second - range->first);
    const std::string fixed =
        std::string(pair.substr(0, pair.find(':'))) + ": " + std::string(pair.substr(pair.find(':') + 1));
    diagnostic.message = "missing space after `:`";
    diagnostic.location = lines.location(lines.begin_of(line - back) + range->first, pair.size());
    diagnostic.helps.clear();
    diagnostic.label.clear();
    diagnostic.help("write `" + fixed + "`").replace(diagnostic.location, fixed);
    break;
  }
  diagnostics.push_back(std::move(diagnostic));
}

bool prescan_failed(const Prescan& scan, const TextLines& lines, std::vector<Diagnostic>& diagnostics) {
  if (!scan.problem) return false;
  Diagnostic diagnostic;
  const size_t at = scan.problem->offset;
  diagnostic.location = lines.location(at);
  switch (scan.problem->kind) {
    case PrescanProblem::Kind::control_character: {
      static constexpr char digits[] = "0123456789ABCDEF";
      const auto byte = static_cast<unsigned char>(lines.text()[at]);
      diagnostic.code = "C0004";
      diagnostic.message = std::string("control character U+00") + digits[byte >> 4] + digits[byte & 15];
      diagnostic.help(byte == 0 ? "a recipe is UTF-8 text; this looks like UTF-16 or a binary file"
                                : "write it as an escape in double quotes, for instance \"\\x1B\"");
      break;
    }
    case PrescanProblem::Kind::tab: {
      size_t end = at;
      while (end < lines.text().size() && lines.text()[end] == '\t') ++end;
      diagnostic.code = "C0003";
      diagnostic.message = "tab used for indentation";
      diagnostic.location = lines.location(at, end - at);
      diagnostic.help("indent with spaces");
      break;
    }
    case PrescanProblem::Kind::flow_depth:
      diagnostic.code = "C0009";
      diagnostic.message = "nested more than " + std::to_string(TreeLimits::kMaxDepth) + " levels deep";
      break;
    case PrescanProblem::Kind::too_many_values:
      diagnostic.code = "C0009";
      diagnostic.message = "more than " + std::to_string(TreeLimits::kNodes) + " values in one file";
      break;
    case PrescanProblem::Kind::long_line:
      diagnostic.code = "C0009";
      diagnostic.message = "a line of more than 1 MiB";
      break;
  }
  diagnostics.push_back(std::move(diagnostic));
  return true;
}

}  // namespace

std::optional<Node> parse_yaml(int source, const std::vector<Source>& sources,
                               std::vector<Diagnostic>& diagnostics) {
  const std::string& text = sources[static_cast<size_t>(source)].text;
  const auto simple = [&](const char* code, std::string message, SourceLocation location, std::string help) {
    Diagnostic diagnostic;
    diagnostic.code = code;
    diagnostic.message = std::move(message);
    diagnostic.location = location;
    diagnostic.help(std::move(help));
    diagnostics.push_back(std::move(diagnostic));
    return std::nullopt;
  };
  if (const auto invalid = first_invalid_utf8(text)) {
    const TextLines lines(source, std::string_view(text).substr(0, *invalid));
    return simple("C0004", "invalid UTF-8 at byte " + std::to_string(*invalid), lines.location(*invalid),
                  "save the file as UTF-8");
  }
  const TextLines lines(source, text);
  const Prescan scan = prescan(text);
  if (prescan_failed(scan, lines, diagnostics)) return std::nullopt;

  Builder builder(lines, scan.unclosed, diagnostics);
  try {
    std::istringstream in(text);
    YAML::Parser parser(in);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const Abort&) {
    return std::nullopt;
  } catch (const YAML::Exception& problem) {
    explain_syntax(problem, lines, scan, diagnostics);
    return std::nullopt;
  }
  if (!builder.root || builder.root->kind == Node::Kind::null)
    return simple("C0011", "empty recipe", lines.location(0),
                  "a recipe is a mapping of sections; `capstan recipe ls` lists examples");
  if (builder.root->kind != Node::Kind::map) {
    const std::string_view first = lines.line(static_cast<size_t>(builder.root->location.line) - 1);
    if (builder.root->kind == Node::Kind::scalar && missing_space(first))
      return simple("C0002", "missing space after `:`", builder.root->location, "write `key: value`");
    try {
      refuse_placeholder(text, sources[static_cast<size_t>(source)].name);
    } catch (const Error& error) {
      return simple("C0013", error.message(), builder.root->location, error.help());
    }
    return simple("C0013",
                  "a recipe is a mapping of sections, not a " +
                      std::string(builder.root->kind == Node::Kind::list ? "list" : "single value"),
                  builder.root->location, "");
  }
  return std::move(builder.root);
}

std::string leading_comment(std::string_view text) {
  std::string result;
  for (const std::string_view line : split(text, '\n')) {
    const std::string_view content = trim(line);
    if (content.empty() && result.empty()) continue;
    if (!content.starts_with('#')) break;
    const std::string_view words = trim(content.substr(1));
    if (words.starts_with("yaml-language-server:")) continue;
    if (words.empty() && !result.empty()) break;
    if (!result.empty()) result += ' ';
    result += words;
  }
  return result;
}

}  // namespace capstan::config
