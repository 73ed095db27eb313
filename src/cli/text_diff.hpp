// Line-by-line comparison of two texts.
#pragma once

#include <string>
#include <string_view>

namespace capstan::cli {

// The form of `diff -u` with three lines around each change; empty where the texts are equal.
std::string unified_diff(std::string_view before, std::string_view after, const std::string& name);

}  // namespace capstan::cli
