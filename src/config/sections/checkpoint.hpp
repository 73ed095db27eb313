// Saving, resuming and starting from weights.
#pragma once

#include <cstdint>
#include <optional>

#include "config/core/types.hpp"

namespace capstan::config {

struct CheckpointConfig {
  std::optional<Path> save;
  std::optional<Path> load;
  std::optional<Path> pretrained_checkpoint;
  std::optional<int64_t> ckpt_step;
  std::optional<int64_t> save_interval;
  std::optional<int64_t> save_retain_interval;
  int64_t most_recent_k = 2;
  bool save_optim = true;
  bool load_optim = true;
  bool async_save = false;
  bool save_tokenizer_assets = true;
};

}  // namespace capstan::config
