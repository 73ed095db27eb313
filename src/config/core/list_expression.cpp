#include "config/core/list_expression.hpp"

#include <cctype>
#include <utility>

namespace capstan::config {

namespace {

// Of items, and of a number.
constexpr size_t kMaxItems = 1 << 13;

// Reads lists, their multiples and their sums.
class ListExpression {
 public:
  explicit ListExpression(std::string_view text) : text_(text) {}
  std::optional<std::vector<int64_t>> parse() {
    std::vector<int64_t> items;
    if (!sum(items) || (skip_spaces(), at_ != text_.size())) return std::nullopt;
    return items;
  }

 private:
  bool sum(std::vector<int64_t>& items) {
    do {
      std::vector<int64_t> part;
      if (!product(part) || items.size() + part.size() > kMaxItems) return false;
      items.insert(items.end(), part.begin(), part.end());
    } while (take('+'));
    return true;
  }
  bool product(std::vector<int64_t>& items) {
    if (take('(')) {
      if (++parentheses_ > 8 || !sum(items) || !take(')')) return false;
    } else if (!list(items)) {
      return false;
    }
    while (take('*')) {
      const auto times = number();
      if (!times || items.size() * *times > kMaxItems) return false;
      const std::vector<int64_t> once = std::move(items);
      items.clear();
      for (size_t i = 0; i < *times && !once.empty(); ++i)
        items.insert(items.end(), once.begin(), once.end());
    }
    return true;
  }
  bool list(std::vector<int64_t>& items) {
    if (!take('[')) return false;
    while (!take(']')) {
      const auto value = number();
      if (!value || items.size() == kMaxItems) return false;
      items.push_back(static_cast<int64_t>(*value));
      if (!take(',') && peek() != ']') return false;
    }
    return true;
  }
  std::optional<size_t> number() {
    if (!std::isdigit(static_cast<unsigned char>(peek()))) return std::nullopt;
    size_t value = 0;
    while (std::isdigit(static_cast<unsigned char>(peek_here())))
      if ((value = 10 * value + static_cast<size_t>(text_[at_++] - '0')) > kMaxItems) return std::nullopt;
    return value;
  }
  void skip_spaces() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  char peek_here() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  char peek() {
    skip_spaces();
    return peek_here();
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
  // Parentheses so far.
  int parentheses_ = 0;
};

}  // namespace

std::optional<std::vector<int64_t>> parse_list_expression(std::string_view text) {
  return ListExpression(text).parse();
}

std::string list_in_full(std::string_view expression) {
  const auto items = parse_list_expression(expression);
  if (!items) return {};
  std::string text;
  for (const int64_t item : *items) text += (text.empty() ? "" : ", ") + std::to_string(item);
  return "[" + text + "]";
}

}  // namespace capstan::config
