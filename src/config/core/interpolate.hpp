// `${…}` in a scalar: other fields, the environment, the time, the recipe's name and hash. A fixed list;
// nothing is executed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/diagnostics.hpp"
#include "config/core/field.hpp"
#include "config/core/tree.hpp"

namespace capstan::config {

struct Interpolation {
  std::vector<Diagnostic>* diagnostics = nullptr;
  // Of the field that holds the text, for ${.sibling} and ${..up.one}.
  std::string section;
  // Of that field.
  std::string path;
  std::string recipe_name;
  // Seconds since 1970, UTC.
  int64_t now = 0;
  // The value of another field (an absolute path) as a node; nullopt: reported through `place`, or already
  // wrong itself.
  std::function<std::optional<Node>(const std::string& path, SourceLocation location)> field_value;
  std::function<std::optional<std::string>(SourceLocation location)> hash;
  std::function<const char*(const std::string&)> environment;
  bool* used_environment = nullptr;
};

// The scalar with everything in `${…}` replaced. A text that is one `${…}` and nothing else keeps the type of
// what it names.
std::optional<Node> interpolate(const Node& scalar, const Interpolation& context);

bool mentions_hash(const Node& node);  // `${hash}` anywhere in it

}  // namespace capstan::config
