// Evaluation on held-out text during training.
#pragma once

#include <cstdint>
#include <optional>

namespace capstan::config {

struct ValidationConfig {
  std::optional<int64_t> eval_interval;           // steps; null: never
  int64_t eval_iters = 100;                       // batches of one evaluation
  std::optional<int64_t> eval_global_batch_size;  // derived: train.global_batch_size
  std::optional<int64_t> eval_micro_batch_size;   // derived: train.micro_batch_size
};

}  // namespace capstan::config
