// The length of a run and its learning-rate schedules, from the recipe.
#pragma once

#include <cstdint>
#include <string>

#include "config/sections/config.hpp"
#include "optim/schedule.hpp"

namespace capstan::train {

// Iterations of the full run. ErrorCode::config if train.epochs defines the length, which then depends on the
// data.
int64_t total_iterations(const config::Config& config);

// "global batch: 10 samples are rounded down to 8 …"; empty if the batch is used as given.
std::string rounded_batch_note(const config::Config& config);

// `decoupled`: the schedule of embedding and output layer, if optimizer.decoupled_lr sets one.
optim::Schedule make_schedule(const config::Config& config, bool decoupled);

}  // namespace capstan::train
