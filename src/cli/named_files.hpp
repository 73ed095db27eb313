// Diagnostics about files that a recipe names: missing ones and unusable ones.
#pragma once

#include <vector>

#include "config/core/resolve.hpp"

namespace capstan::cli {

// One C0801 of this level for each missing file or directory that training would read, at the location that
// names it, with near names. Requires a recipe without errors.
std::vector<config::Diagnostic> missing_files(const config::Resolution& resolution, config::Level level);

// One C0802 of this level for each file that exists and cannot be used; as errors, all that a run would open
// is opened. Requires a recipe without errors.
std::vector<config::Diagnostic> unusable_files(const config::Resolution& resolution, config::Level level);

}  // namespace capstan::cli
