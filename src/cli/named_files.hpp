// Diagnostics about files that a recipe names: missing ones and unusable ones.
#pragma once

#include <filesystem>
#include <vector>

#include "config/resolve/resolve.hpp"

namespace capstan::cli {

// One C0801 of this level for each missing file or directory that training would read, at the location that
// names it, with near names. Requires a recipe without errors.
std::vector<config::Diagnostic> missing_files(const config::Resolution& resolution, config::Level level);

// One C0802 of this level for each file that exists and cannot be used; as errors, all that a run would
// open is opened, and compared with the checkpoints with which the run begins, and a C0806 of level
// warning is added for each warning with which the run would begin. resident_data: takes the bytes of data
// that a run holds in memory, known for errors. Requires a recipe without errors.
std::vector<config::Diagnostic> unusable_files(const config::Resolution& resolution, config::Level level,
                                               int64_t& resident_data);

// An error C0803 if the recipe's name cannot name a run directory, else nothing. Reads no files. Requires a
// recipe without errors.
std::vector<config::Diagnostic> unusable_name(const config::Resolution& resolution);

// One error C0803 for each directory that a new run would write and that cannot be made or written. run_dir:
// its run directory; empty: runs/NAME. Requires a recipe without errors.
std::vector<config::Diagnostic> unwritable_directories(const config::Resolution& resolution,
                                                       const std::filesystem::path& run_dir);

// C0804 for what another run or program holds: a note where the run directory exists, which can be resumed;
// an error where it holds other files, or where checkpoint.save has checkpoints of another run. Requires a
// recipe without errors.
std::vector<config::Diagnostic> occupied_directories(const config::Resolution& resolution,
                                                     const std::filesystem::path& run_dir);

}  // namespace capstan::cli
