// Between a recipe and its run: what is refused, what the run keeps of it, what is different when it is resumed, and
// the recipe that a checkpoint carries.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "config/resolve.hpp"
#include "train/trainer.hpp"

namespace capstan::train {

// ErrorCode::unsupported with every field whose value this version cannot train.
void refuse_missing_features(const config::Config& config);

// overrides: those that the resolution was made with. command: one line.
RecipeRecord recipe_record(const config::Resolution& resolution, std::span<const config::Override> overrides,
                           std::string command);

// Leaf by leaf against the recipe stored with a checkpoint.
std::vector<RecipeChange> changes_since(const std::string& stored, const config::Resolution& now);

struct StoredRecipe {
  std::filesystem::path checkpoint;
  std::vector<std::string> refused;  // newer checkpoints that do not verify, with the reasons
  config::Resolution resolution;     // of the recipe in it, with the overrides; may have errors
};
// name: a checkpoint, a directory of checkpoints, or a run. Throws ErrorCode::not_found and ::format for a checkpoint
// that is not there or does not verify, ::unsupported for other programs' formats.
StoredRecipe stored_recipe(const std::string& name, std::vector<config::Override> overrides);

}  // namespace capstan::train
