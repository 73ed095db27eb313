// Whether a step fits the memory, checked before anything is allocated.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/sections/config.hpp"
#include "train/trainer/estimate.hpp"

namespace capstan::train {

// Bytes that one rank may take of a kind of memory, and the origin of the limit.
struct MemoryLimit {
  int64_t bytes = 0;
  // "resilience.memory_limit allows", "this rank has", "its GPU has beside …", or "the cluster h100 allows".
  std::string source;
};
// resilience.memory_limit or resilience.memory_limit_host; on the device cpu, whose memory is the host's, the
// smaller of the two. Without one, the memory of the host (or of its control group) divided by the number of
// ranks on it; that of a GPU divided by the ranks that share it, less what libraries take, and nothing where
// there is no GPU.
std::optional<MemoryLimit> memory_limit(const config::Config& config, MemoryKind kind, MemorySharers sharers);

// Peak resident memory of this process as the system counts it (VmHWM): the estimated memory and a base of
// program, libraries, stacks and small buffers. 0: the system does not report it.
int64_t resident_peak();

// Returns one rank of each pipeline stage. Memory needs differ between stages only.
std::vector<int64_t> pipeline_ranks(const config::Config& config);

// "parameters 16.0 MiB | gradients 16.0 MiB | …": the categories at the moment of the peak, and memory that
// the allocator caches. Categories of 0 bytes are omitted.
std::string memory_text(const MemoryUse& use);

// Throws ErrorCode::no_fit when the step needs more of a kind of memory than its limit: its needs by
// category, and which overrides would fit, each found by running the changed step on the meta device.
// `estimate` is that of `rank`. cluster: a further limit of the device's memory. That limit and one of the
// recipe are compared with the pipeline stage that needs the most memory, with the same result on every rank.
void check_fits(const config::Config& config, const StepEstimate& estimate, int64_t rank,
                MemorySharers sharers, const std::optional<MemoryLimit>& cluster = std::nullopt);

// The message of that error, without a search for overrides; empty: the step fits.
std::string memory_excess(const config::Config& config, const StepEstimate& estimate, int64_t rank,
                          MemorySharers sharers, const std::optional<MemoryLimit>& cluster = std::nullopt);

// check_fits() for a recipe whose ranks are not running, if it has a memory limit, so that `check` and
// `show --step` refuse the same recipes as `train --nproc`. resident_data: as for estimate_step().
void check_memory_limit(const config::Config& config, int64_t resident_data = 0);
// The number of ranks in the recipe's world as if one host ran all of them. The cores are divided among them.
int ranks_on_one_host(const config::Config& config);

}  // namespace capstan::train
