// The definition of a sweep: a file of schema capstan-sweep/1, or overrides on the command line.
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
  std::string path;  // of a field, canonical; of a section for presets
  AxisKind kind = AxisKind::list;
  // As the right side of an override; empty: any value from low to high.
  std::vector<std::string> values;
  double low = 0, high = 0;  // log, linear
  int64_t points = 0;        // `n` of a range as the command line gives it; reading it makes values of it
  config::SourceLocation location;
  bool continuous() const { return values.empty(); }
};

// Path and value, in the order written. A value is text: the right side of an override.
using Values = std::vector<std::pair<std::string, std::string>>;
std::string value_of(const Values& values, std::string_view path);  // empty: it has none
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

// `loss` and other names of logged steps; `val/loss` of the validation rows (EVENT/NAME of any row with an
// event). A sweep that names none is ranked by `val/loss` where all its trials validate, else by `loss`;
// make_plan chooses, and plan.json says.
struct Metric {
  std::string name;    // empty: not chosen yet
  bool named = false;  // by the definition
  enum class Goal : uint8_t { min, max } goal = Goal::min;
  std::string at = "last";  // last, best or mean(last N)
  int64_t window = 1;       // so many rows at the end are averaged; 0: the best row counts
  // Sets `at` and `window`; false where the text is none of the three.
  bool set_at(std::string_view text);
  bool better(double a, double b) const { return goal == Goal::min ? a < b : a > b; }
};
std::string ranking_text(const Metric& metric);  // "`loss` (last), the training loss, the lowest first"

// Successive halving.
struct Asha {
  std::vector<int64_t> steps;  // the rungs, ascending; empty: none
  double keep = 1.0 / 3;       // fraction of the trials at a rung that continues
};
struct Stop {
  Asha asha;
  bool nan = true;
  std::optional<double> worse_than;
};

struct Limits {
  std::optional<config::Duration> per_trial;
  std::optional<double> device_hours;  // of all ranks of all trials
  int64_t retries = 0;                 // of a trial whose failure is not an error of its configuration
};

struct Resources {
  std::optional<int64_t> ranks, threads;  // threads: of one rank
};

struct Definition {
  std::string name, base;
  std::string directory;         // absolute: what `base` and paths in values are relative to
  std::vector<std::string> set;  // overrides
  std::vector<Axis> axes;
  std::vector<Values> link;
  std::vector<std::vector<Condition>> exclude;  // a point that meets all conditions of a row is excluded
  std::vector<int64_t> seeds;                   // also those of an axis `rng.seed`
  Method method = Method::grid;
  std::optional<int64_t> trials;
  int64_t seed = 0;
  Metric metric;
  Stop stop;
  Limits limits;
  Resources resources;
  std::string text;  // of sweep.yaml: the file, or the equivalent of the command line
};

// A definition with its diagnostics.
struct ParsedDefinition {
  Definition definition;
  std::vector<config::Source> sources;
  std::vector<config::Diagnostic> diagnostics;
  config::Diagnostic& error(config::SourceLocation location, std::string message);  // adds one
  bool ok() const { return config::count(diagnostics, config::Level::error) == 0; }
  void require_ok() const;  // throws ErrorCode::config with the errors
};

// Throws ErrorCode::not_found, ::format or ::io only for a file that cannot be read.
ParsedDefinition read_definition(const std::string& file);
// `directory`: what paths in it are relative to; `shown`: how messages call the file.
ParsedDefinition read_definition_text(std::string text, std::string directory, std::string shown);

// The definition as arguments of a command line.
struct CommandLine {
  std::string recipe;
  std::vector<config::Override> words;  // `optimizer.lr=1e-4,3e-4`: axes; with one value: `set`
  std::optional<int64_t> trials, seed;
};
// Hydra's spelling: a,b,c · choice(a,b) · range(start,stop[,step]) · interval(a,b) · tag(log,interval(a,b)) ·
// loguniform(a,b[,n]) · uniform(a,b[,n]) · glob(pattern) for presets.
ParsedDefinition definition_from_words(const CommandLine& given);
// More of a definition: further values of its axes, new axes, further seeds (`rng.seed=4,5`), more points.
// Its recipe is that of `before`. planned: there are trials already, so that a single value of no axis, which
// would change all of them, is an error.
ParsedDefinition extended(const Definition& before, const CommandLine& more, bool planned);

// The definition as a sweep file that reads back as the same; fields only where they differ from their
// defaults.
std::string to_yaml(const Definition& definition);

// Whether the text is a sweep file (its `schema` says so, or it has `base` and `axes`) and no recipe.
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
