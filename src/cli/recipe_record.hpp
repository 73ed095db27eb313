// What a run keeps of its recipe, and what is different when it is resumed.
#pragma once

#include <string>
#include <vector>

#include "cli/context.hpp"
#include "config/resolve.hpp"
#include "train/trainer.hpp"

namespace capstan::cli {

train::RecipeRecord recipe_record(const config::Resolution& resolution, const Context& context);

// Leaf by leaf against the recipe stored with a checkpoint.
std::vector<train::RecipeChange> changes_since(const std::string& stored, const config::Resolution& now);

}  // namespace capstan::cli
