// Configurations of optimizers whose state may lie outside of the device.
#pragma once

#include <vector>

#include "config/sections/optimizer.hpp"

namespace capstan::test {

inline config::OptimizerConfig optimizer_of(config::OptimizerKind kind, config::MomentType moments,
                                            bool stochastic = false) {
  config::OptimizerConfig config;
  config.optimizer = kind;
  config.exp_avg_dtype = config.exp_avg_sq_dtype = moments;
  config.stochastic_rounding = stochastic;
  return config;
}
inline const auto kAdam = optimizer_of(config::OptimizerKind::adam, config::MomentType::fp32);

// One for each kind of update and each format of the moments.
inline std::vector<config::OptimizerConfig> offloadable_optimizers() {
  using enum config::OptimizerKind;
  using enum config::MomentType;
  return {kAdam, optimizer_of(adam, bf16, true), optimizer_of(adam, fp8), optimizer_of(sgd, fp32),
          optimizer_of(lion, fp32)};
}

}  // namespace capstan::test
