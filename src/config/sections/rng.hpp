// Randomness of initialization and dropout; the data's order has dataset.random_seed.
#pragma once

#include <cstdint>

namespace capstan::config {

struct RngConfig {
  int64_t seed = 1234;
};

}  // namespace capstan::config
