// Checks whether a recipe may continue from a checkpoint, and chooses the schedule for it.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/reader.hpp"
#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "train/trainer/run_data.hpp"
#include "train/trainer/run_log.hpp"
#include "train/trainer/run_options.hpp"
#include "train/trainer/run_schedule.hpp"

namespace capstan::train {

// The origin of the checkpoint that a run continues: this run, or another one (checkpoint.load).
enum class CheckpointOf : uint8_t { this_run, other_run };

// The schedule with which the run continues: see choose_schedule(). Reports it, and the fields that have
// changed since the checkpoint. ErrorCode::failed if a change would alter the results of the run or would
// have no effect, or if the data files hold other samples.
RunSchedule continue_schedule(const config::Config& config, const RunOptions& options, const RunData& data,
                              const RunSchedule& recipe_schedule, const checkpoint::Reader& reader,
                              CheckpointOf whose, int64_t total_steps, RunLog& log);

// Collective. Throws ErrorCode::failed if the checkpoint holds another tokenizer than the recipe's, because
// the run would save its weights beside the wrong tokenizer.
void check_same_tokenizer(const config::Config& config, comm::World& world, const RunData& data,
                          const checkpoint::Reader& reader);

}  // namespace capstan::train
