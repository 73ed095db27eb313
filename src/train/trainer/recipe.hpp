// Between a recipe and its run: unsupported features, the record that a run keeps of its recipe, changes at a
// resume, and the recipe in a checkpoint.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "config/core/resolve.hpp"
#include "train/trainer/run_options.hpp"

namespace capstan::train {

// ErrorCode::unsupported with every field whose value this version cannot train.
void refuse_missing_features(const config::Config& config);

// overrides: those that the resolution was made with. command: one line.
RecipeRecord recipe_record(const config::Resolution& resolution, std::span<const config::Override> overrides,
                           std::string command);

// The recipe in a checkpoint, resolved. ErrorCode::format where it does not resolve.
config::Config stored_config(const std::string& text);

// Field by field against the recipe stored with a checkpoint.
std::vector<RecipeChange> changes_since(const std::string& stored, const config::Resolution& now);

struct StoredRecipe {
  std::filesystem::path checkpoint;  // or `hf:DIR`, `gguf:FILE` with an absolute path
  std::vector<std::string> refused;  // newer checkpoints that do not verify, with the reasons
  config::Resolution resolution;     // of the recipe in it, with the overrides; may have errors
};
// For evaluation and generation on `ranks` ranks, whatever the layout that trained. One rank holds the full
// model; several share it as the recipe's tensor and pipeline sizes say, or those of the overrides. The rest
// of the layout (context and sequence parallelism, virtual and uneven stages, sharding), recomputation and
// tracing are left out. name: a checkpoint, a directory of checkpoints, a run, or an external model (hf:DIR,
// gguf:FILE), whose recipe is made from its own configuration. Throws ErrorCode::not_found and ::format for a
// checkpoint that is not there or does not verify, ::unsupported for models that this version does not
// compute and for adapters beside random weights, ::config for ranks that tensor and pipeline parallelism do
// not use up, and for overrides that ask for another axis.
StoredRecipe stored_recipe(const std::string& name, std::vector<config::Override> overrides, int64_t ranks);

}  // namespace capstan::train
