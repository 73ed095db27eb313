// `model: hf:DIR` and `model: gguf:FILE`: a model section taken from what another program's model says of
// itself. The module that reads such models registers itself at the start of the program.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace capstan::config {

// `hf:DIR`, `gguf:FILE` and `peft:DIR` say what a file is; only what follows is a path.
struct SchemedName {
  // With its colon; empty: a plain path.
  std::string_view scheme;
  std::string_view path;
};
SchemedName split_scheme(std::string_view name);
// The same with an absolute path, which a relative one is below `directory`.
std::string absolute_name(std::string_view name, const std::filesystem::path& directory);
// The reverse: a name in `directory` for what `name` stands for elsewhere, `absolute`. An absolute name stays
// as it is.
std::string relative_name(std::string_view name, std::string_view absolute,
                          const std::filesystem::path& directory);

inline bool is_external_model(std::string_view section, std::string_view name) {
  const std::string_view scheme = split_scheme(name).scheme;
  return section == "model" && (scheme == "hf:" || scheme == "gguf:");
}
// reader: gives the lines of the section; name has an absolute path. It may throw Error.
void read_external_models_with(std::string (*reader)(const std::string& name));
std::string external_model(const std::string& name);  // ErrorCode::unsupported without a reader

}  // namespace capstan::config
