#include "base/wording.hpp"

namespace capstan {

std::string plural(int64_t count, std::string_view noun) {
  if (count == 1) return std::string(noun);
  return std::string(noun) + (noun.ends_with("ch") || noun.ends_with("x") ? "es" : "s");
}

std::string counted(int64_t count, std::string_view noun) {
  return std::to_string(count) + " " + plural(count, noun);
}

std::string shell_quoted(std::string_view word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos) return std::string(word);
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

std::string shell_line(std::span<const std::string> words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + shell_quoted(word);
  return line;
}

std::string markdown_cell(std::string_view text) {
  std::string out;
  for (const char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

}  // namespace capstan
