// What a run says and writes: lines, metrics, events, traces.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "base/error.hpp"
#include "base/text.hpp"
#include "kernels/bench/bench.hpp"
#include "train/fit.hpp"
#include "train/run.hpp"

namespace capstan::train {

namespace {
std::string significant(double value) {  // three digits: 2e-04
  std::array<char, 48> buffer;
  std::snprintf(buffer.data(), buffer.size(), "%.3g", value);
  return buffer.data();
}
}  // namespace

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

void Run::measure_products() {
  // On a device of its own: what the products leave there is not the run's memory.
  const auto device =
      make_device(config_.train.device, config_.train.threads.value_or(0), world_.local_size());
  gemm_rate_ = std::max(
      gemm_rate_,
      kernels::measured_gemm_gflops(*device, kernels::product_type(compute_type(config_.mixed_precision))) *
          1e9);
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

}  // namespace capstan::train
