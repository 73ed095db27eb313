// A training step on random tokens, taken for measuring: what `bench` and `trace` run.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "cli/context.hpp"
#include "config/core/resolve.hpp"
#include "train/trainer/profile.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::cli {

// The recipe with mock data and no tokenizer, for one rank; throws Exit{2} where it has errors.
config::Resolution recipe_for_measuring(const Context& context, const std::string& recipe);

// A step of half a million tokens takes an hour on a CPU: the same recipe with a global batch of at most four micro-batches
// that take about ten seconds.
config::Config shortened(config::Config config, double gemm_gflops);

struct StepRate {
  double tokens_per_second = 0;
  double share = 0;  // of the GEMM rate, by the FLOPs that the model needs
  // The same of the mean rate of a 2048 x 2048 x 2048 product run between the step's operations: what other programs take from
  // the machine, both lose. Zero where it was not measured.
  double share_beside = 0, beside_gflops = 0;
  double seconds = 0;
  std::array<double, train::kPhases> phases{};  // seconds
  int64_t steps = 0, micro_batches = 0;
  std::vector<train::OperationTable::Row> operations;  // a step's, the longest first
  MemoryUse memory, estimated;                         // of the device; on the meta device, before it
};

// At least `seconds` after one or two steps to warm up; the median of each number. A trace, where one is given, sees the
// steps after the warm-up.
StepRate measure_step(const config::Config& config, double gemm_gflops, double seconds,
                      train::Trace* trace = nullptr);

}  // namespace capstan::cli
