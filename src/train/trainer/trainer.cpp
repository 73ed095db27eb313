#include "train/trainer/trainer.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/reduce.hpp"
#include "comm/together.hpp"
#include "kernels/table.hpp"
#include "train/trainer/agreement.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/run.hpp"
#include "train/trainer/stop.hpp"

namespace capstan::train {

std::string Run::stop_reason() {
  const int64_t step = loop_->state().step;
  const double minutes = seconds_since(start_) / 60;
  // Rank 0's clock and any rank's signal: agreed by a reduction, so that all leave after the same step. With it goes how many
  // ranks have written their part of the save that runs beside the training.
  std::array<double, 4> wishes{
      StopSignals::received() ? 1.0 : 0.0,
      is_rank0() && config_.train.exit_duration_in_mins && minutes >= *config_.train.exit_duration_in_mins
          ? 1.0
          : 0.0,
      saver_ && saver_->busy() && saver_->ready() ? 1.0 : 0.0, callback_stops_ ? 1.0 : 0.0};
  comm::all_reduce(world_.communicator(), wishes);
  if (static_cast<int>(wishes[2]) == world_.size())
    if (const auto ended = saver_->advance()) tell(*ended);
  if (wishes[0] > 0) return "asked to stop by a signal";
  if (wishes[3] > 0) return "asked to stop by the step callback";
  if (wishes[1] > 0)
    return "train.exit_duration_in_mins=" + to_text(*config_.train.exit_duration_in_mins) + " reached";
  if (config_.train.exit_interval && step % *config_.train.exit_interval == 0)
    return "train.exit_interval=" + std::to_string(*config_.train.exit_interval) + " reached";
  return {};
}

StepResult Run::next_step(data::Loader& loader) {
  try {
    return loop_->step(loader, timers_);
  } catch (const Error& error) {
    report_anomalies(loop_->state().step + 1, loop_->failure_anomalies());
    // A judgement that all ranks share: what is being saved is sound, and worth waiting for.
    if (error.code() == ErrorCode::failed) finish_save();
    throw;
  }
}

void Run::rewind(const StepResult& result) {
  const int64_t spike = loop_->state().step + 1, rewinds = loop_->state().rewinds;
  finish_save();
  std::vector<std::string> refused;
  const auto found = find_checkpoint(world_, checkpoint_root(), refused);
  for (const std::string& reason : refused) log_.warning("not gone back to " + reason);
  if (rewinds >= config_.resilience.max_rewinds || !found) {
    report_anomalies(spike, result.events);
    if (found)
      fail(ErrorCode::failed,
           "step " + std::to_string(spike) + ": another spike after " + std::to_string(rewinds) +
               " rewinds (resilience.max_rewinds)",
           "a lower optimizer.lr, or look at the data around sample " +
               std::to_string(loop_->state().consumed_samples));
    log_.warning("step " + std::to_string(spike) + ": no checkpoint to go back to; update skipped");
    loop_->pass_over_batch();
    return;
  }
  loop_->pass_over_batch();
  const TrainState passed = loop_->state();
  auto reader = checkpoint::Reader::open(found->path, checkpoint::Depth::structure);
  loop_->state() = load_state(reader, loop_->store(), &loop_->optimizer());
  TrainState& state = loop_->state();
  // The data goes on behind the batch of the spike: what lay between the checkpoint and it is not seen again.
  state.consumed_samples = passed.consumed_samples;
  state.consumed_tokens = passed.consumed_tokens;
  state.rewinds = rewinds + 1;
  saved_step_ = state.step, last_checkpoint_ = found->path;
  unwritten_.clear();
  if (is_rank0()) {
    metrics_.reset();  // the file may be another one afterwards
    records::truncate_after_step(records_->metrics(), state.step);
    metrics_ = std::make_unique<records::MetricsWriter>(records_->metrics());
    if (events_) open_events(state.step);  // hides those of the steps that are undone
  }
  log_seconds_ = {}, events_seconds_ = {};
  // Their rows stand at the step where the run goes on, so that a resume keeps them.
  report_anomalies(spike, result.events, state.step);
  log_.warning("rewound to step " + std::to_string(state.step) + ", past the batch of step " +
               std::to_string(spike) + " (rewind " + std::to_string(state.rewinds) + " of " +
               std::to_string(config_.resilience.max_rewinds) + ")");
  if (is_rank0())
    record(records::MetricsRow(state.step, "rewind")
               .integer("from_step", spike)
               .integer("rewinds", state.rewinds)
               .integer("consumed_samples", state.consumed_samples));
  // A restart must go on behind the batch too, and must not count from nothing: the checkpoint says so from now on.
  saved_step_ = -1;
  save(false);
}

void Run::after_step(const StepResult& result) {
  TrainState& state = loop_->state();
  const int64_t step = state.step;
  if (step == first_step_ + 1) log_.line("memory measured: " + memory_text(loop_->device().memory()));
  last_loss_ = result.loss;
  step_seconds_ = timers_.step_seconds();
  log_seconds_.add(step_seconds_, timers_), events_seconds_.add(step_seconds_, timers_);
  state.since_log.add(result.loss, result.loss_tokens, result.gradient_norm);
  state.since_events.add(result.loss, result.loss_tokens, result.gradient_norm);
  report_anomalies(step, result.events);
  skips_in_a_row_ = result.skipped && !result.events.empty() ? skips_in_a_row_ + 1 : 0;
  if (skips_in_a_row_ > config_.resilience.spike_window)
    fail(ErrorCode::failed,
         "step " + std::to_string(step) + ": the update was skipped " + std::to_string(skips_in_a_row_) +
             " times in a row, more than resilience.spike_window: this is no spike, nothing is learnt any "
             "more",
         "a lower optimizer.lr or a greater resilience.loss_spike_factor, from a checkpoint before it");
  if (result.skipped && result.events.empty()) {
    log_.warning("step " + std::to_string(step) + ": gradient norm " + fixed(result.gradient_norm, 3) +
                 " is above optimizer.grad_norm_skip_threshold; update skipped");
    if (is_rank0())
      record(records::MetricsRow(step, "update_skipped").number("grad_norm", result.gradient_norm));
  }
  // Rows depend on the step alone: a run in parts has those of an uninterrupted one.
  const bool as_row = step % config_.logger.log_interval == 0 || step == 1 || step == total_steps_;
  const bool silent_long = !log_.terminal() && seconds_since(last_line_) > 30;
  const bool as_line = as_row || silent_long || step == first_step_ + 1;
  if (as_line || log_.terminal()) log_step(result, as_line, as_row);
  if (as_line) last_line_ = Clock::now();
  if (as_row) state.since_log = {}, log_seconds_ = {};
  if (step % config_.logger.tensorboard_log_interval == 0) {
    if (events_) write_step_events(result);
    state.since_events = {}, events_seconds_ = {};
  }
  call_on_step(result);
}

void Run::call_on_step(const StepResult& result) {
  if (!options_.on_step) return;
  const TrainState& state = loop_->state();
  const double tokens = static_cast<double>(*config_.train.global_batch_size * config_.model.seq_length);
  StepReport report;
  report.step = state.step;
  report.total_steps = total_steps_;
  report.loss = result.loss;
  report.gradient_norm = result.gradient_norm;
  report.learning_rate = result.learning_rate;
  report.step_seconds = step_seconds_;
  report.tokens_per_second = step_seconds_ > 0 ? tokens / step_seconds_ : 0;
  report.consumed_samples = state.consumed_samples;
  report.consumed_tokens = state.consumed_tokens;
  report.memory_bytes = loop_->device().memory().peak;
  report.update_skipped = result.skipped;
  if (!options_.on_step(report)) callback_stops_ = true;
}

void Run::evaluate(bool last) {
  const auto& v = config_.validation;
  const int64_t step = loop_->state().step;
  if (!v.eval_interval || !datasets_[1] || v.eval_iters <= 0) return;
  if (!last && step % *v.eval_interval != 0) return;
  if (last && step % *v.eval_interval == 0) return;  // just done
  if (last && step == first_step_) return;           // a finished run that was resumed
  timers_.start_step();
  expect(evaluation_seconds_ > 0 ? evaluation_seconds_ + save_seconds_ : 0);
  timers_.enter(Phase::evaluate);
  const double loss = loop_->evaluate(datasets_[1], v.eval_iters);
  timers_.enter(Phase::other);
  evaluation_seconds_ = timers_.seconds(Phase::evaluate);
  report_evaluation("validation", "validation/loss", loss);
}

void Run::test() {
  const auto& v = config_.validation;
  if (!v.eval_interval || !datasets_[2] || v.eval_iters <= 0) return;
  if (loop_->state().step == first_step_) return;  // a finished run that was resumed
  timers_.start_step();
  expect(evaluation_seconds_ > 0 ? evaluation_seconds_ + save_seconds_ : 0);
  timers_.enter(Phase::evaluate);
  const double loss = loop_->evaluate(datasets_[2], v.eval_iters);
  timers_.enter(Phase::other);
  report_evaluation("test", "test/loss", loss);
}

void Run::report_evaluation(const char* split, const char* name, double loss) {
  const int64_t step = loop_->state().step;
  log_.line("step " + std::to_string(step) + " | " + split + " loss " + fixed(loss, 4) + " | perplexity " +
            fixed(std::exp(loss), 2) + " | " + human_duration(timers_.seconds(Phase::evaluate)));
  if (!is_rank0()) return;
  record(records::MetricsRow(step, split)
             .number("loss", loss)
             .number("perplexity", std::exp(loss))
             .number("seconds", timers_.seconds(Phase::evaluate)));
  if (events_) write_events(step, std::array<records::Scalar, 1>{{{name, loss}}});
}

SavePlan Run::save_plan() {
  SavePlan plan;
  plan.root = checkpoint_root();
  plan.run_id = run_id_;
  plan.recipe = options_.recipe.resolved;
  plan.recipe_hash = options_.recipe.hash;
  plan.data = data_;
  plan.base = base_;
  plan.schedule = schedule_text(schedule_);
  plan.version = CAPSTAN_VERSION;
  plan.layout = loop_->mesh().text();
  plan.parent = last_checkpoint_.string();
  plan.retention.most_recent = config_.checkpoint.most_recent_k;
  plan.retention.keep_multiples = config_.checkpoint.save_retain_interval;
  plan.optimizer = config_.checkpoint.save_optim;
  plan.tokenizer = config_.checkpoint.save_tokenizer_assets ? tokenizer_.get() : nullptr;
  plan.assets = assets_;
  plan.chat_template = chat_template_;
  plan.files = options_.files;
  // The rows of the steps before a checkpoint must not be lost by a power cut that leaves the checkpoint.
  if (metrics_) plan.before_commit = [this] { metrics_->sync(); };
  return plan;
}

void Run::finish_save() {
  if (!saver_ || !saver_->busy()) return;
  timers_.enter(Phase::save);
  const auto ended = saver_->finish();
  timers_.enter(Phase::other);
  if (ended) tell(*ended);
}

void Run::save(bool must_succeed) {
  const int64_t step = loop_->state().step;
  timers_.start_step();
  expect(save_seconds_);
  finish_save();  // at most one at a time
  if (saved_step_ == step) return;
  const SavePlan plan = save_plan();
  timers_.enter(Phase::save);
  if (saver_ && !must_succeed) {
    saver_->begin(plan, loop_->state());
    timers_.enter(Phase::other);
    return;
  }
  Saver::Ended ended;
  ended.step = step;
  try {
    ended.directory =
        save_state(world_, plan, loop_->state(), loop_->store(), loop_->optimizer(), &ended.problem);
  } catch (Error& error) {
    if (must_succeed) throw error.in("while saving step " + std::to_string(step));
    ended.error = error.message();
  }
  timers_.enter(Phase::other);
  ended.seconds = ended.stall_seconds = timers_.seconds(Phase::save);
  tell(ended);
}

Outcome Run::run() {
  // From here on a signal means: save, then end. Without the handler it ends the process, as signals do.
  const StopSignals signals(log_.sink(), config_.train.exit_signal_handler && options_.handle_signals);
  // What can be missing or unsupported is found before anything is allocated or written; the step runs once on the meta
  // device, through the same code.
  check_device(config_.train.device);
  require_agreement(world_,
                    {{"the program", program_identity()}, {"the run directory", options_.run_dir.string()}});
  require_same_recipe(world_, config_);
  name_run_directory();
  open_data();
  require_agreement(world_, {{"the training data (fingerprint)", data_}});
  comm::together(world_.communicator(), "planning the memory", [&] {
    estimate_ = estimate_step(config_, world_.rank(), world_.local_size());
    check_fits(config_, estimate_, world_.rank(), world_.local_size());
  });
  log_.log_only("capstan " CAPSTAN_VERSION ": " + options_.recipe.command);
  total_steps_ = total_iterations(config_);
  report_passes();
  open_records();
  world_.share_rank_status(run_dir_ / "rank_status");
  const auto features = kernels::cpu_features();
  loop_ = std::make_unique<Loop>(config_, world_);
  log_.line("run " + run_dir_.string() + " on " + std::string(loop_->device().name()) + ": " +
            std::to_string(world_.size()) + (world_.size() == 1 ? " rank" : " ranks") + " x " +
            std::to_string(loop_->device().context().pool->size()) + " threads, " + features.instruction_set +
            (compute_type(config_.mixed_precision) == DType::bf16 && !features.native_bf16_gemm
                 ? ", bf16 products widened to fp32"
                 : ""));
  start_or_resume();
  require_agreement(world_, {{"the step to go on from", std::to_string(loop_->state().step)}});
  begin_records();
  if (is_rank0()) {
    const int64_t step = loop_->state().step;
    if (records_->resumed()) records::truncate_after_step(records_->metrics(), step);
    metrics_ = std::make_unique<records::MetricsWriter>(records_->metrics());
    if (config_.logger.tensorboard)
      open_events(records_->resumed() ? std::optional<int64_t>(step) : std::nullopt);
    for (const std::string& reason : refused_)
      record(records::MetricsRow(step, "checkpoint_refused").text("reason", reason));
  }
  report_model();
  if (config_.checkpoint.async_save && config_.checkpoint.save_interval)
    saver_ = std::make_unique<Saver>(world_, loop_->store(), loop_->optimizer(),
                                     config_.checkpoint.save_optim, loop_->device());

  Outcome outcome;
  outcome.run_dir = run_dir_;
  first_step_ = loop_->state().step;
  last_line_ = Clock::now();
  timers_.announce([this](Phase phase) {
    StopSignals::at_phase(name_of(phase));
    world_.at_phase(name_of(phase));
  });
  auto loader = std::make_unique<data::Loader>(datasets_[0], loop_->loader_options());
  while (loop_->state().step < total_steps_) {
    StopSignals::at_step(loop_->state().step + 1);
    world_.at_step(loop_->state().step + 1);
    expect(step_seconds_ > 0 ? step_seconds_ + save_seconds_ : 0);
    trace_from(loop_->state().step + 1);
    timers_.start_step();
    const StepResult result = next_step(*loader);
    if (result.rewind) {
      rewind(result);
      loader = std::make_unique<data::Loader>(datasets_[0], loop_->loader_options());
      continue;
    }
    after_step(result);
    evaluate(false);
    const int64_t step = loop_->state().step;
    outcome.reason = stop_reason();
    // The last step's checkpoint follows its evaluations: one that is there says that they are, and a resume repeats neither.
    if (outcome.reason.empty() && config_.checkpoint.save_interval && step < total_steps_ &&
        step % *config_.checkpoint.save_interval == 0) {
      save(false);
      outcome.reason = stop_reason();  // asked for while saving
    }
    if (!outcome.reason.empty() && step < total_steps_) {
      save(true);
      outcome.ended = Ended::stopped;
      break;
    }
  }
  if (trace_) write_trace();
  if (outcome.ended == Ended::finished) {
    outcome.reason.clear();
    evaluate(true);
    test();
    save(true);
  }
  outcome.step = loop_->state().step;
  outcome.checkpoint = last_checkpoint_;
  log_end(outcome);
  if (is_rank0())
    records_->end(outcome.ended == Ended::finished ? records::RunEnd::finished : records::RunEnd::stopped,
                  outcome.reason);
  return outcome;
}

Outcome train(const config::Config& config, comm::World& world, const RunOptions& options,
              ProgressSink& sink) {
  Run run(config, world, options, sink);
  try {
    return run.run();
  } catch (const std::exception& error) {
    run.failed(error.what());
    throw;
  }
}

}  // namespace capstan::train
