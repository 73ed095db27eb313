// The recipe of a model that lies on disk, for everything but the training that it describes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "config/resolve/resolve.hpp"

namespace capstan::train {

struct StoredRecipe {
  // Or `hf:DIR`, `gguf:FILE` with an absolute path.
  std::filesystem::path checkpoint;
  // Newer checkpoints that do not verify, with the reasons.
  std::vector<std::string> refused;
  // Resolution of the stored recipe with the overrides; may have errors.
  config::Resolution resolution;
};
// For evaluation and generation on `ranks` ranks, whatever the layout that trained. One rank holds the full
// model; several share it as the recipe's tensor and pipeline sizes say, or those of the overrides. The rest
// of the layout (context and sequence parallelism, virtual and uneven stages, sharding), recomputation and
// tracing are left out. name: a checkpoint, a directory of checkpoints, a run, or an external model (hf:DIR,
// gguf:FILE), whose recipe is made from its own configuration. Throws ErrorCode::not_found and ::format for a
// checkpoint that is not there or does not verify, ::unsupported for models that this version does not
// compute and for adapters on a random base model, ::config for ranks that tensor and pipeline parallelism do
// not use up, and for overrides that ask for another axis.
StoredRecipe stored_recipe(const std::string& name, std::vector<config::Override> overrides, int64_t ranks);

}  // namespace capstan::train
