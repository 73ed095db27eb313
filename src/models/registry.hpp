#pragma once

#include <memory>
#include <span>

#include "config/sections/model.hpp"
#include "models/architectures/architecture.hpp"
#include "models/model.hpp"

namespace capstan::models {

// One for each value of model.architecture.
std::span<const Architecture* const> all_architectures();

// The model that a resolved section describes (fields marked `derived` hold values), or a rank's shard of it.
// Allocates nothing on a device. Errors: unsupported, naming every field with a value that no model computes;
// config for contradicting sizes, or an architecture that the other fields contradict.
std::unique_ptr<Model> build(const config::ModelConfig& config, const ModelShard& shard = {});

}  // namespace capstan::models
