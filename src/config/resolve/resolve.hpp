// Resolves a request to one immutable Config: compose → merge → interpolate → convert → derive → check. All
// errors are reported at once, and every field records where it was set.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/core/compose.hpp"
#include "config/core/diagnostics.hpp"
#include "config/core/field.hpp"
#include "config/sections/config.hpp"

namespace capstan::config {

struct Origin {
  enum class Kind : uint8_t { default_value, preset, file, cli, derived, ranks };
  Kind kind = Kind::default_value;
  // "default", "preset model/llama3-8b", "my.yaml:9:5", "<cli>:2", "derived: 4 * model.hidden_size"
  std::string text;
  // Location of a file, cli or preset origin.
  SourceLocation location;
  // The text as written, where it is a scalar.
  std::string written;
  // Whether the value uses the environment, so that another machine may resolve it differently.
  bool environment = false;
  bool is_explicit() const { return kind == Kind::file || kind == Kind::cli || kind == Kind::ranks; }
};

// One write to one field, in order; what `explain` lists.
struct HistoryEntry {
  std::string path;
  Origin origin;
  enum class Status : uint8_t { effective, replaced, reset, dropped };
  Status status = Status::effective;
};

// The fields that the given file, `-f` files and the command line set in addition to recipes that have a
// name, which are given or extended: the content of the shortest recipe that resolves to the same.
struct RecipeDelta {
  std::vector<std::string> extends;
  // Fields that go back to the preset's, derived or default value.
  std::vector<std::string> unset;
  // Fields by path. The value is the text as written if it is an interpolation such as "${a.b}", and
  // otherwise empty.
  std::map<std::string, std::string> fields;
  // Chosen presets by section. "null": the section is switched off. "{}": it is on with its defaults.
  std::map<std::string, std::string> sections;
  // Directory of the recipe, to which its relative paths are relative.
  std::string directory;
};

// Everything about a resolution but the typed value.
struct Resolved {
  std::string recipe_name;
  std::vector<Source> sources;
  // Diagnostics, sorted: errors, warnings, notes.
  std::vector<Diagnostic> diagnostics;
  // Origins of the fields, by canonical path.
  std::map<std::string, Origin> origins;
  std::vector<HistoryEntry> history;
  // Presets in effect, by section.
  std::map<std::string, std::string> presets;
  RecipeDelta delta;
  // A file could not be read or parsed: exit code 2, also for `check`.
  bool malformed = false;
  // An override or the command line cannot be parsed: exit code 2 as well.
  bool bad_words = false;
  // Fields that have no value because the given one is wrong.
  std::vector<std::string> failed;

  bool ok() const { return count(diagnostics, Level::error) == 0; }
  const Origin& origin(const std::string& path) const;
  // Throws Error(ErrorCode::config) that holds the rendered errors, unless ok().
  void require_ok() const;
};

// Resolves a recipe into any struct that `schema` describes. `root` holds the defaults. Throws Error only for
// an unreadable recipe.
Resolved resolve_into(const Schema& schema, const Library& library, void* root, const Request& request);

// Does the same as resolve_into() with the given text instead of the content of the recipe file. Relative
// names are still relative to the file.
Resolved resolve_text_into(const Schema& schema, const Library& library, void* root, const Request& request,
                           const std::string& text);

struct Resolution : Resolved {
  Config config;
};
Resolution resolve(const Request& request);

// How many fields of a preset, of a section's presets if it is empty, do not count because a recipe or an
// override sets them (note C0702).
int64_t hidden_fields(const Resolved& resolved, std::string_view section, std::string_view preset = {});
// The same for a recipe that exists as text. request.recipe: the path that messages show, and that relative
// names of the text are relative to; the file need not exist.
Resolution resolve_text(const std::string& text, const Request& request);

}  // namespace capstan::config
