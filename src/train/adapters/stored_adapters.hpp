// Adapters on disk: in a checkpoint of a run with `peft`, or in a PEFT directory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/tensor_source.hpp"
#include "config/sections/peft.hpp"
#include "train/adapters/base_model.hpp"
#include "train/setup/stored_recipe.hpp"

namespace capstan::train {

struct StoredAdapters {
  // Name of the adapters in messages.
  std::string name;
  // The settings with which they were trained. For PEFT adapters, only the settings that define the update
  // are known.
  config::PeftConfig peft;
  // "decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight" …
  std::unique_ptr<checkpoint::TensorSource> tensors;
  // BaseModel::hash() of the weights with which they were trained. Empty: it is not known.
  std::string base_hash;
  // The recipe of the run, if the adapters come from a checkpoint.
  std::optional<StoredRecipe> run;
};

// name: `peft:DIR`, a directory with an adapter_config.json, a checkpoint, a directory of checkpoints or a
// run. model: the model section of the base, with its derived values. parts: see formats::to_capstan().
// overrides: overrides of the recipe, if `name` is a run. Errors: ErrorCode::usage if a checkpoint holds a
// full model; those of reading the files.
StoredAdapters open_adapters(const std::string& name, BaseModel& base, const config::ModelConfig& model,
                             std::optional<bool> parts = {});

// The PEFT directory that a name refers to. Null: the name refers to a checkpoint.
std::optional<std::filesystem::path> peft_directory(const std::string& name);

// A base model with its recipe, without layers of multi-token prediction: adapters are trained without them.
struct StoredBase {
  StoredRecipe recipe;
  BaseModel weights;
  // The overrides with which `recipe` leaves such layers out; empty: its own text has none.
  std::vector<config::Override> overrides;
};
// Opens the base model of adapters. `base` is the name given by the user; without it, the adapters name their
// base: a run by checkpoint.pretrained_checkpoint (after the overrides), a PEFT directory by
// base_model_name_or_path if that directory exists here. Throws ErrorCode::usage if no base can be found.
StoredBase base_of_adapters(const std::string& name, const std::optional<std::string>& base,
                            const std::vector<config::Override>& overrides);

// Throws ErrorCode::failed if the adapters were trained with different weights.
void require_own_base(const StoredAdapters& adapters, BaseModel& base);

// Throws ErrorCode::config that names every field of `recipe` whose adapters would differ from the stored
// ones.
void require_same_adapters(const config::PeftConfig& recipe, const StoredAdapters& adapters,
                           const config::ModelConfig& model);

// Returns the overrides that give a recipe these adapters, such as "peft.scheme=lora".
std::vector<std::string> adapter_overrides(const config::PeftConfig& peft);

}  // namespace capstan::train
