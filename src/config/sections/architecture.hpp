// The architecture of a model, and whether the other fields of its section agree with it.
#pragma once

#include <string>

#include "config/sections/model.hpp"

namespace capstan::config {

// The architecture that the other fields ask for, where `model.architecture` is not set.
Architecture derived_architecture(const ModelConfig& model);

inline Architecture architecture_of(const ModelConfig& model) {
  return model.architecture.value_or(derived_architecture(model));
}

// The field that contradicts model.architecture, and its value: "`model.num_moe_experts` is 8". Empty: none.
std::string architecture_conflict(const ModelConfig& model);

}  // namespace capstan::config
