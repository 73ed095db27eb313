// Checks before a run that all ranks have the same program, recipe and data: a rank that differs would
// compute another model.
#pragma once

#include <string>
#include <vector>

#include "comm/world.hpp"
#include "config/sections/config.hpp"

namespace capstan::train {

// A value that all ranks must have in common.
struct AgreedValue {
  // Name of the value in messages: "the program".
  std::string name;
  // Value on this rank.
  std::string value;
};

// Collective. Throws ErrorCode::rank_failure on every rank if values differ, and names each rank that differs
// from rank 0, its host and both values.
void require_agreement(comm::World& world, const std::vector<AgreedValue>& values);

// Collective. Requires the same value of every field of the recipe, including layout and intervals. The error
// names the first field in which a rank differs.
void require_same_recipe(comm::World& world, const config::Config& config);

// Version of the program, and the build id that the linker gave this executable.
std::string program_identity();

}  // namespace capstan::train
