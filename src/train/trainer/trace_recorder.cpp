#include "train/trainer/trace_recorder.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace capstan::train {

TraceRecorder::TraceRecorder(const config::ProfilingConfig& config, int rank,
                             const std::filesystem::path& run_directory, StepRunner& runner,
                             StepTimers& timers, RunLog& log)
    : config_(config),
      rank_(rank),
      directory_(config.trace_dir ? std::filesystem::path(config.trace_dir->resolved)
                                  : run_directory / "trace"),
      runner_(runner),
      timers_(timers),
      log_(log) {}

void TraceRecorder::before_step(int64_t step) {
  if (!config_.trace) return;
  if (step >= config_.profile_step_end) return finish();
  const auto& ranks = config_.profile_ranks;
  const bool traced_rank = std::find(ranks.begin(), ranks.end(), rank_) != ranks.end();
  if (!trace_ && traced_rank && step >= config_.profile_step_start) {
    trace_ = std::make_unique<Trace>(rank_, config_.record_shapes);
    runner_.observe(trace_.get());
    timers_.listen([this](Phase phase, double end, double seconds) { trace_->phase(phase, end, seconds); });
  }
  if (trace_) trace_->step(step);
}

void TraceRecorder::finish() {
  if (!trace_) return;
  runner_.observe(nullptr);
  timers_.listen({});
  const std::filesystem::path file = directory_ / ("rank-" + std::to_string(rank_) + ".json");
  const size_t events = trace_->events();
  try {
    trace_->write(file);
    log_.line("trace of " + std::to_string(events) + " events in " + file.string() +
              " (https://ui.perfetto.dev opens it)");
  } catch (const Error& problem) {
    log_.warning("the trace was not written: " + problem.message());
  }
  trace_.reset();
}

}  // namespace capstan::train
