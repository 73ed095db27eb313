// Conditions that several sections and rules share.
#pragma once

#include "config/sections/config.hpp"

namespace capstan::config {

inline bool has_pipeline(const Config& c) {
  return c.dist.pipeline_model_parallel_size > 1;
}
inline bool has_experts(const Config& c) {
  return c.model.num_moe_experts.has_value();
}
inline bool trains_all_layers(const Config& c) {
  return !c.peft.has_value();
}
inline bool evaluates(const Config& c) {
  return c.validation.eval_interval.has_value();
}

}  // namespace capstan::config
