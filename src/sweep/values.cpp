#include "sweep/values.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/text.hpp"
#include "config/core/compose.hpp"
#include "config/core/convert.hpp"

namespace capstan::sweep {

using config::Node;

std::optional<AxisTarget> find_target(std::string_view path) {
  const config::Schema& schema = config::schema();
  if (const config::FieldInfo* field = schema.find_spelling(path))
    return AxisTarget{field->path, field, false};
  if (path.empty()) return std::nullopt;
  if (schema.find_section(path)) return AxisTarget{std::string(path), nullptr, false};
  for (size_t end = path.find_last_of(".["); end != std::string_view::npos && end > 0;
       end = path.find_last_of(".[", end - 1)) {
    const config::FieldInfo* field = schema.find_spelling(path.substr(0, end));
    using Kind = config::Type::Kind;
    if (field && (field->type->kind == Kind::map || field->type->kind == Kind::list))
      return AxisTarget{field->path + std::string(path.substr(end)), field, true};
  }
  return std::nullopt;
}

config::Diagnostic unknown_path(const std::string& path, config::SourceLocation location) {
  const size_t dot = path.find('.');
  const bool field = dot != std::string::npos && dot > 0;
  return config::unknown_key(config::schema(), field ? path.substr(0, dot) : "",
                             field ? path.substr(dot + 1) : path, location);
}

std::string near_help(std::string_view name, const std::vector<std::string>& known,
                      std::string_view otherwise) {
  const auto near = near_matches(name, known);
  return near.empty() ? std::string(otherwise) + join(known, ", ")
                      : "did you mean `" + join(near, "`, `") + "`?";
}

std::string described(const config::Diagnostic& diagnostic) {
  std::string text = std::string(config::level_name(diagnostic.level)) +
                     (diagnostic.code.empty() ? "" : "[" + diagnostic.code + "]") + ": " + diagnostic.message;
  for (const std::string& note : diagnostic.notes) text += "; " + note;
  for (const std::string& help : diagnostic.helps) text += "; " + help;
  return text;
}
std::string errors_text(const std::vector<config::Diagnostic>& diagnostics,
                        const std::vector<config::Source>& sources) {
  std::string text;
  for (const config::Diagnostic& one : diagnostics)
    if (one.level == config::Level::error)
      text += "\n    " + (one.location.known() ? config::location_text(one.location, sources) + ": " : "") +
              described(one);
  return text;
}

std::string value_of(const Values& values, std::string_view path) {
  for (const auto& [name, value] : values)
    if (name == path) return value;
  return {};
}
std::string text_of(const Values& values, std::optional<int64_t> seed) {
  std::vector<std::string> parts;
  for (const auto& [path, value] : values) parts.push_back(path + "=" + value);
  if (seed) parts.push_back(std::string(kSeedPath) + "=" + std::to_string(*seed));
  return join(parts, " ");
}

std::string path_of_override(std::string_view word) {
  if (word.starts_with('@')) return {};
  word.remove_prefix(std::min(word.find_first_not_of("+~"), word.size()));
  word = word.substr(0, word.find('='));
  if (word.ends_with('+')) word.remove_suffix(1);
  return std::string(trim(word));
}

std::string override_value(const Node& node) {
  switch (node.kind) {
    case Node::Kind::null:
      return "null";
    case Node::Kind::scalar: {
      // Bare texts are typed by their field; only what the grammar of overrides would split needs quotes.
      const bool plain = !node.text.empty() &&
                         node.text.find_first_of(",[]{}:\"'\n\\") == std::string::npos &&
                         node.text.front() != ' ' && node.text.back() != ' ';
      const bool interpolation = node.text.starts_with("${") && node.text.ends_with("}");
      return (plain || interpolation) && !node.quoted ? node.text : in_quotes(node.text);
    }
    case Node::Kind::list: {
      std::vector<std::string> items;
      for (const Node& item : node.items) items.push_back(override_value(item));
      return "[" + join(items, ", ") + "]";
    }
    case Node::Kind::map: {
      std::vector<std::string> items;
      for (size_t i = 0; i < node.items.size(); ++i)
        items.push_back(override_value(Node::scalar(node.keys[i], {})) + ": " +
                        override_value(node.items[i]));
      return "{" + join(items, ", ") + "}";
    }
  }
  return {};
}

std::optional<double> number_of(std::string_view value) {
  static const config::FieldInfo fraction = [] {
    config::FieldInfo info;
    info.form = config::NumberForm::fraction;
    return info;
  }();
  config::TextProblem problem;
  if (const auto number = config::real_from_text(value, fraction, problem)) return number;
  if (const auto number = config::integer_from_text(value, config::NumberForm::count, problem))
    return static_cast<double>(*number);
  return std::nullopt;
}

std::string point_text(double value, bool integer) {
  if (integer) return std::to_string(std::llround(value));
  std::array<char, 48> digits;
  const auto end =
      std::to_chars(digits.data(), digits.data() + digits.size(), value, std::chars_format::scientific, 5)
          .ptr;
  const double rounded = *parse_double({digits.data(), static_cast<size_t>(end - digits.data())});
  if (std::abs(rounded) < 1e-4 || std::abs(rounded) >= 1e16) return to_text(rounded);
  const auto plain =
      std::to_chars(digits.data(), digits.data() + digits.size(), rounded, std::chars_format::fixed).ptr;
  return {digits.data(), plain};
}

std::vector<double> range_points(double start, double stop, double step) {
  std::vector<double> points;
  const double end = stop - 1e-9 * step;
  for (int64_t i = 0; start + static_cast<double>(i) * step < end; ++i)
    points.push_back(start + static_cast<double>(i) * step);
  return points;
}

double at_fraction(const Axis& axis, double fraction) {
  if (fraction <= 0) return axis.low;
  if (fraction >= 1) return axis.high;
  if (axis.kind == AxisKind::log) return axis.low * std::pow(axis.high / axis.low, fraction);
  return axis.low + (axis.high - axis.low) * fraction;
}

// Longer signs first.
static constexpr std::array<std::pair<std::string_view, Condition::Kind>, 6> kSigns{
    {{">=", Condition::Kind::at_least},
     {"<=", Condition::Kind::at_most},
     {"!=", Condition::Kind::unequal},
     {"==", Condition::Kind::equal},
     {">", Condition::Kind::more},
     {"<", Condition::Kind::less}}};

std::optional<Comparison> comparison_of(std::string_view text) {
  for (const auto& [sign, kind] : kSigns)
    if (text.starts_with(sign)) return Comparison{kind, trim(text.substr(sign.size()))};
  return std::nullopt;
}
std::string_view sign_of(Condition::Kind kind) {
  return std::find_if(kSigns.begin(), kSigns.end(), [&](const auto& one) { return one.second == kind; })
      ->first;
}

static bool holds(const Condition& condition, const std::string& value) {
  const auto number = number_of(value);
  const auto equal = [&](const std::string& other) {
    const auto second = number_of(other);
    return number && second ? *number == *second : value == other;
  };
  using Kind = Condition::Kind;
  const bool any = std::any_of(condition.values.begin(), condition.values.end(), equal);
  if (condition.kind == Kind::equal) return any;
  if (condition.kind == Kind::unequal) return !any;
  const auto bound = number_of(condition.values.front());
  if (!number || !bound) return false;
  return condition.kind == Kind::less      ? *number < *bound
         : condition.kind == Kind::at_most ? *number <= *bound
         : condition.kind == Kind::more    ? *number > *bound
                                           : *number >= *bound;
}

bool holds(const std::vector<Condition>& row, const Values& point) {
  return std::all_of(row.begin(), row.end(), [&](const Condition& condition) {
    return std::any_of(point.begin(), point.end(), [&](const auto& value) {
      return value.first == condition.path && holds(condition, value.second);
    });
  });
}

}  // namespace capstan::sweep
