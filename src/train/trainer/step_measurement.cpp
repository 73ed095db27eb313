#include "train/trainer/step_measurement.hpp"

#include <algorithm>
#include <optional>

#include "base/checked.hpp"
#include "comm/reduce.hpp"
#include "config/sections/batch_ramp.hpp"
#include "data/loader.hpp"
#include "kernels/bench/bench.hpp"
#include "models/model.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/step_runner.hpp"

namespace capstan::train {

config::Config with_short_step(config::Config config, double gemm_gflops) {
  const double flops = estimate_step(config).flops;
  const double affordable = 10 * gemm_gflops * 1e9 / flops;
  const int64_t over_ranks = config.train.micro_batch_size * config.dist.data_parallel_size.value_or(1);
  const int64_t all = *config.train.global_batch_size / over_ranks;
  // With virtual stages micro-batches come in groups.
  const parallel::PipelineShape shape = pipeline_shape(config, all);
  const int64_t group = shape.order == config::PipelineSchedule::interleaved ? shape.group : 1;
  // The V of a schedule is full with 2 P - 1 micro-batches.
  const int64_t filling = shape.order == config::PipelineSchedule::zb_v ? 2 * shape.ranks - 1 : shape.ranks;
  const int64_t least = std::min(all, filling);
  const int64_t most = shape.ranks > 1 ? 8 * shape.ranks : 4;
  const int64_t taken = std::clamp<int64_t>(static_cast<int64_t>(affordable), 1, std::min(all, most));
  config.train.global_batch_size = round_up(std::max(taken, least), group) * over_ranks;
  config.train.rampup_batch_size.clear();
  return config;
}

namespace {

// Passes each operation to the trace, if there is one, or to the table; beside the table it runs the
// reference GEMM between two operations twice a second, and excludes its time.
struct MeasuringObserver final : TapeObserver {
  void observe(const TapeEvent& event) override {
    if (trace) return trace->observe(event);
    table->observe(event);
    if (!peak || event.end_seconds - last < 0.5) return;
    const double before = peak->seconds();
    peak->run();
    timers->exclude(peak->seconds() - before);
    last = event.end_seconds + peak->seconds() - before;
  }
  bool waits() const override { return trace == nullptr; }
  void queue_span(const QueueSpan& span) override {
    if (trace) trace->queue_span(span);
  }
  OperationTable* table = nullptr;
  Trace* trace = nullptr;
  StepTimers* timers = nullptr;
  kernels::PeakMeasurement* peak = nullptr;
  // Time of the last event by the host's clock, in seconds.
  double last = 0;
};

// Seconds of a step, and of its phases.
using StepTimes = std::pair<double, std::array<double, kPhases>>;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The median of the steps.
std::optional<PipelineBubble> median_bubble(const config::Config& config, int64_t micro_batches,
                                            const std::vector<StepTimes>& taken, comm::World& world) {
  std::optional<PipelineBubble> bubble;
  std::vector<double> measured;
  for (const auto& [seconds, phases] : taken)
    if ((bubble = pipeline_bubble(config, micro_batches, phases, world)))
      measured.push_back(bubble->measured);
  if (!bubble) return bubble;
  bubble->measured = median(std::move(measured));
  return bubble;
}

std::optional<GraphMeasurement> measure_graphs(StepRunner& runner, data::Loader& loader, StepTimers& timers,
                                               comm::World& world, double seconds) {
  std::vector<double> taken[2];
  double spent = 0;
  GraphMeasurement result;
  // The first step with graphs instantiates them.
  for (int pair = 0; pair < 4 || spent < seconds; ++pair)
    for (const bool graphs : {true, false}) {
      const Device::GraphCounts before = runner.device().graph_counts();
      runner.allow_graphs(graphs);
      timers.start_step();
      runner.train_step(loader, timers);
      const double now = comm::all_reduce(world.communicator(), timers.step_seconds(), comm::ReduceOp::max);
      const Device::GraphCounts after = runner.device().graph_counts();
      if (graphs) {
        result.graphs = after.graphs - before.graphs, result.nodes = after.nodes - before.nodes;
        result.instantiated = after.instantiated - before.instantiated;
      }
      if (pair == 0) continue;
      taken[graphs].push_back(now);
      spent += now;
    }
  result.with = median(taken[true]), result.without = median(taken[false]);
  return result;
}

}  // namespace

StepMeasurement measure_step(const config::Config& recipe, comm::World& world, double gemm_gflops,
                             double seconds, Trace* trace) {
  check_memory_limit(recipe);
  config::Config config = recipe;
  // Few steps are taken.
  config.model.cuda_graph_warmup_steps = std::min<int64_t>(config.model.cuda_graph_warmup_steps, 1);
  StepRunner runner(config, world);
  runner.initialize();
  const auto datasets = open_datasets(config, nullptr);
  data::Loader loader(datasets[0], runner.loader_options());
  const StepEstimate estimate = estimate_step(config, world.rank(), world.local_size());
  // Of all ranks: stages of a pipeline differ.
  const double flops =
      comm::all_reduce(world.communicator(), estimate.flops * static_cast<double>(runner.micro_batches()));
  const double peak_gflops = gemm_gflops * world.size();
  const double tokens = static_cast<double>(config::full_batch_size(config) * config.model.seq_length);

  StepTimers timers;
  std::vector<StepTimes> taken;
  OperationTable operations;
  MeasuringObserver observer;
  observer.table = &operations, observer.trace = trace, observer.timers = &timers;
  std::optional<kernels::PeakMeasurement> peak;
  MemoryUse memory;
  bool observed = false;
  double spent = 0;
  int warm_up = 2, least = 3;
  for (int step = 0; step < warm_up + least || spent < seconds; ++step) {
    if (step >= warm_up && !observed) {
      observed = true;
      // Memory is read before the reference GEMM allocates its matrices.
      memory = runner.device().memory();
      // The limit is that of the step, not of these matrices on the same device.
      runner.device().limit_memory(MemoryKind::device, std::nullopt, "");
      // A lower throughput is that of a sanitizer. On several ranks the others would wait for it.
      if (!trace && world.size() == 1 && gemm_gflops > 3)
        observer.peak = &peak.emplace(
            runner.device(), backend_of(config.train.device).gemm_type(compute_type(config.mixed_precision)),
            gemm_gflops);
      runner.observe(&observer);
      if (trace) {
        timers.listen([trace](Phase phase, double end, double length) { trace->phase(phase, end, length); });
        world.communicator().barrier();
        trace->start_clock();
      }
    }
    if (trace) trace->step(step + 1);
    timers.start_step();
    runner.train_step(loader, timers);
    // The ranks take the same number of steps.
    const double now = comm::all_reduce(world.communicator(), timers.step_seconds(), comm::ReduceOp::max);
    if (now > 5) warm_up = 1, least = 2;
    if (step < warm_up) continue;
    spent += now;
    auto& row = taken.emplace_back();
    row.first = now;
    for (size_t p = 0; p < kPhases; ++p) row.second[p] = timers.seconds(static_cast<Phase>(p));
  }
  if (trace) trace->finish_step();
  std::optional<GraphMeasurement> graphs;
  if (!trace && config.model.cuda_graph_impl == config::CudaGraphImpl::local &&
      runner.device().has_graphs()) {
    runner.observe(nullptr);
    graphs = measure_graphs(runner, loader, timers, world, seconds);
  }
  const auto bubble = median_bubble(config, runner.micro_batches(), taken, world);
  std::sort(taken.begin(), taken.end());
  std::vector<OperationTable::Row> rows = operations.by_time();
  // The values of one step.
  for (auto& row : rows) {
    const auto count = static_cast<double>(taken.size());
    row.calls /= static_cast<int64_t>(taken.size());
    row.seconds /= count, row.cost.flops /= count, row.cost.bytes /= count;
  }
  const auto& median = taken[taken.size() / 2];
  double mean = 0;
  for (const auto& row : taken) mean += row.first / static_cast<double>(taken.size());
  const double concurrent = peak ? peak->gflops() : 0;
  return {.tokens_per_second = tokens / median.first,
          .fraction_of_peak = flops / median.first / (peak_gflops * 1e9),
          .concurrent_gflops = concurrent,
          .fraction_of_concurrent = concurrent > 0 ? flops / mean / (concurrent * 1e9) : 0,
          .seconds = median.first,
          .phases = median.second,
          .bubble = bubble,
          .steps = static_cast<int64_t>(taken.size()),
          .micro_batches = runner.micro_batches(),
          .graphs = graphs,
          .operations = std::move(rows),
          .memory = memory,
          .estimated = estimate.memory};
}

}  // namespace capstan::train
