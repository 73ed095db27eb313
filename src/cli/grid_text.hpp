// The rank grid of a recipe as a page of text.
#pragma once

#include <optional>
#include <string>

#include "comm/mesh.hpp"

namespace capstan::cli {

// Both grids, and the groups of every name; of many groups the first and the last. With a rank: its coordinates, and its own
// groups. Costs no more than a few groups, whatever the size of the world.
std::string grid_text(const comm::MeshSizes& sizes, std::optional<int64_t> rank);

}  // namespace capstan::cli
