// Evaluation on held-out text during training.
#pragma once

#include <cstdint>
#include <optional>

namespace capstan::config {

struct ValidationConfig {
  std::optional<int64_t> eval_interval;
  int64_t eval_iters = 100;
  // Derived: train.global_batch_size.
  std::optional<int64_t> eval_global_batch_size;
  // Derived: train.micro_batch_size.
  std::optional<int64_t> eval_micro_batch_size;
};

}  // namespace capstan::config
