// Values as text: YAML that reads back as the same value under YAML 1.1 and 1.2, and JSON. Numbers in their
// shortest form that round-trips.
#pragma once

#include <string>
#include <string_view>

#include "config/core/field.hpp"
#include "config/core/value.hpp"

namespace capstan::config {

// The plain text of a scalar: "true", "0.0003", "1h30m", "512MiB", an enum's name, a path.
std::string scalar_text(const Type& type, const Value& value);

// A scalar as YAML: in quotes whenever it would be read as something else. `flow`: inside brackets.
std::string yaml_text(std::string_view text, bool flow = false);

struct EmitOptions {
  // Whether the text can be read back: `${` in texts is escaped, and secrets are written as references.
  bool recipe = true;
  // Whether paths are written in their absolute form, for a recipe that is stored elsewhere.
  bool absolute_paths = false;
  // Directory to which relative paths are rewritten. Empty: they stay as written.
  std::string directory;
};
// Formats a value on one line, with lists and mappings in brackets.
std::string yaml_inline(const Type& type, const Value& value, const EmitOptions& options = {});
// Formats the text after "key:": " value\n", or an indented block for long lists and mappings.
std::string yaml_block(const Type& type, const Value& value, int indent, const EmitOptions& options = {});

// JSON: durations as text with units, bytes as integers, non-finite numbers as text. indent < 0: one line.
std::string json(const Type& type, const Value& value, int indent = -1, int level = 0);

}  // namespace capstan::config
