#include "sweep/definition.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
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
std::string_view name_of(Method method) {
  constexpr std::array<std::string_view, 4> names{"grid", "random", "sobol", "list"};
  return names[static_cast<size_t>(method)];
}
std::string text_of(Metric::Goal goal) {
  return goal == Metric::Goal::min ? "min" : "max";
}
std::string text_of_at(const Metric& metric) {
  if (metric.at == Metric::At::last) return "last";
  if (metric.at == Metric::At::best) return "best";
  return "mean(last " + std::to_string(metric.window) + ")";
}

std::string ranking_text(const Metric& metric) {
  const std::string about = metric.name == "loss"       ? ", the training loss"
                            : metric.name == "val/loss" ? ", the validation loss"
                                                        : "";
  return "`" + metric.name + "` (" + text_of_at(metric) + ")" + about + ", the " +
         (metric.goal == Metric::Goal::min ? "lowest" : "highest") + " first";
}

void ParsedDefinition::require_ok() const {
  if (!ok()) fail(ErrorCode::config, "the sweep file has errors" + errors_text(diagnostics, sources));
}

namespace {

class Reader {
 public:
  Reader(ParsedDefinition& out, const Node& root) : out_(out), root_(root) {}

  void run() {
    only(root_, {"schema", "name", "base", "set", "axes", "link", "exclude", "seeds", "method", "trials",
                 "metric", "stop", "limits", "resources", "seed"});
    if (const Node* node = root_.find("schema"); !node || node->text != kDefinitionSchema)
      error(node ? node->location : root_.location,
            node ? "`" + node->text + "` is not a sweep format that this version reads"
                 : std::string("`schema` is missing"))
          .help("write `schema: " + std::string(kDefinitionSchema) + "`");
    if (const Node* node = root_.find("name")) {
      d_.name = text(*node, "name");
      if (d_.name.find('/') != std::string::npos || d_.name.starts_with('.'))
        error(node->location, "the name of a sweep has no `/` and does not begin with a dot");
    }
    if (const Node* node = root_.find("base"))
      d_.base = text(*node, "base");
    else
      error(root_.location, "`base` is missing").help("write the recipe that is varied: `base: quickstart`");
    read_set();
    if (const Node* node = map("axes"))
      for (size_t i = 0; i < node->items.size(); ++i)
        read_axis(node->keys[i], node->key_locations[i], node->items[i]);
    read_link();
    read_seeds();
    read_method();
    read_exclude();
    read_metric();
    read_stop();
    read_limits();
    if (const Node* node = map("resources")) {
      only(*node, {"ranks", "threads", "gpus"});
      for (const char* key : {"ranks", "gpus"})
        if (const Node* ranks = node->find(key)) d_.resources.ranks = integer(*ranks, key, 1, 1 << 20);
      if (const Node* threads = node->find("threads"))
        d_.resources.threads = integer(*threads, "threads", 1, 4096);
    }
    if (d_.axes.empty() && d_.link.empty() && d_.seeds.empty() && out_.ok())
      error(root_.location, "nothing varies: there are neither `axes` nor `link` nor `seeds`")
          .help("write for instance `axes: {optimizer.lr: [1e-4, 3e-4]}`");
  }

 private:
  Diagnostic& error(SourceLocation location, std::string message) {
    Diagnostic diagnostic;
    diagnostic.message = std::move(message);
    diagnostic.location = location;
    out_.diagnostics.push_back(std::move(diagnostic));
    return out_.diagnostics.back();
  }
  // nullptr: missing, or of another kind and reported.
  const Node* of_kind(const char* key, Node::Kind kind, const char* what) {
    const Node* node = root_.find(key);
    if (!node || node->kind == kind) return node;
    if (node->kind != Node::Kind::null || node->empty)
      error(node->location, std::string("`") + key + "` takes " + what);
    return nullptr;
  }
  const Node* map(const char* key) { return of_kind(key, Node::Kind::map, "a mapping"); }
  const Node* list(const char* key) { return of_kind(key, Node::Kind::list, "a list"); }

  void only(const Node& node, std::initializer_list<std::string_view> known) {
    const std::vector<std::string> names(known.begin(), known.end());
    for (size_t i = 0; i < node.keys.size(); ++i) {
      if (std::find(names.begin(), names.end(), node.keys[i]) != names.end()) continue;
      const auto near = near_matches(node.keys[i], names);
      Diagnostic& found = error(node.key_locations[i], "unknown key `" + node.keys[i] + "`");
      if (near.empty())
        found.help("known here: " + join(names, ", "));
      else
        found.help("did you mean `" + join(near, "`, `") + "`?");
    }
  }
  std::string text(const Node& node, const std::string& what) {
    if (node.kind == Node::Kind::scalar && !node.text.empty()) return node.text;
    error(node.location, "`" + what + "` takes a text");
    return {};
  }
  int64_t integer(const Node& node, const std::string& what, int64_t least, int64_t most) {
    config::TextProblem problem;
    const auto value = node.kind == Node::Kind::scalar
                           ? config::integer_from_text(node.text, config::NumberForm::plain, problem)
                           : std::nullopt;
    if (value && *value >= least && *value <= most) return *value;
    error(node.location,
          "`" + what + "` takes an integer from " + std::to_string(least) + " to " + std::to_string(most))
        .help(problem.help);
    return least;
  }
  std::optional<double> real(const Node& node, const std::string& what) {
    config::TextProblem problem;
    static const FieldInfo plain;
    if (node.kind == Node::Kind::scalar)
      if (const auto value = config::real_from_text(node.text, plain, problem)) return value;
    error(node.location, "`" + what + "` takes a number").help(problem.help);
    return std::nullopt;
  }
  bool boolean(const Node& node, const std::string& what) {
    if (node.kind == Node::Kind::scalar && (node.text == "true" || node.text == "false"))
      return node.text == "true";
    error(node.location, "`" + what + "` takes true or false");
    return false;
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
    if (!fresh) error(location, "`" + path + "` is varied twice").related(at->second, "first here");
    return fresh;
  }

  void read_set() {
    const Node* node = list("set");
    if (!node) return;
    for (const Node& item : node->items) {
      const std::string word = text(item, "set");
      if (word.empty()) continue;
      d_.set.push_back(word);
      const std::string path = path_of_override(word);
      const auto found = find_target(path);
      const std::string canonical = found ? found->path : path;
      for (const std::string_view own : kPerTrialPaths)
        if (canonical == own && !word.ends_with("=null"))
          error(item.location, "each trial has its own `" + canonical + "`")
              .help("leave it out: each trial has its own in its directory");
      set_[canonical] = item.location;
    }
  }

  void read_axis(const std::string& key, SourceLocation location, const Node& node) {
    const auto found = target(key, location);
    if (!found) return;
    Axis axis;
    axis.path = found->path;
    axis.location = location;
    if (const auto at = set_.find(axis.path); at != set_.end())
      error(location, "`" + axis.path + "` is an axis, and `set` gives it a value")
          .related(at->second, "set here");
    if (!first_use(axis.path, location)) return;
    if (node.kind == Node::Kind::map) {
      if (!found->field || found->inside) {
        error(node.location, found->field ? "a range needs a number"
                                          : "an axis of the section `" + key + "` is a list of its presets")
            .help(found->field ? "" : "an axis of one of its fields is written `" + key + ".FIELD: [...]`");
        return;
      }
      if (!read_range(axis, *found->field, node)) return;
    } else if (node.kind == Node::Kind::list) {
      axis.kind = found->field ? AxisKind::list : AxisKind::preset;
      for (const Node& item : node.items) {
        if (!found->field && item.kind != Node::Kind::scalar) {
          error(item.location, "an axis of the section `" + key + "` is a list of its presets");
          return;
        }
        axis.values.push_back(override_value(item));
      }
      if (axis.values.empty()) {
        error(node.location, "the axis `" + key + "` has no values");
        return;
      }
      std::set<std::string> seen;
      for (size_t i = 0; i < axis.values.size(); ++i)
        if (!seen.insert(axis.values[i]).second)
          error(node.items[i].location,
                "the value `" + axis.values[i] + "` occurs twice in the axis `" + key + "`");
    } else {
      error(node.location,
            "the axis `" + key + "` takes a list of values, or a range such as {log: [1e-4, 1e-3], n: 4}")
          .help("one value for all trials is written `set: [" + key + "=" +
                (node.text.empty() ? "..." : node.text) + "]`");
      return;
    }
    d_.axes.push_back(std::move(axis));
  }

  bool read_range(Axis& axis, const FieldInfo& field, const Node& node) {
    const size_t errors = config::count(out_.diagnostics, Level::error);
    only(node, {"log", "linear", "range", "n"});
    const Node *log = node.find("log"), *linear = node.find("linear"), *range = node.find("range"),
               *n = node.find("n");
    if ((log != nullptr) + (linear != nullptr) + (range != nullptr) != 1) {
      error(node.location, "a range has one of `log`, `linear` and `range`")
          .help("for instance {log: [1e-4, 1e-3], n: 4}; {range: [start, stop, step]} leaves the stop out");
      return false;
    }
    const bool whole = field.type->kind == config::Type::Kind::integer;
    if (!whole && field.type->kind != config::Type::Kind::real) {
      error(node.location, "`" + axis.path + "` takes " + config::type_text(*field.type, field) +
                               ", and a range needs numbers")
          .help("list its values: [a, b]");
      return false;
    }
    const Node& bounds = log ? *log : linear ? *linear : *range;
    const char* const word = log ? "log" : linear ? "linear" : "range";
    std::vector<double> numbers;
    if (bounds.kind == Node::Kind::list)
      for (const Node& item : bounds.items)
        if (const auto value = real(item, word)) numbers.push_back(*value);
    const bool counts = numbers.size() == 2 || (range && numbers.size() == 3);
    if (bounds.kind != Node::Kind::list || (!counts && numbers.size() == bounds.items.size()))
      error(bounds.location, std::string("`") + word + "` takes " +
                                 (range ? "[start, stop] or [start, stop, step]" : "two bounds [low, high]"));
    if (n && range) error(n->location, "`n` goes with `log` and `linear`; `range` has a step");
    const int64_t points = n && !range ? integer(*n, "n", 2, kMostValues) : 0;
    if (config::count(out_.diagnostics, Level::error) != errors) return false;
    axis.low = numbers[0], axis.high = numbers[1];
    if (!(axis.low < axis.high)) {
      error(bounds.location, "the first bound is not below the second");
      return false;
    }
    if (log && !(axis.low > 0)) {
      error(bounds.location, "a logarithmic range begins above 0")
          .help("bounds are the values themselves: [1e-5, 1e-1], not their exponents");
      return false;
    }
    axis.kind = log ? AxisKind::log : AxisKind::linear;
    if (range) {
      const double step = numbers.size() == 3 ? numbers[2] : 1;
      if (!(step > 0) || (axis.high - axis.low) / step > static_cast<double>(kMostValues)) {
        error(bounds.location,
              "the step must be above 0, and give at most " + std::to_string(kMostValues) + " values");
        return false;
      }
      for (const double value : range_points(axis.low, axis.high, step)) add_point(axis, value, whole);
    }
    for (int64_t i = 0; i < points; ++i)
      add_point(axis, at_fraction(axis, static_cast<double>(i) / static_cast<double>(points - 1)), whole);
    axis.values.erase(std::unique(axis.values.begin(), axis.values.end()), axis.values.end());
    return true;
  }
  static void add_point(Axis& axis, double value, bool whole) {
    axis.values.push_back(point_text(value, whole));
  }

  void read_link() {
    const Node* node = list("link");
    if (!node) return;
    for (const Node& row : node->items) {
      if (row.kind != Node::Kind::map || row.items.empty()) {
        error(row.location, "a row of `link` is a mapping of paths to values");
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
        const auto has = [](const Values& in, const std::string& path) {
          return std::any_of(in.begin(), in.end(), [&](const auto& value) { return value.first == path; });
        };
        for (const auto& [path, ignored] : d_.link.front())
          if (!has(values, path))
            error(row.location, "this row lacks `" + path + "`, which the first row has");
        for (size_t i = 0; i < values.size(); ++i)
          if (!has(d_.link.front(), values[i].first))
            error(row.key_locations[i], "the first row of `link` has no `" + values[i].first + "`");
      }
      d_.link.push_back(std::move(values));
    }
  }

  void read_seeds() {
    const Node* node = list("seeds");
    if (!node) return;
    for (const Node& item : node->items) {
      const int64_t seed = integer(item, "seeds", 0, INT64_MAX);
      if (std::find(d_.seeds.begin(), d_.seeds.end(), seed) != d_.seeds.end())
        error(item.location, "the seed " + std::to_string(seed) + " occurs twice");
      d_.seeds.push_back(seed);
    }
    if (node->items.empty()) error(node->location, "`seeds` has no values");
    if (const auto at = used_.find(std::string(kSeedPath)); at != used_.end())
      error(node->location, "`seeds` are values of `rng.seed`, which is varied too")
          .related(at->second, "varied here");
  }

  void read_method() {
    const bool free =
        std::any_of(d_.axes.begin(), d_.axes.end(), [](const Axis& a) { return a.continuous(); });
    d_.method = free ? Method::random : Method::grid;
    if (const Node* node = root_.find("method")) {
      static const std::vector<std::string> names{"grid", "random", "sobol", "list"};
      const auto at = std::find(names.begin(), names.end(), node->text);
      if (at == names.end())
        error(node->location, "`" + node->text + "` is not a method").help("one of: " + join(names, ", "));
      else
        d_.method = static_cast<Method>(at - names.begin());
    }
    if (const Node* node = root_.find("trials")) d_.trials = integer(*node, "trials", 1, kMostPoints);
    if (const Node* node = root_.find("seed"))
      d_.seed = static_cast<uint64_t>(integer(*node, "seed", 0, INT64_MAX));
    const bool drawn = d_.method == Method::random || d_.method == Method::sobol;
    const std::string method(name_of(d_.method));
    if (drawn && !d_.trials)
      error(root_.find("method") ? root_.find("method")->location : root_.location,
            "`trials` is missing: method " + method + " draws so many points")
          .help("write `trials: 20`");
    if (!drawn)
      for (const Axis& axis : d_.axes)
        if (axis.continuous())
          error(axis.location,
                "method " + method + " needs a number of points on the axis `" + axis.path + "`")
              .help(std::string("write {") + std::string(name_of(axis.kind)) +
                    ": [...], n: 4}, or `method: random`");
    if (d_.method == Method::list) {
      size_t rows = d_.link.size();
      for (const Axis& axis : d_.axes) {
        if (rows && axis.values.size() != rows)
          error(axis.location, "method list takes the values of all axes side by side, and `" + axis.path +
                                   "` has " + std::to_string(axis.values.size()) + " where others have " +
                                   std::to_string(rows));
        rows = rows ? rows : axis.values.size();
      }
    }
  }

  void read_exclude() {
    const Node* node = list("exclude");
    if (!node) return;
    std::vector<std::string> varied;
    for (const auto& [path, location] : used_) varied.push_back(path);
    for (const Node& row : node->items) {
      if (row.kind != Node::Kind::map || row.items.empty()) {
        error(row.location,
              "a row of `exclude` is a mapping of paths to values or comparisons such as \">8e-4\"");
        continue;
      }
      std::vector<Condition> conditions;
      for (size_t i = 0; i < row.items.size(); ++i) {
        const auto found = find_target(row.keys[i]);
        Condition condition;
        condition.path = found ? found->path : row.keys[i];
        if (!used_.contains(condition.path)) {
          Diagnostic& wrong =
              error(row.key_locations[i], "`" + row.keys[i] + "` is varied by no axis and no link");
          const auto near = near_matches(condition.path, varied);
          wrong.help(near.empty() ? "varied are: " + join(varied, ", ")
                                  : "did you mean `" + join(near, "`, `") + "`?");
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
    using Kind = Condition::Kind;
    static constexpr std::array<std::pair<std::string_view, Kind>, 6> signs{{{">=", Kind::at_least},
                                                                             {"<=", Kind::at_most},
                                                                             {"!=", Kind::unequal},
                                                                             {"==", Kind::equal},
                                                                             {">", Kind::more},
                                                                             {"<", Kind::less}}};
    if (node.kind == Node::Kind::scalar)
      for (const auto& [sign, kind] : signs) {
        if (!node.text.starts_with(sign)) continue;
        const std::string value(trim(std::string_view(node.text).substr(sign.size())));
        condition.kind = kind;
        condition.values = {value};
        if (kind != Kind::equal && kind != Kind::unequal && !number_of(value))
          error(node.location, "`" + value + "` is not a number to compare with");
        return;
      }
    condition.values = {override_value(node)};
  }

  void read_metric() {
    const Node* node = root_.find("metric");
    if (!node) return;
    Metric& metric = d_.metric;
    if (node->kind == Node::Kind::scalar) {
      metric.name = node->text;
      metric.named = true;
      check_metric_name(*node);
      return;
    }
    if (node->kind != Node::Kind::map) {
      error(node->location,
            "`metric` takes a name or a mapping such as {name: val/loss, goal: min, at: last}");
      return;
    }
    only(*node, {"name", "goal", "at"});
    if (const Node* name = node->find("name")) {
      metric.name = text(*name, "metric.name");
      metric.named = true;
      check_metric_name(*name);
    }
    if (const Node* goal = node->find("goal")) {
      if (goal->text != "min" && goal->text != "max") error(goal->location, "`metric.goal` is min or max");
      metric.goal = goal->text == "max" ? Metric::Goal::max : Metric::Goal::min;
    }
    if (const Node* at = node->find("at")) {
      const std::string_view word = at->text;
      if (word == "best") {
        metric.at = Metric::At::best;
      } else if (word.starts_with("mean(last ") && word.ends_with(")")) {
        metric.at = Metric::At::mean;
        metric.window = parse_int(trim(word.substr(10, word.size() - 11))).value_or(0);
      }
      if ((metric.at == Metric::At::last && word != "last") ||
          (metric.at == Metric::At::mean && metric.window < 1))
        error(at->location, "`metric.at` is last, best or mean(last N)");
    }
  }

  // Another program can report any metric; a name that `train` does not write may be misspelled.
  void check_metric_name(const Node& node) {
    static const std::vector<std::string> written{"loss",
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
    const std::string& name = d_.metric.name;
    if (name.empty() || std::find(written.begin(), written.end(), name) != written.end() ||
        name.starts_with("seconds_") || (name.find('/') != std::string::npos && !name.starts_with("val/")))
      return;
    Diagnostic& warning = error(
        node.location, "`train` writes no metric `" + name + "`: trials have values only from `sweep tell`");
    warning.level = Level::warning;
    const auto near = near_matches(name, written);
    warning.help(near.empty() ? "written are: " + join(written, ", ")
                              : "did you mean `" + join(near, "`, `") + "`?");
  }

  void read_stop() {
    const Node* node = map("stop");
    if (!node) return;
    only(*node, {"asha", "nan", "worse_than"});
    if (const Node* nan = node->find("nan")) d_.stop.nan = boolean(*nan, "stop.nan");
    if (const Node* worse = node->find("worse_than")) d_.stop.worse_than = real(*worse, "stop.worse_than");
    const Node* asha = node->find("asha");
    if (!asha) return;
    if (asha->kind != Node::Kind::map) {
      error(asha->location, "`stop.asha` takes a mapping such as {steps: [200, 600], keep: 1/3}");
      return;
    }
    only(*asha, {"steps", "keep"});
    const Node* steps = asha->find("steps");
    if (!steps || steps->kind != Node::Kind::list || steps->items.empty())
      error(steps ? steps->location : asha->location,
            "`stop.asha.steps` takes the steps at which trials are compared: [200, 600]");
    else
      for (const Node& item : steps->items) {
        d_.stop.steps.push_back(integer(item, "stop.asha.steps", 1, INT64_MAX));
        const auto count = d_.stop.steps.size();
        if (count > 1 && d_.stop.steps[count - 1] <= d_.stop.steps[count - 2])
          error(item.location, "the steps of `stop.asha` must ascend");
      }
    if (const Node* keep = asha->find("keep")) {
      const auto parts = split(keep->text, '/');
      const auto upper = parse_double(trim(parts[0]));
      const auto lower = parts.size() == 2 ? parse_double(trim(parts[1])) : std::optional<double>(1);
      const double value = upper && lower && parts.size() <= 2 ? *upper / *lower : 0;
      if (!(value > 0 && value < 1))
        error(keep->location, "`stop.asha.keep` takes a fraction between 0 and 1, such as 1/3");
      else
        d_.stop.keep = value;
    }
  }

  void read_limits() {
    const Node* node = map("limits");
    if (!node) return;
    only(*node, {"per_trial", "device_hours", "gpu_hours", "retries"});
    if (const Node* time = node->find("per_trial")) {
      config::TextProblem problem;
      d_.limits.per_trial_seconds = config::duration_from_text(time->text, "", problem);
      if (!d_.limits.per_trial_seconds || !(*d_.limits.per_trial_seconds > 0))
        error(time->location, "`limits.per_trial` takes a time such as 2h or 30m").help(problem.help);
    }
    for (const char* key : {"device_hours", "gpu_hours"})
      if (const Node* hours = node->find(key)) {
        d_.limits.device_hours = real(*hours, std::string("limits.") + key);
        if (d_.limits.device_hours && !(*d_.limits.device_hours > 0))
          error(hours->location, "the hours must be above 0");
      }
    if (const Node* retries = node->find("retries"))
      d_.limits.retries = integer(*retries, "limits.retries", 0, 1000);
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
  for (Diagnostic& diagnostic : out.diagnostics)  // the parser's messages are about recipes
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
