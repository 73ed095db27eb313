// Memory and communication of a training step on each rank, as text.
#pragma once

#include <optional>
#include <string>

#include "config/sections/config.hpp"

namespace capstan::cli {

// A table of the first rank of each pipeline stage, or of one rank: peak memory by category and bytes sent in
// a step by group; then the rank with the largest peak in one line. Runs on the meta device: any world size,
// no allocation. held_data: as for train::estimate_step().
std::string step_text(const config::Config& config, std::optional<int64_t> rank, int64_t held_data);

}  // namespace capstan::cli
