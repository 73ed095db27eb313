// Whether a step fits the memory, checked before anything is allocated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/core/config.hpp"
#include "train/trainer/estimate.hpp"

namespace capstan::train {

// Bytes that one rank may take: resilience.memory_limit, else the host's memory (or its control group's) over
// the ranks there.
int64_t memory_limit(const config::Config& config, int local_ranks);

// Peak resident memory of this process as the system counts it (VmHWM): that of the estimate, and the base:
// the program with its libraries, stacks and small buffers. 0 where the system does not say.
int64_t resident_peak();

// One rank of each pipeline stage; what a step needs differs between stages only.
std::vector<int64_t> pipeline_ranks(const config::Config& config);

// "parameters 16.0 MiB | gradients 16.0 MiB | …": the categories at the moment of the peak, memory that the
// allocator caches beside them, and scratch of kernels; empty ones are left out.
std::string memory_text(const MemoryUse& use);

// Throws ErrorCode::no_fit when the step needs more than the limit: its needs by category, and which
// overrides would fit, each found by running the changed step on the meta device. `estimate` is that of
// `rank`; resilience.memory_limit is held against the stage that needs the most, on every rank alike.
void check_fits(const config::Config& config, const StepEstimate& estimate, int64_t rank, int local_ranks);

// The same for a recipe whose ranks are not there, where it has a resilience.memory_limit: `check` and `show
// --step` refuse what `train --nproc` would. Takes milliseconds (0.2 s for the eight stages of 405B).
void check_memory_limit(const config::Config& config);
// The ranks of the recipe's world, as many as one host would run them: the cores are divided over them.
int ranks_on_one_host(const config::Config& config);

}  // namespace capstan::train
