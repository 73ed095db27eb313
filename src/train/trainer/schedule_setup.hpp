// The length of a run and its learning-rate schedules, as the recipe gives them.
#pragma once

#include <cstdint>

#include "config/sections/config.hpp"
#include "optim/schedule.hpp"

namespace capstan::train {

// Iterations of the full run. ErrorCode::config where train.epochs gives the length, which depends on the
// data.
int64_t total_iterations(const config::Config& config);

// `decoupled`: the schedule of embedding and head, where optimizer.decoupled_lr gives them their own.
optim::Schedule make_schedule(const config::Config& config, bool decoupled);

}  // namespace capstan::train
