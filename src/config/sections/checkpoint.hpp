// Saving, resuming and starting from weights.
#pragma once

#include <cstdint>
#include <optional>

#include "config/core/types.hpp"

namespace capstan::config {

struct CheckpointConfig {
  std::optional<Path> save;  // directory of the checkpoints; null: `checkpoints` of the run directory
  std::optional<Path> load;  // run, checkpoint directory or checkpoint to continue from (everything)
  std::optional<Path> pretrained_checkpoint;    // start from these weights alone
  std::optional<int64_t> ckpt_step;             // with load: this step instead of the newest
  std::optional<int64_t> save_interval;         // steps; null: only at the end
  std::optional<int64_t> save_retain_interval;  // steps whose multiples are never deleted
  int64_t most_recent_k = 2;                    // newest checkpoints kept; -1: all
  bool save_optim = true;
  bool load_optim = true;
  bool async_save = false;
  bool save_tokenizer_assets = true;
};

}  // namespace capstan::config
