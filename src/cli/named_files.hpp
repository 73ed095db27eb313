// The files that a recipe names: whether they are there, and whether they can be used.
#pragma once

#include <vector>

#include "config/core/resolve.hpp"

namespace capstan::cli {

// One C0801 of this level for each file or directory that training by the recipe would read and that is not there, at the place
// that names it, with near names. The recipe has no errors.
std::vector<config::Diagnostic> missing_files(const config::Resolution& resolution, config::Level level);

// One C0802 for each that is there and cannot be used. Nothing is missing.
std::vector<config::Diagnostic> unusable_files(const config::Resolution& resolution);

}  // namespace capstan::cli
