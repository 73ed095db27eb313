// A configuration of another trainer as a recipe, with everything that has no counterpart listed. The text is matched,
// never executed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/resolve.hpp"

namespace capstan::importer {

enum class Format : uint8_t { megatron, deepspeed, bridge, torchtune, axolotl, training_arguments };

struct FormatInfo {
  Format format;
  std::string_view name;        // "megatron": what --from takes
  std::string_view title;       // "Megatron command line"
  std::string_view recognised;  // what such a file looks like, for people
};
std::span<const FormatInfo> formats();
const FormatInfo& info_of(Format format);

// Why something of theirs is not in the recipe.
enum class Why : uint8_t {
  unknown,     // no table has the key
  value,       // the key is known, this value is not
  to_fill_in,  // the file does not say, somebody has to
  not_there,   // a feature that does not exist here
  theirs,      // a path, a service or an account of their world
  no_effect,   // changes no number here
  replaced,    // given again later in the file
  same,        // the value that the leaf has anyway
  off,         // switched off or empty, so nothing is lost
};
std::string_view why_name(Why why);   // "no_effect"
std::string_view why_title(Why why);  // "without effect here"

// Places are in `Imported::sources[0]`.
struct Taken {
  config::Place place;
  std::string key;    // as the file names it
  std::string path;   // our leaf; `section (preset)` for the choice of a preset
  std::string value;  // as the recipe has it
};
struct Assumed {  // written though the file does not say so: their default where ours differs, or a stand-in
  std::string path, value, reason;
};
struct Left {
  config::Place place;  // unknown where the file lacks the key
  std::string key, value, reason;
  Why why = Why::unknown;
  std::vector<std::string> near;  // keys with a similar name
  bool branch = false;            // a branch or loop whose values are missing
};

struct Options {
  std::optional<Format> format;  // else recognised from the text
  std::map<std::string, std::string>
      variables;     // what a script takes from its environment or arguments ("1")
  std::string base;  // recipe to extend; empty: `quickstart` where the format says nothing of the model
  std::string recipe_name = "imported.yaml";  // what diagnostics call the recipe
};

struct Imported {
  Format format = Format::megatron;
  std::vector<config::Source> sources;  // the file that was read
  std::vector<Taken> taken;             // in the recipe's order
  std::vector<Assumed> assumed;         // in the recipe's order
  std::vector<Left> left;               // in the file's order
  std::string recipe;                   // YAML
  config::Resolution resolution;        // of that recipe; may have errors where something is to be filled in
  std::vector<std::string> hints;       // overrides that get round what `train` of this version refuses
  bool undecided = false;               // a branch or loop of the script is left out: its values are missing
};

// Throws ErrorCode::format for text that is malformed, too large, or of no known format.
Imported import_recipe(std::string text, const std::string& file_name, const Options& options = {});

}  // namespace capstan::importer
