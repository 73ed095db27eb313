#include "base/text.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "base/utf8.hpp"

namespace capstan {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

std::string lower_case(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = lower_case(c);
  return result;
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view blanks = " \t\r\n\f\v";
  const size_t begin = text.find_first_not_of(blanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

std::string join(std::span<const std::string> parts, std::string_view separator) {
  std::string result;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i) result += separator;
    result += parts[i];
  }
  return result;
}

std::string join_some(std::span<const std::string> parts, std::string_view separator, size_t most) {
  std::string text = join(parts.first(std::min(most, parts.size())), separator);
  if (parts.size() > most) text += std::string(separator) + "…";
  return text;
}

template <class T>
static std::optional<T> parse(std::string_view text) {
  if (!text.empty() && text[0] == '+') text.remove_prefix(1);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}
std::optional<int64_t> parse_int(std::string_view text) {
  return parse<int64_t>(text);
}
std::optional<double> parse_double(std::string_view text) {
  return parse<double>(text);
}

std::string to_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::array<char, 40> buffer;
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return {buffer.data(), end};
}

// Optimal string alignment distance from a to b, case-insensitive; some number above `limit` if the distance
// is greater. A message about a wrong key compares it with every name, most of which differ completely, so
// the computation ends as soon as the limit is exceeded.
static size_t edit_distance(std::string_view a, std::string_view b, size_t limit) {
  const size_t difference = a.size() < b.size() ? b.size() - a.size() : a.size() - b.size();
  if (difference > limit) return difference;
  // A step changes the letters' counts by one too many and one too few at most.
  std::array<int, 256> letters{};
  for (const char c : a) ++letters[static_cast<unsigned char>(lower_case(c))];
  size_t missing = 0;
  for (const char c : b)
    if (--letters[static_cast<unsigned char>(lower_case(c))] < 0) ++missing;
  if (missing > limit) return missing;
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const bool same = lower_case(a[i - 1]) == lower_case(b[j - 1]);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && lower_case(a[i - 1]) == lower_case(b[j - 2]) &&
          lower_case(a[i - 2]) == lower_case(b[j - 1]))
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

std::vector<std::string> near_matches(std::string_view text, std::span<const std::string> candidates,
                                      size_t most) {
  if (text.size() > 200) return {};
  struct Match {
    size_t distance;
    const std::string* name;
    // True if the names are similar only because one contains the other.
    bool only_part;
  };
  std::vector<Match> matches;
  for (const auto& candidate : candidates) {
    const size_t limit = std::max<size_t>(1, std::max(text.size(), candidate.size()) / 3);
    const size_t distance = edit_distance(text, candidate, std::max<size_t>(limit, 2));
    // A prefix or a part ("lr_warmup" of "lr_warmup_iters") is near, however long the rest.
    const bool part =
        text.size() >= 3 && candidate.size() >= 3 &&
        (candidate.find(text) != std::string::npos || text.find(candidate) != std::string_view::npos);
    const size_t near = part ? std::min<size_t>(distance, 2) : distance;
    if (near <= limit) matches.push_back({near, &candidate, distance > limit});
  }
  std::stable_sort(matches.begin(), matches.end(),
                   [](const Match& a, const Match& b) { return a.distance < b.distance; });
  // If a name differs by one typing error, omits names that merely contain the text.
  if (!matches.empty() && matches.front().distance == 1)
    std::erase_if(matches, [](const Match& match) { return match.only_part; });
  std::vector<std::string> result;
  for (size_t i = 0; i < matches.size() && i < most; ++i) result.push_back(*matches[i].name);
  return result;
}

static std::string scaled(double value, double step, std::span<const char* const> units,
                          const char* separator) {
  size_t unit = 0;
  while (std::abs(value) >= step && unit + 1 < units.size()) {
    value /= step;
    ++unit;
  }
  std::array<char, 48> buffer;
  const int decimals = unit == 0 ? 0 : std::abs(value) < 10 ? 2 : 1;
  std::snprintf(buffer.data(), buffer.size(), "%.*f%s%s", decimals, value, units[unit][0] ? separator : "",
                units[unit]);
  return buffer.data();
}

std::string human_bytes(double bytes) {
  static constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  return scaled(bytes, 1024, units, " ");
}

std::string significant(double value, int digits) {
  std::array<char, 48> buffer;
  std::snprintf(buffer.data(), buffer.size(), "%.*g", digits, value);
  return buffer.data();
}

std::string hex(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
  return text;
}

std::string fixed(double value, int digits) {
  if (std::isnan(value)) return "nan";  // without the sign that printf would write
  // A fixed notation of 1e308 has 309 digits.
  std::array<char, 400> text;
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string human_count(double count) {
  static constexpr std::array units{"", "K", "M", "B", "T"};
  return scaled(count, 1000, units, "");
}

std::string human_flop(double flop) {
  static constexpr std::array units{" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP", " PFLOP", " EFLOP"};
  return scaled(flop, 1000, units, "");
}

std::string human_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  std::array<char, 48> buffer;
  const auto total = static_cast<int64_t>(seconds + 0.5);
  if (seconds < 1)
    std::snprintf(buffer.data(), buffer.size(), "%.0f ms", seconds * 1000);
  else if (total < 60)
    std::snprintf(buffer.data(), buffer.size(), "%llds", static_cast<long long>(total));
  else if (total < 3600)
    std::snprintf(buffer.data(), buffer.size(), "%lldm %02llds", static_cast<long long>(total / 60),
                  static_cast<long long>(total % 60));
  else if (total < 86400)
    std::snprintf(buffer.data(), buffer.size(), "%lldh %02lldm", static_cast<long long>(total / 3600),
                  static_cast<long long>(total / 60 % 60));
  else
    std::snprintf(buffer.data(), buffer.size(), "%lldd %02lldh", static_cast<long long>(total / 86400),
                  static_cast<long long>(total / 3600 % 24));
  return buffer.data();
}

std::string with_separators(int64_t value) {
  std::string digits = std::to_string(value);
  const size_t first = digits[0] == '-' ? 1 : 0;
  for (size_t i = digits.size(); i > first + 3;) digits.insert(i -= 3, " ");
  return digits;
}

std::string in_quotes(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        result += "\\\"";
        break;
      case '\\':
        result += "\\\\";
        break;
      case '\n':
        result += "\\n";
        break;
      case '\r':
        result += "\\r";
        break;
      case '\t':
        result += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          std::array<char, 8> buffer;
          std::snprintf(buffer.data(), buffer.size(), "\\u%04x", static_cast<unsigned>(c));
          result += buffer.data();
        } else {
          result += c;
        }
    }
  }
  return result + "\"";
}

std::string escape_controls(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = decode_utf8(text, i);
    const char32_t c = point.value;
    const bool control = (c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7f && c < 0xa0),
               direction = (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
    if (control || direction) {
      char escape[16];
      std::snprintf(escape, sizeof escape, control ? "\\x%02x" : "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      append_utf8(out, c);
    }
    i += static_cast<size_t>(point.bytes);
  }
  return out;
}

std::string escape_name(std::string_view name) {
  std::string out;
  for (const char c : escape_controls(name)) out += c == '\n' ? std::string("\\n") : std::string(1, c);
  return out;
}

}  // namespace capstan
