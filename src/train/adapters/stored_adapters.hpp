// Adapters that lie on disk: in a checkpoint of a run with `peft`, or in a directory of PEFT's.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/tensor_source.hpp"
#include "config/sections/peft.hpp"
#include "train/adapters/base_model.hpp"
#include "train/trainer/recipe.hpp"

namespace capstan::train {

struct StoredAdapters {
  std::string name;         // for messages
  config::PeftConfig peft;  // as they were trained; of PEFT's only what makes the update
  // "decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight" …
  std::unique_ptr<checkpoint::TensorSource> tensors;
  // BaseModel::hash() of the weights that they were trained beside; empty: it is not known.
  std::string base_hash;
  std::optional<StoredRecipe> run;  // where a checkpoint holds them
};

// name: `peft:DIR`, a directory with an adapter_config.json, a checkpoint, a directory of checkpoints or a
// run. model: the base's section, with its derived values; parts: as formats::to_capstan(). overrides: to
// the recipe of a run. Errors: ErrorCode::usage where a checkpoint holds a full model; those of the files.
StoredAdapters open_adapters(const std::string& name, BaseModel& base, const config::ModelConfig& model,
                             std::optional<bool> parts = {});

// The directory of PEFT's that a name means; null: it means a checkpoint.
std::optional<std::filesystem::path> peft_directory(const std::string& name);

// A base with its recipe.
struct StoredBase {
  StoredRecipe recipe;
  BaseModel weights;
};
// base: what the user named; else what the adapters say: checkpoint.pretrained_checkpoint of a run (with the
// overrides), base_model_name_or_path where it is a directory here. ErrorCode::usage where that leads
// nowhere.
StoredBase base_of_adapters(const std::string& name, const std::optional<std::string>& base,
                            const std::vector<config::Override>& overrides);

// ErrorCode::failed where the weights are others than those that the adapters were trained beside.
void require_own_base(const StoredAdapters& adapters, BaseModel& base);

// ErrorCode::config with every field of `recipe` in which its adapters would be others than the stored ones.
void require_same_adapters(const config::PeftConfig& recipe, const StoredAdapters& adapters,
                           const config::ModelConfig& model);

// The overrides that give a recipe these adapters: peft.scheme=lora …
std::vector<std::string> adapter_overrides(const config::PeftConfig& peft);

}  // namespace capstan::train
