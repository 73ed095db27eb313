#include "config/core/emit.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "base/text.hpp"
#include "base/utf8.hpp"
#include "config/core/external.hpp"

namespace capstan::config {

namespace {

std::string duration_text(double seconds) {
  if (!std::isfinite(seconds)) return to_text(seconds);
  if (seconds < 60 || std::floor(seconds) != seconds || seconds > 1e12) return to_text(seconds) + "s";
  const auto total = static_cast<int64_t>(seconds);
  std::string out;
  if (total >= 3600) out += std::to_string(total / 3600) + "h";
  if (total % 3600 >= 60) out += std::to_string(total % 3600 / 60) + "m";
  if (total % 60) out += std::to_string(total % 60) + "s";
  return out;
}

std::string bytes_text(int64_t bytes) {
  static constexpr std::array units{"TiB", "GiB", "MiB", "KiB"};
  int64_t size = int64_t{1} << 40;
  for (const char* unit : units) {
    if (bytes != 0 && bytes % size == 0 && bytes / size < 100'000) return std::to_string(bytes / size) + unit;
    size >>= 10;
  }
  return std::to_string(bytes);
}

// The shortest digits that round-trip, spelled so that YAML 1.1 also reads a number: it needs a point before
// an exponent.
std::string real_text(double value) {
  if (!std::isfinite(value)) return to_text(value);
  if (value == 0) return std::signbit(value) ? "-0.0" : "0";
  std::array<char, 400> buffer;
  const double size = std::abs(value);
  const bool fixed = size >= 1e-4 && size < 1e16;
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                          fixed ? std::chars_format::fixed : std::chars_format::scientific);
  std::string text(buffer.data(), end);
  const size_t exponent = text.find('e');
  if (exponent != std::string::npos && text.find('.') == std::string::npos) text.insert(exponent, ".0");
  return text;
}

// Would YAML 1.1 or 1.2 read this plain text as null, a boolean, a number, a time or a merge key?
bool reads_as_other_type(std::string_view text) {
  const std::string word = lower_case(text.substr(0, 12));
  for (const std::string_view other :
       {"~",  "null", "true", "false", "yes",   "no",   "on",  "off",  "y",    "n",  "none",
        "<<", "=",    ".inf", "-.inf", "+.inf", ".nan", "inf", "-inf", "+inf", "nan"})
    if (word == other && text.size() == other.size()) return true;
  const size_t sign = text[0] == '+' || text[0] == '-' ? 1 : 0;
  if (sign >= text.size()) return true;
  const bool starts =
      is_digit(text[sign]) || (text[sign] == '.' && sign + 1 < text.size() && is_digit(text[sign + 1]));
  return starts &&
         text.find_first_not_of("0123456789abcdefABCDEFxXoO_.:+-tTzZ kMGTBimsh%") == std::string_view::npos;
}

bool needs_double_quotes(std::string_view text) {
  for (const char c : text)
    if (is_control(c)) return true;
  // Characters that YAML takes for line ends or refuses to print.
  return text.find("\xC2\x85") != std::string_view::npos ||
         text.find("\xE2\x80\xA8") != std::string_view::npos ||
         text.find("\xE2\x80\xA9") != std::string_view::npos ||
         text.find(kByteOrderMark) != std::string_view::npos ||
         text.find("\xEF\xBF\xBE") != std::string_view::npos ||
         text.find("\xEF\xBF\xBF") != std::string_view::npos;
}

std::string double_quoted(std::string_view text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const std::string_view rest = text.substr(i);
    if (c == '"' || c == '\\')
      out += '\\', out += c;
    else if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else if (c == '\r')
      out += "\\r";
    else if (is_control(c)) {
      std::array<char, 8> buffer;
      std::snprintf(buffer.data(), buffer.size(), "\\x%02X", static_cast<unsigned>(c));
      out += buffer.data();
    } else if (rest.starts_with("\xC2\x85"))
      out += "\\u0085", i += 1;
    else if (rest.starts_with("\xE2\x80\xA8"))
      out += "\\u2028", i += 2;
    else if (rest.starts_with("\xE2\x80\xA9"))
      out += "\\u2029", i += 2;
    else if (rest.starts_with(kByteOrderMark))
      out += "\\uFEFF", i += 2;
    else if (rest.starts_with("\xEF\xBF\xBE"))
      out += "\\uFFFE", i += 2;
    else if (rest.starts_with("\xEF\xBF\xBF"))
      out += "\\uFFFF", i += 2;
    else
      out += c;
  }
  return out + "\"";
}

std::string single_quoted(std::string_view text) {
  std::string out = "'";
  for (const char c : text) {
    out += c;
    if (c == '\'') out += '\'';
  }
  return out + "'";
}

std::string escaped(std::string text, bool recipe) {
  if (!recipe) return text;
  for (size_t at = text.find("${"); at != std::string::npos; at = text.find("${", at + 3))
    text.insert(at, 1, '\\');
  return text;
}

bool is_text(const Type& type) {
  return type.kind == Type::Kind::text || type.kind == Type::Kind::path ||
         type.kind == Type::Kind::enumeration || type.kind == Type::Kind::secret;
}

std::string yaml_scalar(const Type& of_field, const Value& value, bool flow, const EmitOptions& options) {
  const Type& type = of_field.type_for(value);
  if (value.is_null()) return "null";
  if (!is_text(type)) {
    const std::string text = scalar_text(type, value);
    if (value.kind == Value::Kind::real && !std::isfinite(value.real))
      return std::isnan(value.real) ? ".nan" : value.real < 0 ? "-.inf" : ".inf";
    return text;
  }
  if (type.kind == Type::Kind::secret) {
    if (value.text.starts_with("env:")) return single_quoted("${env:" + value.text.substr(4) + "}");
    return yaml_text(value.text, flow);
  }
  std::string text = value.text;
  if (type.kind == Type::Kind::path && !value.resolved.empty()) {
    if (options.absolute_paths)
      text = value.resolved;
    else if (!options.directory.empty())
      text = relative_name(text, value.resolved, options.directory);
  }
  // An enum is read by its name alone: quoting a name such as `none` would change nothing.
  return yaml_text(escaped(text, options.recipe), flow);
}

const Type& element_type(const Type& type, const std::string& key) {
  if (type.kind == Type::Kind::record) {
    const FieldInfo* field = type.record->find(key);
    if (field) return *field->type;
  }
  return *type.element;
}

}  // namespace

std::string scalar_text(const Type& of_field, const Value& value) {
  const Type& type = of_field.type_for(value);
  switch (value.kind) {
    case Value::Kind::null:
      return "null";
    case Value::Kind::boolean:
      return value.boolean ? "true" : "false";
    case Value::Kind::integer:
      return type.kind == Type::Kind::bytes ? bytes_text(value.integer) : std::to_string(value.integer);
    case Value::Kind::real:
      return type.kind == Type::Kind::duration ? duration_text(value.real) : real_text(value.real);
    default:
      return value.text;
  }
}

std::string yaml_text(std::string_view text, bool flow) {
  if (text.empty()) return "\"\"";
  if (needs_double_quotes(text)) return double_quoted(text);
  const char first = text.front(), last = text.back();
  bool quote = reads_as_other_type(text) || first == ' ' || last == ' ' || last == ':' ||
               std::string_view("-?:,[]{}#&*!|>'\"%@`").find(first) != std::string_view::npos ||
               text.find(": ") != std::string_view::npos || text.find(" #") != std::string_view::npos ||
               text.starts_with("---") || text.starts_with("...");
  // yaml-cpp 0.7 ends a text at `?` there.
  if (flow && text.find_first_of(",[]{}:?") != std::string_view::npos) quote = true;
  return quote ? single_quoted(text) : std::string(text);
}

std::string yaml_inline(const Type& type, const Value& value, const EmitOptions& options) {
  if (value.kind == Value::Kind::list) {
    std::string out = "[";
    for (size_t i = 0; i < value.items.size(); ++i) {
      const bool nested = value.items[i].kind == Value::Kind::list || value.items[i].kind == Value::Kind::map;
      out += (i ? ", " : "") + (nested ? yaml_inline(*type.element, value.items[i], options)
                                       : yaml_scalar(*type.element, value.items[i], true, options));
    }
    return out + "]";
  }
  if (value.kind == Value::Kind::map) {
    std::string out = "{";
    for (size_t i = 0; i < value.items.size(); ++i) {
      const Type& element = element_type(type, value.keys[i]);
      const bool nested = value.items[i].kind == Value::Kind::list || value.items[i].kind == Value::Kind::map;
      out += (i ? ", " : "") + yaml_text(value.keys[i], true) + ": " +
             (nested ? yaml_inline(element, value.items[i], options)
                     : yaml_scalar(element, value.items[i], true, options));
    }
    return out + "}";
  }
  return yaml_scalar(type, value, false, options);
}

std::string yaml_block(const Type& type, const Value& value, int indent, const EmitOptions& options) {
  const bool collection = value.kind == Value::Kind::list || value.kind == Value::Kind::map;
  const std::string line = yaml_inline(type, value, options);
  if (!collection || value.items.empty() ||
      (static_cast<int>(line.size()) + indent < 100 && value.kind == Value::Kind::list))
    return " " + line + "\n";
  std::string out = "\n";
  const std::string blank(static_cast<size_t>(indent) + 2, ' ');
  for (size_t i = 0; i < value.items.size(); ++i) {
    if (value.kind == Value::Kind::list) {
      out += blank + "- " + yaml_inline(*type.element, value.items[i], options) + "\n";
    } else {
      const Type& element = element_type(type, value.keys[i]);
      out +=
          blank + yaml_text(value.keys[i]) + ":" + yaml_block(element, value.items[i], indent + 2, options);
    }
  }
  return out;
}

std::string json(const Type& type, const Value& value, int indent, int level) {
  const auto newline = [&](int depth) {
    return indent < 0 ? std::string() : "\n" + std::string(static_cast<size_t>(indent * depth), ' ');
  };
  switch (value.kind) {
    case Value::Kind::null:
      return "null";
    case Value::Kind::boolean:
      return value.boolean ? "true" : "false";
    case Value::Kind::integer:
      return std::to_string(value.integer);
    case Value::Kind::real:
      if (type.kind == Type::Kind::duration) return in_quotes(duration_text(value.real));
      if (!std::isfinite(value.real)) return in_quotes(to_text(value.real));
      return real_text(value.real);
    case Value::Kind::text:
      return in_quotes(value.text);
    case Value::Kind::list: {
      std::string out = "[";
      for (size_t i = 0; i < value.items.size(); ++i)
        out += (i ? (indent < 0 ? "," : ", ") : "") + json(*type.element, value.items[i]);
      return out + "]";
    }
    case Value::Kind::map: {
      std::string out = "{";
      for (size_t i = 0; i < value.items.size(); ++i)
        out += (i ? "," : "") + newline(level + 1) + in_quotes(value.keys[i]) + (indent < 0 ? ":" : ": ") +
               json(element_type(type, value.keys[i]), value.items[i], indent, level + 1);
      return out + (value.items.empty() ? "" : newline(level)) + "}";
    }
  }
  return "null";
}

}  // namespace capstan::config
