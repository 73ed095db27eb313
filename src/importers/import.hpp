// A configuration of another trainer as a recipe, with everything that has no counterpart listed. The text is
// matched, never executed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/resolve.hpp"

namespace capstan::importers {

enum class Format : uint8_t { megatron, deepspeed, bridge, torchtune, axolotl, training_arguments };

struct FormatInfo {
  Format format;
  // "megatron": what --from takes.
  std::string_view name;
  // "Megatron command line"
  std::string_view title;
  // What such a file looks like, for people.
  std::string_view recognized;
};
std::span<const FormatInfo> known_formats();
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
  same,        // the value that the field has anyway
  off,         // switched off or empty, so nothing is lost
};
std::string_view why_name(Why why);   // "no_effect"
std::string_view why_title(Why why);  // "without effect here"

// Places are in `Imported::sources[0]`.
struct Taken {
  config::SourceLocation location;
  // As the file names it.
  std::string key;
  // Our field; `section (preset)` for the choice of a preset.
  std::string path;
  // As the recipe has it.
  std::string value;
};
struct Assumed {  // written though the file does not say so: their default where ours differs, or a stand-in
  std::string path, value, reason;
};
struct Left {
  // Unknown where the file lacks the key.
  config::SourceLocation location;
  std::string key, value, reason;
  Why why = Why::unknown;
  // Keys with a similar name.
  std::vector<std::string> near;
  // A branch or loop whose values are missing.
  bool branch = false;
};

struct Options {
  // Else recognized from the text.
  std::optional<Format> format;
  // What a script takes from its environment or arguments ("1")
  std::map<std::string, std::string> variables;
  // Recipe to extend; empty: `quickstart` where the format says nothing of the model.
  std::string base;
  std::string recipe_name = "imported.yaml";  // what diagnostics call the recipe
};

struct Imported {
  Format format = Format::megatron;
  // The file that was read.
  std::vector<config::Source> sources;
  // In the recipe's order.
  std::vector<Taken> taken;
  // In the recipe's order.
  std::vector<Assumed> assumed;
  // In the file's order.
  std::vector<Left> left;
  std::string recipe;  // YAML
  // Of that recipe; may have errors where something is to be filled in.
  config::Resolution resolution;
  // Overrides that get round what `train` of this version refuses.
  std::vector<std::string> hints;
  // A branch or loop of the script is left out: its values are missing.
  bool undecided = false;
};

// Throws ErrorCode::format for text that is malformed, too large, or of no known format.
Imported import_recipe(std::string text, const std::string& file_name, const Options& options = {});

}  // namespace capstan::importers
