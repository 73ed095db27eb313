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
inline constexpr int64_t kMaxPoints = 100'000;
// Maximum number of values of one range.
inline constexpr int64_t kMaxValues = 10'000;
// Paths that each trial sets for itself: a base that sets them would make its trials overwrite each other.
inline constexpr std::array<std::string_view, 3> kPerTrialPaths{"checkpoint.save", "logger.tensorboard_dir",
                                                                "profiling.trace_dir"};

// The field, item of a field (`dataset.blend.code`) or section (field is null) that a path names.
struct AxisTarget {
  // Canonical path.
  std::string path;
  const config::FieldInfo* field = nullptr;
  bool inside = false;
};
std::optional<AxisTarget> find_target(std::string_view path);
config::Diagnostic unknown_path(const std::string& path, config::SourceLocation location);

// Returns "did you mean `a`, `b`?" if known names are similar; otherwise lists all of them after `otherwise`.
std::string near_help(std::string_view name, const std::vector<std::string>& known,
                      std::string_view otherwise);

// Formats a diagnostic on one line; and all errors on one line each, with their locations.
std::string described(const config::Diagnostic& diagnostic);
std::string errors_text(const std::vector<config::Diagnostic>& diagnostics,
                        const std::vector<config::Source>& sources);

// Returns the path of an override: "a.b" of "a.b=c", "++a.b=c", "a.b+=c" and "~a.b". Empty for "@file".
std::string path_of_override(std::string_view word);

// Formats a value of the file as the right side of an equivalent override.
std::string override_value(const config::Node& node);

// Returns the number that a value such as 3e-4, 4k or 3% stands for; nullopt for other texts.
std::optional<double> number_of(std::string_view value);

// Formats a value rounded to an integer, or to six significant digits.
std::string point_text(double value, bool integer);
// Returns start, start + step, … without the stop value, which a sum of steps may miss by a rounding error.
std::vector<double> range_points(double start, double stop, double step);
// The value of a continuous axis, or of one made of points, at a fraction of 0 … 1 between its ends.
double at_fraction(const Axis& axis, double fraction);

// The comparison at the beginning of a condition such as ">8e-4" or "!= a".
struct Comparison {
  Condition::Kind kind;
  std::string_view value;
};
std::optional<Comparison> comparison_of(std::string_view text);
std::string_view sign_of(Condition::Kind kind);

// The fields of a sweep file that have a fixed name and type: all but axes, link and exclude.
const config::RecordInfo& definition_fields();

// Whether all conditions of the row hold for the point.
bool holds(const std::vector<Condition>& row, const Values& point);

}  // namespace capstan::sweep
