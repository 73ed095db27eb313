#include "train/trainer/trainer.hpp"

#include <array>
#include <exception>

#include "base/commit.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "comm/collective_errors.hpp"
#include "comm/reduce.hpp"
#include "train/setup/cuda.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/setup/offload.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/setup/transport.hpp"
#include "train/trainer/agreement.hpp"
#include "train/trainer/checkpoint_root.hpp"
#include "train/trainer/checkpointer.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/initial_state.hpp"
#include "train/trainer/inputs.hpp"
#include "train/trainer/run_data.hpp"
#include "train/trainer/run_log.hpp"
#include "train/trainer/run_recorder.hpp"
#include "train/trainer/run_schedule.hpp"
#include "train/trainer/schedule_setup.hpp"
#include "train/trainer/step_logger.hpp"
#include "train/trainer/step_runner.hpp"
#include "train/trainer/stop.hpp"
#include "train/trainer/trace_recorder.hpp"

namespace capstan::train {

using Clock = std::chrono::steady_clock;

Outcome train(const config::Config& config, comm::World& world, const RunOptions& options,
              ProgressSink& sink) {
  Trainer trainer(config, world, options, sink);
  try {
    return trainer.run();
  } catch (const std::exception& error) {
    trainer.record_failure(error);
    throw;
  }
}

Outcome Trainer::run() {
  begin_run();
  std::string stop;
  while (stop.empty() && step() < total_steps_) {
    begin_step();
    StepResult result = runner_->train_step(*loader_, *timers_);
    if (result.rewind && rewind(result)) continue;
    end_step(result);
    evaluate_at_interval();
    stop = check_for_stop();
    if (stop.empty() && save_is_due()) {
      checkpointer_->save();
      // A signal may have come while saving.
      stop = check_for_stop();
    }
  }
  trace_->finish();
  // The last checkpoint is saved after the final evaluations. It shows that they are done, so that a resume
  // does not repeat them.
  if (step() >= total_steps_) evaluate_at_end();
  checkpointer_->save_and_wait();
  return end_run(stop);
}

Trainer::~Trainer() = default;

// Throws ErrorCode::io if the run cannot write to its directories.
static void check_directories(const config::Config& config, comm::World& world, const RunOptions& options) {
  comm::run_collectively(world.communicator(), "checking the output directories", [&] {
    if (world.rank() == 0) require_writable(unwritable_directories(config, options));
  });
}

Trainer::Trainer(const config::Config& config, comm::World& world, const RunOptions& options,
                 ProgressSink& sink)
    : config_(config), world_(world), options_(options), start_(Clock::now()) {
  log_ = std::make_unique<RunLog>(sink, is_rank0());
  // From here on, a signal makes the run save a checkpoint and end. Without the handlers it ends the process.
  stop_signals_ = std::make_unique<StopSignals>(log_->sink(),
                                                config_.train.exit_signal_handler && options_.handle_signals);
  // Missing files, directories that cannot be written, unsupported features and a lack of memory are found
  // before anything is allocated or written.
  comm::run_collectively(world_.communicator(), "opening the device",
                         [&] { check_device(config_, world_.local_rank()); });
  check_ranks_agree();
  for (const std::string& note : device_notes(config_)) log_->line(note);
  if (const std::string note = rounded_batch_note(config_); !note.empty()) log_->line(note);
  recorder_ = std::make_unique<RunRecorder>(config_, world_, options_, *log_);
  check_directories(config_, world_, options_);
  data_ = std::make_unique<RunData>(open_run_data(config_, options_.resume != Resume::no, *log_));
  require_agreement(world_, {{"the training data (fingerprint)", data_->fingerprint}});
  estimate_memory();
  log_->log_only("capstan " CAPSTAN_VERSION ": " + options_.recipe.command);
  total_steps_ = total_iterations(config_);
  report_epochs(config_, *data_->training(), total_steps_, *log_);

  recorder_->open();
  checkpoint_root_ = std::make_unique<CheckpointRoot>(config_, recorder_->directory());
  checkpoint_root_->open(world_, options_, recorder_->run_id(), *log_);
  world_.share_rank_status(recorder_->directory() / "rank_status");

  runner_ = std::make_unique<StepRunner>(config_, world_);
  optim::StateFile* const state_file = runner_->store().state_file();
  comm::run_collectively(world_.communicator(), "creating the files of the optimizer state", [&] {
    if (state_file) state_file->open();
  });
  const std::string kernels_text =
      backend_of(config_.train.device).kernels_text(compute_type(config_.mixed_precision));
  log_->line("run " + recorder_->directory().string() + " on " + runner_->device().description() + ": " +
             counted(world_.size(), "rank") + " x " +
             counted(runner_->device().host_threads().size(), "thread") +
             (kernels_text.empty() ? "" : ", " + kernels_text));
  const TransportChoice& transport = runner_->transport();
  for (const std::string& note :
       {shared_gpus(world_, runner_->device()), transport.note,
        tensor_overlap_note(config_, transport.transport), offload_note(config_, runner_->device()),
        no_offload_note(config_.optimizer), state_file_note(state_file, world_.size())})
    if (!note.empty()) log_->line(note);
  CheckpointAssets assets;
  if (is_rank0()) assets = find_assets(config_, *data_, nullptr, *log_);
  initial_ = std::make_unique<InitialState>(start_or_resume(
      config_, world_, options_, *data_, *recorder_, *checkpoint_root_, *runner_, total_steps_, *log_));
  require_agreement(world_, {{"the step to resume from", std::to_string(step())}});
  first_step_ = step();
  total_steps_ =
      total_iterations_after(config_, *data_->training(), step(), runner_->state().consumed_samples);

  timers_ = std::make_unique<StepTimers>();
  checkpointer_ = std::make_unique<Checkpointer>(config_, world_, save_plan(*initial_, std::move(assets)),
                                                 *runner_, *timers_, *recorder_, *log_, initial_->checkpoint);
  logger_ =
      std::make_unique<StepLogger>(config_, world_, *runner_, *timers_, *recorder_, *log_, total_steps_);
  trace_ = std::make_unique<TraceRecorder>(config_.profiling, world_.rank(), recorder_->directory(), *runner_,
                                           *timers_, *log_);
}

// A rank that was started with another program or recipe would compute another model.
void Trainer::check_ranks_agree() {
  require_agreement(world_,
                    {{"the program", program_identity()},
                     {"the run directory", options_.run_dir.string()},
                     {"the device", std::string(config::enum_name(device_kind(config_.train.device)))}});
  require_same_recipe(world_, config_);
}

// Runs a step on the meta device. ErrorCode::no_fit where it needs more memory than this rank or its cluster
// has, unless the run is forced: then the allocator has no limit of the recipe either.
void Trainer::estimate_memory() {
  const std::optional<RankGpu> gpu = gpu_of_rank(world_, config_);
  const TransportChoice transport = choose_transport(config_, world_, gpu);
  const MemorySharers sharers = memory_sharers(world_, gpu);
  std::string excess;
  comm::run_collectively(world_.communicator(), "estimating the memory", [&] {
    estimate_ = std::make_unique<StepEstimate>(estimate_step(config_, world_.rank(), world_.local_size(),
                                                             data_->bytes_in_memory(), transport.transport));
    if (options_.force)
      excess = memory_excess(config_, *estimate_, world_.rank(), sharers, options_.cluster_memory);
    else
      check_fits(config_, *estimate_, world_.rank(), sharers, options_.cluster_memory);
  });
  if (!options_.force) return;
  const double ranks = comm::all_reduce(world_.communicator(), excess.empty() ? 0.0 : 1.0);
  if (excess.empty() && ranks > 0)
    excess = counted(static_cast<int64_t>(ranks), "other rank") + " lack memory for a step";
  if (excess.empty()) return;
  log_->warning(excess + "; started all the same");
  config_.resilience.memory_limit.reset();
  config_.resilience.memory_limit_host.reset();
}

void Trainer::open_loader() {
  loader_ = std::make_unique<data::Loader>(data_->training(), runner_->loader_options());
}

SavePlan Trainer::save_plan(const InitialState& initial, CheckpointAssets assets) const {
  SavePlan plan;
  plan.root = checkpoint_root_->path();
  plan.run_id = recorder_->run_id();
  plan.recipe = recipe_with_schedule(options_.recipe.resolved, initial.schedule, config_);
  plan.recipe_hash = options_.recipe.hash;
  plan.data = data_->fingerprint;
  plan.base = initial.base;
  plan.schedule = schedule_text(initial.schedule);
  plan.version = CAPSTAN_VERSION;
  plan.layout = runner_->mesh().text();
  plan.retention.most_recent = config_.checkpoint.most_recent_k;
  plan.retention.keep_multiples = config_.checkpoint.save_retain_interval;
  plan.optimizer = config_.checkpoint.save_optim;
  plan.tokenizer = config_.checkpoint.save_tokenizer_assets ? data_->tokenizer.get() : nullptr;
  plan.tokenizer_record = data_->tokenizer_record;
  plan.assets = std::move(assets.files);
  plan.chat_template = std::move(assets.chat_template);
  plan.files = options_.files;
  // The metrics of the steps before a checkpoint reach the disk before the checkpoint does.
  plan.before_commit = [this] { recorder_->sync(); };
  return plan;
}

// From here on the run directory describes this launch. A launch that was refused earlier has not changed it.
void Trainer::begin_run() {
  recorder_->begin(
      {.recipe_name = options_.recipe.name,
       .recipe_given = options_.recipe.given,
       .recipe = recipe_with_schedule(options_.recipe.resolved, initial_->schedule, config_),
       .command = options_.recipe.command,
       .version = dump_json(OrderedJson{
                      {"version", CAPSTAN_VERSION}, {"commit", program_commit()}, {"world", world_.size()}}) +
                  "\n",
       .checkpoints = config_.checkpoint.save ? config_.checkpoint.save->resolved : "checkpoints",
       .layout = runner_->mesh().text(),
       .data = data_text(config_.dataset, *data_->training()),
       .ranks = world_.size(),
       .seed = config_.rng.seed,
       .steps = total_steps_});
  recorder_->open_metrics(first_step_);
  for (const std::string& reason : initial_->refused)
    recorder_->write(records::MetricsRow(first_step_, "checkpoint_refused").text("reason", reason));
  if (is_rank0() && options_.estimate_time)
    logger_->expect_time(options_.estimate_time(gpu_name(runner_->device())));
  logger_->report_model(*estimate_, options_.measure_rate);
  checkpointer_->allocate_snapshot();
  timers_->announce([this](Phase phase) {
    StopSignals::publish_phase(name_of(phase));
    world_.publish_phase(name_of(phase));
  });
  open_loader();
}

void Trainer::begin_step() {
  StopSignals::publish_step(step() + 1);
  world_.publish_step(step() + 1);
  // Before the first step is measured, the expected time is a lower bound, because the estimate counts only
  // matrix products.
  const double seconds = logger_->step_seconds();
  publish_expected_stop(world_, seconds > 0 ? ExpectedStop{.seconds = seconds + checkpointer_->seconds()}
                                            : ExpectedStop{logger_->estimated_step_seconds(), true});
  trace_->before_step(step() + 1);
  timers_->start_step();
}

void Trainer::end_step(const StepResult& result) {
  logger_->report_anomalies(step(), result.anomalies);
  check_skipped_update(result);
  logger_->log_step(result);
  if (options_.on_step && !call_on_step(result)) callback_stops_ = true;
}

// Reports an update that was left out. ErrorCode::failed after too many in a row.
void Trainer::check_skipped_update(const StepResult& result) {
  const bool spike = !result.anomalies.empty();
  skips_in_a_row_ = result.skipped && spike ? skips_in_a_row_ + 1 : 0;
  if (skips_in_a_row_ > config_.resilience.spike_window)
    fail(ErrorCode::failed,
         "step " + std::to_string(step()) + ": the update was skipped " + std::to_string(skips_in_a_row_) +
             " times in a row, more than resilience.spike_window: the run has diverged, which is not an "
             "isolated spike",
         "try a lower optimizer.lr or a greater resilience.loss_spike_factor, from a checkpoint before it");
  if (!result.skipped || spike) return;
  if (result.overflow) {
    log_->warning("step " + std::to_string(step()) + ": the gradients overflow at the loss scale " +
                  to_text(*result.loss_scale) + "; update skipped, loss scale now " +
                  to_text(runner_->state().loss_scale->scale));
    recorder_->write(records::MetricsRow(step(), "update_skipped").number("loss_scale", *result.loss_scale));
    return;
  }
  log_->warning("step " + std::to_string(step()) + ": gradient norm " + fixed(result.gradient_norm, 3) +
                " is above optimizer.grad_norm_skip_threshold; update skipped");
  recorder_->write(records::MetricsRow(step(), "update_skipped").number("grad_norm", result.gradient_norm));
}

// Reports the step to RunOptions::on_step. Returns false if the callback asks for a stop.
bool Trainer::call_on_step(const StepResult& result) {
  const TrainState& state = runner_->state();
  const double tokens = static_cast<double>(result.global_batch_size * config_.model.seq_length);
  const double seconds = logger_->step_seconds();
  StepReport report;
  report.step = state.step;
  report.total_steps = total_steps_;
  report.loss = result.loss;
  report.grad_norm = result.gradient_norm;
  report.learning_rate = result.learning_rate;
  report.step_seconds = seconds;
  report.tokens_per_second = seconds > 0 ? tokens / seconds : 0;
  report.consumed_samples = state.consumed_samples;
  report.consumed_tokens = state.consumed_tokens;
  report.memory_bytes = runner_->device().memory().peak;
  report.update_skipped = result.skipped;
  return options_.on_step(report);
}

// Rewinds to the newest valid checkpoint and continues with the batch after the spike. False: there is no
// checkpoint, and the step counts as one whose update was skipped.
bool Trainer::rewind(StepResult& result) {
  const int64_t spike = step() + 1, rewinds = runner_->state().rewinds;
  checkpointer_->finish();
  std::vector<std::string> refused;
  const auto found = find_checkpoint(world_, checkpoint_root_->path(), refused);
  for (const std::string& reason : refused) log_->warning("checkpoint not used: " + reason);
  TrainState& state = runner_->state();
  if (rewinds >= config_.resilience.max_rewinds || !found) {
    for (Anomaly& anomaly : result.anomalies)
      if (anomaly.action == config::enum_name(config::SpikeAction::rewind))
        anomaly.action = found ? "stop" : "skip";
    if (found) {
      logger_->report_anomalies(spike, result.anomalies);
      fail(ErrorCode::failed,
           "step " + std::to_string(spike) + ": another spike after " + std::to_string(rewinds) +
               " rewinds (resilience.max_rewinds)",
           "try a lower optimizer.lr, or look at the data around sample " +
               std::to_string(state.consumed_samples));
    }
    log_->warning("step " + std::to_string(spike) + ": no checkpoint to rewind to; update skipped");
    runner_->consume_batch();
    result.skipped = true;
    return false;
  }
  runner_->consume_batch();
  const TrainState at_spike = state;
  auto reader = checkpoint::Reader::open(found->path, checkpoint::Verification::structure);
  state = load_state(reader, runner_->store(), &runner_->optimizer());
  // The data continues after the batch of the spike. The batches between the checkpoint and the spike are not
  // used again.
  state.consumed_samples = at_spike.consumed_samples;
  state.consumed_tokens = at_spike.consumed_tokens;
  state.rewinds = rewinds + 1;
  recorder_->rewind(state.step);
  logger_->reset_intervals();
  // The rows of the anomalies have the step from which the run continues, so that a resume keeps them.
  logger_->report_anomalies(spike, result.anomalies, state.step);
  log_->warning("rewound to step " + std::to_string(state.step) + "; skipping the batch of step " +
                std::to_string(spike) + " (rewind " + std::to_string(state.rewinds) + " of " +
                std::to_string(config_.resilience.max_rewinds) + ")");
  recorder_->write(records::MetricsRow(state.step, "rewind")
                       .integer("from_step", spike)
                       .integer("rewinds", state.rewinds)
                       .integer("consumed_samples", state.consumed_samples));
  // Save now, so that a restart keeps the rewind count and skips this batch.
  checkpointer_->rewound_to(found->path);
  checkpointer_->save();
  open_loader();
  return true;
}

bool Trainer::evaluation_enabled() const {
  return config_.validation.eval_interval && config_.validation.eval_iters > 0;
}

void Trainer::evaluate_at_interval() {
  if (evaluation_enabled() && data_->validation() && step() % *config_.validation.eval_interval == 0)
    evaluate("validation", data_->validation());
}

// A step is not evaluated twice: neither when a finished run is resumed, nor when validation already ran
// after that step.
void Trainer::evaluate_at_end() {
  if (!evaluation_enabled() || step() == first_step_) return;
  if (data_->validation() && step() % *config_.validation.eval_interval != 0)
    evaluate("validation", data_->validation());
  if (data_->test()) evaluate("test", data_->test());
}

void Trainer::evaluate(const char* split, const std::shared_ptr<const data::Dataset>& dataset) {
  timers_->start_step();
  publish_expected_stop(
      world_, {.seconds = evaluation_seconds_ > 0 ? evaluation_seconds_ + checkpointer_->seconds() : 0});
  timers_->enter(Phase::evaluate);
  const double loss = runner_->evaluate(dataset, config_.validation.eval_iters);
  timers_->enter(Phase::other);
  evaluation_seconds_ = timers_->seconds(Phase::evaluate);
  logger_->report_evaluation(split, loss, evaluation_seconds_);
}

// Returns why the run stops after this step; empty: it continues. A reduction combines rank 0's clock with
// the signals and callbacks of all ranks, so that all ranks stop after the same step. The same reduction
// counts the ranks that have written their share of an asynchronous save.
std::string Trainer::check_for_stop() {
  const auto& limit = config_.train.exit_duration_in_mins;
  const bool too_long = is_rank0() && limit && seconds_since(start_) / 60 >= *limit;
  const auto flag = [](bool value) { return value ? 1.0 : 0.0; };
  std::array<double, 4> ranks{flag(StopSignals::received()), flag(too_long),
                              flag(checkpointer_->rank_is_written()), flag(callback_stops_)};
  comm::all_reduce(world_.communicator(), ranks);
  const auto [signals, out_of_time, written, callbacks] = ranks;
  if (static_cast<int>(written) == world_.size()) checkpointer_->commit();
  if (signals > 0) return "asked to stop by a signal";
  if (callbacks > 0) return "asked to stop by the step callback";
  if (out_of_time > 0) return "train.exit_duration_in_mins=" + to_text(*limit) + " reached";
  if (const auto& interval = config_.train.exit_interval; interval && step() % *interval == 0)
    return "train.exit_interval=" + std::to_string(*interval) + " reached";
  return {};
}

bool Trainer::save_is_due() const {
  const auto& interval = config_.checkpoint.save_interval;
  return interval && step() < total_steps_ && step() % *interval == 0;
}

Outcome Trainer::end_run(const std::string& stop) {
  Outcome outcome;
  outcome.step = step();
  const bool finished = outcome.step >= total_steps_;
  outcome.ended = finished ? Ended::finished : Ended::stopped;
  if (!finished) outcome.reason = stop;
  outcome.run_dir = recorder_->directory();
  outcome.checkpoint = checkpointer_->last();
  std::string text = finished ? "done: " + counted(outcome.step, "step")
                              : "stopped at step " + std::to_string(outcome.step) + ": " + outcome.reason;
  if (const auto loss = logger_->last_loss()) text += ", loss " + fixed(*loss, 4);
  text += ", " + human_duration(seconds_since(start_)) + ", " +
          human_bytes(static_cast<double>(resident_peak())) + " peak resident; run " +
          outcome.run_dir.string();
  if (!outcome.checkpoint.empty()) text += ", checkpoint " + outcome.checkpoint.filename().string();
  log_->line(text);
  recorder_->end(finished ? records::RunEnd::finished : records::RunEnd::stopped, outcome.reason);
  return outcome;
}

void Trainer::record_failure(const std::exception& error) noexcept {
  try {
    if (!runner_->failure_anomalies().empty()) {
      logger_->report_anomalies(step() + 1, runner_->failure_anomalies());
      // All ranks failed in the same step, so that the save of an earlier step can be completed.
      const auto* known = dynamic_cast<const Error*>(&error);
      if (known && known->code() == ErrorCode::failed) checkpointer_->finish();
    }
    recorder_->write(records::MetricsRow(step(), "failed").text("reason", error.what()));
    if (!recorder_->begun()) return;
    recorder_->end(records::RunEnd::failed, error.what());
    log_->log_only(std::string("failed: ") + error.what());
  } catch (const std::exception&) {
    // The disk may be the cause of the failure, which is rethrown.
  }
}

int64_t Trainer::step() const {
  return runner_->state().step;
}

}  // namespace capstan::train
