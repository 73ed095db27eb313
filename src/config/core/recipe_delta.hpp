// The settings of a recipe beyond the recipes that it extends by name (see RecipeDelta in resolve.hpp).
#pragma once

#include <map>
#include <string>

#include "config/core/compose.hpp"
#include "config/core/field.hpp"

namespace capstan::config {

// Whether a recipe that only extends the same names has this write too.
bool in_base(const Composition& composed, const Write& write);

// Returns, by section, the presets that the recipe itself chooses: the name of the preset, "null" for a
// section that it switches off, or "{}" for one that it switches on. The path of a preset file is relative to
// the recipe's directory.
std::map<std::string, std::string> own_choices(const Schema& schema, const void* root,
                                               const Composition& composed);

}  // namespace capstan::config
