// The rank grids of a recipe, as text.
#pragma once

#include <optional>
#include <string>

#include "comm/mesh.hpp"

namespace capstan::cli {

// The dense and the expert grid, and the process groups by name; of many groups the first and the last ones.
// With a rank: its coordinates and its groups. The cost does not grow with the world size.
std::string grid_text(const comm::MeshSizes& sizes, std::optional<int64_t> rank);

}  // namespace capstan::cli
