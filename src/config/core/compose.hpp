// Reads the recipe, the files it extends, `-f` files and the command line, and lists every
// write to every field in the order of its rank. Nothing is decided here; merge and conversion follow in
// resolve.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/core/diagnostics.hpp"
#include "config/core/field.hpp"
#include "config/core/library.hpp"
#include "config/core/override.hpp"
#include "config/core/tree.hpp"

namespace capstan::config {

struct Request {
  // A name, a path (contains "/" or ends in .yaml/.yml), or "-" for standard input.
  std::string recipe;
  // In the order given, -f files included.
  std::vector<Override> overrides;
  // --ranks: the world size, instead of the recipe's.
  std::optional<int64_t> ranks;
  std::string ranks_origin = "--ranks";  // what messages call it
  // Fields, or whole sections, as if the recipe and what it extends did not set them; -f files and overrides
  // may.
  std::vector<std::string> unset;
  // Overrides above all others, which `imposed_by` asks for.
  std::vector<Override> imposed;
  std::string imposed_by;
  // Seconds since 1970 for ${now:…}; tests and resumed runs fix it.
  std::optional<int64_t> now;
  // Absolute: what paths in overrides and in embedded recipes are relative to; empty: the current directory.
  std::string directory;
};

// One file, preset or command line. Later layers win over earlier ones of the same or a lower rank.
struct Layer {
  enum class Rank : uint8_t { preset = 2, recipe = 3, file = 4, cli = 5, imposed = 6 };
  Rank rank = Rank::recipe;
  // "model/llama3-8b" for presets.
  std::string preset;
  // Of a recipe that the given one extends by name, or of what that one extends.
  bool base = false;
};

struct Write {
  // remove: an item of a list or a key of a map.
  enum class Op : uint8_t { set, append, remove };
  Op op = Op::set;
  const FieldInfo* field = nullptr;
  // Below the field: an index, a key.
  std::vector<Segment> rest;
  Node value;
  // The key, or the override.
  SourceLocation location;
  // The path as written.
  std::string spelling;
  // Index into Composition::layers.
  size_t layer = 0;
  // A later `~path` took it back.
  bool dead = false;
  // The layer with that `~path`; kRequested: Request::unset.
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
  // Name, or the path of a preset file.
  std::string preset;
  SourceLocation location;
};

struct Composition {
  std::string recipe_name;
  std::vector<Source> sources;
  std::vector<Diagnostic> diagnostics;
  // The names that the given recipe extends, itself or by the files that it extends.
  std::vector<std::string> extends;
  std::vector<Layer> layers;
  // Soft ones first, then by rank and order.
  std::vector<Write> writes;
  // By section index.
  std::vector<std::vector<Choice>> choices;
  // By section index: the preset in effect, empty without.
  std::vector<std::string> preset_of;
  // Given twice where once is legal, and reported: their value is unknown.
  std::vector<const FieldInfo*> ambiguous;
  // A file could not be read or parsed.
  bool malformed = false;
  // An override that is none.
  bool bad_words = false;
  // By section index: the preset that was chosen cannot be read.
  std::vector<bool> unknown_presets;
  // What an `extends` or a file would have set is unknown.
  bool incomplete = false;
};

// text: of the recipe, instead of what its file holds.
// Throws Error only when the recipe itself cannot be read (ErrorCode::not_found, format, io).
Composition compose(const Schema& schema, const Library& library, const Request& request,
                    const std::string* text = nullptr);

// "unknown key" with at most three near matches, other sections included. `section`: where it stood, empty at
// the top.
Diagnostic unknown_key(const Schema& schema, const std::string& section, const std::string& key,
                       SourceLocation location, bool suggest = true);

}  // namespace capstan::config
