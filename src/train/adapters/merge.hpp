// Merges adapters into their base model, as a checkpoint without adapters.
#pragma once

#include <filesystem>

#include "checkpoint/file_system.hpp"
#include "train/adapters/stored_adapters.hpp"

namespace capstan::train {

struct Merged {
  // The checkpoint that was written.
  std::filesystem::path checkpoint;
  // Number of weights that an adapter has changed.
  int64_t layers = 0;
  // Layers of multi-token prediction of the base, which the checkpoint does not have.
  int64_t prediction_layers = 0;
};

// Writes ROOT/step-N, where N is the step of the adapters' run, or of the base for PEFT adapters. Recipe and
// element types are those of the base; sequence lengths, chat template and tokenizer are those of the
// adapters' run. Sums are computed in fp32, with one weight at a time in memory. Errors: ErrorCode::failed if
// the adapters were trained with another base, or `root` already holds that step; ::format for adapters of
// other shapes.
Merged merge_adapters(const StoredAdapters& adapters, StoredBase& base, const std::filesystem::path& root,
                      checkpoint::FileSystem& files);

}  // namespace capstan::train
