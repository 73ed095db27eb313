// Output of a resolution, for people and for programs: the resolved recipe, one field, its history, the
// difference of two.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/core/field.hpp"
#include "config/resolve/resolve.hpp"

namespace capstan::config {

enum class ShowFormat : unsigned char {
  // A complete recipe; texts such as `4k` beside the number they stand for.
  yaml,
  // Plain nested values.
  json,
  // One field on each line: path = value  # origin
  origin,
  // The shortest recipe that resolves to the same: what it extends, presets, and what differs from them.
  minimal,
};
struct ShowOptions {
  ShowFormat format = ShowFormat::yaml;
  // A section, a field or something inside one; empty: everything. Aliases are known.
  std::string path;
};
// Ends with a newline. Throws Error(ErrorCode::usage) for a path that names nothing, with near matches.
std::string show(const Schema& schema, const void* root, const Resolved& resolved,
                 const ShowOptions& options = {});
std::string show(const Resolution& resolution, const ShowOptions& options = {});

// The recipe that a run directory keeps: every field, paths made absolute, each field's origin as a comment.
// Resolves to the same Config by itself, except for values of presets that have no effect, which are omitted.
std::string resolved_recipe(const Schema& schema, const void* root, const Resolved& resolved);
std::string resolved_recipe(const Resolution& resolution);

// Everything about a field, a section, a rule (`R0201`, `global_batch_divisible`) or a diagnostic code;
// with a resolution also the value, every write in order, and what depends on it. Empty `what`: the
// sections. Throws like show.
std::string explain(const Schema& schema, std::string_view what, const void* root = nullptr,
                    const Resolved* resolved = nullptr);
std::string explain(std::string_view what, const Resolution* resolution = nullptr);
std::string explain_json(const Schema& schema, std::string_view what, const void* root = nullptr,
                         const Resolved* resolved = nullptr);

struct Change {
  std::string path;
  Effect effect;
  // Values as YAML. Empty if the section is off.
  std::string before, after;
  std::string before_origin, after_origin;
};
// Returns the fields that differ, sorted by effect (math first), then in the order of the schema.
std::vector<Change> diff(const Schema& schema, const void* before_root, const Resolved& before,
                         const void* after_root, const Resolved& after);
std::vector<Change> diff(const Resolution& before, const Resolution& after);
// Formats changes for people, grouped by effect. Empty if there are none.
std::string render_diff(const std::vector<Change>& changes);

// One line for each diagnostic code of this module, for `explain` and the documentation.
struct CodeInfo {
  const char* code;
  const char* title;
};
const std::vector<CodeInfo>& diagnostic_codes();

}  // namespace capstan::config
