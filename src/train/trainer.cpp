#include "train/trainer.hpp"
#include "train/records/run_list.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <deque>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/writer.hpp"
#include "comm/reduce.hpp"
#include "comm/together.hpp"
#include "kernels/bench/bench.hpp"
#include "kernels/table.hpp"
#include "train/agreement.hpp"
#include "train/fit.hpp"
#include "train/loop.hpp"
#include "train/profile.hpp"
#include "train/records/events.hpp"
#include "train/records/log_file.hpp"
#include "train/records/metrics.hpp"
#include "train/records/run_dir.hpp"
#include "train/saver.hpp"
#include "train/stop.hpp"

namespace capstan::train {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
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
  void clear_leftovers();
  void refuse_foreign_checkpoints();
  void say_end(const Outcome& outcome);
  void write_events(int64_t step, std::span<const records::Scalar> scalars);
  void start_or_resume();
  void check_changes(const checkpoint::Reader& reader);
  bool harmless(const RecipeChange& change, const checkpoint::Reader& reader) const;
  void measure_products();  // gemm_rate_, or a higher one
  void report_model();
  void trace_from(int64_t step);  // begins or ends the trace before that step
  void write_trace();
  StepResult next_step(data::Loader& loader);
  void say_events(int64_t step, const std::vector<GuardEvent>& events);
  void rewind(const StepResult& result);  // or passes over the batch, where there is no checkpoint
  void after_step(const StepResult& result, double step_seconds);
  void log_step(const StepResult& result, double step_seconds, bool as_line);
  void evaluate(bool last);
  void save(bool must_succeed);
  SavePlan save_plan();
  void finish_save();  // waits for the save that runs beside the training, if there is one
  void tell(const Saver::Ended& ended);
  void record(const records::MetricsRow& row);
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
  std::unique_ptr<records::FileLock> owner_lock_;   // of the run whose directory checkpoint.save lies in
  std::unique_ptr<records::FileLock> root_lock_;  // of checkpoint.save, where it is not in the run directory
  std::unique_ptr<records::MetricsWriter> metrics_;
  std::deque<records::MetricsRow> unwritten_;  // rows that found no room on the disk, oldest first
  Clock::time_point last_complaint_;
  std::unique_ptr<records::EventsWriter> events_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  std::array<std::shared_ptr<const data::GptDataset>, 3> datasets_;
  std::string data_;  // which samples are trained on
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<Saver> saver_;  // with checkpoint.async_save
  StepTimers timers_;
  int64_t total_steps_ = 0, first_step_ = 0, saved_step_ = -1;
  int64_t skips_in_a_row_ = 0;  // by the guards
  fs::path last_checkpoint_;
  std::vector<std::string> refused_;  // checkpoints that were not resumed from, with the reasons
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
    clear_leftovers();
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

// What killed processes left behind of saves; the run's lock, which is held here, says that nobody is at it.
void Run::clear_leftovers() {
  std::error_code unknown;
  if (config_.checkpoint.save && !fs::equivalent(checkpoint_root(), run_dir_, unknown)) {
    checkpoint::real_file_system().make_directories(checkpoint_root());
    root_lock_ = std::make_unique<records::FileLock>(checkpoint_root(), "checkpoint directory");
    refuse_foreign_checkpoints();
  }
  try {
    checkpoint::remove_leftovers(options_.files ? *options_.files : checkpoint::real_file_system(),
                                 checkpoint_root());
  } catch (const Error& error) {
    speaker_.warning("what an earlier save left behind was not removed: " + error.message());
  }
}

// Two runs that save into one directory would take turns in deleting each other's checkpoints.
void Run::refuse_foreign_checkpoints() {
  const fs::path root = checkpoint_root();
  std::error_code unknown;
  const fs::path owner = fs::weakly_canonical(root, unknown).parent_path();
  if (records::is_run(owner) && !fs::equivalent(owner, run_dir_, unknown))
    owner_lock_ = std::make_unique<records::FileLock>(owner, "run");  // it saves there itself
  if (config_.checkpoint.load && fs::equivalent(config_.checkpoint.load->resolved, root, unknown))
    return;  // to go on in it
  for (const auto& one : checkpoint::list_checkpoints(root)) {
    std::string id;
    try {
      id = checkpoint::Reader::open(one.path, checkpoint::Depth::structure).info().run_id;
    } catch (const Error&) {  // damaged: whose it was is not known, and nobody is kept from saving
    }
    if (!id.empty() && id != run_id_)
      fail(ErrorCode::failed,
           "checkpoint.save `" + root.string() + "` holds checkpoints of another run (" + id + "; " +
               one.path.filename().string() + ")",
           "choose a directory of its own; checkpoint.load=" + root.string() + " goes on from what is there");
  }
}

void Run::write_events(int64_t step, std::span<const records::Scalar> scalars) {
  try {
    events_->write(step, wall_time(), scalars);
  } catch (const Error& error) {  // metrics.jsonl has them too, and says so when there is no room
    speaker_.log_only(error.message());
  }
}

// A full disk ends no run: rows wait until there is room, and until then it is said every half minute that there is none.
void Run::record(const records::MetricsRow& row) {
  if (!metrics_) return;
  constexpr size_t kLongest = size_t{1} << 17;
  unwritten_.push_back(row);
  try {
    const bool complained = unwritten_.size() > 1;
    while (!unwritten_.empty()) {
      metrics_->write(unwritten_.front());
      unwritten_.pop_front();
    }
    if (complained) speaker_.line("metrics.jsonl is written again, and complete");
  } catch (const Error& error) {
    if (unwritten_.size() > kLongest) unwritten_.pop_front();
    if (unwritten_.size() > 1 && seconds_since(last_complaint_) < 30) return;
    last_complaint_ = Clock::now();
    speaker_.warning(error.message() + "; training goes on, " + std::to_string(unwritten_.size()) +
                     " rows of the metrics wait for room");
  }
}

void Run::open_data() {
  tokenizer_ = load_tokenizer(config_);
  datasets_ = open_datasets(config_, tokenizer_.get());
  if (!datasets_[0])
    fail(ErrorCode::config, "dataset.split gives the training data no share", "dataset.split=969,30,1");
  data_ = datasets_[0]->fingerprint();
}

// Changes that a continued run may have although they would alter a new one.
bool Run::harmless(const RecipeChange& change, const checkpoint::Reader& reader) const {
  // Where a run began is past; the state says it all.
  if (change.path.starts_with("checkpoint.")) return true;
  const bool schedule = change.path.starts_with("scheduler.") || change.path == "optimizer.lr" ||
                        change.path == "optimizer.min_lr" || change.path == "optimizer.decoupled_lr" ||
                        change.path == "optimizer.decoupled_min_lr" ||
                        change.path == "optimizer.weight_decay";
  if (schedule && config_.scheduler.override_opt_param_scheduler) return true;
  // Files that have moved: the samples are the same.
  const bool sources = change.path == "dataset.data_path" || (change.path.starts_with("dataset.") &&
                                                              change.path.find("blend") != std::string::npos);
  return sources && !data_.empty() && data_of(reader) == data_;
}

void Run::check_changes(const checkpoint::Reader& reader) {
  if (!options_.changes_since || !reader.has_file(checkpoint::kRecipeFile)) return;
  const auto changes = options_.changes_since(reader.read_text(checkpoint::kRecipeFile));
  std::string altering;
  for (const RecipeChange& change : changes) {
    const std::string text = change.path + ": " + change.before + " -> " + change.after;
    if (change.alters_numerics && !harmless(change, reader))
      altering += "\n    " + text;
    else
      speaker_.line("changed since the checkpoint: " + text);
  }
  const std::string trained_on = data_of(reader);
  if (altering.empty() && !trained_on.empty() && trained_on != data_)
    fail(ErrorCode::failed,
         "the recipe is the run's, but the data files hold other samples than those that it was trained on",
         "restore the files, or start a new run from the weights with checkpoint.pretrained_checkpoint=" +
             reader.directory().string());
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
  refused_ = std::move(refused);
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
      refused_.insert(refused_.end(), reasons.begin(), reasons.end());
    }
  }
  const auto damaged = comm::gather_texts(world_.communicator(), join(refused_, "\n    "))[0];
  if (options_.resume && !from && !damaged.empty())
    fail(ErrorCode::failed, "no checkpoint of the run verifies:\n    " + damaged,
         "restore one of them; or, to give them up, move them away and --resume begins at step 0, or take "
         "another run directory");
  if (!from && config_.checkpoint.load) {
    const fs::path load = config_.checkpoint.load->resolved;
    if (config_.checkpoint.ckpt_step) {
      fs::path root = load;
      if (fs::is_directory(root / "checkpoints")) root /= "checkpoints";
      from = checkpoint::Checkpoint{root / checkpoint::step_directory_name(*config_.checkpoint.ckpt_step),
                                    *config_.checkpoint.ckpt_step};
    } else {
      from = checkpoint::resolve_checkpoint(records::saved_in(load));
    }
  }
  if (from) {
    // What find_checkpoint() and resolve_checkpoint() return has been read and hashed; a step that was named has not.
    const bool named = !own && config_.checkpoint.ckpt_step;
    auto reader = checkpoint::Reader::open(from->path,
                                           named ? checkpoint::Depth::content : checkpoint::Depth::structure);
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
    const auto found =
        checkpoint::resolve_checkpoint(records::saved_in(config_.checkpoint.pretrained_checkpoint->resolved));
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
  if (options_.measure_rate) measure_products();
  speaker_.line(human_count(static_cast<double>(loop_->store().elements())) + " parameters, " +
                human_flop(flops_per_step_) + " a step and rank, about " +
                human_bytes(static_cast<double>(estimate_.memory.total())) + " at the peak; GEMM rate " +
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
  // Rank 0's clock and any rank's signal: agreed by a reduction, so that all leave after the same step. With it goes how many
  // ranks have written their part of the save that runs beside the training.
  std::array<double, 3> wishes{
      config_.train.exit_signal_handler && StopSignals::received() ? 1.0 : 0.0,
      chief() && config_.train.exit_duration_in_mins && minutes >= *config_.train.exit_duration_in_mins ? 1.0
                                                                                                        : 0.0,
      saver_ && saver_->busy() && saver_->ready() ? 1.0 : 0.0};
  comm::all_reduce(world_.communicator(), wishes);
  if (static_cast<int>(wishes[2]) == world_.size())
    if (const auto ended = saver_->advance()) tell(*ended);
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
  const MemoryUse memory = loop_->device().memory();
  const std::string text = "step " + std::to_string(step) + "/" + std::to_string(total_steps_) + " | loss " +
                           fixed(result.loss, 4) + " | grad " + fixed(result.gradient_norm, 3) + " | lr " +
                           significant(result.learning_rate) + " | " + human_count(tokens_per_second) +
                           " tok/s | gemm " + fixed(100 * share, 0) + "% | " +
                           human_bytes(static_cast<double>(memory.total())) + " | " +
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
      .integer("memory_bytes", memory.peak)
      .integer("kernel_scratch_bytes", memory.kernel_scratch)
      .number("gemm_share", share)
      .integer("consumed_samples", loop_->state().consumed_samples)
      .integer("consumed_tokens", loop_->state().consumed_tokens);
  for (size_t p = 0; p < kPhases; ++p)
    row.number("seconds_" + std::string(name_of(static_cast<Phase>(p))),
               timers_.seconds(static_cast<Phase>(p)));
  record(row);
}

StepResult Run::next_step(data::Loader& loader) {
  try {
    return loop_->step(loader, timers_);
  } catch (const Error& error) {
    say_events(loop_->state().step + 1, loop_->failure_events());
    // A judgement that all ranks share: what is being saved is sound, and worth waiting for.
    if (error.code() == ErrorCode::failed) finish_save();
    throw;
  }
}

void Run::say_events(int64_t step, const std::vector<GuardEvent>& events) {
  for (const GuardEvent& event : events) {
    speaker_.warning("step " + std::to_string(step) + ": " + event.text);
    if (!chief()) continue;
    records::MetricsRow row(step, event.event);
    for (const auto& [name, value] : event.numbers) row.number(name, value);
    for (const auto& [name, value] : event.texts) row.text(name, value);
    record(row);
  }
}

void Run::rewind(const StepResult& result) {
  const int64_t spike = loop_->state().step + 1, rewinds = loop_->state().rewinds;
  finish_save();
  std::vector<std::string> refused;
  const auto found = find_checkpoint(world_, checkpoint_root(), refused);
  for (const std::string& reason : refused) speaker_.warning("not gone back to " + reason);
  if (rewinds >= config_.resilience.max_rewinds || !found) {
    say_events(spike, result.events);
    if (found)
      fail(ErrorCode::failed,
           "step " + std::to_string(spike) + ": another spike after " + std::to_string(rewinds) +
               " rewinds (resilience.max_rewinds)",
           "a lower optimizer.lr, or look at the data around sample " +
               std::to_string(loop_->state().consumed_samples));
    speaker_.warning("step " + std::to_string(spike) + ": no checkpoint to go back to; update skipped");
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
  if (chief()) {
    metrics_.reset();  // the file may be another one afterwards
    records::truncate_after_step(records_->metrics(), state.step);
    metrics_ = std::make_unique<records::MetricsWriter>(records_->metrics());
  }
  say_events(state.step,
             result.events);  // at the step where the run goes on, so that a resume keeps the rows
  speaker_.warning("rewound to step " + std::to_string(state.step) + ", past the batch of step " +
                   std::to_string(spike) + " (rewind " + std::to_string(state.rewinds) + " of " +
                   std::to_string(config_.resilience.max_rewinds) + ")");
  if (chief())
    record(records::MetricsRow(state.step, "rewind")
               .integer("from_step", spike)
               .integer("rewinds", state.rewinds)
               .integer("consumed_samples", state.consumed_samples));
  // A restart must go on behind the batch too, and must not count from nothing: the checkpoint says so from now on.
  saved_step_ = -1;
  save(false);
}

void Run::after_step(const StepResult& result, double step_seconds) {
  const int64_t step = loop_->state().step;
  if (step == first_step_ + 1) speaker_.line("memory measured: " + memory_text(loop_->device().memory()));
  last_loss_ = result.loss;
  ++steps_since_log_;
  seconds_since_log_ += step_seconds;
  say_events(step, result.events);
  skips_in_a_row_ = result.skipped && !result.events.empty() ? skips_in_a_row_ + 1 : 0;
  if (skips_in_a_row_ > config_.resilience.spike_window)
    fail(ErrorCode::failed,
         "step " + std::to_string(step) + ": the update was skipped " + std::to_string(skips_in_a_row_) +
             " times in a row, more than resilience.spike_window: this is no spike, nothing is learnt any "
             "more",
         "a lower optimizer.lr or a greater resilience.loss_spike_factor, from a checkpoint before it");
  if (result.skipped && result.events.empty()) {
    speaker_.warning("step " + std::to_string(step) + ": gradient norm " + fixed(result.gradient_norm, 3) +
                     " is above optimizer.grad_norm_skip_threshold; update skipped");
    if (chief())
      record(records::MetricsRow(step, "update_skipped").number("grad_norm", result.gradient_norm));
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
  record(records::MetricsRow(step, "validation")
             .number("loss", loss)
             .number("perplexity", std::exp(loss))
             .number("seconds", timers_.seconds(Phase::evaluate)));
  if (events_) write_events(step, std::array<records::Scalar, 1>{{{"validation/loss", loss}}});
}

SavePlan Run::save_plan() {
  SavePlan plan;
  plan.root = checkpoint_root();
  plan.run_id = run_id_;
  plan.recipe = options_.recipe.resolved;
  plan.recipe_hash = options_.recipe.hash;
  plan.data = data_;
  plan.version = CAPSTAN_VERSION;
  plan.layout = "dp" + std::to_string(loop_->data_parallel().size());
  plan.parent = last_checkpoint_.string();
  plan.retention.most_recent = config_.checkpoint.most_recent_k;
  plan.retention.keep_multiples = config_.checkpoint.save_retain_interval;
  plan.optimizer = config_.checkpoint.save_optim;
  plan.tokenizer = config_.checkpoint.save_tokenizer_assets ? tokenizer_.get() : nullptr;
  plan.files = options_.files;
  // The rows of the steps before a checkpoint must not be lost by a power cut that leaves the checkpoint.
  if (metrics_) plan.before_commit = [this] { metrics_->sync(); };
  return plan;
}

void Run::tell(const Saver::Ended& ended) {
  const std::string step = "step " + std::to_string(ended.step);
  if (!ended.error.empty()) {
    // The old checkpoint is untouched: training goes on and the next interval tries again.
    speaker_.warning(step + " was not saved: " + ended.error);
    if (chief()) record(records::MetricsRow(ended.step, "save_failed").text("error", ended.error));
    return;
  }
  last_checkpoint_ = ended.directory;
  saved_step_ = ended.step;
  const bool beside = ended.stall_seconds < ended.seconds;
  speaker_.line(step + " | saved " + last_checkpoint_.string() + " in " + human_duration(ended.seconds) +
                (beside ? ", of which training waited " + human_duration(ended.stall_seconds) : ""));
  if (!ended.problem.empty()) speaker_.warning("old checkpoints were not deleted: " + ended.problem);
  if (chief())
    record(records::MetricsRow(ended.step, "save")
               .number("seconds", ended.seconds)
               .number("stall_seconds", ended.stall_seconds));
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
    record(records::MetricsRow(loop_ ? loop_->state().step : 0, "failed").text("reason", reason));
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
  require_agreement(world_,
                    {{"the program", program_identity()}, {"the recipe (hash)", options_.recipe.hash}});
  open_data();
  require_agreement(world_, {{"the training data (fingerprint)", data_}});
  comm::together(world_.communicator(), "planning the memory", [&] {
    estimate_ = estimate_step(config_, world_.rank(), world_.local_size());
    check_fits(config_, estimate_, world_.rank(), world_.local_size());
  });
  const std::string& name = options_.recipe.name;
  if (options_.run_dir.empty() && (name.find('/') != std::string::npos || name == "." || name == ".."))
    fail(ErrorCode::config, "the recipe's name `" + name + "` cannot name a directory in runs/",
         "a name without `/`, or --run-dir DIR");
  run_dir_ = options_.run_dir.empty() ? fs::path("runs") / options_.recipe.name : options_.run_dir;
  speaker_.log_only("capstan " CAPSTAN_VERSION ": " + options_.recipe.command);
  total_steps_ = total_iterations(config_);
  open_records();
  world_.share_posts(run_dir_ / "board");
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
  require_agreement(world_, {{"the step to go on from", std::to_string(loop_->state().step)}});
  begin_records();
  if (chief()) {
    const int64_t step = loop_->state().step;
    if (records_->resumed()) records::truncate_after_step(records_->metrics(), step);
    metrics_ = std::make_unique<records::MetricsWriter>(records_->metrics());
    if (config_.logger.tensorboard)
      events_ = std::make_unique<records::EventsWriter>(
          config_.logger.tensorboard_dir ? fs::path(config_.logger.tensorboard_dir->resolved) : run_dir_,
          wall_time(), records_->resumed() ? std::optional<int64_t>(step) : std::nullopt);
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
  timers_.announce([this](Phase phase) { world_.at_phase(name_of(phase)); });
  auto loader = std::make_unique<data::Loader>(datasets_[0], loop_->loader_options());
  while (loop_->state().step < total_steps_) {
    world_.at_step(loop_->state().step + 1);
    trace_from(loop_->state().step + 1);
    timers_.start_step();
    const StepResult result = next_step(*loader);
    if (result.rewind) {
      rewind(result);
      loader = std::make_unique<data::Loader>(datasets_[0], loop_->loader_options());
      continue;
    }
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
