// `model: hf:DIR` and `model: gguf:FILE`: a model section taken from what another program's model says of itself. Who can read
// such models says so once, at the start of the program; this room knows none.
#pragma once

#include <string>
#include <string_view>

namespace capstan::config {

inline bool is_foreign_model(std::string_view section, std::string_view name) {
  return section == "model" && (name.starts_with("hf:") || name.starts_with("gguf:"));
}
// reader: gives the lines of the section; name has an absolute path. It may throw Error.
void read_foreign_models_with(std::string (*reader)(const std::string& name));
std::string foreign_model(const std::string& name);  // ErrorCode::unsupported without a reader

}  // namespace capstan::config
