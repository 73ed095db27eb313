#pragma once

#include <memory>

#include "config/sections/model.hpp"
#include "models/model.hpp"

namespace capstan::models {

// The model that a resolved section describes (fields marked `derived` hold values), or a rank's part of it. Allocates
// nothing on a device. Errors: unsupported, naming every field whose value no family of this build can do; config for
// sizes that contradict each other.
std::unique_ptr<Model> build(const config::ModelConfig& config, const ModelShard& part = {});

}  // namespace capstan::models
