// Who says what: reads the recipe, the files it extends, `-f` files and the command line, and lists every write to
// every leaf in the order of its rank. Nothing is decided here; merge and conversion follow in resolve.cpp.
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
  std::string recipe;  // a name, a path (contains "/" or ends in .yaml/.yml), or "-" for standard input
  std::vector<Override> overrides;       // in the order given, -f files included
  std::optional<int64_t> ranks;          // --ranks: the world size, instead of the recipe's
  std::string ranks_origin = "--ranks";  // what messages call it
  // Leaves, or whole sections, as if the recipe and what it extends did not set them; -f files and overrides may.
  std::vector<std::string> unset;
  std::vector<Override> imposed;  // overrides above all others, which `imposed_by` asks for
  std::string imposed_by;
  std::optional<int64_t> now;  // seconds since 1970 for ${now:…}; tests and resumed runs fix it
  // Absolute: what paths in overrides and in embedded recipes are relative to; empty: the current directory.
  std::string directory;
};

// One file, preset or command line. Later layers win over earlier ones of the same or a lower rank.
struct Layer {
  enum class Rank : uint8_t { preset = 2, recipe = 3, file = 4, cli = 5, imposed = 6 };
  Rank rank = Rank::recipe;
  std::string preset;  // "model/llama3-8b" for presets
  bool base = false;   // of a recipe that the given one extends by name, or of what that one extends
};

struct Write {
  enum class Op : uint8_t { set, append, remove };  // remove: an item of a list or a key of a map
  Op op = Op::set;
  const FieldInfo* field = nullptr;
  std::vector<Segment> rest;  // below the leaf: an index, a key
  Node value;
  Place place;           // the key, or the override
  std::string spelling;  // the path as written
  size_t layer = 0;      // index into Composition::layers
  bool dead = false;     // a later `~path` took it back
  size_t dead_by = 0;    // the layer with that `~path`; kRequested: Request::unset
  static constexpr size_t kRequested = static_cast<size_t>(-1);
  void take_back(size_t by) {
    if (!dead) dead = true, dead_by = by;
  }
};

// A preset chosen for a section, or the section switched off.
struct Choice {
  size_t layer = 0;
  bool off = false;
  std::string preset;  // name, or the path of a preset file
  Place place;
};

struct Composition {
  std::string recipe_name;
  std::vector<Source> sources;
  std::vector<Diagnostic> diagnostics;
  std::vector<std::string>
      extends;  // the names that the given recipe extends, itself or by the files that it extends
  std::vector<Layer> layers;
  std::vector<Write> writes;                 // soft ones first, then by rank and order
  std::vector<std::vector<Choice>> choices;  // by section index
  std::vector<std::string> preset_of;        // by section index: the preset in effect, empty without
  std::vector<const FieldInfo*>
      ambiguous;                      // given twice where once is legal, and reported: their value is unknown
  bool malformed = false;             // a file could not be read or parsed
  bool bad_words = false;             // an override that is none
  std::vector<bool> unknown_presets;  // by section index: the preset that was chosen cannot be read
  bool incomplete = false;            // what an `extends` or a file would have set is unknown
};

// Throws Error only when the recipe itself cannot be read (ErrorCode::not_found, format, io).
Composition compose(const Schema& schema, const Library& library, const Request& request);

// "unknown key" with at most three near matches, other sections included. `section`: where it stood, empty at the top.
Diagnostic unknown_key(const Schema& schema, const std::string& section, const std::string& key, Place place,
                       bool suggest = true);

}  // namespace capstan::config
