// The log, metrics and progress output of a run.
#pragma once

#include <cstdint>
#include <optional>

#include "config/core/types.hpp"

namespace capstan::config {

struct LoggerConfig {
  int64_t log_interval = 10;
  bool tensorboard = true;
  std::optional<Path> tensorboard_dir;
  int64_t tensorboard_log_interval = 1;
  bool log_params_norm = false;
  bool log_num_zeros_in_grad = false;
};

}  // namespace capstan::config
