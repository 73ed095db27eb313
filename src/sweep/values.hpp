// Paths and values of a sweep as text: what an axis may name, how its points are written, how they compare.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "config/core/field.hpp"
#include "config/core/tree.hpp"
#include "sweep/definition.hpp"

namespace capstan::sweep {

inline constexpr std::string_view kSeedPath = "rng.seed";
inline constexpr int64_t kMostPoints = 100'000;
inline constexpr int64_t kMostValues = 10'000;  // of one range
// Paths that each trial sets for itself: a base that sets them would make its trials overwrite each other.
inline constexpr std::array<std::string_view, 3> kPerTrialPaths{"checkpoint.save", "logger.tensorboard_dir",
                                                                "profiling.trace_dir"};

// The field, item of a field (`dataset.blend.code`) or section (field is null) that a path names.
struct AxisTarget {
  std::string path;  // canonical
  const config::FieldInfo* field = nullptr;
  bool inside = false;
};
std::optional<AxisTarget> find_target(std::string_view path);
config::Diagnostic unknown_path(const std::string& path, config::SourceLocation location);

// "did you mean `a`, `b`?" where known names are near, else all of them after `otherwise`.
std::string near_help(std::string_view name, const std::vector<std::string>& known,
                      std::string_view otherwise);

// A diagnostic on one line, and all errors on lines of their own with their places.
std::string described(const config::Diagnostic& diagnostic);
std::string errors_text(const std::vector<config::Diagnostic>& diagnostics,
                        const std::vector<config::Source>& sources);

// "a.b" of "a.b=c", "++a.b=c", "a.b+=c", "~a.b"; empty for "@file".
std::string path_of_override(std::string_view word);

// A value of the file as the right side of an override that says the same.
std::string override_value(const config::Node& node);

// The number that a value stands for: 3e-4, 4k, 3%; nullopt for other texts.
std::optional<double> number_of(std::string_view value);

// Rounded to six significant digits, or to an integer.
std::string point_text(double value, bool whole);
// start, start + step, …, without the stop, which a sum of steps may miss by a rounding error.
std::vector<double> range_points(double start, double stop, double step);
// Where a continuous axis, or one made of points, is at 0 … 1 between its ends.
double at_fraction(const Axis& axis, double fraction);

// The comparison that a text begins with: ">8e-4", "!= a".
struct Comparison {
  Condition::Kind kind;
  std::string_view value;
};
std::optional<Comparison> comparison_of(std::string_view text);
std::string_view sign_of(Condition::Kind kind);

// The fields of a sweep file that have a fixed name and type: all but axes, link and exclude.
const config::RecordInfo& definition_fields();

// Whether the row of conditions holds for the point: all of them.
bool holds(const std::vector<Condition>& row, const Values& point);

}  // namespace capstan::sweep
