// What a recipe says beyond the recipes that it extends by name (see RecipeDelta in resolve.hpp).
#pragma once

#include <map>
#include <string>

#include "config/core/compose.hpp"
#include "config/core/field.hpp"

namespace capstan::config {

// Whether a recipe that only extends the same names has this write too.
bool in_base(const Composition& composed, const Write& write);

// By section, where the choice of a preset is the recipe's own: the preset, "null" for a section that it
// switches off, "{}" for one that it switches on. A preset's file is named as seen from the recipe's
// directory.
std::map<std::string, std::string> own_choices(const Schema& schema, const void* root,
                                               const Composition& composed);

}  // namespace capstan::config
