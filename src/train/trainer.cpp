#include "train/trainer.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/writer.hpp"
#include "comm/reduce.hpp"
#include "comm/together.hpp"
#include "kernels/bench/bench.hpp"
#include "kernels/table.hpp"
#include "train/fit.hpp"
#include "train/loop.hpp"
#include "train/profile.hpp"
#include "train/records/events.hpp"
#include "train/records/log_file.hpp"
#include "train/records/metrics.hpp"
#include "train/records/run_dir.hpp"
#include "train/stop.hpp"

namespace capstan::train {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string fixed(double value, int digits) {
  std::array<char, 48> buffer;
  std::snprintf(buffer.data(), buffer.size(), "%.*f", digits, value);
  return buffer.data();
}

std::string significant(double value) {  // three digits: 2e-04
  std::array<char, 48> buffer;
  std::snprintf(buffer.data(), buffer.size(), "%.3g", value);
  return buffer.data();
}

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Only rank 0 speaks. What it says is also in the run's log; what is said before there is one waits for it.
class Speaker {
 public:
  Speaker(ProgressSink& sink, bool speaks) : sink_(sink), speaks_(speaks) {}
  void open_log(const fs::path& path) {
    log_ = std::make_unique<records::LogFile>(path);
    for (const std::string& text : std::exchange(unlogged_, {})) log_->line(text);
  }
  void log_only(const std::string& text) {
    if (log_)
      log_->line(text);
    else
      unlogged_.push_back(text);
  }
  void line(const std::string& text) {
    if (speaks_) sink_.line(text);
    log_only(text);
  }
  void warning(const std::string& text) {
    if (speaks_) sink_.warning(text);
    log_only("warning: " + text);
  }
  void status(const std::string& text) {
    if (speaks_) sink_.status(text);
  }
  bool terminal() const { return speaks_ && sink_.terminal(); }

 private:
  ProgressSink& sink_;
  bool speaks_;
  std::unique_ptr<records::LogFile> log_;
  std::vector<std::string> unlogged_;
};

class Run {
 public:
  Run(const config::Config& config, comm::World& world, const RunOptions& options, ProgressSink& sink)
      : config_(config),
        world_(world),
        options_(options),
        speaker_(sink, world.rank() == 0),
        start_(Clock::now()) {}
  Outcome run();
  void failed(const std::string&
                  reason) noexcept;  // leaves a record of how the run ended, where there is a place for it

 private:
  void open_data();
  void open_records();
  void begin_records();
  void say_end(const Outcome& outcome);
  void write_events(int64_t step, std::span<const records::Scalar> scalars);
  void start_or_resume();
  void check_changes(const checkpoint::Reader& reader);
  bool harmless(const RecipeChange& change) const;
  void measure_products();  // gemm_rate_, or a higher one
  void report_model();
  void trace_from(int64_t step);  // begins or ends the trace before that step
  void write_trace();
  void after_step(const StepResult& result, double step_seconds);
  void log_step(const StepResult& result, double step_seconds, bool as_line);
  void evaluate(bool last);
  bool save(bool must_succeed);
  std::string stop_reason();  // agreed by all ranks; empty: go on
  bool chief() const { return world_.rank() == 0; }
  fs::path checkpoint_root() const {
    return config_.checkpoint.save ? fs::path(config_.checkpoint.save->resolved) : run_dir_ / "checkpoints";
  }

  const config::Config& config_;
  comm::World& world_;
  const RunOptions& options_;
  Speaker speaker_;
  Clock::time_point start_;

  fs::path run_dir_;
  std::string run_id_;
  std::unique_ptr<records::RunDirectory> records_;  // rank 0
  bool begun_ = false;                              // its texts are those of this start
  std::unique_ptr<records::MetricsWriter> metrics_;
  std::unique_ptr<records::EventsWriter> events_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  std::array<std::shared_ptr<const data::GptDataset>, 3> datasets_;
  std::unique_ptr<Loop> loop_;
  StepTimers timers_;
  int64_t total_steps_ = 0, first_step_ = 0, saved_step_ = -1;
  fs::path last_checkpoint_;
  StepEstimate estimate_;
  double flops_per_step_ = 0, gemm_rate_ = 0;  // of this rank; FLOP/s
  int gemm_measures_ = 0;                      // again
  std::unique_ptr<Trace> trace_;
  std::optional<double> last_loss_;  // none: no step was left to do
  Clock::time_point last_line_;
  int64_t steps_since_log_ = 0;
  double seconds_since_log_ = 0;
};

void Run::open_records() {
  // Rank 0 owns the directory; a refusal there ends the run on every rank.
  comm::together(world_.communicator(), "opening the run directory", [&] {
    if (!chief()) return;
    records_ = std::make_unique<records::RunDirectory>(run_dir_, options_.resume);
    run_id_ = records_->id();
  });
  run_id_ = comm::gather_texts(world_.communicator(), run_id_)[0];
}

// What the directory says about the run changes only now: a start that was refused has left it as it was.
void Run::begin_records() {
  comm::together(world_.communicator(), "beginning the run's records", [&] {
    if (!chief()) return;
    records_->begin(
        {.recipe_name = options_.recipe.name,
         .recipe_given = options_.recipe.given,
         .recipe = options_.recipe.resolved,
         .command = options_.recipe.command,
         .version =
             "{\"version\": \"" CAPSTAN_VERSION "\", \"world\": " + std::to_string(world_.size()) + "}\n",
         .checkpoints = config_.checkpoint.save ? config_.checkpoint.save->resolved : "checkpoints"});
    begun_ = true;
    speaker_.open_log(records_->log());
  });
}

void Run::write_events(int64_t step, std::span<const records::Scalar> scalars) {
  events_->write(step, wall_time(), scalars);
}

void Run::open_data() {
  tokenizer_ = load_tokenizer(config_);
  datasets_ = open_datasets(config_, tokenizer_.get());
  if (!datasets_[0])
    fail(ErrorCode::config, "dataset.split gives the training data no share", "dataset.split=969,30,1");
}

// Changes that a continued run may have although they would alter a new one.
bool Run::harmless(const RecipeChange& change) const {
  // Where a run began is past; the state says it all.
  if (change.path.starts_with("checkpoint.")) return true;
  const bool schedule = change.path.starts_with("scheduler.") || change.path == "optimizer.lr" ||
                        change.path == "optimizer.min_lr" || change.path == "optimizer.decoupled_lr" ||
                        change.path == "optimizer.decoupled_min_lr" ||
                        change.path == "optimizer.weight_decay";
  if (schedule && config_.scheduler.override_opt_param_scheduler) return true;
  // Files that have moved together with everything else: other directories, the same names.
  const auto names = [](const std::string& text) {
    std::string kept;
    for (const std::string_view path : split(text, ',')) {
      const size_t slash = path.rfind('/');
      kept += std::string(slash == std::string_view::npos ? path : path.substr(slash + 1)) + ",";
    }
    return kept;
  };
  const bool paths =
      change.before.find('/') != std::string::npos && change.after.find('/') != std::string::npos;
  return paths && change.path.starts_with("dataset.") && names(change.before) == names(change.after);
}

void Run::check_changes(const checkpoint::Reader& reader) {
  if (!options_.changes_since || !reader.has_file(checkpoint::kRecipeFile)) return;
  const auto changes = options_.changes_since(reader.read_text(checkpoint::kRecipeFile));
  std::string altering;
  for (const RecipeChange& change : changes) {
    const std::string text = change.path + ": " + change.before + " -> " + change.after;
    if (change.alters_numerics && !harmless(change))
      altering += "\n    " + text;
    else
      speaker_.line("changed since the checkpoint: " + text);
  }
  if (!altering.empty())
    fail(ErrorCode::failed, "the recipe differs from the run's in what alters the numbers:" + altering,
         "resume with the run's own values (scheduler.override_opt_param_scheduler=true takes a changed "
         "schedule), or start a new run from its weights with "
         "checkpoint.pretrained_checkpoint=" +
             reader.directory().string());
}

void Run::start_or_resume() {
  std::optional<checkpoint::Checkpoint> from;
  std::vector<std::string> refused;
  if (options_.resume) from = find_checkpoint(world_, checkpoint_root(), refused);
  for (const std::string& reason : refused) speaker_.warning("not resumed from " + reason);
  const bool own = from.has_value();
  if (options_.resume && !from) {
    // checkpoint.save may have changed since: what the run has lies where it was written.
    const fs::path before = comm::gather_texts(
        world_.communicator(), chief() && records_->resumed() ? records_->checkpoints().string() : "")[0];
    std::error_code unknown;
    if (!before.empty() && !fs::equivalent(before, checkpoint_root(), unknown)) {
      std::vector<std::string> reasons;
      from = find_checkpoint(world_, before, reasons);
      for (const std::string& reason : reasons) speaker_.warning("not resumed from " + reason);
    }
  }
  if (!from && config_.checkpoint.load) {
    const fs::path load = config_.checkpoint.load->resolved;
    if (config_.checkpoint.ckpt_step) {
      fs::path root = load;
      if (fs::is_directory(root / "checkpoints")) root /= "checkpoints";
      from = checkpoint::Checkpoint{root / checkpoint::step_directory_name(*config_.checkpoint.ckpt_step),
                                    *config_.checkpoint.ckpt_step};
    } else {
      from = checkpoint::resolve_checkpoint(load);
    }
  }
  if (from) {
    auto reader = checkpoint::Reader::open(from->path, checkpoint::Depth::structure);
    check_changes(reader);
    loop_->initialise();
    loop_->state() =
        load_state(reader, loop_->store(), config_.checkpoint.load_optim ? &loop_->optimizer() : nullptr);
    speaker_.line("resumed from " + from->path.string() + " at step " + std::to_string(loop_->state().step));
    if (own) saved_step_ = loop_->state().step, last_checkpoint_ = from->path;
    return;
  }
  if (options_.resume) speaker_.line("the run has no checkpoint yet: it starts over");
  loop_->initialise();
  if (config_.checkpoint.pretrained_checkpoint) {
    const auto found = checkpoint::resolve_checkpoint(config_.checkpoint.pretrained_checkpoint->resolved);
    auto reader = checkpoint::Reader::open(found.path, checkpoint::Depth::structure);
    load_parameters(reader, loop_->store());
    speaker_.line("weights from " + found.path.string());
  }
}

void Run::measure_products() {
  gemm_rate_ = std::max(gemm_rate_, kernels::measured_gemm_gflops(loop_->device()) * 1e9);
  loop_->device().release_cached();  // the measurement's matrices are no part of the run
  loop_->device().reset_peak();
}

void Run::report_model() {
  flops_per_step_ = estimate_.flops * static_cast<double>(loop_->micro_batches());
  measure_products();
  speaker_.line(human_count(static_cast<double>(loop_->store().elements())) + " parameters, " +
                human_flop(flops_per_step_) + " a step and rank, about " +
                human_bytes(static_cast<double>(estimate_.memory.peak)) + " at the peak; GEMM rate " +
                human_flop(gemm_rate_) + "/s");
  speaker_.line("memory foretold: " + memory_text(estimate_.memory));
}

void Run::trace_from(int64_t step) {
  const config::ProfilingConfig& p = config_.profiling;
  if (!p.trace) return;
  if (trace_ && step >= p.profile_step_end) write_trace();
  const bool wanted =
      std::find(p.profile_ranks.begin(), p.profile_ranks.end(), world_.rank()) != p.profile_ranks.end();
  if (!wanted || trace_ || step < p.profile_step_start || step >= p.profile_step_end) {
    if (trace_) trace_->step(step);
    return;
  }
  trace_ = std::make_unique<Trace>(world_.rank(), p.record_shapes);
  trace_->step(step);
  loop_->observe(trace_.get());
  timers_.listen([this](Phase phase, double end, double seconds) { trace_->phase(phase, end, seconds); });
}

void Run::write_trace() {
  loop_->observe(nullptr);
  timers_.listen({});
  const fs::path directory =
      config_.profiling.trace_dir ? fs::path(config_.profiling.trace_dir->resolved) : run_dir_ / "trace";
  const fs::path file = directory / ("rank-" + std::to_string(world_.rank()) + ".json");
  const size_t events = trace_->events();
  try {
    trace_->write(file);
    speaker_.line("trace of " + std::to_string(events) + " events in " + file.string() +
                  " (https://ui.perfetto.dev opens it)");
  } catch (const Error& problem) {  // a trace is not worth a run
    speaker_.warning("the trace was not written: " + problem.message());
  }
  trace_.reset();
}

std::string Run::stop_reason() {
  const int64_t step = loop_->state().step;
  const double minutes = seconds_since(start_) / 60;
  // Rank 0's clock and any rank's signal: agreed by a reduction, so that all leave after the same step.
  std::array<double, 2> wishes{
      config_.train.exit_signal_handler && StopSignals::received() ? 1.0 : 0.0,
      chief() && config_.train.exit_duration_in_mins && minutes >= *config_.train.exit_duration_in_mins
          ? 1.0
          : 0.0};
  comm::all_reduce(world_.communicator(), wishes);
  if (wishes[0] > 0) return "asked to stop by a signal";
  if (wishes[1] > 0)
    return "train.exit_duration_in_mins=" + to_text(*config_.train.exit_duration_in_mins) + " reached";
  if (config_.train.exit_interval && step % *config_.train.exit_interval == 0)
    return "train.exit_interval=" + std::to_string(*config_.train.exit_interval) + " reached";
  return {};
}

void Run::log_step(const StepResult& result, double step_seconds, bool as_line) {
  const int64_t step = loop_->state().step;
  const double mean_seconds =
      seconds_since_log_ / static_cast<double>(std::max<int64_t>(1, steps_since_log_));
  const double tokens_per_second =
      static_cast<double>(*config_.train.global_batch_size * config_.model.seq_length) / mean_seconds;
  // No step is faster than the products that it consists of: then the machine was busy when they were measured.
  if (gemm_rate_ > 0 && flops_per_step_ / mean_seconds > gemm_rate_ && gemm_measures_++ < 3)
    measure_products();
  const double share = gemm_rate_ > 0 ? flops_per_step_ / mean_seconds / gemm_rate_ : 0;
  const auto memory = static_cast<double>(loop_->device().memory().peak);
  const std::string text = "step " + std::to_string(step) + "/" + std::to_string(total_steps_) + " | loss " +
                           fixed(result.loss, 4) + " | grad " + fixed(result.gradient_norm, 3) + " | lr " +
                           significant(result.learning_rate) + " | " + human_count(tokens_per_second) +
                           " tok/s | gemm " + fixed(100 * share, 0) + "% | " + human_bytes(memory) + " | " +
                           human_duration(mean_seconds * static_cast<double>(total_steps_ - step)) + " left";
  if (as_line)
    speaker_.line(text);
  else
    speaker_.status(text);
  if (!as_line || !chief()) return;
  records::MetricsRow row(step);
  row.number("loss", result.loss)
      .number("grad_norm", result.gradient_norm)
      .number("learning_rate", result.learning_rate)
      .number("tokens_per_second", tokens_per_second)
      .number("step_seconds", step_seconds)
      .integer("memory_bytes", static_cast<int64_t>(memory))
      .number("gemm_share", share)
      .integer("consumed_samples", loop_->state().consumed_samples)
      .integer("consumed_tokens", loop_->state().consumed_tokens);
  for (size_t p = 0; p < kPhases; ++p)
    row.number("seconds_" + std::string(name_of(static_cast<Phase>(p))),
               timers_.seconds(static_cast<Phase>(p)));
  metrics_->write(row);
}

void Run::after_step(const StepResult& result, double step_seconds) {
  const int64_t step = loop_->state().step;
  if (step == first_step_ + 1) speaker_.line("memory measured: " + memory_text(loop_->device().memory()));
  last_loss_ = result.loss;
  ++steps_since_log_;
  seconds_since_log_ += step_seconds;
  if (result.skipped) {
    speaker_.warning("step " + std::to_string(step) + ": gradient norm " + fixed(result.gradient_norm, 3) +
                     " is above optimizer.grad_norm_skip_threshold; update skipped");
    if (chief())
      metrics_->write(records::MetricsRow(step, "update_skipped").number("grad_norm", result.gradient_norm));
  }
  const bool at_interval =
      step % config_.logger.log_interval == 0 || step == first_step_ + 1 || step == total_steps_;
  const bool silent_long = !speaker_.terminal() && seconds_since(last_line_) > 30;
  const bool as_line = at_interval || silent_long;
  if (as_line || speaker_.terminal()) log_step(result, step_seconds, as_line);
  if (as_line) last_line_ = Clock::now(), steps_since_log_ = 0, seconds_since_log_ = 0;
  if (events_ && step % config_.logger.tensorboard_log_interval == 0)
    write_events(step, std::array<records::Scalar, 4>{{{"train/loss", result.loss},
                                                       {"train/grad_norm", result.gradient_norm},
                                                       {"train/learning_rate", result.learning_rate},
                                                       {"train/step_seconds", step_seconds}}});
}

void Run::evaluate(bool last) {
  const auto& v = config_.validation;
  const int64_t step = loop_->state().step;
  if (!v.eval_interval || !datasets_[1] || v.eval_iters <= 0) return;
  if (!last && step % *v.eval_interval != 0) return;
  if (last && step % *v.eval_interval == 0) return;  // just done
  timers_.start_step();
  timers_.enter(Phase::evaluate);
  const double loss = loop_->evaluate(datasets_[1], v.eval_iters);
  timers_.enter(Phase::other);
  speaker_.line("step " + std::to_string(step) + " | validation loss " + fixed(loss, 4) + " | perplexity " +
                fixed(std::exp(loss), 2) + " | " + human_duration(timers_.seconds(Phase::evaluate)));
  if (!chief()) return;
  metrics_->write(records::MetricsRow(step, "validation")
                      .number("loss", loss)
                      .number("perplexity", std::exp(loss))
                      .number("seconds", timers_.seconds(Phase::evaluate)));
  if (events_) write_events(step, std::array<records::Scalar, 1>{{{"validation/loss", loss}}});
}

bool Run::save(bool must_succeed) {
  const int64_t step = loop_->state().step;
  if (saved_step_ == step) return true;
  timers_.start_step();
  timers_.enter(Phase::save);
  SavePlan plan;
  plan.root = checkpoint_root();
  plan.run_id = run_id_;
  plan.recipe = options_.recipe.resolved;
  plan.recipe_hash = options_.recipe.hash;
  plan.version = CAPSTAN_VERSION;
  plan.layout = "dp" + std::to_string(loop_->data_parallel().size());
  plan.parent = last_checkpoint_.string();
  plan.retention.most_recent = config_.checkpoint.most_recent_k;
  plan.retention.keep_multiples = config_.checkpoint.save_retain_interval;
  plan.optimizer = config_.checkpoint.save_optim;
  plan.tokenizer = config_.checkpoint.save_tokenizer_assets ? tokenizer_.get() : nullptr;
  try {
    last_checkpoint_ = save_state(world_, plan, loop_->state(), loop_->store(), loop_->optimizer());
    saved_step_ = step;
  } catch (Error& error) {
    if (must_succeed) throw error.in("while saving step " + std::to_string(step));
    // The old checkpoint is untouched: training goes on and the next interval tries again.
    speaker_.warning("step " + std::to_string(step) + " was not saved: " + error.message());
    if (chief()) metrics_->write(records::MetricsRow(step, "save_failed").text("error", error.message()));
    return false;
  }
  timers_.enter(Phase::other);
  const double seconds = timers_.seconds(Phase::save);
  speaker_.line("step " + std::to_string(step) + " | saved " + last_checkpoint_.string() + " in " +
                human_duration(seconds));
  if (chief()) {
    metrics_->write(records::MetricsRow(step, "save").number("seconds", seconds));
    metrics_->sync();
  }
  return true;
}

void Run::say_end(const Outcome& outcome) {
  std::string text = outcome.ended == Ended::finished
                         ? "done: " + std::to_string(outcome.step) + " steps"
                         : "stopped at step " + std::to_string(outcome.step) + ": " + outcome.reason;
  if (last_loss_) text += ", loss " + fixed(*last_loss_, 4);
  text += ", " + human_duration(seconds_since(start_)) + "; run " + run_dir_.string();
  if (!outcome.checkpoint.empty()) text += ", checkpoint " + outcome.checkpoint.filename().string();
  speaker_.line(text);
}

void Run::failed(const std::string& reason) noexcept {
  try {
    if (metrics_) metrics_->write(records::MetricsRow(loop_->state().step, "failed").text("reason", reason));
    if (!begun_) return;
    records_->end(records::RunEnd::failed, reason);
    speaker_.log_only("failed: " + reason);
  } catch (const std::exception&) {  // the disk may be what failed: the error that is on its way says more
  }
}

Outcome Run::run() {
  const StopSignals signals;  // from here on a signal means: save, then end
  // What can be missing or unsupported is found before anything is allocated or written; the step runs once on the meta
  // device, through the same code.
  check_device(config_.train.device);
  open_data();
  estimate_ = estimate_step(config_, *models::build(config_.model));
  check_fits(config_, estimate_, world_.local_size());
  run_dir_ = options_.run_dir.empty() ? fs::path("runs") / options_.recipe.name : options_.run_dir;
  speaker_.log_only("capstan " CAPSTAN_VERSION ": " + options_.recipe.command);
  total_steps_ = total_iterations(config_);
  open_records();
  const auto features = kernels::cpu_features();
  loop_ = std::make_unique<Loop>(config_, world_);
  speaker_.line("run " + run_dir_.string() + " on " + std::string(loop_->device().name()) + ": " +
                std::to_string(world_.size()) + (world_.size() == 1 ? " rank" : " ranks") + " x " +
                std::to_string(loop_->device().context().pool->size()) + " threads, " +
                features.instruction_set +
                (compute_type(config_.mixed_precision) == DType::bf16 && !features.native_bf16_gemm
                     ? ", bf16 products widened to fp32"
                     : ""));
  start_or_resume();
  begin_records();
  if (chief()) {
    const int64_t step = loop_->state().step;
    if (records_->resumed()) records::truncate_after_step(records_->metrics(), step);
    metrics_ = std::make_unique<records::MetricsWriter>(records_->metrics());
    if (config_.logger.tensorboard)
      events_ = std::make_unique<records::EventsWriter>(
          config_.logger.tensorboard_dir ? fs::path(config_.logger.tensorboard_dir->resolved) : run_dir_,
          wall_time(), records_->resumed() ? std::optional<int64_t>(step) : std::nullopt);
  }
  report_model();

  Outcome outcome;
  outcome.run_dir = run_dir_;
  first_step_ = loop_->state().step;
  last_line_ = Clock::now();
  data::Loader loader(datasets_[0], loop_->loader_options());
  while (loop_->state().step < total_steps_) {
    trace_from(loop_->state().step + 1);
    timers_.start_step();
    const StepResult result = loop_->step(loader, timers_);
    after_step(result, timers_.step_seconds());
    evaluate(false);
    const int64_t step = loop_->state().step;
    outcome.reason = stop_reason();
    if (!outcome.reason.empty() && step < total_steps_) {
      save(true);
      outcome.ended = Ended::stopped;
      break;
    }
    if (config_.checkpoint.save_interval && step % *config_.checkpoint.save_interval == 0)
      save(step == total_steps_);
  }
  if (trace_) write_trace();
  if (outcome.ended == Ended::finished) {
    outcome.reason.clear();
    evaluate(true);
    save(true);
  }
  outcome.step = loop_->state().step;
  outcome.checkpoint = last_checkpoint_;
  say_end(outcome);
  if (chief())
    records_->end(outcome.ended == Ended::finished ? records::RunEnd::finished : records::RunEnd::stopped,
                  outcome.reason);
  return outcome;
}

}  // namespace

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
