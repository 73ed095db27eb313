// Memory and communication of a training step on each rank, as text.
#pragma once

#include <optional>
#include <string>

#include "config/sections/config.hpp"
#include "train/trainer/start_checks.hpp"

namespace capstan::cli {

// A table of the first rank of each pipeline stage, or of one rank: peak memory by category and bytes sent in
// a step by group; then the rank with the largest peak in one line. Runs on the meta device: any world size,
// no allocation. data: what the run holds; a last line says what of it is not known.
std::string step_text(const config::Config& config, std::optional<int64_t> rank,
                      const train::ResidentData& data);

}  // namespace capstan::cli
