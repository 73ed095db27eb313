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
  // Section of the field that holds the text, for ${.sibling} and ${..up.one}.
  std::string section;
  // Path of that field.
  std::string path;
  std::string recipe_name;
  // Seconds since 1970, UTC.
  int64_t now = 0;
  // Returns the value of another field, named by an absolute path, as a node. nullopt: an error was reported
  // at `location`, or the other field has an error itself.
  std::function<std::optional<Node>(const std::string& path, SourceLocation location)> field_value;
  std::function<std::optional<std::string>(SourceLocation location)> hash;
  std::function<const char*(const std::string&)> environment;
  bool* used_environment = nullptr;
};

// Returns the scalar with every `${…}` replaced. A text that consists of a single `${…}` gets the type of the
// value that it names.
std::optional<Node> interpolate(const Node& scalar, const Interpolation& context);

// Whether `${hash}` occurs anywhere in the node.
bool mentions_hash(const Node& node);

}  // namespace capstan::config
