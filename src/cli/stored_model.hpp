// The model of a checkpoint, for eval and generate.
#pragma once

#include <memory>
#include <string>

#include "cli/context.hpp"
#include "train/loaded_model.hpp"

namespace capstan::cli {

// name: a checkpoint, a directory of checkpoints, or a run. The overrides of the command line apply to its
// recipe.
std::shared_ptr<train::LoadedModel> load_stored_model(const Context& context, const std::string& name);

}  // namespace capstan::cli
