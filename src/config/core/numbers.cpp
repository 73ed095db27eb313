// Texts of numbers: counts with decimal and binary suffixes, reals, bytes and durations. No locale, no octal,
// no guessing.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "base/checked.hpp"
#include "base/text.hpp"
#include "config/core/convert.hpp"

namespace capstan::config {

namespace {

// digits * 10^exponent, and what stands after the number.
struct Decimal {
  bool negative = false;
  // Digits without leading zeros. Empty for zero.
  std::string digits;
  int64_t exponent = 0;
  std::string_view rest;
  // The number begins with 0 and another digit: 017.
  bool leading_zero = false;
  // Digits (and underscores) alone: no point, no exponent.
  bool pure = true;
};

// A number at the start of the text; nullopt when there is none or an underscore stands where none may.
std::optional<Decimal> read_decimal(std::string_view text) {
  Decimal number;
  size_t at = 0;
  if (at < text.size() && (text[at] == '+' || text[at] == '-')) number.negative = text[at++] == '-';
  const size_t begin = at;
  size_t count = 0;
  bool point = false;
  for (; at < text.size(); ++at) {
    const char c = text[at];
    if (is_digit(c)) {
      ++count;
      if (!number.digits.empty() || c != '0') number.digits += c;
      if (point) --number.exponent;
    } else if (c == '_') {
      if (at == begin || !is_digit(text[at - 1]) || at + 1 == text.size() || !is_digit(text[at + 1]))
        return std::nullopt;
    } else if (c == '.' && !point) {
      point = true;
      number.pure = false;
    } else {
      break;
    }
  }
  if (count == 0) return std::nullopt;
  number.leading_zero = text[begin] == '0' && begin + 1 < text.size() && is_digit(text[begin + 1]);
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    size_t end = at + 1;
    if (end < text.size() && (text[end] == '+' || text[end] == '-')) ++end;
    const size_t first = end;
    while (end < text.size() && is_digit(text[end])) ++end;
    if (end > first) {
      number.pure = false;
      const auto exponent = parse_int(text.substr(at + 1, end - at - 1));
      number.exponent += exponent.value_or(text[at + 1] == '-' ? -100000 : 100000);
      at = end;
    }
  }
  number.rest = text.substr(at);
  return number;
}

enum class Fit : unsigned char { fits, fraction, overflow };

// digits * 10^exponent * factor, when that is a 64-bit integer.
Fit to_integer(Decimal number, int64_t factor, int64_t& result) {
  result = 0;
  if (number.digits.empty()) return Fit::fits;
  while (number.exponent < 0 && number.digits.back() == '0') {
    number.digits.pop_back();
    ++number.exponent;
  }
  if (number.exponent > 30 || number.digits.size() > 40)
    return number.exponent < -60 ? Fit::fraction : Fit::overflow;
  __int128 value = 0;
  const __int128 limit = static_cast<__int128>(std::numeric_limits<int64_t>::max()) * 4096;
  for (const char c : number.digits) {
    value = value * 10 + (c - '0');
    if (value > limit * 100000000) return number.exponent < 0 ? Fit::fraction : Fit::overflow;
  }
  while (factor > 1 && number.exponent < 0 && factor % 10 == 0) {
    factor /= 10;
    ++number.exponent;
  }
  if (number.exponent < 0 && factor > 1) {
    if (value > limit) return number.digits.size() > 24 ? Fit::fraction : Fit::overflow;
    value *= factor;
  }
  if (number.exponent >= 0) {
    for (int64_t i = 0; i < number.exponent; ++i) {
      value *= 10;
      if (value > limit) return Fit::overflow;
    }
    if (value > limit) return Fit::overflow;
    value *= factor;
  } else {
    for (int64_t i = 0; i > number.exponent; --i) {
      if (value % 10 != 0) return Fit::fraction;
      value /= 10;
    }
  }
  if (number.negative) value = -value;
  if (value > std::numeric_limits<int64_t>::max() || value < std::numeric_limits<int64_t>::min())
    return Fit::overflow;
  result = static_cast<int64_t>(value);
  return Fit::fits;
}

struct Suffix {
  std::string_view text;
  int64_t factor;
};
constexpr int64_t kKi = 1024, kMi = kKi * 1024, kGi = kMi * 1024, kTi = kGi * 1024;
constexpr Suffix kCounts[] = {
    {"k", 1'000}, {"M", 1'000'000}, {"B", 1'000'000'000}, {"G", 1'000'000'000}, {"T", 1'000'000'000'000},
    {"Ki", kKi},  {"Mi", kMi},      {"Gi", kGi},          {"Ti", kTi}};
constexpr Suffix kByteUnits[] = {
    {"B", 1},     {"kB", 1'000}, {"MB", 1'000'000}, {"GB", 1'000'000'000}, {"TB", 1'000'000'000'000},
    {"KiB", kKi}, {"MiB", kMi},  {"GiB", kGi},      {"TiB", kTi}};
template <size_t N>
const Suffix* find_suffix(const Suffix (&table)[N], std::string_view text) {
  for (const auto& suffix : table)
    if (suffix.text == text) return &suffix;
  return nullptr;
}

std::nullopt_t refuse(TextProblem& problem, std::string message, std::string help = {}) {
  problem = {std::move(message), std::move(help), false, {}};
  return std::nullopt;
}

// Refuses a text whose meaning can be written in one way only, `right`, which replaces it.
std::nullopt_t refuse_for(TextProblem& problem, std::string message, std::string right) {
  problem = {std::move(message), "write " + right, false, right};
  return std::nullopt;
}

const char* const kIntegerRange = "-9223372036854775808 to 9223372036854775807";

std::string without_leading_zeros(std::string_view text) {
  std::string out;
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) {
    if (text[0] == '-') out += '-';
    text.remove_prefix(1);
  }
  const size_t first = text.find_first_not_of("0_");
  return out + (first == std::string_view::npos ? "0" : std::string(text.substr(first)));
}

bool all_digits_and(std::string_view text, char separator) {
  bool seen = false;
  for (const char c : text) {
    seen = seen || c == separator;
    if (!is_digit(c) && c != separator) return false;
  }
  return seen && is_digit(text.front()) && is_digit(text.back());
}

// `0,001`, as much of the world writes it; `1,000` may also be a thousand.
std::nullopt_t refuse_comma(TextProblem& problem, std::string_view text) {
  const size_t comma = text.find(',');
  std::string point(text);
  point[comma] = '.';
  const bool one = comma > 0 && text.find(',', comma + 1) == std::string_view::npos;
  const auto number = one ? read_decimal(point) : std::nullopt;
  if (!number || !number->rest.empty() || number->leading_zero)
    return refuse(problem, "is not a number", "the decimal mark is a point: 1.5");
  const std::string_view digits = text[0] == '-' || text[0] == '+' ? text.substr(1) : text;
  const bool grouped =
      digits[0] != '0' && text.size() - comma == 4 && text.find_first_of("eE") == std::string_view::npos;
  if (!grouped) return refuse_for(problem, "has a decimal comma", point);
  std::string without_comma(text);
  without_comma.erase(comma, 1);
  return refuse(problem, "is not a number", "write " + point + " or " + without_comma);
}

// `1,024` may be 1024.
std::nullopt_t refuse_integer_with_comma(TextProblem& problem, std::string_view text) {
  const auto groups = split(text, ',');
  std::string digits;
  bool by_three = text[0] != '0' && groups[0].size() <= 3;
  for (const std::string_view group : groups) {
    by_three = by_three && std::ranges::all_of(group, is_digit) && (digits.empty() || group.size() == 3);
    digits += group;
  }
  return refuse(problem, "is not an integer",
                (by_three ? "write " + digits + "; " : "") + "digits may be grouped with `_`: 1_000_000");
}

// number * factor as a 64-bit integer. `fraction`: the message where the product is not an integer.
std::optional<int64_t> scaled_integer(const Decimal& number, int64_t factor, const char* fraction,
                                      TextProblem& problem, const char* help = "") {
  int64_t value = 0;
  switch (to_integer(number, factor, value)) {
    case Fit::fits:
      return value;
    case Fit::fraction:
      return refuse(problem, fraction, help);
    case Fit::overflow:
      return refuse(problem, "does not fit 64 bits", std::string("integers reach from ") + kIntegerRange);
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> integer_from_text(std::string_view text, NumberForm form, TextProblem& problem) {
  const std::string_view unsigned_text =
      !text.empty() && (text[0] == '-' || text[0] == '+') ? text.substr(1) : text;
  if (unsigned_text.starts_with("0x") || unsigned_text.starts_with("0X") || unsigned_text.starts_with("0o") ||
      unsigned_text.starts_with("0b")) {
    const int base = unsigned_text[1] == 'o' ? 8 : unsigned_text[1] == 'b' ? 2 : 16;
    uint64_t value = 0;
    const char* last = text.data() + text.size();
    const auto [end, error] = std::from_chars(unsigned_text.data() + 2, last, value, base);
    if (error != std::errc{} || end != last || unsigned_text.size() == 2 ||
        value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      return refuse(problem, "is not an integer");
    const int64_t number = text[0] == '-' ? -static_cast<int64_t>(value) : static_cast<int64_t>(value);
    if (form == NumberForm::hex && base == 16) return number;
    return refuse_for(problem,
                      base == 8   ? "is octal"
                      : base == 2 ? "is binary"
                                  : "is hexadecimal",
                      std::to_string(number));
  }
  const auto number = read_decimal(text);
  if (!number) {
    if (text.find(',') != std::string_view::npos && read_decimal(text.substr(0, text.find(','))))
      return refuse_integer_with_comma(problem, text);
    return refuse(problem, "is not an integer");
  }
  if (number->leading_zero && number->pure && number->rest.empty())
    return refuse_for(problem, "has a leading zero", without_leading_zeros(text));
  int64_t factor = 1;
  if (!number->rest.empty()) {
    const std::string_view rest = number->rest;
    const std::string head(text.substr(0, text.size() - rest.size()));
    const Suffix* suffix = find_suffix(kCounts, rest);
    if (!suffix) {
      if (rest.find(',') != std::string_view::npos) return refuse_integer_with_comma(problem, text);
      if (find_suffix(kByteUnits, rest) || rest == "KB" || rest == "b")
        return refuse(problem, "is a number of bytes in a count field",
                      "write " + head + std::string(rest.substr(0, 1) == "K" ? "k" : rest.substr(0, 1)) +
                          " or the number itself");
      if (rest == "K")
        return refuse(problem, "has the unknown suffix `K`",
                      head + "k is " + head + "000, " + head + "Ki is " + head + " * 1024");
      if (rest == "m")
        return refuse(problem, "has the unknown suffix `m`", "a million is `M`: " + head + "M");
      if (rest == "g" || rest == "t")
        return refuse(problem, "has the unknown suffix `" + std::string(rest) + "`",
                      "suffixes are k M B G T and Ki Mi Gi Ti");
      if (rest == "%") return refuse(problem, "is a percentage in an integer field");
      if (rest.front() == ' ' && find_suffix(kCounts, trim(rest)))
        return refuse_for(problem, "has a blank before its suffix", head + std::string(trim(rest)));
      return refuse(problem, "is not an integer");
    }
    if (form == NumberForm::tokens) {
      int64_t decimal = 0, binary = 0;
      const int64_t power = suffix->factor == 1'000 || suffix->factor == kKi           ? 1
                            : suffix->factor == 1'000'000 || suffix->factor == kMi     ? 2
                            : suffix->factor == 1'000'000'000 || suffix->factor == kGi ? 3
                                                                                       : 4;
      int64_t ten = 1, two = 1;
      for (int64_t i = 0; i < power; ++i) ten *= 1000, two *= 1024;
      const bool both =
          to_integer(*number, ten, decimal) == Fit::fits && to_integer(*number, two, binary) == Fit::fits;
      return refuse(problem, "has a suffix, which a length in tokens does not accept",
                    both ? "write " + std::to_string(decimal) + " or " + std::to_string(binary)
                         : "write the number itself");
    }
    factor = suffix->factor;
  }
  return scaled_integer(*number, factor, "is not an integer", problem);
}

std::optional<double> real_from_text(std::string_view text, const FieldInfo& field, TextProblem& problem) {
  std::string_view bare = text;
  bool negative = false;
  if (!bare.empty() && (bare[0] == '-' || bare[0] == '+')) {
    negative = bare[0] == '-';
    bare.remove_prefix(1);
  }
  std::string lower = lower_case(bare);
  if (lower.starts_with('.') && lower.size() > 1 && is_letter(lower[1])) lower.erase(0, 1);
  if (lower == "inf" || lower == "infinity") {
    if (!field.allow_inf) return refuse(problem, "is not finite");
    return negative ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
  }
  if (lower == "nan") {
    if (!field.allow_nan) return refuse(problem, "is not a number here");
    return std::numeric_limits<double>::quiet_NaN();
  }
  const auto number = read_decimal(text);
  if (!number) {
    if (text.find(',') != std::string_view::npos) return refuse_comma(problem, text);
    return refuse(problem, "is not a number");
  }
  if (number->leading_zero && number->pure && number->rest.empty())
    return refuse_for(problem, "has a leading zero", without_leading_zeros(text));
  std::string digits;
  for (const char c : text.substr(0, text.size() - number->rest.size()))
    if (c != '_' && c != '+') digits += c;
  if (!number->rest.empty()) {
    const Suffix* suffix = find_suffix(kCounts, number->rest);
    const bool exponent = digits.find_first_of("eE") != std::string::npos;
    if (number->rest == "%" && field.form == NumberForm::fraction && !exponent) {
      digits += "e-2";
    } else if (number->rest == "%") {
      const auto value = parse_double(digits + (exponent ? "" : "e-2"));
      if (value && !exponent) return refuse_for(problem, "is a percentage", to_text(*value));
      return refuse(problem, "is a percentage", "write a plain number");
    } else if (suffix && field.form == NumberForm::count) {
      const auto value = parse_double(digits);
      if (!value) return refuse(problem, "is not a number");
      return *value * static_cast<double>(suffix->factor);
    } else if (suffix) {
      const auto value = parse_double(digits);
      if (!value) return refuse(problem, "has a suffix, which this field does not accept");
      return refuse_for(problem, "has a suffix, which this field does not accept",
                        to_text(*value * static_cast<double>(suffix->factor)));
    } else if (number->rest.front() == ',') {
      return refuse_comma(problem, text);
    } else {
      return refuse(problem, "is not a number");
    }
  }
  double value = 0;
  const char* last = digits.data() + digits.size();
  const auto [end, error] = std::from_chars(digits.data(), last, value);
  if (error == std::errc::result_out_of_range) {
    if (number->digits.empty()) return 0.0;
    const int64_t magnitude = number->exponent + static_cast<int64_t>(number->digits.size());
    if (magnitude > 0) return refuse(problem, "does not fit a double", "the largest is about 1.8e308");
    problem = {"is too small for a double and becomes 0", "", true};
    return 0.0;
  }
  if (error != std::errc{} || end != last) return refuse(problem, "is not a number");
  return value;
}

std::optional<int64_t> bytes_from_text(std::string_view text, TextProblem& problem) {
  const auto number = read_decimal(text);
  if (!number) return refuse(problem, "is not a number of bytes", "write for instance 512MiB or 4GB");
  const std::string head(text.substr(0, text.size() - number->rest.size()));
  if (number->leading_zero && number->pure && number->rest.empty())
    return refuse_for(problem, "has a leading zero", without_leading_zeros(text));
  int64_t factor = 1;
  if (!number->rest.empty()) {
    const Suffix* suffix = find_suffix(kByteUnits, number->rest);
    if (!suffix) {
      const char first = number->rest.front();
      const std::string_view unit = number->rest;
      if ((unit.size() == 1 || (unit.size() == 2 && (unit[1] == 'B' || unit[1] == 'i' || unit[1] == 'b'))) &&
          std::string_view("kKMGT").find(first) != std::string_view::npos) {
        const std::string decimal(1, first == 'K' ? 'k' : first), binary(1, first == 'k' ? 'K' : first);
        return refuse(
            problem, "is ambiguous",
            "write " + head + decimal + "B (powers of 1000) or " + head + binary + "iB (powers of 1024)");
      }
      return refuse(problem, "is not a number of bytes", "units are B kB MB GB TB and KiB MiB GiB TiB");
    }
    factor = suffix->factor;
  }
  return scaled_integer(*number, factor, "is not an integer number of bytes", problem,
                        "use a smaller unit: 3174MiB is about 3.1GiB");
}

std::optional<double> duration_from_text(std::string_view text, std::string_view default_unit,
                                         TextProblem& problem) {
  if (all_digits_and(text, ':')) {
    const auto parts = split(text, ':');
    static constexpr const char* units[] = {"h", "m", "s"};
    std::string clock, minutes;
    for (size_t i = 0; i < parts.size() && i < 3; ++i) {
      clock += std::string(parts[i]) + units[i];
      if (i + 1 < 3) minutes += std::string(parts[i]) + units[i + 1];
    }
    if (parts.size() == 3) return refuse_for(problem, "is not a duration", clock);
    if (parts.size() == 2) return refuse(problem, "is not a duration", "write " + clock + " or " + minutes);
    return refuse(problem, "is not a duration");
  }
  const auto unit_seconds = [](std::string_view unit) -> double {
    return unit == "ms"  ? 1e-3
           : unit == "s" ? 1
           : unit == "m" ? 60
           : unit == "h" ? 3600
           : unit == "d" ? 86400
                         : 0;
  };
  double total = 0, last_unit = std::numeric_limits<double>::infinity();
  std::string_view rest = text;
  if (rest.empty()) return refuse(problem, "is not a duration", "write for instance 90s, 5m or 1h30m");
  for (bool first = true; !rest.empty(); first = false) {
    const auto number = read_decimal(rest);
    if (!number || (number->negative && !first))
      return refuse(problem, "is not a duration", "write for instance 90s, 5m or 1h30m");
    std::string digits;
    for (const char c : rest.substr(0, rest.size() - number->rest.size()))
      if (c != '_' && c != '+') digits += c;
    const auto value = parse_double(digits);
    if (!value) return refuse(problem, "is not a duration");
    size_t end = 0;
    while (end < number->rest.size() && is_letter(number->rest[end])) ++end;
    const std::string_view unit = number->rest.substr(0, end);
    if (unit.empty() && first && number->rest.empty()) {
      if (default_unit.empty())
        return refuse(problem, "has no unit", "write " + digits + "s, " + digits + "m or " + digits + "h");
      return *value * unit_seconds(default_unit);
    }
    const double seconds = unit_seconds(unit);
    if (seconds == 0) {
      if (unit == "M") return refuse(problem, "is not a duration", "minutes are `m`: " + digits + "m");
      return refuse(problem, "is not a duration", "units are ms s m h d, for instance 1h30m");
    }
    if (seconds >= last_unit)
      return refuse(problem, "is not a duration", "units go from large to small, each once: 1h30m");
    last_unit = seconds;
    total += *value * seconds;
    rest = number->rest.substr(end);
  }
  if (!std::isfinite(total)) return refuse(problem, "is not a duration");
  return text[0] == '-' && total > 0 ? -total : total;
}

}  // namespace capstan::config
