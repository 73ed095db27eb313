// Whether a step fits the memory, asked before anything is allocated.
#pragma once

#include <cstdint>
#include <string>

#include "config/config.hpp"
#include "train/estimate.hpp"

namespace capstan::train {

// Bytes that one rank may take: resilience.memory_limit, else the host's memory (or its control group's) over the ranks there.
int64_t memory_limit(const config::Config& config, int local_ranks);

// "parameters 16.0 MiB | gradients 16.0 MiB | …": the owners at the moment of the peak, and what kernels keep; those with
// nothing left out.
std::string memory_text(const MemoryUse& use);

// Throws ErrorCode::no_fit when the step needs more than the limit: what it needs by owner, and which overrides would fit,
// each found by running the changed step on the meta device.
void check_fits(const config::Config& config, const StepEstimate& estimate, int64_t rank, int local_ranks);

}  // namespace capstan::train
