// Checks before a run that all ranks have the same program, recipe and data: a rank with others would compute
// another model.
#pragma once

#include <string>
#include <vector>

#include "comm/world.hpp"
#include "config/core/config.hpp"

namespace capstan::train {

struct Common {
  std::string what;   // "the program"
  std::string value;  // of this rank
};

// ErrorCode::rank_failure on every rank, naming each rank that differs from rank 0, its host and both values.
// Collective.
void require_agreement(comm::World& world, const std::vector<Common>& values);

// The same for every field of the recipe, layout and intervals too: the first field in which a rank differs
// is named. Collective.
void require_same_recipe(comm::World& world, const config::Config& config);

// Version of the program and the build id that the linker gave this executable.
std::string program_identity();

}  // namespace capstan::train
