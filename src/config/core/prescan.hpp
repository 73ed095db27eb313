// One pass over YAML text before yaml-cpp sees it: refuses what would make the parser slow, deep or silent,
// and finds facts that its messages lack (where an unclosed bracket was opened, tabs used for indentation).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace capstan::config {

struct PrescanProblem {
  enum class Kind : unsigned char { control_character, tab, flow_depth, too_many_values, long_line };
  Kind kind;
  // Offset in bytes.
  size_t offset;
};
struct Prescan {
  std::optional<PrescanProblem> problem;
  // Byte offset of the last bracket or brace that is never closed.
  std::optional<size_t> unclosed;
};
Prescan prescan(std::string_view text);

}  // namespace capstan::config
