// The trainer: trains the model of a resolved recipe on the ranks of a world, and writes a run directory with
// metrics and checkpoints.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "train/trainer/progress.hpp"
#include "train/trainer/run_options.hpp"

namespace capstan::data {
class Dataset;
class Loader;
}  // namespace capstan::data

namespace capstan::train {

class CheckpointRoot;
class Checkpointer;
class RunLog;
class RunRecorder;
class StepLogger;
class StepRunner;
class StepTimers;
class StopSignals;
class TraceRecorder;
struct CheckpointAssets;
struct InitialState;
struct RunData;
struct SavePlan;
struct StepEstimate;
struct StepResult;

// One training run. Every rank has a Trainer, and all ranks call the same functions.
class Trainer {
 public:
  // Builds the run, in this order: data, memory estimate, run directory, device, mesh, model, schedules,
  // parameters, optimizer, and the state to begin with (initial values, pretrained weights or a checkpoint).
  // ErrorCode::not_found and ::format for data, tokenizer, checkpoints and the run to resume (before anything
  // large is allocated), ::unsupported for features that this build lacks, ::no_fit for a step that does not
  // fit the memory, ::failed for a refused resume.
  Trainer(const config::Config& config, comm::World& world, const RunOptions& options, ProgressSink& sink);
  ~Trainer();

  // Trains to the end, or until a stop is requested. ErrorCode::failed for a loss or gradient that is
  // not finite (the state is then that of the step before), ::rank_failure from the transport.
  Outcome run();

  // Leaves a record of a failed run() in the run directory.
  void record_failure(const std::exception& error) noexcept;

 private:
  void check_ranks_agree();
  void estimate_memory();
  SavePlan save_plan(const InitialState& initial, CheckpointAssets assets) const;
  void begin_run();
  void begin_step();
  void end_step(const StepResult& result);
  void check_skipped_update(const StepResult& result);
  bool call_on_step(const StepResult& result);
  bool rewind(StepResult& result);
  void open_loader();
  bool evaluation_enabled() const;
  void evaluate_at_interval();
  void evaluate_at_end();
  void evaluate(const char* split, const std::shared_ptr<const data::Dataset>& dataset);
  std::string check_for_stop();
  bool save_is_due() const;
  Outcome end_run(const std::string& stop);
  int64_t step() const;
  bool is_rank0() const { return world_.rank() == 0; }

  // A copy, because train.epochs becomes train.train_iters once the data is open.
  config::Config config_;
  comm::World& world_;
  const RunOptions& options_;
  const std::chrono::steady_clock::time_point start_;
  std::unique_ptr<RunLog> log_;
  std::unique_ptr<StopSignals> stop_signals_;
  std::unique_ptr<RunRecorder> recorder_;
  std::unique_ptr<RunData> data_;
  std::unique_ptr<StepEstimate> estimate_;
  std::unique_ptr<CheckpointRoot> checkpoint_root_;
  std::unique_ptr<StepRunner> runner_;
  std::unique_ptr<InitialState> initial_;
  std::unique_ptr<StepTimers> timers_;
  std::unique_ptr<data::Loader> loader_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::unique_ptr<StepLogger> logger_;
  std::unique_ptr<TraceRecorder> trace_;
  int64_t total_steps_ = 0, first_step_ = 0;
  // Number of consecutive updates that were skipped because of spikes.
  int64_t skips_in_a_row_ = 0;
  // Time of the last evaluation. 0: not known.
  double evaluation_seconds_ = 0;
  // RunOptions::on_step has returned false on this rank.
  bool callback_stops_ = false;
};

// Builds a Trainer and runs it. A failure is recorded in the run directory before it is thrown.
Outcome train(const config::Config& config, comm::World& world, const RunOptions& options,
              ProgressSink& sink);

}  // namespace capstan::train
