#include "config/core/prescan.hpp"

#include <vector>

#include "base/text.hpp"
#include "config/core/tree.hpp"

namespace capstan::config {

namespace {

// Follows quotes, comments, block scalars and flow brackets. It need not agree with YAML in every detail,
// because the depth limit of yaml-cpp and the node limit catch the problems that it misses.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  Prescan run() {
    size_t line_begin = 0;
    while (line_begin < text_.size() && !result_.problem) {
      size_t line_end = text_.find('\n', line_begin);
      if (line_end == std::string_view::npos) line_end = text_.size();
      line(line_begin, line_end);
      line_begin = line_end + 1;
    }
    if (!open_.empty()) result_.unclosed = open_.back();
    return result_;
  }

 private:
  enum class State : unsigned char { none, plain, single_quoted, double_quoted };

  void report(PrescanProblem::Kind kind, size_t offset) {
    if (!result_.problem) result_.problem = PrescanProblem{kind, offset};
  }

  void line(size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (is_control(text_[i]) && text_[i] != '\t') return report(PrescanProblem::Kind::control_character, i);
    }
    if (static_cast<int64_t>(end - begin) > TreeLimits::kLineBytes)
      return report(PrescanProblem::Kind::long_line, begin);
    size_t first = begin;
    while (first < end && text_[first] == ' ') ++first;
    const size_t indent = first - begin;
    // A blank line inside a block scalar.
    if (block_ && first == end) return;
    if (block_) {
      if (static_cast<int64_t>(indent) > block_indent_) return;
      block_ = false;
    }
    const bool quoted = state_ == State::single_quoted || state_ == State::double_quoted;
    if (!quoted && open_.empty() && first < end && text_[first] == '\t') {
      size_t content = first;
      while (content < end && is_space_or_tab(text_[content])) ++content;
      if (content < end && text_[content] != '#') return report(PrescanProblem::Kind::tab, first);
    }
    if (!quoted) state_ = State::none;
    content(begin, first, end);
  }

  void content(size_t begin, size_t i, size_t end) {
    // The lines of a block scalar are indented more than the key or the dash that it belongs to.
    int64_t parent = static_cast<int64_t>(i - begin) - 1;
    // True while only "- " marks precede.
    bool in_entries = open_.empty();
    for (; i < end && !result_.problem; ++i) {
      const char c = text_[i];
      const char next = i + 1 < end ? text_[i + 1] : '\n';
      switch (state_) {
        case State::single_quoted:
          if (c == '\'' && next == '\'')
            ++i;
          else if (c == '\'')
            state_ = State::none;
          continue;
        case State::double_quoted:
          if (c == '\\')
            ++i;
          else if (c == '"')
            state_ = State::none;
          continue;
        case State::plain:
          if (c == '#' && is_space_or_tab(text_[i - 1])) return;
          if (c == ':' && (is_space_or_tab(next) || next == '\n')) state_ = State::none;
          if (!open_.empty() && (c == ',' || c == '[' || c == ']' || c == '{' || c == '}')) {
            state_ = State::none;
            flow(c, i);
          }
          continue;
        case State::none:
          break;
      }
      if (is_space_or_tab(c)) continue;
      if (c == '#') return;
      if (c == '-' && in_entries && (is_space_or_tab(next) || next == '\n')) {
        parent = static_cast<int64_t>(i - begin);
        continue;
      }
      if (in_entries && c != '|' && c != '>') {
        parent = static_cast<int64_t>(i - begin);
        in_entries = false;
      }
      if (c == '"')
        state_ = State::double_quoted;
      else if (c == '\'')
        state_ = State::single_quoted;
      else if (c == '[' || c == '{' || ((c == ']' || c == '}' || c == ',') && !open_.empty()))
        flow(c, i);
      else if (c == ':' && (is_space_or_tab(next) || next == '\n'))
        continue;
      else if (c == '&' || c == '!' || c == '*') {
        const auto ends = [&](char d) {
          return is_space_or_tab(d) ||
                 (!open_.empty() && std::string_view(",[]{}").find(d) != std::string_view::npos);
        };
        while (i + 1 < end && !ends(text_[i + 1])) ++i;
      } else if ((c == '|' || c == '>') && open_.empty()) {
        block_ = true;
        block_indent_ = parent;
        return;
      } else {
        state_ = State::plain;
      }
    }
  }

  void flow(char c, size_t offset) {
    if (++flow_tokens_ > TreeLimits::kFlowTokens)
      return report(PrescanProblem::Kind::too_many_values, offset);
    if (c == '[' || c == '{') {
      open_.push_back(offset);
      if (open_.size() > static_cast<size_t>(TreeLimits::kMaxDepth))
        report(PrescanProblem::Kind::flow_depth, offset);
    } else if (c != ',' && !open_.empty()) {
      open_.pop_back();
    }
  }

  std::string_view text_;
  Prescan result_;
  State state_ = State::none;
  bool block_ = false;
  int64_t block_indent_ = 0;
  // Offsets of the open brackets.
  std::vector<size_t> open_;
  int64_t flow_tokens_ = 0;
};

}  // namespace

Prescan prescan(std::string_view text) {
  return Scanner(text).run();
}

}  // namespace capstan::config
