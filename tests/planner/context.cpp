// V12: the length from which context parallelism is faster, against a published table whose fastest layouts
// with and without it are given for each length.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "planner/counts.hpp"
#include "planner/memory.hpp"
#include "planner/published_rows.hpp"
#include "planner/step_time.hpp"

using namespace capstan;
using namespace capstan::planner;
using namespace capstan::planner::test;

namespace {

RunShape long_shape(const PublishedRow& row) {
  RunShape s = shape_of(row, true);
  s.format = GemmFormat::fp8;
  s.saved_operand_bytes = 1;
  s.sharding = config::ShardingStrategy::optim;
  s.overlap_grad_reduce = s.overlap_param_gather = s.overlap_tp = true;
  return s;
}

bool fits(const RunShape& shape, const Cluster& cluster) {
  return std::ranges::all_of(memory_by_rank(shape), [&](const MemoryShape& memory) {
    return memory.total() <= static_cast<double>(cluster.usable_memory.value);
  });
}

// Seconds of the layout with no recomputation or that of a fifth to all layers that is the fastest of those
// that fit; infinity: none fits.
double fastest_recomputation(RunShape s, const Cluster& cluster) {
  const int64_t of_stage = s.layers / (s.pp * s.vpp);
  double least = std::numeric_limits<double>::infinity();
  for (int64_t fifths = 0; fifths <= 5; ++fifths) {
    s.recompute = {.full = fifths > 0, .layers = of_stage * fifths / 5};
    if (fits(s, cluster)) least = std::min(least, step_time(s, cluster).seconds);
  }
  return least;
}

// Of all layouts of the row's model, batch and GPUs with a micro-batch of 1, with or without context
// parallelism.
double fastest_layout(const PublishedRow& row, const Cluster& cluster, bool context_parallel) {
  double least = std::numeric_limits<double>::infinity();
  for (const int64_t tp : {1, 2, 4, 8, 16, 32})
    for (const int64_t pp : {1, 2, 4, 8})
      for (const int64_t vpp : {1, 2, 4})
        for (int64_t cp = context_parallel ? 2 : 1; cp <= (context_parallel ? 64 : 1); cp *= 2) {
          RunShape s = long_shape(row);
          s.tp = s.etp = tp, s.pp = s.group = pp, s.vpp = vpp, s.cp = cp, s.micro_batch = 1;
          if (row.size("ngpu") % (tp * pp * cp) != 0 || (vpp > 1 && pp == 1)) continue;
          s.dp = row.size("ngpu") / (tp * pp * cp);
          if (s.global_batch % s.dp != 0 || (vpp > 1 && s.micro_batches() % pp != 0)) continue;
          s.sequence_parallel = tp > 1;
          s.schedule =
              vpp > 1 ? config::PipelineSchedule::interleaved : config::PipelineSchedule::one_f_one_b;
          split_evenly(s);
          least = std::min(least, fastest_recomputation(s, cluster));
        }
  return least;
}

}  // namespace

TEST_CASE(
    "layouts of long sequences take their published times, and context parallelism pays for the longest") {
  const Cluster cluster = read_cluster("h100");
  double sum = 0;
  int rows = 0;
  for (const PublishedRow& row : published_rows("long_sequences.csv")) {
    if (!row.text("notes").starts_with("with CP")) continue;
    const int64_t seq = row.size("seq");
    CAPTURE(seq);
    const RunShape shape = long_shape(row);
    const double error =
        row.number("tflops_per_gpu") / tflops_per_gpu(shape, fastest_recomputation(shape, cluster)) - 1;
    const double without = fastest_layout(row, cluster, false), with = fastest_layout(row, cluster, true);
    MESSAGE(seq, " tokens: time of the layout ", 100 * error, " %; gain of context parallelism ",
            100 * (without / with - 1), " %; ", row.text("notes"));
    if (seq <= 8192) CHECK(without < with);
    if (seq >= 262144) CHECK(with < without);
    sum += std::abs(error), ++rows;
  }
  CHECK(rows == 7);
  MESSAGE("V12, long sequences: ", rows, " layouts, mean ", 100 * sum / rows, " %");
  CHECK(sum / rows <= 0.10);
}
