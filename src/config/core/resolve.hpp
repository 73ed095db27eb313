// From a request to one immutable Config: compose → merge → interpolate → convert → derive → check. All errors at once;
// every leaf knows where it was set.
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
  std::string
      text;  // "default", "preset model/llama3-8b", "my.yaml:9:5", "<cli>:2", "derived: 4 * model.hidden_size"
  Place place;          // file, cli and preset
  std::string written;  // the text as written, where it is a scalar
  bool environment =
      false;  // took something from the environment: another machine may resolve it differently
  bool is_explicit() const { return kind == Kind::file || kind == Kind::cli || kind == Kind::ranks; }
};

// One write to one leaf, in order; what `explain` lists.
struct HistoryEntry {
  std::string path;
  Origin origin;
  enum class Fate : uint8_t { effective, replaced, reset, dropped };
  Fate fate = Fate::effective;
};

// What the given recipe, its `-f` files and its command line say beyond the recipes that it extends by name: the content of
// the shortest recipe that resolves to the same.
struct OwnPart {
  std::vector<std::string> extends;
  std::vector<std::string> unset;  // fields that go back to the preset's, derived or default value
  std::map<std::string, std::string>
      fields;  // by path; the text as written where the value does not say it: "${a.b}"
  std::map<std::string, std::string>
      sections;           // preset chosen, "null": switched off, "{}": on with its defaults
  std::string directory;  // of the recipe: what its relative paths are relative to
};

// Everything about a resolution but the typed value.
struct Resolved {
  std::string recipe_name;
  std::vector<Source> sources;
  std::vector<Diagnostic> diagnostics;    // sorted: errors, warnings, notes
  std::map<std::string, Origin> origins;  // by canonical path
  std::vector<HistoryEntry> history;
  std::map<std::string, std::string> presets;  // section → preset in effect
  OwnPart own;
  bool malformed = false;           // some file could not be read or parsed: exit code 2, also for `check`
  bool bad_words = false;           // an override that is none, a bad command line: the same
  std::vector<std::string> failed;  // leaves without a value, because theirs is wrong

  bool ok() const { return count(diagnostics, Level::error) == 0; }
  const Origin& origin(const std::string& path) const;
  // Throws Error(ErrorCode::config) that holds the rendered errors, unless ok().
  void require_ok() const;
};

// Into any struct that `schema` describes. `root` holds the defaults. Throws Error only for an unreadable recipe.
Resolved resolve_into(const Schema& schema, const Library& library, void* root, const Request& request);

struct Resolution : Resolved {
  Config config;
};
Resolution resolve(const Request& request);

}  // namespace capstan::config
