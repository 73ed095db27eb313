// The schedule of learning rate and weight decay that a run follows. A fresh run follows its recipe. A
// resumed run follows the checkpoint, except for fields that the resuming recipe sets explicitly.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/sections/batch_ramp.hpp"
#include "config/sections/config.hpp"
#include "optim/schedule.hpp"
#include "train/trainer/run_options.hpp"

namespace capstan::train {

// All values that define the curves, as a checkpoint stores them. Lengths are in samples.
struct RunSchedule {
  optim::ScheduleOptions options;
  // Learning rates of embedding and output layer. Null: those of `options`.
  std::optional<double> decoupled_lr, decoupled_min_lr;
  // The fractions from which lengths were computed, if they were given as fractions.
  std::optional<double> lr_warmup_fraction, lr_wsd_decay_fraction;
  // Fields whose values came from a command line, not a file.
  std::vector<std::string> from_command_line;

  optim::Schedule schedule() const;
  optim::Schedule decoupled_schedule() const;
};

// The recipe's own schedule.
RunSchedule schedule_of(const config::Config& config, const RecipeRecord& record);

// One JSON object; reading it throws ErrorCode::format. `location` names the file in messages.
std::string schedule_text(const RunSchedule& schedule);
RunSchedule parse_schedule(const std::string& text, const std::string& location);

// "linear, learning rate 0.01 to 0.001, warm-up 2 steps, decay 10 steps, weight decay 0.01"
std::string summary(const RunSchedule& schedule, const config::BatchRamp& ramp);

// Replaces the schedule in a resolved recipe by the one that the run follows, for the records of the run.
// Returns `recipe` unchanged if no recipe expresses that schedule. config: the configuration of `recipe`.
std::string recipe_with_schedule(const std::string& recipe, const RunSchedule& followed,
                                 const config::Config& config);

struct ScheduleChoice {
  RunSchedule schedule;
  // "scheduler.lr_decay_iters: 10 steps -> 14 steps".
  std::vector<std::string> fields_taken;
  // "scheduler.lr_decay_iters: the checkpoint's 10 steps, not 14 steps".
  std::vector<std::string> fields_kept;
  // Changes that are refused, such as "optimizer.lr: 0.01 -> 0.001".
  std::vector<std::string> refused;
  bool keeps_decay_length = false;
};

// The schedule of a resumed run: with override_opt_param_scheduler that of the recipe, with
// use_checkpoint_opt_param_scheduler that of the checkpoint; else that of the checkpoint, changed by the
// fields of `scheduler` that the recipe sets explicitly. Explicit changes of peak, floor and weight decay
// (section `optimizer`) are refused.
ScheduleChoice choose_schedule(const RunSchedule& stored, const RunSchedule& now, const RecipeRecord& record,
                               const config::Config& config);

}  // namespace capstan::train
