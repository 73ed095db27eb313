#include "importers/shell_condition.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <optional>
#include <span>

#include "base/text.hpp"

namespace capstan::importers {

namespace {

Truth of(bool value) {
  return value ? Truth::yes : Truth::no;
}

Truth compared(const std::string& left, std::string_view sign, const std::string& right, bool patterns) {
  if (sign == "=" || sign == "==" || sign == "!=") {
    const bool equal = patterns ? ::fnmatch(right.c_str(), left.c_str(), 0) == 0 : left == right;
    return of(equal == (sign != "!="));
  }
  const auto a = parse_int(trim(left)), b = parse_int(trim(right));
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
  return !word.open.empty() || !word.defaulted.empty();
}

// The words between the brackets.
Truth tested(std::span<const ShellWord> words, bool patterns) {
  if (!words.empty() && words[0].text == "!") return negated(tested(words.subspan(1), patterns));
  if (std::any_of(words.begin(), words.end(), is_undecided)) return Truth::unknown;
  if (words.size() == 1) return of(!words[0].text.empty());
  if (words.size() == 2 && words[0].text == "-z") return of(words[1].text.empty());
  if (words.size() == 2 && words[0].text == "-n") return of(!words[1].text.empty());
  if (words.size() == 3) return compared(words[0].text, words[1].text, words[2].text, patterns);
  return Truth::unknown;
}

}  // namespace

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
  const bool twice = first == "[[";
  if ((!twice && first != "[") || words.back().text != (twice ? "]]" : "]")) return Truth::unknown;
  return tested(words.subspan(1, words.size() - 2), twice);
}

bool is_test(const ShellCommand& command) {
  if (command.empty()) return false;
  const std::string& first = command[command[0].text == "!" && command.size() > 1 ? 1 : 0].text;
  return first == "[" || first == "[[" || first == "test" || first == "true" || first == "false";
}

Truth matches(const ShellWord& word, const ShellWord& pattern) {
  if (pattern.text == "*") return Truth::yes;
  if (is_undecided(word) || is_undecided(pattern)) return Truth::unknown;
  return of(::fnmatch(pattern.text.c_str(), word.text.c_str(), 0) == 0);
}

}  // namespace capstan::importers
