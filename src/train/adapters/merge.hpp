// Adapters and their base, made one plain checkpoint.
#pragma once

#include <filesystem>

#include "checkpoint/file_system.hpp"
#include "train/adapters/stored_adapters.hpp"

namespace capstan::train {

struct Merged {
  // The checkpoint that was written.
  std::filesystem::path checkpoint;
  // Weights that an adapter has changed.
  int64_t layers = 0;
};

// Writes ROOT/step-N, N the step of the adapters' run, or the base's for adapters of PEFT's, with the base's
// recipe and element types, the lengths of sequences, the chat template and the tokenizer of the adapters'
// run; sums are made in fp32. One weight at a time is in memory. Errors: ErrorCode::failed when the base is
// not the one of the training or `root` holds that step already; ::format for adapters of other shapes.
Merged merge_adapters(const StoredAdapters& adapters, StoredBase& base, const std::filesystem::path& root,
                      checkpoint::FileSystem& files);

}  // namespace capstan::train
