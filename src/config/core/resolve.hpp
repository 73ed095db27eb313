// From a request to one immutable Config: compose → merge → interpolate → convert → derive → check. All
// errors at once; every field knows where it was set.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/core/compose.hpp"
#include "config/core/config.hpp"
#include "config/core/diagnostics.hpp"
#include "config/core/field.hpp"

namespace capstan::config {

struct Origin {
  enum class Kind : uint8_t { default_value, preset, file, cli, derived, ranks };
  Kind kind = Kind::default_value;
  // "default", "preset model/llama3-8b", "my.yaml:9:5", "<cli>:2", "derived: 4 * model.hidden_size"
  std::string text;
  // File, cli and preset.
  SourceLocation location;
  // The text as written, where it is a scalar.
  std::string written;
  // Took something from the environment: another machine may resolve it differently.
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

// The fields that the given recipe, its `-f` files and its command line set in addition to the recipes that
// it extends by name: the content of the shortest recipe that resolves to the same.
struct RecipeDelta {
  std::vector<std::string> extends;
  // Fields that go back to the preset's, derived or default value.
  std::vector<std::string> unset;
  // By path; the text as written where it is an interpolation, "${a.b}", else empty.
  std::map<std::string, std::string> fields;
  // Preset chosen, "null": switched off, "{}": on with its defaults.
  std::map<std::string, std::string> sections;
  // Of the recipe: what its relative paths are relative to.
  std::string directory;
};

// Everything about a resolution but the typed value.
struct Resolved {
  std::string recipe_name;
  std::vector<Source> sources;
  // Sorted: errors, warnings, notes.
  std::vector<Diagnostic> diagnostics;
  // By canonical path.
  std::map<std::string, Origin> origins;
  std::vector<HistoryEntry> history;
  // Section → preset in effect.
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

// Into any struct that `schema` describes. `root` holds the defaults. Throws Error only for an unreadable
// recipe.
Resolved resolve_into(const Schema& schema, const Library& library, void* root, const Request& request);

// As resolve_into(), with the text of the recipe file instead of what the file holds; its relative names are
// relative to the file all the same.
Resolved resolve_text_into(const Schema& schema, const Library& library, void* root, const Request& request,
                           const std::string& text);

struct Resolution : Resolved {
  Config config;
};
Resolution resolve(const Request& request);
// The same for a recipe that exists as text. request.recipe: the path that messages show, and that relative
// names of the text are relative to; the file need not exist.
Resolution resolve_text(const std::string& text, const Request& request);

}  // namespace capstan::config
