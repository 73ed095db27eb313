// What a run says and writes: lines, metrics, events, traces.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/reduce.hpp"
#include "kernels/bench/bench.hpp"
#include "models/registry.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/run.hpp"
#include "train/trainer/stop.hpp"

namespace capstan::train {

namespace {
std::string significant(double value) {  // three digits: 2e-04
  std::array<char, 48> buffer;
  std::snprintf(buffer.data(), buffer.size(), "%.3g", value);
  return buffer.data();
}

// "4.00M parameters"; with adapters "4.10M parameters (98.3K trainable, 2.4%; 4.00M frozen)". Of the whole model.
std::string parameters_text(const config::Config& config, const comm::Mesh& mesh) {
  models::ModelShard full;
  full.adapters = model_shard(config, mesh).adapters;
  const auto model = models::build(config.model, full);
  double all = 0, trainable = 0;
  for (const auto& parameter : model->parameters()) {
    const auto count = static_cast<double>(parameter->spec().shape.elements());
    all += count;
    if (!config.peft || parameter->spec().adapter) trainable += count;
  }
  std::string text = human_count(all) + " parameters";
  if (config.peft)
    text += " (" + human_count(trainable) + " trainable, " + significant(100 * trainable / all) + "%; " +
            human_count(all - trainable) + " frozen)";
  return text;
}

}  // namespace

void Run::open_events(std::optional<int64_t> resumed_at) {
  events_ = std::make_unique<records::EventsWriter>(
      config_.logger.tensorboard_dir ? fs::path(config_.logger.tensorboard_dir->resolved) : run_dir_,
      wall_time(), resumed_at);
}

void Run::write_events(int64_t step, std::span<const records::Scalar> scalars) {
  try {
    events_->write(step, wall_time(), scalars);
  } catch (const Error& error) {  // metrics.jsonl has them too, and says so when there is no room
    log_.log_only(error.message());
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
    if (complained) log_.line("metrics.jsonl is written again, and complete");
  } catch (const Error& error) {
    if (unwritten_.size() > kLongest) unwritten_.pop_front();
    if (unwritten_.size() > 1 && seconds_since(last_complaint_) < 30) return;
    last_complaint_ = Clock::now();
    log_.warning(error.message() + "; training goes on, " + std::to_string(unwritten_.size()) +
                 " rows of the metrics wait for room");
  }
}

void Run::measure_gemm_throughput() {
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
  std::array<double, 1> flops{flops_per_step_};
  comm::all_reduce(world_.communicator(), flops);
  model_flops_ = flops[0];
  if (options_.measure_rate) measure_gemm_throughput();
  log_.line(parameters_text(config_, loop_->mesh()) + ", " + human_flop(flops_per_step_) +
            " a step and rank, about " + human_bytes(static_cast<double>(estimate_.memory.total())) +
            " at the peak; GEMM rate " + human_flop(gemm_rate_) + "/s");
  log_.line("memory foretold: " + memory_text(estimate_.memory));
  estimate_time();
}

// The time of a step when this run was last at work, else a lower bound: that of its matrix products at this machine's peak. The
// bound is no measurement, and the answer to a signal does not take it for one.
void Run::estimate_time() {
  const int64_t steps = total_steps_ - loop_->state().step;
  if (is_rank0() && records_->resumed())
    if (const auto row = records::last_logged_step(records_->metrics()))
      if (const double seconds = row->number("step_seconds"); seconds > 0) step_seconds_ = seconds;
  const bool measured = step_seconds_ > 0;
  double seconds = step_seconds_;
  if (!measured && gemm_rate_ > 0)
    seconds = estimate_.executed_flops * static_cast<double>(loop_->micro_batches()) / gemm_rate_;
  if (seconds <= 0 || steps <= 0) return;
  log_.line(std::string("estimated time: ") + (measured ? "" : "at least ") + human_duration(seconds) +
            " a step, " + human_duration(seconds * static_cast<double>(steps)) + " for " +
            std::to_string(steps) + (steps == 1 ? " step (" : " steps (") +
            (measured ? "as measured before the resume)"
                      : "matrix products at this machine's measured peak; the progress line has the "
                        "measured time)"));
}

void Run::expect(double seconds) {
  StopSignals::expect(seconds);
  world_.expect(seconds);
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
    log_.line("trace of " + std::to_string(events) + " events in " + file.string() +
              " (https://ui.perfetto.dev opens it)");
  } catch (const Error& problem) {  // a trace is not worth a run
    log_.warning("the trace was not written: " + problem.message());
  }
  trace_.reset();
}

Throughput Run::throughput(const IntervalSeconds& seconds) const {
  Throughput result;
  const auto ranks = static_cast<double>(world_.size());
  result.step_seconds = seconds.mean();
  result.tokens_per_second =
      static_cast<double>(*config_.train.global_batch_size * config_.model.seq_length) / result.step_seconds;
  result.rank_tokens_per_second = result.tokens_per_second / ranks;
  const double rank_flops = model_flops_ / ranks / result.step_seconds;
  result.rank_tflops = rank_flops / 1e12;
  result.mfu = gemm_rate_ > 0 ? rank_flops / gemm_rate_ : 0;
  return result;
}

void Run::log_step(const StepResult& result, bool as_line, bool as_row) {
  const TrainState& state = loop_->state();
  // No step is faster than the products that it consists of: then the machine was busy when they were measured.
  if (gemm_rate_ > 0 && flops_per_step_ / log_seconds_.mean() > gemm_rate_ && gemm_measures_++ < 3)
    measure_gemm_throughput();
  const Throughput speed = throughput(log_seconds_);
  const MemoryUse memory = loop_->device().memory();
  const std::string text =
      "step " + std::to_string(state.step) + "/" + std::to_string(total_steps_) + " | loss " +
      fixed(state.since_log.loss, 4) + " | grad " + fixed(state.since_log.grad_norm, 3) +
      (result.params_norm ? " | params " + fixed(*result.params_norm, 3) : "") +
      (result.num_zeros ? " | zeros " + std::to_string(*result.num_zeros) : "") + " | lr " +
      significant(result.learning_rate) + " | " + human_count(speed.tokens_per_second) + " tok/s" +
      (speed.mfu > 0 ? " | MFU " + fixed(100 * speed.mfu, 0) + "%" : "") + " | " +
      human_bytes(static_cast<double>(memory.total())) + " | " +
      human_duration(speed.step_seconds * static_cast<double>(total_steps_ - state.step)) + " left";
  if (as_line)
    log_.line(text);
  else
    log_.status(text);
  if (as_row && is_rank0()) write_step_row(result, speed);
}

void Run::write_step_row(const StepResult& result, const Throughput& speed) {
  const TrainState& state = loop_->state();
  const MemoryUse memory = loop_->device().memory();
  records::MetricsRow row(state.step);
  row.number("loss", state.since_log.loss)
      .number("grad_norm", state.since_log.grad_norm)
      .number("step_loss", result.loss)
      .number("step_grad_norm", result.gradient_norm)
      .number("learning_rate", result.learning_rate)
      .number("tokens_per_second", speed.tokens_per_second)
      .number("tokens_per_second_per_rank", speed.rank_tokens_per_second)
      .number("tflops_per_rank", speed.rank_tflops)
      .number("step_seconds", speed.step_seconds)
      .integer("memory_bytes", memory.peak + memory.cached())
      .integer("kernel_scratch_bytes", memory.kernel_scratch)
      .integer("resident_bytes", resident_peak())
      .integer("consumed_samples", state.consumed_samples)
      .integer("consumed_tokens", state.consumed_tokens);
  if (speed.mfu > 0) row.number("mfu", speed.mfu);
  if (result.params_norm) row.number("params_norm", *result.params_norm);
  if (result.num_zeros) row.integer("num_zeros", *result.num_zeros);
  for (size_t p = 0; p < kPhases; ++p)
    row.number("seconds_" + std::string(name_of(static_cast<Phase>(p))),
               log_seconds_.phases[p] / static_cast<double>(log_seconds_.steps));
  record(row);
}

void Run::write_step_events(const StepResult& result) {
  const StepMeans& means = loop_->state().since_events;
  const Throughput speed = throughput(events_seconds_);
  std::vector<records::Scalar> scalars{{"train/loss", means.loss},
                                       {"train/grad_norm", means.grad_norm},
                                       {"train/learning_rate", result.learning_rate},
                                       {"train/step_seconds", speed.step_seconds},
                                       {"train/tokens_per_second", speed.tokens_per_second},
                                       {"train/tokens_per_second_per_rank", speed.rank_tokens_per_second},
                                       {"train/tflops_per_rank", speed.rank_tflops}};
  if (speed.mfu > 0) scalars.push_back({"train/mfu", speed.mfu});
  if (result.params_norm) scalars.push_back({"train/params_norm", *result.params_norm});
  if (result.num_zeros) scalars.push_back({"train/num_zeros", static_cast<double>(*result.num_zeros)});
  if (config_.logger.tensorboard_log_interval > 1) {  // else the step's own are the means
    scalars.push_back({"train/step_loss", result.loss});
    scalars.push_back({"train/step_grad_norm", result.gradient_norm});
  }
  write_events(loop_->state().step, scalars);
}

void Run::report_anomalies(int64_t step, const std::vector<Anomaly>& events,
                           std::optional<int64_t> row_step) {
  for (const Anomaly& event : events) {
    log_.warning("step " + std::to_string(step) + ": " + event.text);
    if (!is_rank0()) continue;
    records::MetricsRow row(row_step.value_or(step), event.event);
    if (row_step) row.integer("seen_at_step", step);
    for (const auto& [name, value] : event.numbers) row.number(name, value);
    for (const auto& [name, value] : event.texts) row.text(name, value);
    record(row);
  }
}

void Run::tell(const Saver::Ended& ended) {
  const std::string step = "step " + std::to_string(ended.step);
  if (!ended.error.empty()) {
    // The old checkpoint is untouched: training goes on and the next interval tries again.
    log_.warning(step + " was not saved: " + ended.error);
    if (is_rank0()) record(records::MetricsRow(ended.step, "save_failed").text("error", ended.error));
    return;
  }
  last_checkpoint_ = ended.directory;
  saved_step_ = ended.step;
  save_seconds_ = ended.seconds;
  const bool beside = ended.stall_seconds < ended.seconds;
  log_.line(step + " | saved " + last_checkpoint_.string() + " in " + human_duration(ended.seconds) +
            (beside ? ", of which training waited " + human_duration(ended.stall_seconds) : ""));
  if (!ended.problem.empty()) log_.warning("old checkpoints were not deleted: " + ended.problem);
  if (is_rank0())
    record(records::MetricsRow(ended.step, "save")
               .number("seconds", ended.seconds)
               .number("stall_seconds", ended.stall_seconds)
               .integer("resident_bytes", resident_peak()));
}

void Run::log_end(const Outcome& outcome) {
  std::string text = outcome.ended == Ended::finished
                         ? "done: " + std::to_string(outcome.step) + " steps"
                         : "stopped at step " + std::to_string(outcome.step) + ": " + outcome.reason;
  if (last_loss_) text += ", loss " + fixed(*last_loss_, 4);
  text += ", " + human_duration(seconds_since(start_)) + ", " +
          human_bytes(static_cast<double>(resident_peak())) + " resident at most; run " + run_dir_.string();
  if (!outcome.checkpoint.empty()) text += ", checkpoint " + outcome.checkpoint.filename().string();
  log_.line(text);
}

void Run::failed(const std::string& reason) noexcept {
  try {
    record(records::MetricsRow(loop_ ? loop_->state().step : 0, "failed").text("reason", reason));
    if (!begun_) return;
    records_->end(records::RunEnd::failed, reason);
    log_.log_only("failed: " + reason);
  } catch (const std::exception&) {  // the disk may be what failed: the error that is on its way says more
  }
}

}  // namespace capstan::train
