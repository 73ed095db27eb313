// Reads the recipe, the files it extends, `@FILE` files and the command line, and lists every write to every
// field in the order of precedence. Nothing is decided here; merge and conversion follow in resolve.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/diagnostics.hpp"
#include "config/core/field.hpp"
#include "config/core/library.hpp"
#include "config/core/override.hpp"
#include "config/core/tree.hpp"

namespace capstan::config {

// Whether the text is the path of a file and not a name: it contains "/" or ends in .yaml or .yml.
bool is_path(std::string_view text);

struct Request {
  // A name, a path (contains "/" or ends in .yaml/.yml), or "-" for standard input.
  std::string recipe;
  // The overrides in the order given, including -f files.
  std::vector<Override> overrides;
  // A world size that replaces the recipe's.
  std::optional<int64_t> ranks;
  // The words for `ranks` in messages.
  std::string ranks_origin = "the number of ranks";
  // Fields or full sections that are treated as if the recipe, and the recipes that it extends, did not set
  // them. -f files and overrides may set them.
  std::vector<std::string> unset;
  // Overrides that take precedence over all others. `imposed_by` names who imposes them.
  std::vector<Override> imposed;
  std::string imposed_by;
  // Seconds since 1970 for ${now:…}; tests and resumed runs fix it.
  std::optional<int64_t> now;
  // Absolute directory to which paths in overrides and in embedded recipes are relative. Empty: the current
  // directory.
  std::string directory;
};

// One file, preset or command line. Later layers win over earlier ones of the same or a lower precedence.
struct Layer {
  enum class Precedence : uint8_t { preset = 2, recipe = 3, file = 4, cli = 5, imposed = 6 };
  Precedence precedence = Precedence::recipe;
  // "model/llama3-8b" for presets.
  std::string preset;
  // Whether the layer belongs to a recipe that is given by name, or that the given file extends by name,
  // directly or indirectly.
  bool base = false;
  // Whether it is the recipe that is given, by name or as a file, and not one that this extends.
  bool given = false;
  // Whether it is the entry of the chosen model in the `models` of a recipe.
  bool of_model = false;
};

struct Write {
  // remove: an item of a list or a key of a map.
  enum class Op : uint8_t { set, append, remove };
  Op op = Op::set;
  const FieldInfo* field = nullptr;
  // Path below the field: an index or a key.
  std::vector<Segment> rest;
  Node value;
  // Location of the key or of the override.
  SourceLocation location;
  // The path as written.
  std::string spelling;
  // Index into Composition::layers.
  size_t layer = 0;
  // Whether a later `~path` took the write back.
  bool dead = false;
  // Index of the layer with that `~path`. kRequested: Request::unset.
  size_t dead_by = 0;
  static constexpr size_t kRequested = static_cast<size_t>(-1);
  void take_back(size_t by) {
    if (!dead) dead = true, dead_by = by;
  }
};

// A preset chosen for a section, or the section switched off.
struct Choice {
  size_t layer = 0;
  bool off = false;
  // Name of the preset, or the path of a preset file.
  std::string preset;
  SourceLocation location;
};

struct Composition {
  std::string recipe_name;
  std::vector<Source> sources;
  std::vector<Diagnostic> diagnostics;
  // The name of the given recipe, or those that a given file extends, itself or through files.
  std::vector<std::string> extends;
  std::vector<Layer> layers;
  // All writes: those of presets first, then by precedence and order.
  std::vector<Write> writes;
  // Chosen presets, by section index.
  std::vector<std::vector<Choice>> choices;
  // The preset in effect, by section index. Empty: there is none.
  std::vector<std::string> preset_of;
  // Fields that are given twice where only one value is legal. They are reported, and their values are
  // unknown.
  std::vector<const FieldInfo*> ambiguous;
  // Whether a file could not be read or parsed.
  bool malformed = false;
  // Whether an override cannot be parsed.
  bool bad_words = false;
  // Whether the chosen preset cannot be read, by section index.
  std::vector<bool> unknown_presets;
  // Whether values are unknown that a missing `extends` or file would have set.
  bool incomplete = false;
};

// Composes a recipe. `text` replaces the content of the recipe's file. Throws Error only if the recipe itself
// cannot be read (ErrorCode::not_found, format, io).
Composition compose(const Schema& schema, const Library& library, const Request& request,
                    const std::string* text = nullptr);

// Returns the error "unknown key" with at most three similar names, also from other sections. `section` is
// the section in which the key stood. Empty: the top of the recipe.
Diagnostic unknown_key(const Schema& schema, const std::string& section, const std::string& key,
                       SourceLocation location, bool suggest = true);

}  // namespace capstan::config
