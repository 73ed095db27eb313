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

#include "config/resolve/resolve.hpp"

namespace capstan::importers {

enum class Format : uint8_t { megatron, deepspeed, bridge, torchtune, axolotl, training_arguments };

struct FormatInfo {
  Format format;
  // Name on the command line, such as "megatron".
  std::string_view name;
  // Title for people, such as "Megatron command line".
  std::string_view title;
  // How a file of this format is recognized, for people.
  std::string_view recognized;
};
std::span<const FormatInfo> known_formats();
const FormatInfo& info_of(Format format);

// Why a key of the source file is not in the recipe.
enum class OmissionReason : uint8_t {
  // Capstan does not know the key.
  unknown,
  // The key is known, but this value has no counterpart.
  value,
  // The file does not give the value; the user has to.
  to_fill_in,
  // The key configures a feature that Capstan does not have.
  unsupported,
  // The key names a path, a service or an account outside of the recipe.
  external,
  // The setting does not change the numerical results of Capstan.
  no_effect,
  // A later key of the file sets the field again.
  replaced,
  // The value is the default of the field.
  same,
  // The value is empty or switches the feature off.
  off,
};
// The name of a reason in JSON, such as "no_effect".
std::string_view omission_name(OmissionReason why);
// The name of a reason for people, such as "without effect here".
std::string_view omission_title(OmissionReason why);

// Locations are in `Imported::sources[0]`.
struct ImportedKey {
  config::SourceLocation location;
  // The name of the key in the file.
  std::string key;
  // Path of the recipe's field, or `section (preset)` for the choice of a preset.
  std::string path;
  // The value in the recipe.
  std::string value;
};
// A value that the file does not give: the other trainer's default if Capstan's differs, or a value to fill
// in. Reasons may hold markers of actions (base/actions.hpp).
struct AssumedValue {
  std::string path, value, reason;
};
struct OmittedKey {
  // Location of the key; unknown if the file lacks it.
  config::SourceLocation location;
  std::string key, value, reason;
  OmissionReason why = OmissionReason::unknown;
  // Keys with a similar name.
  std::vector<std::string> near;
  // True for a branch or loop of a script whose condition is unknown.
  bool branch = false;
};

struct Options {
  // Format of the file; nullopt: it is recognized from the text.
  std::optional<Format> format;
  // Values that a script takes from its environment or arguments ("1").
  std::map<std::string, std::string> variables;
  // Recipe to extend. If empty, formats that do not describe the model extend `quickstart`.
  std::string base;
  // Value of `extends`: a file relative to the directory of the recipe. Empty: the same as `base`.
  std::string extends;
  // The path of the recipe in diagnostics.
  std::string recipe_name = "imported.yaml";
};

struct Imported {
  Format format = Format::megatron;
  // The file that was read.
  std::vector<config::Source> sources;
  // Keys whose values were taken, in the recipe's order.
  std::vector<ImportedKey> taken;
  // Values that were assumed, in the recipe's order.
  std::vector<AssumedValue> assumed;
  // Keys that were omitted, in the order of the file.
  std::vector<OmittedKey> omitted;
  // The recipe as YAML.
  std::string recipe;
  // The resolved recipe, which has errors if a value must be filled in.
  config::Resolution resolution;
  // True if a branch or loop of the script was omitted because its condition is unknown.
  bool undecided = false;
};

// Throws ErrorCode::format for text that is malformed, too large, or of no known format.
Imported import_recipe(std::string text, const std::string& file_name, const Options& options = {});

}  // namespace capstan::importers
