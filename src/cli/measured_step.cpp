#include "cli/measured_step.hpp"

#include <algorithm>
#include <optional>

#include "base/error.hpp"
#include "cli/recipe_input.hpp"
#include "comm/world.hpp"
#include "data/loader.hpp"
#include "kernels/bench/bench.hpp"
#include "models/model.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/step_runner.hpp"

namespace capstan::cli {

config::Resolution recipe_for_measuring(const Context& context, const std::string& recipe) {
  config::Request request;
  request.recipe = recipe;
  request.overrides = {config::Override::token("dataset=mock"), config::Override::token("tokenizer=none")};
  const auto& given = context.args.overrides();
  request.overrides.insert(request.overrides.end(), given.begin(), given.end());
  request.ranks = 1;
  config::Resolution resolution = config::resolve(request);
  if (!resolution.ok()) {
    show_diagnostics(context, resolution);
    throw Exit{2};
  }
  return resolution;
}

config::Config shortened(config::Config config, double gemm_gflops) {
  const double flops = train::estimate_step(config).flops;
  const double affordable = 10 * gemm_gflops * 1e9 / flops;
  const int64_t all = *config.train.global_batch_size / config.train.micro_batch_size;
  const int64_t taken = std::clamp<int64_t>(static_cast<int64_t>(affordable), 1, std::min<int64_t>(all, 4));
  config.train.global_batch_size = taken * config.train.micro_batch_size;
  config.train.rampup_batch_size.clear();
  return config;
}

namespace {

// Passes each operation to the trace, if there is one, or to the table; beside the table it runs the
// reference GEMM between two operations twice a second, and excludes its time.
struct StepObserver final : TapeObserver {
  void observe(const TapeEvent& event) override {
    if (trace) return trace->observe(event);
    table->observe(event);
    if (!peak || event.end - last < 0.5) return;
    const double before = peak->seconds();
    peak->run();
    timers->exclude(peak->seconds() - before);
    last = event.end + peak->seconds() - before;
  }
  bool waits() const override { return trace == nullptr; }
  void queue_span(const QueueSpan& span) override {
    if (trace) trace->queue_span(span);
  }
  train::OperationTable* table = nullptr;
  train::Trace* trace = nullptr;
  train::StepTimers* timers = nullptr;
  kernels::PeakMeasurement* peak = nullptr;
  double last = 0;  // host clock, seconds
};

}  // namespace

StepMeasurement measure_step(const config::Config& config, double gemm_gflops, double seconds,
                             train::Trace* trace) {
  const auto world = comm::World::join();
  if (world->size() > 1) fail(ErrorCode::usage, "one process is measured", "start it without mpirun");
  train::StepRunner loop(config, *world);
  loop.initialize();
  const auto datasets = train::open_datasets(config, nullptr);
  data::Loader loader(datasets[0], loop.loader_options());
  const train::StepEstimate estimate = train::estimate_step(config);
  const double flops = estimate.flops * static_cast<double>(loop.micro_batches());
  const double tokens = static_cast<double>(*config.train.global_batch_size * config.model.seq_length);

  train::StepTimers timers;
  std::vector<std::pair<double, std::array<double, train::kPhases>>> taken;
  train::OperationTable operations;
  StepObserver watch;
  watch.table = &operations, watch.trace = trace, watch.timers = &timers;
  std::optional<kernels::PeakMeasurement> peak;
  MemoryUse memory;
  bool observed = false;
  double spent = 0;
  int warm_up = 2, least = 3;
  for (int step = 0; step < warm_up + least || spent < seconds; ++step) {
    if (step >= warm_up && !observed) {
      observed = true;
      // Memory is read before the reference GEMM allocates its matrices.
      memory = loop.device().memory();
      if (!trace && gemm_gflops > 3)  // not under a sanitizer
        watch.peak =
            &peak.emplace(loop.device(), kernels::gemm_type(train::compute_type(config.mixed_precision)));
      loop.observe(&watch);
      if (trace)
        timers.listen(
            [trace](train::Phase phase, double end, double length) { trace->phase(phase, end, length); });
    }
    if (trace) trace->step(step + 1);
    timers.start_step();
    loop.train_step(loader, timers);
    const double now = timers.step_seconds();
    if (now > 5) warm_up = 1, least = 2;
    if (step < warm_up) continue;
    spent += now;
    auto& row = taken.emplace_back();
    row.first = now;
    for (size_t p = 0; p < train::kPhases; ++p) row.second[p] = timers.seconds(static_cast<train::Phase>(p));
  }
  if (trace) trace->finish_step();
  std::sort(taken.begin(), taken.end());
  std::vector<train::OperationTable::Row> rows = operations.by_time();
  for (auto& row : rows) {  // of one step
    const auto count = static_cast<double>(taken.size());
    row.calls /= static_cast<int64_t>(taken.size());
    row.seconds /= count, row.cost.flops /= count, row.cost.bytes /= count;
  }
  const auto& median = taken[taken.size() / 2];
  double mean = 0;
  for (const auto& row : taken) mean += row.first / static_cast<double>(taken.size());
  const double concurrent = peak ? peak->gflops() : 0;
  return {.tokens_per_second = tokens / median.first,
          .fraction_of_peak = flops / median.first / (gemm_gflops * 1e9),
          .concurrent_gflops = concurrent,
          .fraction_of_concurrent = concurrent > 0 ? flops / mean / (concurrent * 1e9) : 0,
          .seconds = median.first,
          .phases = median.second,
          .steps = static_cast<int64_t>(taken.size()),
          .micro_batches = loop.micro_batches(),
          .operations = std::move(rows),
          .memory = memory,
          .estimated = estimate.memory};
}

}  // namespace capstan::cli
