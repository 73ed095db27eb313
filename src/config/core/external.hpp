// `model: hf:DIR` and `model: gguf:FILE`: a model section taken from what another program's model says of
// itself. The module that reads such models registers itself at the start of the program.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace capstan::config {

// A name such as `hf:DIR`, `gguf:FILE` or `peft:DIR`. The scheme names the kind of file; the rest is a path.
struct SchemedName {
  // The scheme with its colon. Empty: the name is a plain path.
  std::string_view scheme;
  std::string_view path;
};
SchemedName split_scheme(std::string_view name);
// Returns the name with an absolute path. A relative path is below `directory`.
std::string absolute_name(std::string_view name, const std::filesystem::path& directory);
// Does the reverse: returns a name relative to `directory` for `name`, which stands for `absolute` elsewhere.
// An absolute name stays unchanged.
std::string relative_name(std::string_view name, std::string_view absolute,
                          const std::filesystem::path& directory);

inline bool is_external_model(std::string_view section, std::string_view name) {
  const std::string_view scheme = split_scheme(name).scheme;
  return section == "model" && (scheme == "hf:" || scheme == "gguf:");
}
// The scheme with which a recipe names the model at a path: "hf:" for a directory with a config.json, "gguf:"
// for a GGUF file. Empty: neither is there.
std::string model_scheme(const std::filesystem::path& path);
// Begins a help text about such a model: "a Hugging Face model is in that directory".
std::string model_found_text(std::string_view scheme);
// Help for a model of another program that is given as a recipe: `hf:DIR`, `gguf:FILE`, or the path of one.
// It holds markers of actions. Empty: the name is none of these.
std::string model_as_recipe_help(const std::string& name);
// reader: gives the lines of the section; name has an absolute path. It may throw Error.
void read_external_models_with(std::string (*reader)(const std::string& name));
// ErrorCode::unsupported without a reader.
std::string external_model(const std::string& name);

}  // namespace capstan::config
