#include "sweep/definition.hpp"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "config/core/convert.hpp"
#include "sweep/values.hpp"

namespace capstan::sweep {

namespace fs = std::filesystem;
using config::Diagnostic;
using config::FieldInfo;
using config::Level;
using config::Node;
using config::SourceLocation;

std::string_view name_of(AxisKind kind) {
  constexpr std::array<std::string_view, 4> names{"list", "log", "linear", "preset"};
  return names[static_cast<size_t>(kind)];
}

bool Metric::set_at(std::string_view text) {
  if (text == "last" || text == "best") {
    at = text;
    window = text == "last" ? 1 : 0;
    return true;
  }
  constexpr std::string_view begin = "mean(last ";
  if (!text.starts_with(begin) || !text.ends_with(")")) return false;
  const auto rows = parse_int(trim(text.substr(begin.size(), text.size() - begin.size() - 1)));
  if (!rows || *rows < 1) return false;
  at = std::string(begin) + std::to_string(*rows) + ")";
  window = *rows;
  return true;
}

std::string ranking_text(const Metric& metric) {
  const std::string about = metric.name == "loss"       ? ", the training loss"
                            : metric.name == "val/loss" ? ", the validation loss"
                                                        : "";
  return "`" + metric.name + "` (" + metric.at + ")" + about + ", the " +
         (metric.goal == Metric::Goal::min ? "lowest" : "highest") + " first";
}

Diagnostic& ParsedDefinition::error(SourceLocation location, std::string message) {
  Diagnostic& added = diagnostics.emplace_back();
  added.message = std::move(message);
  added.location = location;
  return added;
}
void ParsedDefinition::require_ok() const {
  if (!ok()) fail(ErrorCode::config, "the sweep file has errors" + errors_text(diagnostics, sources));
}

// ---- the fields of fixed name and type

static void describe(config::Section<Metric>& s) {
  s.field("name", &Metric::name);
  s.field("goal", &Metric::goal);
  s.field("at", &Metric::at);
}
static void describe(config::Section<Asha>& s) {
  s.field("steps", &Asha::steps).min(1);
  s.field("keep", &Asha::keep).above(0).below(1).range_help("write a fraction such as 1/3");
}
static void describe(config::Section<Stop>& s) {
  s.field("asha", &Stop::asha);
  s.field("nan", &Stop::nan);
  s.field("worse_than", &Stop::worse_than);
}
static void describe(config::Section<Limits>& s) {
  s.field("per_trial", &Limits::per_trial).above(0);
  s.field("device_hours", &Limits::device_hours).above(0).alias("gpu_hours");
  s.field("retries", &Limits::retries).range(0, 1000);
}
static void describe(config::Section<Resources>& s) {
  s.field("ranks", &Resources::ranks).range(1, 1 << 20).alias("gpus");
  s.field("threads", &Resources::threads).range(1, 4096);
}
static void describe(config::Section<Definition>& s) {
  s.field("name", &Definition::name);
  s.field("base", &Definition::base);
  s.field("set", &Definition::set);
  s.field("seeds", &Definition::seeds).min(0);
  s.field("method", &Definition::method);
  s.field("trials", &Definition::trials).range(1, kMaxPoints);
  s.field("seed", &Definition::seed).min(0);
  s.field("metric", &Definition::metric);
  s.field("stop", &Definition::stop);
  s.field("limits", &Definition::limits);
  s.field("resources", &Definition::resources);
}

const config::RecordInfo& definition_fields() {
  return *config::type_of<Definition>().record;
}

// An axis that is no list: one of the three, and `n`.
struct RangeFields {
  std::vector<double> log, linear, range;
  std::optional<int64_t> n;
};
static void describe(config::Section<RangeFields>& s) {
  s.field("log", &RangeFields::log);
  s.field("linear", &RangeFields::linear);
  s.field("range", &RangeFields::range);
  s.field("n", &RangeFields::n).range(2, kMaxValues);
}

namespace {

// Quotes mean nothing to these fields, and `keep` may be a quotient.
void simplify(Node& node, std::string_view key) {
  node.quoted = false;
  if (const auto parts = split(node.text, '/'); key == "keep" && parts.size() == 2) {
    const auto upper = parse_double(trim(parts[0])), lower = parse_double(trim(parts[1]));
    if (upper && lower) node.text = to_text(*upper / *lower);
  }
  for (size_t i = 0; i < node.items.size(); ++i)
    simplify(node.items[i], node.kind == Node::Kind::map ? std::string_view(node.keys[i]) : "");
}

class Reader {
 public:
  Reader(ParsedDefinition& out, const Node& root) : out_(out), root_(root) {}

  void run() {
    if (const Node* node = root_.find("schema"); !node || node->text != kDefinitionSchema)
      out_.error(node ? node->location : root_.location,
                 node ? "`" + node->text + "` is not a sweep format that this version reads"
                      : std::string("`schema` is missing"))
          .help("write `schema: " + std::string(kDefinitionSchema) + "`");
    read_fields(definition_fields(), &d_, root_, "", {"schema", "axes", "link", "exclude"});
    if (d_.name.find('/') != std::string::npos || d_.name.starts_with('.'))
      out_.error(root_.find("name")->location,
                 "the name of a sweep must not contain `/` or begin with a dot");
    if (d_.base.empty())
      out_.error(root_.location, "`base` is missing").help("name the recipe to vary: `base: quickstart`");
    check_set();
    if (const Node* node = of_kind("axes", Node::Kind::map, "a mapping"))
      for (size_t i = 0; i < node->items.size(); ++i)
        read_axis(node->keys[i], node->key_locations[i], node->items[i]);
    read_link();
    check_seeds();
    check_method();
    read_exclude();
    check_metric();
    check_stop();
    if (d_.axes.empty() && d_.link.empty() && d_.seeds.empty() && out_.ok())
      out_.error(root_.location, "nothing varies: there are neither `axes` nor `link` nor `seeds`")
          .help("write for instance `axes: {optimizer.lr: [1e-4, 3e-4]}`");
  }

 private:
  // nullptr: missing, or of another kind and reported.
  const Node* of_kind(const char* key, Node::Kind kind, const char* what) {
    const Node* node = root_.find(key);
    if (!node || node->kind == kind) return node;
    if (node->kind != Node::Kind::null || node->empty)
      out_.error(node->location, std::string("`") + key + "` takes " + what);
    return nullptr;
  }

  // Stores each field by itself, so that one wrong value hides no other. others: keys that are no fields.
  void read_fields(const config::RecordInfo& table, void* object, const Node& node, const std::string& prefix,
                   std::vector<std::string> others = {}) {
    for (size_t i = 0; i < node.items.size(); ++i) {
      const std::string& key = node.keys[i];
      const auto field = std::find_if(table.fields.begin(), table.fields.end(), [&](const FieldInfo& one) {
        return one.name == key || std::find(one.aliases.begin(), one.aliases.end(), key) != one.aliases.end();
      });
      if (field == table.fields.end()) {
        if (std::find(others.begin(), others.end(), key) != others.end()) continue;
        std::vector<std::string> known = others;
        for (const FieldInfo& one : table.fields) known.push_back(one.name);
        out_.error(node.key_locations[i], "unknown key `" + prefix + key + "`")
            .help(near_help(key, known, "known here: "));
        continue;
      }
      Node value = node.items[i];
      if (value.kind == Node::Kind::null && !value.empty) continue;
      // A scalar is the metric's name.
      if (key == "metric" && value.kind == Node::Kind::scalar) {
        value.kind = Node::Kind::map;
        value.add("name", value.location, node.items[i]);
      }
      simplify(value, key);
      void* const member = static_cast<char*>(object) + field->offset;
      if (field->type->record && value.kind == Node::Kind::map)
        read_fields(*field->type->record, member, value, prefix + key + ".");
      else if (const auto read =
                   config::convert(*field, value, prefix + key, {&out_.sources, &out_.diagnostics, {}}))
        field->type->store(member, *read);
    }
  }

  std::optional<AxisTarget> target(const std::string& key, SourceLocation location) {
    auto found = find_target(key);
    if (found) return found;
    out_.diagnostics.push_back(unknown_path(key, location));
    return std::nullopt;
  }
  // Each path is varied in one place.
  bool first_use(const std::string& path, SourceLocation location) {
    const auto [at, fresh] = used_.emplace(path, location);
    if (!fresh) out_.error(location, "`" + path + "` is varied twice").related(at->second, "first here");
    return fresh;
  }

  void check_set() {
    for (size_t i = 0; i < d_.set.size(); ++i) {
      const SourceLocation location = root_.find("set")->items[i].location;
      const std::string path = path_of_override(d_.set[i]);
      const auto found = find_target(path);
      const std::string canonical = found ? found->path : path;
      for (const std::string_view own : kPerTrialPaths)
        if (canonical == own && !d_.set[i].ends_with("=null"))
          out_.error(location, "a sweep cannot set `" + canonical + "`")
              .help("leave it out: each trial has its own, in its directory");
      set_[canonical] = location;
    }
  }

  void read_axis(const std::string& key, SourceLocation location, const Node& node) {
    const auto found = target(key, location);
    if (!found) return;
    Axis axis;
    axis.path = found->path;
    axis.location = location;
    if (const auto at = set_.find(axis.path); at != set_.end())
      out_.error(location, "`" + axis.path + "` is an axis, and `set` gives it a value")
          .related(at->second, "set here");
    if (!first_use(axis.path, location)) return;
    if (node.kind == Node::Kind::map) {
      if (!found->field || found->inside) {
        out_.error(node.location, found->field
                                      ? "a range needs a number"
                                      : "an axis of the section `" + key + "` is a list of its presets")
            .help(found->field ? "" : "an axis of one of its fields is written `" + key + ".FIELD: [...]`");
        return;
      }
      if (!read_range(axis, *found->field, node)) return;
    } else if (node.kind == Node::Kind::list) {
      axis.kind = found->field ? AxisKind::list : AxisKind::preset;
      for (const Node& item : node.items) {
        if (!found->field && item.kind != Node::Kind::scalar) {
          out_.error(item.location, "an axis of the section `" + key + "` is a list of its presets");
          return;
        }
        axis.values.push_back(override_value(item));
      }
      if (axis.values.empty()) {
        out_.error(node.location, "the axis `" + key + "` has no values");
        return;
      }
      std::set<std::string> seen;
      for (size_t i = 0; i < axis.values.size(); ++i)
        if (!seen.insert(axis.values[i]).second)
          out_.error(node.items[i].location,
                     "the value `" + axis.values[i] + "` occurs twice in the axis `" + key + "`");
    } else {
      out_.error(node.location, "the axis `" + key +
                                    "` takes a list of values, or a range such as {log: [1e-4, 1e-3], n: 4}")
          .help("one value for all trials is written `set: [" + key + "=" +
                (node.text.empty() ? "..." : node.text) + "]`");
      return;
    }
    d_.axes.push_back(std::move(axis));
  }

  bool read_range(Axis& axis, const FieldInfo& field, const Node& node) {
    const size_t errors = config::count(out_.diagnostics, Level::error);
    RangeFields given;
    read_fields(*config::type_of<RangeFields>().record, &given, node, axis.path + ".");
    const Node *log = node.find("log"), *linear = node.find("linear"), *range = node.find("range"),
               *n = node.find("n");
    if ((log != nullptr) + (linear != nullptr) + (range != nullptr) != 1) {
      out_.error(node.location, "a range has one of `log`, `linear` and `range`")
          .help(
              "for example, write {log: [1e-4, 1e-3], n: 4}; {range: [start, stop, step]} excludes the stop");
      return false;
    }
    const config::Type& type = field.type->one_or_more ? *field.type->element : *field.type;
    const bool integer = type.kind == config::Type::Kind::integer;
    if (!integer && type.kind != config::Type::Kind::real) {
      out_.error(node.location, "`" + axis.path + "` takes " + config::type_text(*field.type, field) +
                                    ", and a range needs numbers")
          .help("list its values: [a, b]");
      return false;
    }
    if (n && range) out_.error(n->location, "`n` goes with `log` and `linear`; `range` has a step");
    if (config::count(out_.diagnostics, Level::error) != errors) return false;
    const SourceLocation location = (log ? log : linear ? linear : range)->location;
    const std::vector<double>& numbers = log ? given.log : linear ? given.linear : given.range;
    if (numbers.size() != 2 && !(range && numbers.size() == 3)) {
      out_.error(location, log      ? "`log` takes two bounds [low, high]"
                           : linear ? "`linear` takes two bounds [low, high]"
                                    : "`range` takes [start, stop] or [start, stop, step]");
      return false;
    }
    axis.low = numbers[0], axis.high = numbers[1];
    if (!(axis.low < axis.high)) {
      out_.error(location, "the first bound is not below the second");
      return false;
    }
    if (log && !(axis.low > 0)) {
      out_.error(location, "a logarithmic range begins above 0")
          .help("bounds are the values themselves: [1e-5, 1e-1], not their exponents");
      return false;
    }
    axis.kind = log ? AxisKind::log : AxisKind::linear;
    if (range) {
      const double step = numbers.size() == 3 ? numbers[2] : 1;
      if (!(step > 0) || (axis.high - axis.low) / step > static_cast<double>(kMaxValues)) {
        out_.error(location,
                   "the step must be above 0, and give at most " + std::to_string(kMaxValues) + " values");
        return false;
      }
      for (const double value : range_points(axis.low, axis.high, step))
        axis.values.push_back(point_text(value, integer));
    }
    const int64_t points = given.n.value_or(0);
    for (int64_t i = 0; i < points; ++i)
      axis.values.push_back(
          point_text(at_fraction(axis, static_cast<double>(i) / static_cast<double>(points - 1)), integer));
    axis.values.erase(std::unique(axis.values.begin(), axis.values.end()), axis.values.end());
    return true;
  }

  void read_link() {
    const Node* node = of_kind("link", Node::Kind::list, "a list");
    if (!node) return;
    for (const Node& row : node->items) {
      if (row.kind != Node::Kind::map || row.items.empty()) {
        out_.error(row.location, "a row of `link` is a mapping of paths to values");
        continue;
      }
      Values values;
      for (size_t i = 0; i < row.items.size(); ++i)
        if (const auto found = target(row.keys[i], row.key_locations[i]))
          values.emplace_back(found->path, override_value(row.items[i]));
      if (values.size() != row.items.size()) continue;
      if (d_.link.empty()) {
        for (size_t i = 0; i < values.size(); ++i) first_use(values[i].first, row.key_locations[i]);
      } else {
        for (const auto& [path, ignored] : d_.link.front())
          if (value_of(values, path).empty())
            out_.error(row.location, "this row lacks `" + path + "`, which the first row has");
        for (size_t i = 0; i < values.size(); ++i)
          if (value_of(d_.link.front(), values[i].first).empty())
            out_.error(row.key_locations[i], "the first row of `link` has no `" + values[i].first + "`");
      }
      d_.link.push_back(std::move(values));
    }
  }

  void check_seeds() {
    const Node* node = root_.find("seeds");
    if (!node || node->kind == Node::Kind::null) return;
    for (auto seed = d_.seeds.begin(); seed != d_.seeds.end(); ++seed)
      if (std::find(d_.seeds.begin(), seed, *seed) != seed)
        out_.error(node->items[static_cast<size_t>(seed - d_.seeds.begin())].location,
                   "the seed " + std::to_string(*seed) + " occurs twice");
    if (node->kind == Node::Kind::list && node->items.empty())
      out_.error(node->location, "`seeds` has no values");
    if (const auto at = used_.find(std::string(kSeedPath)); at != used_.end())
      out_.error(node->location, "`seeds` are values of `rng.seed`, which is varied too")
          .related(at->second, "varied here");
  }

  void check_method() {
    if (!root_.find("method") &&
        std::any_of(d_.axes.begin(), d_.axes.end(), [](const Axis& axis) { return axis.continuous(); }))
      d_.method = Method::random;
    const bool drawn = d_.method == Method::random || d_.method == Method::sobol;
    const std::string method(config::enum_name(d_.method));
    if (drawn && !d_.trials)
      out_.error(root_.find("method") ? root_.find("method")->location : root_.location,
                 "`trials` is missing: method " + method + " draws so many points")
          .help("write `trials: 20`");
    if (!drawn)
      for (const Axis& axis : d_.axes)
        if (axis.continuous())
          out_.error(axis.location,
                     "method " + method + " needs a number of points on the axis `" + axis.path + "`")
              .help(std::string("write {") + std::string(name_of(axis.kind)) +
                    ": [...], n: 4}, or `method: random`");
    if (d_.method == Method::list) {
      size_t rows = d_.link.size();
      for (const Axis& axis : d_.axes) {
        if (rows && axis.values.size() != rows)
          out_.error(axis.location, "method list takes the values of all axes side by side, and `" +
                                        axis.path + "` has " + std::to_string(axis.values.size()) +
                                        " where others have " + std::to_string(rows));
        rows = rows ? rows : axis.values.size();
      }
    }
  }

  void read_exclude() {
    const Node* node = of_kind("exclude", Node::Kind::list, "a list");
    if (!node) return;
    std::vector<std::string> varied;
    for (const auto& [path, location] : used_) varied.push_back(path);
    for (const Node& row : node->items) {
      if (row.kind != Node::Kind::map || row.items.empty()) {
        out_.error(row.location,
                   "a row of `exclude` is a mapping of paths to values or comparisons such as \">8e-4\"");
        continue;
      }
      std::vector<Condition> conditions;
      for (size_t i = 0; i < row.items.size(); ++i) {
        const auto found = find_target(row.keys[i]);
        Condition condition;
        condition.path = found ? found->path : row.keys[i];
        if (!used_.contains(condition.path)) {
          out_.error(row.key_locations[i], "`" + row.keys[i] + "` is varied by no axis and no link")
              .help(near_help(condition.path, varied, "varied fields: "));
          continue;
        }
        const Node& value = row.items[i];
        if (value.kind == Node::Kind::list)
          for (const Node& item : value.items) condition.values.push_back(override_value(item));
        else
          read_condition(condition, value);
        conditions.push_back(std::move(condition));
      }
      d_.exclude.push_back(std::move(conditions));
    }
  }
  void read_condition(Condition& condition, const Node& node) {
    const auto compared = node.kind == Node::Kind::scalar ? comparison_of(node.text) : std::nullopt;
    if (!compared) {
      condition.values = {override_value(node)};
      return;
    }
    condition.kind = compared->kind;
    condition.values = {std::string(compared->value)};
    if (condition.is_bound() && !number_of(compared->value))
      out_.error(node.location, "`" + condition.values[0] + "` is not a number to compare with");
  }

  void check_metric() {
    const Node* node = root_.find("metric");
    if (!node) return;
    Metric& metric = d_.metric;
    metric.named = !metric.name.empty();
    if (metric.named) check_metric_name(node->kind == Node::Kind::map ? *node->find("name") : *node);
    if (!metric.set_at(std::string(metric.at)))
      out_.error(node->find("at")->location, "`metric.at` is last, best or mean(last N)");
  }

  // Another program can report any metric; a name that `train` does not write may be misspelled.
  void check_metric_name(const Node& node) {
    constexpr std::string_view names[] = {"loss",
                                          "grad_norm",
                                          "learning_rate",
                                          "tokens_per_second",
                                          "step_seconds",
                                          "memory_bytes",
                                          "mfu",
                                          "consumed_samples",
                                          "consumed_tokens",
                                          "val/loss",
                                          "val/perplexity",
                                          "step_loss",
                                          "step_grad_norm",
                                          "tokens_per_second_per_rank",
                                          "tflops_per_rank"};
    const std::vector<std::string> written(std::begin(names), std::end(names));
    const std::string& name = d_.metric.name;
    if (std::find(written.begin(), written.end(), name) != written.end() || name.starts_with("seconds_") ||
        (name.find('/') != std::string::npos && !name.starts_with("val/")))
      return;
    out_.error(node.location, "`train` writes no metric `" + name + "`: only `sweep tell` can report it")
        .help(near_help(name, written, "metrics of `train`: "))
        .level = Level::warning;
  }

  void check_stop() {
    const Node* stop = root_.find("stop");
    const Node* asha = stop ? stop->find("asha") : nullptr;
    if (!asha || asha->kind != Node::Kind::map) return;
    const Node* node = asha->find("steps");
    if (!node || (node->kind == Node::Kind::list && node->items.empty()))
      out_.error(node ? node->location : asha->location,
                 "`stop.asha.steps` takes the steps at which trials are compared: [200, 600]");
    const std::vector<int64_t>& steps = d_.stop.asha.steps;
    for (size_t i = 1; i < steps.size(); ++i)
      if (steps[i] <= steps[i - 1])
        out_.error(node->items[i].location, "the steps of `stop.asha` must ascend");
  }

  ParsedDefinition& out_;
  Definition& d_ = out_.definition;
  const Node& root_;
  std::map<std::string, SourceLocation> used_, set_;
};

}  // namespace

ParsedDefinition read_definition_text(std::string text, std::string directory, std::string shown) {
  ParsedDefinition out;
  out.definition.text = text;
  out.definition.directory = directory;
  out.sources.push_back({config::Source::Kind::file, std::move(shown), config::normalized(std::move(text)),
                         std::move(directory)});
  const auto root = config::parse_yaml(0, out.sources, out.diagnostics);
  // The parser's messages speak of recipes.
  for (Diagnostic& diagnostic : out.diagnostics)
    if (diagnostic.code == "C0011" || diagnostic.code == "C0013") {
      diagnostic.message = diagnostic.code == "C0011" ? "empty sweep file" : "a sweep file is a mapping";
      diagnostic.helps = {"it begins with `schema: " + std::string(kDefinitionSchema) + "`"};
    }
  if (!root) return out;
  Reader(out, *root).run();
  config::sort_diagnostics(out.diagnostics);
  return out;
}

ParsedDefinition read_definition(const std::string& file) {
  std::error_code ignored;
  const fs::path path = fs::absolute(file, ignored).lexically_normal();
  ParsedDefinition out = read_definition_text(read_file(file, config::TreeLimits::kFileBytes),
                                              path.parent_path().string(), file);
  if (out.definition.name.empty()) out.definition.name = path.stem().string();
  return out;
}

bool is_sweep_file(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return false;
  const std::vector<config::Source> sources{
      {config::Source::Kind::file, path, config::normalized(read_file(path, config::TreeLimits::kFileBytes)),
       ""}};
  std::vector<Diagnostic> diagnostics;
  const auto root = config::parse_yaml(0, sources, diagnostics);
  if (!root) return sources[0].text.find(kDefinitionSchema) != std::string::npos;
  const Node* schema = root->find("schema");
  return (schema && schema->text.starts_with("capstan-sweep")) || (root->find("base") && root->find("axes"));
}

}  // namespace capstan::sweep
