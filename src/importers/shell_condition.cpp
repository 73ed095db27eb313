#include "importers/shell_condition.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <optional>
#include <set>
#include <span>
#include <string_view>

#include "base/text.hpp"

namespace capstan::importers {

namespace {

Truth of(bool value) {
  return value ? Truth::yes : Truth::no;
}

// A number in arithmetic, in which a leading zero marks an octal one; these are not computed.
std::optional<int64_t> arithmetic_number(std::string_view text) {
  const std::string_view digits = text.substr(text.starts_with('-') || text.starts_with('+') ? 1 : 0);
  if (digits.size() > 1 && digits.front() == '0') return std::nullopt;
  return parse_int(text);
}

// `[[ … ]]` matches patterns and computes its numbers; `[ … ]` compares texts and decimal numbers.
Truth compared(const std::string& left, std::string_view sign, const std::string& right,
               bool double_brackets) {
  if (sign == "=" || sign == "==" || sign == "!=") {
    const bool equal = double_brackets ? ::fnmatch(right.c_str(), left.c_str(), 0) == 0 : left == right;
    return of(equal == (sign != "!="));
  }
  const auto number = double_brackets ? arithmetic_number : parse_int;
  const auto a = number(trim(left)), b = number(trim(right));
  if (!a || !b) return Truth::unknown;
  if (sign == "-eq") return of(*a == *b);
  if (sign == "-ne") return of(*a != *b);
  if (sign == "-lt") return of(*a < *b);
  if (sign == "-le") return of(*a <= *b);
  if (sign == "-gt") return of(*a > *b);
  if (sign == "-ge") return of(*a >= *b);
  return Truth::unknown;
}

bool is_undecided(const ShellWord& word) {
  return !word.unknown_reason.empty() || !word.defaulted.empty();
}

// The words between the brackets.
Truth tested(std::span<const ShellWord> words, bool double_brackets) {
  if (!words.empty() && words[0].text == "!") return negated(tested(words.subspan(1), double_brackets));
  if (std::any_of(words.begin(), words.end(), is_undecided)) return Truth::unknown;
  if (words.size() == 1) return of(!words[0].text.empty());
  if (words.size() == 2 && words[0].text == "-z") return of(words[1].text.empty());
  if (words.size() == 2 && words[0].text == "-n") return of(!words[1].text.empty());
  if (words.size() == 3) return compared(words[0].text, words[1].text, words[2].text, double_brackets);
  return Truth::unknown;
}

// Computes the tokens of `((…))`: integers, operators and brackets.
class Arithmetic {
 public:
  explicit Arithmetic(std::span<const ShellWord> words) : words_(words) {}

  Truth truth() {
    if (words_.size() > kMaxTokens || std::any_of(words_.begin(), words_.end(), is_undecided))
      return Truth::unknown;
    const auto value = expression(0);
    return value && next_ == words_.size() ? of(*value != 0) : Truth::unknown;
  }

 private:
  static constexpr size_t kMaxTokens = 200;
  using Number = std::optional<int64_t>;

  // Precedence of an operator, from 1 (binds least) to 6 (binds most); 0: not an operator.
  static int precedence(const std::string& sign) {
    static const std::vector<std::vector<std::string_view>> levels = {
        {"||"}, {"&&"}, {"==", "!="}, {"<", "<=", ">", ">="}, {"+", "-"}, {"*", "/", "%"}};
    for (size_t i = 0; i < levels.size(); ++i)
      if (std::find(levels[i].begin(), levels[i].end(), sign) != levels[i].end())
        return static_cast<int>(i) + 1;
    return 0;
  }

  static Number apply(int64_t a, const std::string& sign, int64_t b) {
    int64_t result = 0;
    if (sign == "+") return __builtin_add_overflow(a, b, &result) ? Number() : result;
    if (sign == "-") return __builtin_sub_overflow(a, b, &result) ? Number() : result;
    if (sign == "*") return __builtin_mul_overflow(a, b, &result) ? Number() : result;
    if (sign == "/" || sign == "%") {
      if (b == 0 || b == -1) return std::nullopt;
      return sign == "/" ? a / b : a % b;
    }
    if (sign == "||") return a != 0 || b != 0;
    if (sign == "&&") return a != 0 && b != 0;
    if (sign == "==") return a == b;
    if (sign == "!=") return a != b;
    if (sign == "<") return a < b;
    if (sign == "<=") return a <= b;
    if (sign == ">") return a > b;
    return a >= b;
  }

  Number operand() {
    if (next_ >= words_.size()) return std::nullopt;
    const std::string& text = words_[next_++].text;
    if (text == "!" || text == "-" || text == "+") {
      const Number value = operand();
      if (!value || *value == INT64_MIN) return std::nullopt;
      return text == "!" ? static_cast<int64_t>(*value == 0) : text == "-" ? -*value : *value;
    }
    if (text != "(") return arithmetic_number(text);
    const Number value = expression(0);
    if (next_ >= words_.size() || words_[next_++].text != ")") return std::nullopt;
    return value;
  }

  Number expression(int above) {
    Number left = operand();
    while (left && next_ < words_.size()) {
      const std::string& sign = words_[next_].text;
      const int level = precedence(sign);
      if (level <= above) break;
      ++next_;
      const Number right = expression(level);
      left = right ? apply(*left, sign, *right) : std::nullopt;
    }
    return left;
  }

  std::span<const ShellWord> words_;
  size_t next_ = 0;
};

// Whether a command only prepares for the next ones. It is taken to succeed, because a script is imported for
// the training that it starts where its preparations succeed.
bool prepares(const std::string& name) {
  static const std::set<std::string_view> names = {
      ":",     ".",      "alias", "cd",   "chmod",  "conda", "cp",     "date",   "echo",  "exit", "ln",
      "mkdir", "module", "mv",    "popd", "printf", "pushd", "pwd",    "return", "rm",    "set",  "shopt",
      "sleep", "source", "spack", "tee",  "touch",  "trap",  "ulimit", "umask",  "unset", "wait"};
  return names.contains(name);
}

}  // namespace

Truth success_of(const ShellCommand& command) {
  if (!command.empty() && command[0].text == "!" && command.size() > 1)
    return negated(success_of(ShellCommand(command.begin() + 1, command.end())));
  if (!command.empty() && !is_undecided(command[0]) && prepares(command[0].text)) return Truth::yes;
  return truth_of(command);
}

Truth negated(Truth truth) {
  return truth == Truth::unknown ? truth : of(truth == Truth::no);
}
Truth both(Truth a, Truth b) {
  return std::min(a, b);
}
Truth either(Truth a, Truth b) {
  return std::max(a, b);
}

Truth truth_of(const ShellCommand& command) {
  const std::span<const ShellWord> words(command);
  if (words.empty() || is_undecided(words[0])) return Truth::unknown;
  const std::string& first = words[0].text;
  if (first == "!") return negated(truth_of(ShellCommand(words.begin() + 1, words.end())));
  if (words.size() == 1 && (first == "true" || first == ":")) return Truth::yes;
  if (words.size() == 1 && first == "false") return Truth::no;
  if (first == "test") return tested(words.subspan(1), false);
  if (first == "((") return Arithmetic(words.subspan(1)).truth();
  const bool double_brackets = first == "[[";
  if ((!double_brackets && first != "[") || words.back().text != (double_brackets ? "]]" : "]"))
    return Truth::unknown;
  return tested(words.subspan(1, words.size() - 2), double_brackets);
}

bool is_test(const ShellCommand& command) {
  if (command.empty()) return false;
  const std::string& first = command[command[0].text == "!" && command.size() > 1 ? 1 : 0].text;
  return first == "[" || first == "[[" || first == "test" || first == "((" || first == "true" ||
         first == "false";
}

Truth matches(const ShellWord& word, const ShellWord& pattern) {
  if (pattern.text == "*") return Truth::yes;
  if (is_undecided(word) || is_undecided(pattern)) return Truth::unknown;
  return of(::fnmatch(pattern.text.c_str(), word.text.c_str(), 0) == 0);
}

}  // namespace capstan::importers
