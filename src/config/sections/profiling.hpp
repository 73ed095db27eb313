// A trace of operations over some steps.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "config/core/types.hpp"

namespace capstan::config {

struct ProfilingConfig {
  bool trace = false;
  int64_t profile_step_start = 10;
  int64_t profile_step_end = 12;
  std::vector<int64_t> profile_ranks = {0};
  bool record_shapes = true;
  std::optional<Path> trace_dir;
};

}  // namespace capstan::config
