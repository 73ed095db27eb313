#include "train/trainer/step_logger.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "base/text.hpp"
#include "comm/reduce.hpp"
#include "kernels/bench/bench.hpp"
#include "kernels/table.hpp"
#include "models/registry.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/pipeline_bubble.hpp"

namespace capstan::train {

using Clock = std::chrono::steady_clock;

namespace {
// "4.00M parameters"; with adapters "4.10M parameters (98.3K trainable, 2.4%; 4.00M frozen)". Of the full
// model.
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
    text += " (" + human_count(trainable) + " trainable, " + significant(100 * trainable / all, 3) + "%; " +
            human_count(all - trainable) + " frozen)";
  return text;
}

double dropped_fraction(double dropped, double choices) {
  return choices > 0 ? dropped / choices : 0;
}

// The greatest load of all layers, the fraction of dropped choices, and sums over the layers of the losses:
// plain means over the micro-batches, whereas training weights each micro-batch with its loss tokens.
struct RouterSummary {
  double max_load = 0;
  // nullopt: experts have no capacity.
  std::optional<double> dropped;
  // By the names in metrics.jsonl; those that are 0 are left out.
  std::vector<std::pair<std::string, double>> losses;
  explicit RouterSummary(const StepResult& result) {
    std::map<config::RouterBalancing, double> balance_losses;
    double balance_loss = 0, z_loss = 0, choices = 0;
    for (const RouterResult& router : result.routers) {
      choices += router.choices;
      if (router.dropped) dropped = dropped.value_or(0) + *router.dropped;
      max_load = std::max(max_load, router.max_load());
      for (const auto& [type, loss] : router.balance_losses) balance_losses[type] += loss;
      balance_loss += router.balance_loss;
      z_loss += router.z_loss;
    }
    if (dropped) dropped = dropped_fraction(*dropped, choices);
    const auto add = [&](std::string_view name, double loss) {
      if (loss != 0) losses.emplace_back(name, loss);
    };
    add("balance_loss", balance_loss);
    if (balance_losses.size() > 1)
      for (const auto& [type, loss] : balance_losses) add(enum_name(type), loss);
    add("z_loss", z_loss);
  }
};

void add_routers(records::MetricsRow& row, const StepResult& result) {
  if (result.routers.empty()) return;
  const RouterSummary summary(result);
  row.number("expert_max_load", summary.max_load);
  if (summary.dropped) row.number("expert_dropped", *summary.dropped);
  for (const auto& [name, loss] : summary.losses) row.number(name, loss);
  for (const RouterResult& router : result.routers) {
    const std::string layer = "_layer_" + std::to_string(router.layer);
    row.numbers("expert_load" + layer, router.load);
    if (router.dropped)
      row.number("expert_dropped" + layer, dropped_fraction(*router.dropped, router.choices));
  }
}

// The loads of each layer as a histogram, and where layers times experts are few also a scalar for each
// expert.
void add_router_events(std::vector<records::Scalar>& scalars, std::vector<records::Histogram>& histograms,
                       const StepResult& result) {
  constexpr size_t kFewExperts = 256;
  if (result.routers.empty()) return;
  const RouterSummary summary(result);
  scalars.push_back({"train/expert_max_load", summary.max_load});
  if (summary.dropped) scalars.push_back({"train/expert_dropped", *summary.dropped});
  const size_t experts = result.routers[0].load.size();
  const bool few = result.routers.size() * experts <= kFewExperts;
  for (const RouterResult& router : result.routers) {
    const std::string layer = "_layer_" + std::to_string(router.layer);
    scalars.push_back({"train/expert_max_load" + layer, router.max_load()});
    if (router.dropped)
      scalars.push_back({"train/expert_dropped" + layer, dropped_fraction(*router.dropped, router.choices)});
    records::Histogram& loads =
        histograms.emplace_back(records::Histogram{"train/expert_load" + layer, router.load});
    for (size_t expert = 0; expert < experts; ++expert) {
      loads.values[expert] *= static_cast<double>(experts);
      if (few)
        scalars.push_back(
            {"experts/load" + layer + "_expert_" + std::to_string(expert), loads.values[expert]});
    }
  }
  for (const auto& [name, loss] : summary.losses) scalars.push_back({"train/" + name, loss});
}

void add_mtp_losses(records::MetricsRow& row, const StepResult& result) {
  for (size_t i = 0; i < result.mtp_losses.size(); ++i)
    row.number(models::mtp_loss_name(i + 1), result.mtp_losses[i]);
}

}  // namespace

StepLogger::StepLogger(const config::Config& config, comm::World& world, StepRunner& runner,
                       StepTimers& timers, RunRecorder& recorder, RunLog& log, int64_t total_steps)
    : config_(config),
      batch_ramp_(config),
      world_(world),
      runner_(runner),
      timers_(timers),
      recorder_(recorder),
      log_(log),
      total_steps_(total_steps),
      first_step_(runner.state().step),
      // The measurement uses its own device, so that its matrices do not count as memory of the run.
      gemm_peak_([this] {
        const auto device =
            make_device(config_.train.device, config_.train.threads.value_or(0), local_rank_of(world_));
        const auto type = backend_of(config_.train.device).gemm_type(compute_type(config_.mixed_precision));
        // The GEMMs of one measurement are few, and other work may interrupt all of them. Measures again if
        // the result is implausibly low.
        constexpr double kSlow = 3;  // GFLOPS
        double gflops = 0;
        for (int i = 0; i < 3 && gflops < kSlow; ++i)
          gflops = std::max(gflops, kernels::measured_gemm_gflops(*device, type));
        return gflops * 1e9;
      }),
      last_line_(Clock::now()) {}

void PeakThroughput::measure() {
  if (measurements_++ < 4) value_ = std::max(value_, measure_());
}

bool PeakThroughput::reached(double flops_per_second) {
  if (value_ == 0 || flops_per_second <= value_) return false;
  measure();
  value_ = std::max(value_, flops_per_second);
  return true;
}

void StepLogger::report_model(const StepEstimate& estimate, bool measure_gemm) {
  resident_data_ = estimate.resident_data;
  estimated_memory_ = estimate.memory.total();
  const double flops_per_step = estimate.flops * static_cast<double>(runner_.micro_batches());
  flops_per_sample_ = comm::all_reduce(world_.communicator(), flops_per_step) /
                      static_cast<double>(runner_.global_batch_size());
  if (measure_gemm) gemm_peak_.measure();
  reported_peak_ = gemm_peak_.value();
  log_.line(parameters_text(config_, runner_.mesh()) + ", " + human_flop(flops_per_step) +
            " per step per rank, about " + human_bytes(static_cast<double>(estimate.memory.total())) +
            " at the peak; GEMM throughput " + human_flop(gemm_peak_.value()) +
            "/s (measured; MFU is a fraction of it)");
  const int64_t on_host = estimate.host_memory.total();
  log_.line("memory estimated: " + memory_text(estimate.memory) +
            (on_host > 0 ? "; on the host: " + memory_text(estimate.host_memory) : "") +
            (estimate.state_file > 0
                 ? "; in a file: optimizer state, " + human_bytes(static_cast<double>(estimate.state_file))
                 : ""));
  report_estimated_time(estimate);
  last_line_ = Clock::now();
}

// A resumed run takes the time of its last logged step. A new run takes the time of its matrix products at
// the GEMM throughput measured now, which another program on the machine may have slowed down.
void StepLogger::report_estimated_time(const StepEstimate& estimate) {
  const int64_t steps = total_steps_ - runner_.state().step;
  step_seconds_ = recorder_.logged_step_seconds();
  const bool measured = step_seconds_ > 0;
  if (gemm_peak_.value() > 0)
    estimated_step_seconds_ =
        estimate.executed_flops * static_cast<double>(runner_.micro_batches()) / gemm_peak_.value();
  const double seconds = measured ? step_seconds_ : estimated_step_seconds_;
  if (seconds <= 0 || steps <= 0) return;
  const std::string complete = expected_time_ ? "; with them " + significant(expected_time_->seconds, 3) +
                                                    " s a step by the formula of `capstan plan` for " +
                                                    expected_time_->cluster
                                              : "";
  log_.line(std::string("estimated time: ") + (measured ? "" : "about ") +
            (seconds < 1e-3 ? std::string("1 ms") : human_duration(seconds)) + " a step, " +
            human_duration(seconds * steps_left(static_cast<double>(runner_.global_batch_size()))) + " for " +
            std::to_string(steps) + (steps == 1 ? " step (" : " steps (") +
            (measured ? "as measured before the resume)"
                      : "matrix products at the measured GEMM throughput, other operations add to it" +
                            complete + "; the progress line has the measured time)"));
}

double StepLogger::steps_left(double samples) const {
  const TrainState& state = runner_.state();
  const int64_t left = batch_ramp_.samples_of(total_steps_ - state.step, state.consumed_samples);
  return static_cast<double>(left) / samples;
}

void StepLogger::log_step(const StepResult& result) {
  TrainState& state = runner_.state();
  const int64_t step = state.step;
  step_seconds_ = timers_.step_seconds();
  last_loss_ = result.loss;
  if (const auto next_note = runner_.device().table().next_note)
    while (const char* const note = next_note()) log_.line(note);
  log_memory(step);
  const int64_t samples = result.global_batch_size;
  if (step > first_step_ + 1) compared_seconds_.add(step_seconds_, samples, timers_);
  raise_peak(flops_per_sample_ * static_cast<double>(samples) / world_.size() / step_seconds_);
  log_seconds_.add(step_seconds_, samples, timers_), events_seconds_.add(step_seconds_, samples, timers_);
  for (StepMeans* means : {&state.since_log, &state.since_events})
    means->add(result.loss, result.loss_tokens, result.gradient_norm, result.overflow);

  // Rows depend on the step alone, so that a run in several starts has the rows of an uninterrupted one.
  const bool row_is_due = step % config_.logger.log_interval == 0 || step == 1 || step == total_steps_;
  const bool silent_long = !log_.terminal() && seconds_since(last_line_) > 30;
  const bool line_is_due = row_is_due || silent_long || step == first_step_ + 1;
  if (line_is_due || log_.terminal()) {
    const Throughput speed = throughput(log_seconds_);
    if (line_is_due)
      log_.line(step_text(result, speed));
    else
      log_.status(step_text(result, speed));
    if (row_is_due) write_step_row(result, speed);
  }
  if (line_is_due) last_line_ = Clock::now();
  compare_estimates(step);
  if (row_is_due) state.since_log = {}, log_seconds_ = {};
  if (step % config_.logger.tensorboard_log_interval == 0) {
    if (recorder_.has_events()) write_step_events(result);
    state.since_events = {}, events_seconds_ = {};
  }
}

void StepLogger::raise_peak(double flops_per_second) {
  // Rows have every value; smaller changes do not alter the percentage of a log line.
  constexpr double kNotable = 1.02;
  if (!gemm_peak_.reached(flops_per_second) || gemm_peak_.value() < kNotable * reported_peak_) return;
  log_.line("step " + std::to_string(runner_.state().step) +
            ": faster than the measured GEMM throughput allows; it is now " + human_flop(gemm_peak_.value()) +
            "/s instead of " + human_flop(reported_peak_) + "/s, and MFU is a fraction of that from here on");
  reported_peak_ = gemm_peak_.value();
}

Throughput StepLogger::throughput(const IntervalSeconds& seconds) const {
  Throughput result;
  const auto ranks = static_cast<double>(world_.size());
  result.step_seconds = seconds.mean();
  const double samples_per_second = static_cast<double>(seconds.samples) / seconds.total;
  result.tokens_per_second = samples_per_second * static_cast<double>(config_.model.seq_length);
  result.rank_tokens_per_second = result.tokens_per_second / ranks;
  const double rank_flops = flops_per_sample_ * samples_per_second / ranks;
  result.rank_tflops = rank_flops / 1e12;
  result.mfu = gemm_peak_.value() > 0 ? rank_flops / gemm_peak_.value() : 0;
  return result;
}

std::string StepLogger::step_text(const StepResult& result, const Throughput& speed) const {
  const TrainState& state = runner_.state();
  // Mean number of samples of a step since the last row.
  const double samples = static_cast<double>(log_seconds_.samples) / static_cast<double>(log_seconds_.steps);
  const double dropped = RouterSummary(result).dropped.value_or(0);
  return "step " + std::to_string(state.step) + "/" + std::to_string(total_steps_) + " | loss " +
         fixed(state.since_log.loss, 4) + " | grad " + fixed(state.since_log.grad_norm, 3) +
         (result.params_norm ? " | params " + fixed(*result.params_norm, 3) : "") +
         (result.num_zeros ? " | zeros " + std::to_string(*result.num_zeros) : "") + " | lr " +
         significant(result.learning_rate, 3) +
         (batch_ramp_.grows() ? " | batch " + std::to_string(result.global_batch_size) : "") +
         (result.loss_scale ? " | loss scale " + to_text(*result.loss_scale) : "") +
         (dropped > 0 ? " | dropped " + significant(100 * dropped, 2) + "%" : "") + " | " +
         human_count(speed.tokens_per_second) + " tok/s" +
         (speed.mfu > 0 ? " | MFU " + fixed(100 * speed.mfu, 0) + "%" : "") + " | " +
         human_bytes(static_cast<double>(memory().total())) + " | " +
         human_duration(speed.step_seconds * steps_left(samples)) + " left";
}

MemoryUse StepLogger::memory() const {
  return with_resident_data(runner_.device().memory(),
                            backend_of(config_.train.device).shares_host_memory ? resident_data_ : 0);
}

// Logs the memory that the allocator reserved in the first step, and later growth.
void StepLogger::log_memory(int64_t step) {
  const MemoryUse memory = this->memory();
  const std::string reserved = human_bytes(static_cast<double>(memory.reserved)) + " reserved in " +
                               std::to_string(memory.system_requests) + " requests";
  if (step == first_step_ + 1)
    log_.line("memory measured: " + memory_text(memory) + "; " + reserved);
  else if (memory.system_requests > memory_requests_)
    log_.line("memory: " + reserved + ", " + std::to_string(memory.system_requests - memory_requests_) +
              " of them since step " + std::to_string(step - 1));
  memory_requests_ = memory.system_requests;
}

void StepLogger::compare_estimates(int64_t step) {
  constexpr int64_t kCompared = 3;
  const int64_t measured = memory().total();
  const double seconds = compared_seconds_.steps > 0 ? compared_seconds_.mean() : step_seconds_;
  const auto bytes_text = [](int64_t bytes) { return human_bytes(static_cast<double>(bytes)); };
  const bool line_is_due = step == std::min(first_step_ + kCompared, total_steps_),
             row_is_due = step == std::min(kCompared, total_steps_);
  if (!line_is_due && !row_is_due) return;
  std::optional<PipelineBubble> bubble;
  if (compared_seconds_.steps > 0)
    bubble = pipeline_bubble(config_, runner_.micro_batches(), compared_seconds_.phases, world_);
  if (line_is_due)
    log_.line("memory: " + bytes_text(measured) + " measured, " + bytes_text(estimated_memory_) +
              " estimated; step " + significant(seconds, 3) + " s measured" +
              (expected_time_ ? ", " + significant(expected_time_->seconds, 3) + " s estimated for " +
                                    expected_time_->cluster
                              : "") +
              (bubble ? "; " + bubble_text(*bubble) : ""));
  // A row depends on the step alone (log_step).
  if (!row_is_due) return;
  records::MetricsRow row(step, "estimate");
  row.integer("memory_bytes", measured).integer("memory_estimated_bytes", estimated_memory_);
  row.number("step_seconds", seconds);
  if (expected_time_)
    row.number("step_estimated_seconds", expected_time_->seconds).text("cluster", expected_time_->cluster);
  if (bubble)
    row.number("pipeline_bubble", bubble->measured).number("pipeline_bubble_simulated", bubble->simulated);
  recorder_.write(row);
}

void StepLogger::write_step_row(const StepResult& result, const Throughput& speed) {
  const TrainState& state = runner_.state();
  const MemoryUse memory = this->memory();
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
      .integer("memory_bytes", memory.total())
      .integer("resident_bytes", resident_peak())
      .integer("consumed_samples", state.consumed_samples)
      .integer("consumed_tokens", state.consumed_tokens);
  if (speed.mfu > 0) row.number("mfu", speed.mfu).number("gemm_tflops_per_rank", gemm_peak_.value() / 1e12);
  if (result.params_norm) row.number("params_norm", *result.params_norm);
  if (result.num_zeros) row.integer("num_zeros", *result.num_zeros);
  if (batch_ramp_.grows()) row.integer("global_batch_size", result.global_batch_size);
  if (result.loss_scale) row.number("loss_scale", *result.loss_scale);
  add_mtp_losses(row, result);
  add_routers(row, result);
  // Saves and evaluations follow the step and have rows of their own.
  for (size_t p = 0; p < kPhases; ++p)
    if (p != static_cast<size_t>(Phase::evaluate) && p != static_cast<size_t>(Phase::save))
      row.number("seconds_" + std::string(name_of(static_cast<Phase>(p))),
                 log_seconds_.phases[p] / static_cast<double>(log_seconds_.steps));
  recorder_.write(row);
}

void StepLogger::write_step_events(const StepResult& result) {
  const StepMeans& means = runner_.state().since_events;
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
  std::vector<records::Histogram> histograms;
  add_router_events(scalars, histograms, result);
  for (size_t i = 0; i < result.mtp_losses.size(); ++i)
    scalars.push_back({"train/" + models::mtp_loss_name(i + 1), result.mtp_losses[i]});
  // The means of one step are its values.
  if (config_.logger.tensorboard_log_interval > 1) {
    scalars.push_back({"train/step_loss", result.loss});
    scalars.push_back({"train/step_grad_norm", result.gradient_norm});
  }
  recorder_.write_events(runner_.state().step, scalars, histograms);
}

void StepLogger::report_anomalies(int64_t step, const std::vector<Anomaly>& anomalies,
                                  std::optional<int64_t> row_step) {
  for (const Anomaly& anomaly : anomalies) {
    log_.warning("step " + std::to_string(step) + ": " + anomaly.text +
                 (anomaly.action.empty() ? "" : ": " + anomaly.action));
    records::MetricsRow row(row_step.value_or(step), anomaly.event);
    if (row_step) row.integer("seen_at_step", step);
    for (const auto& [name, value] : anomaly.numbers) row.number(name, value);
    if (!anomaly.action.empty()) row.text("action", anomaly.action);
    for (const auto& [name, value] : anomaly.texts) row.text(name, value);
    recorder_.write(row);
  }
}

void StepLogger::report_evaluation(const std::string& split, double loss, double seconds) {
  const int64_t step = runner_.state().step;
  log_.line("step " + std::to_string(step) + " | " + split + " loss " + fixed(loss, 4) + " | perplexity " +
            fixed(std::exp(loss), 2) + " | " + human_duration(seconds));
  recorder_.write(records::MetricsRow(step, split)
                      .number("loss", loss)
                      .number("perplexity", std::exp(loss))
                      .number("seconds", seconds));
  recorder_.write_events(step, std::array<records::Scalar, 1>{{{split + "/loss", loss}}});
}

}  // namespace capstan::train
