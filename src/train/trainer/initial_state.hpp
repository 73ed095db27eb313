// The state with which a run begins: a checkpoint of its own, pretrained weights, or initial values.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "formats/convert.hpp"
#include "train/adapters/base_model.hpp"
#include "train/trainer/checkpoint_root.hpp"
#include "train/trainer/run_data.hpp"
#include "train/trainer/run_recorder.hpp"
#include "train/trainer/run_schedule.hpp"
#include "train/trainer/step_runner.hpp"

namespace capstan::train {

struct InitialState {
  RunSchedule schedule;
  // Hash of the base model of adapters; empty: no adapters.
  std::string base;
  // The checkpoint that was loaded, if it is in the directory that this run saves to; else empty.
  std::filesystem::path checkpoint;
  // Newer checkpoints that do not verify, with the reasons; rank 0.
  std::vector<std::string> refused;
};

// The checkpoint that checkpoint.load and ckpt_step name, verified. ErrorCode::not_found, format, failed.
checkpoint::Reader open_given_checkpoint(const config::CheckpointConfig& config);

// Collective. Sets parameters, optimizer state, counters and schedules of `runner`.
InitialState start_or_resume(const config::Config& config, comm::World& world, const RunOptions& options,
                             const RunData& data, const RunRecorder& recorder, const CheckpointRoot& root,
                             StepRunner& runner, int64_t total_steps, RunLog& log);

// Warns of settings in which an external model differs from the recipe. Shapes are not among them.
void report_differences(const config::Config& config, const BaseModel& weights, RunLog& log);

// Files for other programs that checkpoints contain in addition to the weights; rank 0.
struct CheckpointAssets {
  // config.json, generation settings and the like, which came with checkpoint.pretrained_checkpoint. If they
  // no longer exist when a run is resumed, its checkpoints lack them.
  formats::Assets files;
  // The chat template of the recipe; empty: the tokenizer's own.
  std::string chat_template;
};
// Also warns if the tokenizer of the pretrained weights is not that of the data. weights: the pretrained
// weights; null: they are opened here.
CheckpointAssets find_assets(const config::Config& config, const RunData& data, const BaseModel* weights,
                             RunLog& log);

}  // namespace capstan::train
