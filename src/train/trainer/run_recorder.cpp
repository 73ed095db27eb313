#include "train/trainer/run_recorder.hpp"

#include "base/error.hpp"
#include "comm/collective_errors.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

namespace fs = std::filesystem;

namespace {
double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}
}  // namespace

fs::path run_directory(const RunOptions& options) {
  if (!options.run_dir.empty()) return options.run_dir;
  const std::string& name = options.recipe.name;
  if (name.find('/') != std::string::npos || name == "." || name == "..")
    fail(ErrorCode::config, "the recipe's name `" + name + "` cannot name a directory in runs/",
         "choose a name without `/`, or {other_run_dir}");
  return fs::path("runs") / name;
}

RunRecorder::RunRecorder(const config::Config& config, comm::World& world, const RunOptions& options,
                         RunLog& log)
    : config_(config), world_(world), options_(options), log_(log), directory_(run_directory(options)) {
  if (options.resume != Resume::existing) return;
  comm::run_collectively(world.communicator(), "looking for the run to resume", [&] {
    if (world_.rank() == 0) records::require_run(directory_);
  });
}

void RunRecorder::open() {
  comm::run_collectively(world_.communicator(), "opening the run directory", [&] {
    if (world_.rank() != 0) return;
    run_ = std::make_unique<records::RunDirectory>(directory_, options_.resume != Resume::no);
    run_id_ = run_->id();
  });
  run_id_ = comm::gather_texts(world_.communicator(), run_id_)[0];
}

void RunRecorder::begin(const records::RunRecords& start) {
  comm::run_collectively(world_.communicator(), "beginning the run's records", [&] {
    if (!run_) return;
    run_->begin(start);
    begun_ = true;
    log_.open(run_->log());
    if (run_->killed())
      log_.log_only("the start before this one was killed: its process ended without a record of its end");
  });
}

void RunRecorder::open_metrics(int64_t step) {
  if (!run_) return;
  if (run_->resumed()) records::truncate_after_step(run_->metrics(), step);
  metrics_ = std::make_unique<records::MetricsWriter>(run_->metrics());
  if (config_.logger.tensorboard) open_events(run_->resumed() ? std::optional<int64_t>(step) : std::nullopt);
}

void RunRecorder::open_events(std::optional<int64_t> resumed_at) {
  events_ = std::make_unique<records::EventsWriter>(
      config_.logger.tensorboard_dir ? fs::path(config_.logger.tensorboard_dir->resolved) : directory_,
      wall_time(), resumed_at);
}

void RunRecorder::rewind(int64_t step) {
  unwritten_.clear();
  if (!run_) return;
  // Truncation may replace the file.
  metrics_.reset();
  records::truncate_after_step(run_->metrics(), step);
  metrics_ = std::make_unique<records::MetricsWriter>(run_->metrics());
  if (events_) open_events(step);
}

void RunRecorder::write(const records::MetricsRow& row) {
  if (!metrics_) return;
  constexpr size_t kMaxRows = size_t{1} << 17;
  unwritten_.push_back(row);
  try {
    const bool complained = unwritten_.size() > 1;
    while (!unwritten_.empty()) {
      metrics_->write(unwritten_.front());
      unwritten_.pop_front();
    }
    if (complained) log_.line("metrics.jsonl can be written again, and is complete");
  } catch (const Error& error) {
    if (unwritten_.size() > kMaxRows) unwritten_.pop_front();
    if (unwritten_.size() > 1 && seconds_since(last_warning_) < 30) return;
    last_warning_ = std::chrono::steady_clock::now();
    log_.warning(error.message() + "; training continues, " + std::to_string(unwritten_.size()) +
                 " metrics rows wait for disk space");
  }
}

void RunRecorder::write_events(int64_t step, std::span<const records::Scalar> scalars,
                               std::span<const records::Histogram> histograms) {
  if (!events_) return;
  try {
    events_->write(step, wall_time(), scalars, histograms);
  } catch (const Error& error) {
    // write() warns of a full disk.
    log_.log_only(error.message());
  }
}

void RunRecorder::sync() {
  if (metrics_) metrics_->sync();
}

void RunRecorder::end(records::RunEnd how, const std::string& reason) {
  if (run_) run_->end(how, reason);
}

fs::path RunRecorder::earlier_checkpoints() const {
  return resumed() ? run_->checkpoints() : fs::path();
}

double RunRecorder::logged_step_seconds() const {
  if (!resumed()) return 0;
  const auto row = records::last_logged_step(run_->metrics());
  const double seconds = row ? row->number("step_seconds") : 0;
  return seconds > 0 ? seconds : 0;
}

}  // namespace capstan::train
