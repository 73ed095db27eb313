// The bubble of a pipeline as a run measures it, beside that of its schedule.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

// Idle time as a fraction of the time of the passes: (P - 1)/M for GPipe and 1F1B of P ranks and M
// micro-batches where all passes of a kind take equal times (Narayanan et al. 2021, section 2.2).
struct PipelineBubble {
  // Time that the ranks wait or transfer until the last one has ended its passes, over the time of all of
  // them.
  double measured = 0;
  // Of rank 0 in the simulated schedule: equal times of the stages, a backward pass of twice a forward pass,
  // no transfers.
  double simulated = 0;
};

// phases: seconds of one step, or sums over several, on this rank. nullopt without a pipeline, and on a
// device with queues, where a call returns before its work is done. Collective.
std::optional<PipelineBubble> pipeline_bubble(const config::Config& config, int64_t micro_batches,
                                              const std::array<double, kPhases>& phases, comm::World& world);

// "pipeline bubble 60.2% measured, 50.0% simulated".
std::string bubble_text(const PipelineBubble& bubble);

}  // namespace capstan::train
