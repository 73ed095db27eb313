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
std::string_view trim(std::string_view text);  // ASCII blanks
std::string join(std::span<const std::string> parts, std::string_view separator);
// The first `most`, and "…" for the rest.
std::string join_some(std::span<const std::string> parts, std::string_view separator, size_t most);

// The whole text must be the number; nullopt otherwise. Never looks at the locale.
std::optional<int64_t> parse_int(std::string_view text);
std::optional<double> parse_double(std::string_view text);
// Shortest decimal that reads back as the same double; "inf", "-inf", "nan".
std::string to_text(double value);

// Up to `most` candidates near `text` (edit distance with transpositions, common prefixes), best first.
std::vector<std::string> near_matches(std::string_view text, std::span<const std::string> candidates,
                                      size_t most = 3);

std::string fixed(double value, int digits);  // 12.50: so many digits behind the point
std::string human_bytes(double bytes);        // "1.5 GiB"
std::string human_count(double count);        // "124.4M", "8.03B"
std::string human_flop(double flop);          // "104.7 GFLOP"; a rate has "/s" after it
std::string human_duration(double seconds);   // "3m 12s"
std::string with_separators(int64_t value);   // "4 194 304"
std::string quoted(std::string_view text);    // JSON string with quotes, escapes and all

}  // namespace capstan
