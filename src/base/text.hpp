// Small text helpers that every module needs: numbers without the locale, near matches, readable units.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace capstan {

std::vector<std::string_view> split(std::string_view text, char separator);
// Whether a byte separates words in JSON, YAML and records: a blank, a tab, or part of a line break.
constexpr bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}
// Whether a byte separates words within a line.
constexpr bool is_space_or_tab(char c) {
  return c == ' ' || c == '\t';
}
// A control character of ASCII.
constexpr bool is_control(char c) {
  return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
}
constexpr bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
constexpr bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
// Maps the ASCII letters A to Z to lower case; other bytes stay.
constexpr char lower_case(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}
std::string lower_case(std::string_view text);
// Removes ASCII blanks from both ends.
std::string_view trim(std::string_view text);
std::string join(std::span<const std::string> parts, std::string_view separator);
// Joins the first `most` parts, and adds "…" if there are more.
std::string join_some(std::span<const std::string> parts, std::string_view separator, size_t most);

// Parses a number, independently of the locale. Returns nullopt unless the complete text is the number.
std::optional<int64_t> parse_int(std::string_view text);
std::optional<double> parse_double(std::string_view text);
// Formats as the shortest decimal that reads back as the same double; "inf", "-inf", "nan".
std::string to_text(double value);

// Returns up to `most` candidates that are similar to `text` (edit distance with transpositions, common
// prefixes), best first.
std::vector<std::string> near_matches(std::string_view text, std::span<const std::string> candidates,
                                      size_t most = 3);

// Formats with a fixed number of digits after the point: 12.50 with two digits.
std::string fixed(double value, int digits);
// Formats with a number of significant digits, as %g does: 2e-04 or 0.123 with three digits.
std::string significant(double value, int digits);
// Formats as 16 hexadecimal digits.
std::string hex(uint64_t value);
// Formats a number of bytes, as in "1.5 GiB".
std::string human_bytes(double bytes);
// Formats a count, as in "124.4M" or "8.03B".
std::string human_count(double count);
// Formats a number of FLOPs, as in "104.7 GFLOP". For a rate, the caller appends "/s".
std::string human_flop(double flop);
// Formats a duration, as in "3m 12s".
std::string human_duration(double seconds);
// Formats with a blank between groups of three digits, as in "4 194 304".
std::string with_separators(int64_t value);
// Formats a text as a JSON string with quotes and escapes.
std::string in_quotes(std::string_view text);

// Escapes the control characters of a text for a terminal, which would obey them: "\x1b". Characters that
// reverse the direction of writing are escaped as well; line breaks and tabs stay.
std::string escape_controls(std::string_view text);
// Escapes a name within a line: its line breaks too, as "\n".
std::string escape_name(std::string_view name);

}  // namespace capstan
