// The definition of a sweep: a file of schema capstan-sweep/1, or overrides of a recipe.
//
//   schema: capstan-sweep/1
//   name: lr-batch
//   base: quickstart                          # a recipe by name, or by a path relative to this file
//   set: [train.train_iters=200]              # overrides of every trial
//   axes:                                     # their product
//     optimizer.lr: {log: [1e-4, 1e-3], n: 4} # inclusive; or {linear: …}, or {range: …}, without its end
//     optimizer.weight_decay: [0, 0.1]
//     mixed_precision: [fp32, bf16_mixed]     # a section: its presets
//   link:                                     # rows whose values vary together
//     - {model.num_layers: 2, model.hidden_size: 64}
//   exclude: [{optimizer.lr: ">8e-4", mixed_precision: bf16_mixed}]
//   seeds: [1, 2, 3]                          # replicates: rng.seed
//   method: grid                              # grid | random | sobol | list
//   trials: 48                                # points of random and sobol; of a grid, a random subset
//   seed: 0                                   # of random
//   metric: {name: val/loss, goal: min, at: last}   # last | best | mean(last 100)
//   stop: {asha: {steps: [200, 600], keep: 1/3}, nan: true, worse_than: 20}
//   limits: {per_trial: 2h, device_hours: 400, retries: 1}
//   resources: {ranks: 2, threads: 4}         # else as the recipe says
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/core/diagnostics.hpp"
#include "config/core/override.hpp"
#include "config/core/types.hpp"

namespace capstan::sweep {

inline constexpr std::string_view kDefinitionSchema = "capstan-sweep/1";

enum class AxisKind : uint8_t { list, log, linear, preset };
std::string_view name_of(AxisKind kind);

struct Axis {
  // Canonical path of a field; name of a section for presets.
  std::string path;
  AxisKind kind = AxisKind::list;
  // Right sides of overrides. Empty: any value from `low` to `high`.
  std::vector<std::string> values;
  // Bounds of a log or linear range.
  double low = 0, high = 0;
  // The number `n` of a range given as an override. Reading the definition computes `values` from it.
  int64_t points = 0;
  config::SourceLocation location;
  bool continuous() const { return values.empty(); }
};

// Path and value, in the order written. A value is text: the right side of an override.
using Values = std::vector<std::pair<std::string, std::string>>;
// Returns an empty text if there is no value for the path.
std::string value_of(const Values& values, std::string_view path);
// "optimizer.lr=3e-4 rng.seed=1"
std::string text_of(const Values& values, std::optional<int64_t> seed);

// `optimizer.lr: ">8e-4"`; equal: also plain values and lists of them (any of `values`).
struct Condition {
  enum class Kind : uint8_t { equal, unequal, less, at_most, more, at_least };
  std::string path;
  Kind kind = Kind::equal;
  std::vector<std::string> values;
  bool is_bound() const { return kind != Kind::equal && kind != Kind::unequal; }
};

enum class Method : uint8_t { grid, random, sobol, list };

// The metric by which trials are ranked: `loss` or another name of logged steps, or `val/loss` of the
// validation rows (EVENT/NAME of any row with an event). A sweep that names none is ranked by `val/loss` if
// all its trials validate, and otherwise by `loss`. make_plan chooses, and plan.json records the choice.
struct Metric {
  // Empty: not chosen yet.
  std::string name;
  // Whether the definition names the metric. Otherwise it is the validation or the training loss.
  bool named = false;
  enum class Goal : uint8_t { min, max } goal = Goal::min;
  // "last", "best" or "mean(last N)".
  std::string at = "last";
  // Number of rows at the end that are averaged. 0: the best row counts.
  int64_t window = 1;
  // Sets `at` and `window`. Returns false if the text is none of the three forms.
  bool set_at(std::string_view text);
  bool better(double a, double b) const { return goal == Goal::min ? a < b : a > b; }
};
// "`loss` (last), the training loss, the lowest first".
std::string ranking_text(const Metric& metric);

// Successive halving.
struct Asha {
  // Steps of the rungs, ascending. Empty: successive halving is off.
  std::vector<int64_t> steps;
  // Fraction of the trials at a rung that continues.
  double keep = 1.0 / 3;
};
struct Stop {
  Asha asha;
  bool nan = true;
  std::optional<double> worse_than;
};

struct Limits {
  std::optional<config::Duration> per_trial;
  // Limit of the sum over all ranks of all trials.
  std::optional<double> device_hours;
  // Applies to a trial whose failure is not an error of its configuration.
  int64_t retries = 0;
};

struct Resources {
  // Number of ranks of a trial, and threads of each rank.
  std::optional<int64_t> ranks, threads;
};

struct Definition {
  std::string name, base;
  // Absolute directory to which `base` and paths in values are relative.
  std::string directory;
  // Overrides that apply to every trial.
  std::vector<std::string> set;
  std::vector<Axis> axes;
  std::vector<Values> link;
  // A point that meets all conditions of a row is excluded.
  std::vector<std::vector<Condition>> exclude;
  // Seeds of the trials, including those of an axis `rng.seed`.
  std::vector<int64_t> seeds;
  Method method = Method::grid;
  std::optional<int64_t> trials;
  int64_t seed = 0;
  Metric metric;
  Stop stop;
  Limits limits;
  Resources resources;
  // Content of sweep.yaml: the file, or the equivalent of the overrides.
  std::string text;
};

// A definition with its diagnostics.
struct ParsedDefinition {
  Definition definition;
  std::vector<config::Source> sources;
  std::vector<config::Diagnostic> diagnostics;
  // Appends an error and returns it, for a hint to be added.
  config::Diagnostic& error(config::SourceLocation location, std::string message);
  bool ok() const { return config::count(diagnostics, config::Level::error) == 0; }
  // Throws ErrorCode::config with the errors.
  void require_ok() const;
};

// Reads a definition. Throws ErrorCode::not_found, ::format or ::io only if the file cannot be read.
ParsedDefinition read_definition(const std::string& file);
// Parses a definition given as text. `directory`: the directory to which its paths are relative. `shown`: the
// name of the file in messages.
ParsedDefinition read_definition_text(std::string text, std::string directory, std::string shown);

// A definition as overrides of a recipe, for a front end or a program.
struct SweepOverrides {
  std::string recipe;
  // `optimizer.lr=1e-4,3e-4`: axes; with one value: `set`.
  std::vector<config::Override> overrides;
  std::optional<int64_t> trials, seed;
};
// Hydra's spelling: a,b,c · choice(a,b) · range(start,stop[,step]) · interval(a,b) · tag(log,interval(a,b)) ·
// loguniform(a,b[,n]) · uniform(a,b[,n]) · glob(pattern) for presets.
ParsedDefinition definition_from_overrides(const SweepOverrides& given);
// Extends a definition: further values of its axes, new axes, further seeds (`rng.seed=4,5`) or more points.
// The recipe is that of `before`. planned: the sweep has trials already. A single value for a path that is no
// axis would change all of them, and is an error then.
ParsedDefinition extended(const Definition& before, const SweepOverrides& more, bool planned);

// Writes the definition as a sweep file that reads back as the same definition. Fields with default values
// are left out.
std::string to_yaml(const Definition& definition);

// Whether the file is a sweep file, and not a recipe: its `schema` says so, or it has `base` and `axes`.
bool is_sweep_file(const std::string& path);

}  // namespace capstan::sweep

template <>
struct capstan::config::EnumNames<capstan::sweep::Method> {
  using Method = sweep::Method;
  static constexpr EnumEntry<Method> list[] = {
      {Method::grid, "grid"}, {Method::random, "random"}, {Method::sobol, "sobol"}, {Method::list, "list"}};
};
template <>
struct capstan::config::EnumNames<capstan::sweep::Metric::Goal> {
  using Goal = sweep::Metric::Goal;
  static constexpr EnumEntry<Goal> list[] = {{Goal::min, "min"}, {Goal::max, "max"}};
};
