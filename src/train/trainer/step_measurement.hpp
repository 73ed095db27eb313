// Measures training steps of a recipe on random tokens.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "train/trainer/pipeline_bubble.hpp"
#include "train/trainer/profile.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

// Reduces the global batch to at most four micro-batches on each rank that take about ten seconds at this
// GEMM throughput, because a step of half a million tokens takes an hour on a CPU. A pipeline, whose bubble
// depends on them, has at most eight for each of its ranks, and as many as its schedule needs.
config::Config with_short_step(config::Config config, double gemm_gflops);

// Steps with and without CUDA graphs, taken in turn, neither of them observed: medians, in seconds.
struct GraphMeasurement {
  double with = 0, without = 0;
  // In the last step: graphs, the kernels, fills and copies in them, and how many of the graphs updated no
  // executable graph, which a step after the first should not have.
  int64_t graphs = 0, nodes = 0, instantiated = 0;
};

struct StepMeasurement {
  double tokens_per_second = 0;
  // Model FLOP/s of all ranks as a fraction of the measured peak GEMM throughput of as many ranks.
  double fraction_of_peak = 0;
  // Mean throughput of a 2048 x 2048 x 2048 GEMM run between the operations of the step, and the model FLOP/s
  // as a fraction of it. Other load on the machine slows both, so that the fraction stays comparable. Zero if
  // not measured: with a trace, and on several ranks.
  double concurrent_gflops = 0, fraction_of_concurrent = 0;
  double seconds = 0;
  // Seconds of a step in each phase.
  std::array<double, kPhases> phases{};
  // The median of the steps; nullopt as pipeline_bubble() has it.
  std::optional<PipelineBubble> bubble;
  int64_t steps = 0, micro_batches = 0;
  // Where model.cuda_graph_impl asks for them, on a device that has graphs, and without a trace.
  std::optional<GraphMeasurement> graphs;
  // Operations of one step, the longest first.
  std::vector<OperationTable::Row> operations;
  // Peak memory, measured on the device and estimated on the meta device.
  MemoryUse memory, estimated;
};

// Runs steps for at least `seconds` after one or two warm-up steps, and returns the median of each number.
// `trace` records the steps after the warm-up; its clock starts at the same time on all ranks. recipe: with
// mock data, for this world. gemm_gflops: of a rank, the same on all of them. Phases, operations and memory
// are those of this rank. Collective.
StepMeasurement measure_step(const config::Config& recipe, comm::World& world, double gemm_gflops,
                             double seconds, Trace* trace = nullptr);

}  // namespace capstan::train
