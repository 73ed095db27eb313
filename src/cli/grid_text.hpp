// The rank grids of a recipe, as text.
#pragma once

#include <optional>
#include <string>

#include "comm/mesh.hpp"

namespace capstan::cli {

// Describes the dense and the expert grid, and the process groups by name. If there are many groups, only the
// first and the last ones are listed. With a rank, it describes the coordinates and groups of that rank. The
// cost does not grow with the world size.
std::string grid_text(const comm::MeshSizes& sizes, std::optional<int64_t> rank);

}  // namespace capstan::cli
