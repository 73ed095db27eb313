// Python's expressions for lists of numbers, as Megatron's options have them: "([0]*3+[1]*58)".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::config {

// The items of lists, of their multiples and of their sums; nullopt: the text is anything else, or has more
// than 8192 items.
std::optional<std::vector<int64_t>> parse_list_expression(std::string_view text);

// The list that a recipe takes instead of an expression, "[0, 0, 0, 1]"; empty: the text is no expression.
std::string list_in_full(std::string_view expression);

}  // namespace capstan::config
