// What a step of a recipe holds and sends on each rank, as a page of text.
#pragma once

#include <optional>
#include <string>

#include "config/core/config.hpp"

namespace capstan::cli {

// The first rank of each pipeline stage, or one rank: its peak of memory by owner, and the bytes that it sends in a step by
// group; then the rank with the largest peak in one line. Found on the meta device: any world, no data, nothing allocated.
std::string step_text(const config::Config& config, std::optional<int64_t> rank);

}  // namespace capstan::cli
