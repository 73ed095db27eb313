// What a run prints and records.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace capstan::config {

enum class LogLevel : uint8_t { debug, info, warning, error };

struct LoggerConfig {
  int64_t log_interval = 10;  // steps between two progress lines and rows of metrics.jsonl
  LogLevel logging_level = LogLevel::info;
  bool tensorboard = true;                     // event files
  std::optional<std::string> tensorboard_dir;  // null: `tensorboard` of the run directory
  int64_t tensorboard_log_interval = 1;
  bool log_timers = true;      // seconds of data wait, forward, backward, reduce, optimizer, save
  bool log_throughput = true;  // tokens/s and the share of the GEMM rate
  bool log_memory = true;
  bool log_params_norm = false;
  bool log_num_zeros_in_grad = false;
  bool log_validation_ppl = true;
};

}  // namespace capstan::config
