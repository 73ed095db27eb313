// The definition as overrides of a recipe, and written out as a file.
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "config/core/emit.hpp"
#include "config/core/library.hpp"
#include "sweep/definition.hpp"
#include "sweep/values.hpp"

namespace capstan::sweep {

namespace fs = std::filesystem;
using config::Diagnostic;

namespace {

// Splits at commas outside brackets and quotes.
std::vector<std::string> parts_of(std::string_view text) {
  std::vector<std::string> parts(1);
  int depth = 0;
  char quote = 0;
  for (const char c : text) {
    if (quote) {
      if (c == quote) quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '(' || c == '[' || c == '{') {
      ++depth;
    } else if (c == ')' || c == ']' || c == '}') {
      --depth;
    } else if (c == ',' && depth == 0) {
      parts.emplace_back();
      continue;
    }
    parts.back() += c;
  }
  for (std::string& part : parts) part = trim(part);
  return parts;
}

struct SweepFunction {
  std::string name;
  std::vector<std::string> arguments;
};
// "interval(1e-4,1e-3)"; nullopt: no call.
std::optional<SweepFunction> parse_function(std::string_view text) {
  const size_t open = text.find('(');
  if (open == std::string_view::npos || open == 0 || !text.ends_with(')')) return std::nullopt;
  const std::string name(text.substr(0, open));
  if (name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_") != std::string::npos) return std::nullopt;
  return SweepFunction{name, parts_of(text.substr(open + 1, text.size() - open - 2))};
}

// A value in a file: bare where YAML leaves it alone.
std::string yaml_value(const std::string& value) {
  const char first = value.empty() ? '%' : value[0];
  const bool plain = first != '%' && value.find_first_not_of(
                                         "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                         "_.+-/%") == std::string::npos;
  const bool quoted = first == '"' || (first == '\'' && value.size() > 1 && value.back() == '\'');
  return plain || quoted || first == '[' || first == '{' ? value : in_quotes(value);
}

std::string yaml_list(const std::vector<std::string>& values) {
  std::vector<std::string> items;
  for (const std::string& value : values) items.push_back(yaml_value(value));
  return "[" + join(items, ", ") + "]";
}

// Reads overrides into a definition; diagnostics point into a `<cli>` source.
class OverrideReader {
 public:
  OverrideReader(ParsedDefinition& out, bool planned) : out_(out), d_(out.definition), planned_(planned) {}

  void read(const std::vector<config::Override>& overrides) {
    out_.sources.push_back({config::Source::Kind::cli, "<cli>", "", ""});
    for (const config::Override& word : overrides) {
      std::string line = word.text;
      std::replace(line.begin(), line.end(), '\n', ' ');
      out_.sources[0].text += line + "\n";
      ++line_;
      std::string text = word.text;
      if (word.kind == config::Override::Kind::file) text = "@" + text;
      if (word.kind == config::Override::Kind::unset) text = "~" + text;
      if (const size_t at = text.find('='); word.kind == config::Override::Kind::append && at != text.npos)
        text.insert(at, "+");
      read(text);
    }
  }

 private:
  Diagnostic& error(std::string message) { return out_.error({0, line_, 1, 1}, std::move(message)); }

  bool is_axis(const std::string& path) const {
    return std::any_of(d_.axes.begin(), d_.axes.end(), [&](const Axis& axis) { return axis.path == path; });
  }
  void set(const std::string& word) {
    if (planned_)
      error("`" + word + "` would change every trial of the sweep")
          .help("an axis has several values: a,b; to change the base, plan another sweep");
    d_.set.push_back(word);
  }

  void read(const std::string& word) {
    const size_t at = word.find('=');
    const std::string path = word.substr(0, at);
    if (at == std::string::npos || path.empty() || path.find_first_of("+~@ -") == 0 || path.ends_with('+')) {
      set(word);
      return;
    }
    const std::string value(trim(std::string_view(word).substr(at + 1)));
    const auto target = find_target(path);
    Axis axis;
    axis.path = target ? target->path : path;
    axis.kind = target && !target->field ? AxisKind::preset : AxisKind::list;
    if (const auto call = parse_function(value)) {
      if (!expand(axis, *call)) return;
    } else if (const auto parts = parts_of(value); parts.size() > 1) {
      if (std::any_of(parts.begin(), parts.end(), [](const auto& part) { return part.empty(); }))
        error("an empty value in `" + word + "`").help("an empty text is written \"\"");
      axis.values = parts;
    } else if (planned_ && (axis.path == kSeedPath || is_axis(axis.path))) {
      axis.values = {value};
    } else {
      set(word);
      return;
    }
    if (axis.path == kSeedPath && !axis.continuous()) {
      for (const std::string& text : axis.values) {
        const auto seed = parse_int(text);
        if (!seed)
          error("`" + text + "` is not a seed");
        else if (std::find(d_.seeds.begin(), d_.seeds.end(), *seed) == d_.seeds.end())
          d_.seeds.push_back(*seed);
      }
      return;
    }
    merge(std::move(axis));
  }

  void merge(Axis axis) {
    const auto same =
        std::find_if(d_.axes.begin(), d_.axes.end(), [&](const Axis& a) { return a.path == axis.path; });
    if (same == d_.axes.end()) {
      d_.axes.push_back(std::move(axis));
      return;
    }
    if (same->continuous() || axis.continuous()) {
      error("the axis `" + axis.path + "` is a continuous range: it has no list of values to extend")
          .help("more `trials` draw more points");
      return;
    }
    for (std::string& value : axis.values)
      if (std::find(same->values.begin(), same->values.end(), value) == same->values.end())
        same->values.push_back(std::move(value));
    if (same->kind != AxisKind::preset) same->kind = AxisKind::list;
  }

  bool expand(Axis& axis, const SweepFunction& call) {
    const auto& given = call.arguments;
    const auto wrong = [&](const std::string& form) {
      error("`" + call.name + "` takes " + form);
      return false;
    };
    if (call.name == "choice" || call.name == "shuffle") {
      axis.values = given;
      return given.size() == 1 && given[0].empty() ? wrong("values: choice(a,b)") : true;
    }
    if (call.name == "glob") return glob(axis, given);
    // For example tag(log, interval(a, b)).
    if (call.name == "tag") {
      const auto inner = given.size() >= 2 ? parse_function(given.back()) : std::nullopt;
      if (!inner || !expand(axis, *inner))
        return inner ? false : wrong("tags and a range: tag(log,interval(1e-4,1e-3))");
      for (size_t i = 0; i + 1 < given.size(); ++i) {
        if (given[i] == "log")
          axis.kind = AxisKind::log;
        else if (given[i] != "int" && given[i] != "float")
          error("unknown tag `" + given[i] + "`").help("known: log");
      }
      return true;
    }
    const bool range = call.name == "range";
    const bool log = call.name == "loguniform" || call.name == "log";
    if (!range && !log && call.name != "interval" && call.name != "uniform" && call.name != "linear") {
      error("there is no sweep function `" + call.name + "`")
          .help(
              "the functions are choice, range, interval, uniform, loguniform, log, linear, tag and glob; "
              "put a text "
              "with brackets in quotes");
      return false;
    }
    std::vector<double> numbers;
    for (std::string argument : given) {
      if (const size_t at = argument.find('='); at != std::string::npos) argument = argument.substr(at + 1);
      const auto number = number_of(trim(argument));
      if (!number) {
        error("`" + argument + "` is not a number");
        return false;
      }
      numbers.push_back(*number);
    }
    if (numbers.size() != 2 && numbers.size() != 3)
      return wrong(range ? "start, stop and a step: range(1,9,2)"
                         : "two bounds, and the number of points: " + call.name + "(1e-4,1e-3,4)");
    // A range is half-open.
    if (range) {
      const double step = numbers.size() == 3 ? numbers[2] : 1;
      if (!(step > 0) || !(numbers[0] < numbers[1]) || (numbers[1] - numbers[0]) / step > kMaxPoints)
        return wrong("a start below the stop, and a step above 0");
      for (const double value : range_points(numbers[0], numbers[1], step))
        axis.values.push_back(point_text(value, value == std::floor(value)));
      return true;
    }
    axis.kind = log ? AxisKind::log : AxisKind::linear;
    axis.low = numbers[0], axis.high = numbers[1];
    if (numbers.size() == 2) return true;
    const double points = numbers[2];
    if (points != std::floor(points) || points < 2 || points > kMaxValues)
      return wrong("as its third argument the number of points, from 2 to " + std::to_string(kMaxValues));
    axis.points = static_cast<int64_t>(points);
    return true;
  }

  bool glob(Axis& axis, const std::vector<std::string>& patterns) {
    if (axis.kind != AxisKind::preset) {
      error("`glob` lists the presets of a section, and `" + axis.path + "` is a field")
          .help("list its values: a,b");
      return false;
    }
    std::vector<std::string> names;
    for (const auto& preset : config::Library::standard().presets(axis.path)) {
      names.push_back(preset.name);
      for (const std::string& pattern : patterns)
        if (::fnmatch(pattern.c_str(), preset.name.c_str(), 0) == 0) {
          axis.values.push_back(preset.name);
          break;
        }
    }
    if (axis.values.empty())
      error("no preset of `" + axis.path + "` matches").help("its presets: " + join(names, ", "));
    return !axis.values.empty();
  }

  ParsedDefinition& out_;
  Definition& d_;
  bool planned_;
  int line_ = 0;
};

std::string yaml_axis(const Axis& axis) {
  if (axis.kind == AxisKind::list || axis.kind == AxisKind::preset) return yaml_list(axis.values);
  int64_t points = axis.points;
  bool regular = true;
  if (!axis.continuous()) {
    points = static_cast<int64_t>(axis.values.size());
    const bool integer = axis.values.front().find_first_of(".e") == std::string::npos &&
                         axis.values.back().find_first_of(".e") == std::string::npos;
    for (int64_t i = 0; i < points && regular; ++i)
      regular =
          points > 1 &&
          number_of(axis.values[static_cast<size_t>(i)]) ==
              number_of(point_text(
                  at_fraction(axis, static_cast<double>(i) / static_cast<double>(points - 1)), integer));
  }
  if (!regular) return yaml_list(axis.values);
  return "{" + std::string(name_of(axis.kind)) + ": [" + to_text(axis.low) + ", " + to_text(axis.high) + "]" +
         (points > 0 ? ", n: " + std::to_string(points) : "") + "}";
}

std::string yaml_condition(const Condition& condition) {
  if (condition.kind != Condition::Kind::equal)
    return in_quotes(std::string(sign_of(condition.kind)) + condition.values.front());
  return condition.values.size() == 1 ? yaml_value(condition.values[0]) : yaml_list(condition.values);
}

// The fields that differ from their defaults.
config::Value changed_fields(const config::RecordInfo& table, const void* object) {
  config::Value changed = config::Value::map();
  for (const config::FieldInfo& field : table.fields) {
    const void* member = static_cast<const char*>(object) + field.offset;
    config::Value value = field.type->load(member);
    if (value == field.default_value) continue;
    changed.add(field.name,
                field.type->record ? changed_fields(*field.type->record, member) : std::move(value));
  }
  return changed;
}

std::string yaml_of(Definition d, bool write_method) {
  if (!d.metric.named) d.metric.name.clear();
  const config::RecordInfo& table = definition_fields();
  const config::Value fields = changed_fields(table, &d);
  std::string out = "schema: " + std::string(kDefinitionSchema) + "\n";
  for (size_t i = 0; i < fields.items.size(); ++i)
    out += fields.keys[i] + ": " +
           config::yaml_inline(*table.find(fields.keys[i])->type, fields.items[i], {.recipe = false}) + "\n";
  // The default, unless an axis that is added takes any value.
  if (write_method && d.method == Method::grid) out += "method: grid\n";
  if (!d.axes.empty()) out += "axes:\n";
  for (const Axis& axis : d.axes) out += "  " + axis.path + ": " + yaml_axis(axis) + "\n";
  const auto add_rows = [&](const char* key, const auto& rows, auto text_of_item) {
    if (!rows.empty()) out += std::string(key) + ":\n";
    for (const auto& row : rows) {
      std::vector<std::string> items;
      for (const auto& item : row) items.push_back(text_of_item(item));
      out += "  - {" + join(items, ", ") + "}\n";
    }
  };
  add_rows("link", d.link, [](const auto& item) { return item.first + ": " + yaml_value(item.second); });
  add_rows("exclude", d.exclude,
           [](const Condition& item) { return item.path + ": " + yaml_condition(item); });
  return out;
}

ParsedDefinition parse_again(ParsedDefinition reading, bool write_method) {
  if (!reading.ok()) return reading;
  return read_definition_text(yaml_of(reading.definition, write_method), reading.definition.directory,
                              "<sweep>");
}

}  // namespace

std::string to_yaml(const Definition& definition) {
  return yaml_of(definition, true);
}

ParsedDefinition definition_from_overrides(const SweepOverrides& given) {
  ParsedDefinition reading;
  Definition& d = reading.definition;
  std::error_code ignored;
  d.directory = fs::current_path(ignored).string();
  d.base = given.recipe;
  d.name = fs::path(given.recipe).stem().string();
  d.trials = given.trials;
  d.seed = given.seed.value_or(0);
  OverrideReader(reading, false).read(given.overrides);
  if (reading.ok() && d.axes.empty() && d.seeds.empty()) {
    if (!fs::exists(given.recipe, ignored) && fs::path(given.recipe).extension().string().starts_with(".y"))
      fail(ErrorCode::not_found, not_found_text("sweep file", given.recipe),
           near_paths_help(near_paths(given.recipe)));
    const auto library = config::Library::standard();
    const bool is_name = given.recipe.find('/') == std::string::npos && given.recipe != "-";
    if (is_name && !fs::exists(given.recipe, ignored) && !library.recipe(given.recipe))
      config::fail_no_recipe(library, given.recipe);
    Diagnostic& nothing = reading.error({}, "nothing varies: no field has several values");
    nothing.help("name an axis, for example `optimizer.lr=1e-4,3e-4`");
    if (fs::exists(given.recipe, ignored))
      nothing.help("`" + given.recipe +
                   "` is read as the recipe to vary: a sweep file begins with `schema: " +
                   std::string(kDefinitionSchema) + "`");
  }
  // A range without a number of points is sampled; so is a grid with `trials`.
  return parse_again(std::move(reading), false);
}

ParsedDefinition extended(const Definition& before, const SweepOverrides& more, bool planned) {
  ParsedDefinition reading;
  reading.definition = before;
  if (more.trials) reading.definition.trials = more.trials;
  if (more.seed) reading.definition.seed = *more.seed;
  OverrideReader(reading, planned).read(more.overrides);
  return parse_again(std::move(reading), true);
}

}  // namespace capstan::sweep
