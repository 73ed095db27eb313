// The recipe of a stored model, for evaluation, generation and conversion.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "config/resolve/resolve.hpp"

namespace capstan::train {

struct StoredRecipe {
  // The checkpoint, or `hf:DIR` or `gguf:FILE` with an absolute path.
  std::filesystem::path checkpoint;
  // Newer checkpoints that do not verify, with the reasons.
  std::vector<std::string> refused;
  // Resolution of the stored recipe with the overrides; may have errors.
  config::Resolution resolution;
  // Presets among the overrides, as `mixed_precision=fp32`, of which the stored recipe keeps a field of its
  // own.
  std::vector<std::string> hidden_presets;
};
// The recipe for evaluation and generation on `ranks` ranks, independent of the layout of the training. One
// rank holds the full model; several ranks shard it by the tensor and pipeline sizes of the recipe or of the
// overrides. The rest of the layout (context and sequence parallelism, virtual and uneven stages, sharding),
// recomputation and tracing are disabled. name: a checkpoint, a directory of checkpoints, a run, or an
// external model (hf:DIR, gguf:FILE), whose recipe is made from its own configuration. Throws
// ErrorCode::not_found and ::format for a checkpoint that is missing or invalid, ::unsupported for models
// that this version does not support and for adapters on a random base model, ::config if tensor times
// pipeline size is not `ranks`, and for overrides of another axis or of the tokenizer that it has.
StoredRecipe stored_recipe(const std::string& name, const std::vector<config::Override>& overrides,
                           int64_t ranks);

}  // namespace capstan::train
