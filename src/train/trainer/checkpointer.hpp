// Decides when a run saves checkpoints, and saves them asynchronously or synchronously.
#pragma once

#include <filesystem>
#include <memory>

#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "train/trainer/run_log.hpp"
#include "train/trainer/run_recorder.hpp"
#include "train/trainer/saver.hpp"
#include "train/trainer/step_runner.hpp"

namespace capstan::train {

class Checkpointer {
 public:
  // `plan` holds what every checkpoint of the run has in common. saved: the checkpoint that holds the current
  // state; empty: none.
  Checkpointer(const config::Config& config, comm::World& world, SavePlan plan, StepRunner& runner,
               StepTimers& timers, RunRecorder& recorder, RunLog& log, const std::filesystem::path& saved);

  // Allocates the buffers of asynchronous saves if the recipe uses them.
  void allocate_snapshot();

  // Collective. Saves the current step. With checkpoint.async_save the files are written during the next
  // steps. A failure is a warning: the next interval tries again.
  void save();
  // Collective. Saves the current step and returns when the checkpoint exists. Throws an error if it cannot
  // be saved.
  void save_and_wait();
  // Collective. Waits for a save that is in progress.
  void finish();

  // Whether this rank has written its share of a save that is in progress.
  bool rank_is_written() const { return saver_ && saver_->busy() && saver_->ready(); }
  // Collective. Commits the save once rank_is_written() is true on all ranks.
  void commit();

  // Called when the run was rewound to `checkpoint`, whose rewind count is lower than that of the current
  // state. The next save() then writes that step again.
  void rewound_to(const std::filesystem::path& checkpoint) {
    saved_step_ = -1, last_ = checkpoint;
    last_step_ = runner_.state().step;
  }

  // The newest checkpoint of this run. Empty: there is none.
  const std::filesystem::path& last() const { return last_; }
  // Seconds that the last save took; 0: not known.
  double seconds() const { return seconds_; }

 private:
  bool prepare();
  void save_synchronously(bool must_succeed);
  void report(const Saver::SaveResult& ended);

  const config::Config& config_;
  comm::World& world_;
  SavePlan plan_;
  StepRunner& runner_;
  StepTimers& timers_;
  RunRecorder& recorder_;
  RunLog& log_;
  // Null without checkpoint.async_save.
  std::unique_ptr<Saver> saver_;
  // The step whose state is saved, and the step of the newest checkpoint; -1: none.
  int64_t saved_step_ = -1, last_step_ = -1;
  std::filesystem::path last_;
  double seconds_ = 0;
};

}  // namespace capstan::train
