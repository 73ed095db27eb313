// Overrides after which a step needs less memory, for a recipe that does not fit.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "config/sections/config.hpp"

namespace capstan::train {

// A recipe with overrides that keep the mathematics of training: the global batch size stays.
struct SmallerStep {
  std::vector<std::string> overrides;
  config::Config config;
  // Bytes that the step needs.
  int64_t bytes = 0;
};

// What a step needs: bytes of the memory in question, and whether it is within all limits.
struct StepNeed {
  int64_t bytes = 0;
  bool fits = false;
};

struct SmallerSteps {
  // Steps that fit, with one change each; if there are none, with the fewest changes together. The least
  // delay of training comes first.
  std::vector<SmallerStep> fitting;
  // The step with all changes, where nothing fits.
  SmallerStep smallest;
};

// Tries micro-batches, recomputation, ZeRO stages, offload, smaller evaluations and synchronous saves.
// `need_of` runs a step on the meta device. At most `most` steps are listed.
SmallerSteps find_smaller_steps(const config::Config& config,
                                const std::function<StepNeed(const config::Config&)>& need_of,
                                size_t most = 3);

}  // namespace capstan::train
