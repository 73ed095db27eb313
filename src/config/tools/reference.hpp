// The reference pages of docs/reference/, in Markdown, generated from the field tables, the rules and what
// comes with the binary.
#pragma once

#include <map>
#include <string>

#include "config/core/field.hpp"
#include "config/core/library.hpp"

namespace capstan::config {

// File name → content: README.md (the list of pages and the fields at the top of a recipe), one page for each
// section, rules.md (rules and diagnostic codes) and recipes.md (recipes and presets).
std::map<std::string, std::string> reference_pages(const Schema& schema, const Library& library);

}  // namespace capstan::config
