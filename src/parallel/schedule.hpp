// A pipeline schedule as data: for each rank the list of what it computes, in order. Made by a pure function
// from a few numbers, carried out by the trainer, drawn and checked without processes.
//
// P ranks hold P * V stages of layers, stage s on rank s % P as its chunk s / P. A micro-batch goes forward
// through stages 0 … PV - 1 and backward through them in the opposite order. All schedules here flush: a step
// ends when every micro-batch has come back, so the numbers are those of one rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace capstan::parallel {

struct PipelineShape {
  int64_t ranks = 1;  // P
  // V: virtual stages of each rank.
  int64_t chunks = 1;
  int64_t micro_batches = 1;  // M
  // Micro-batches that pass through a chunk before the next chunk's turn; V > 1: at least P.
  int64_t group = 1;
  // GPipe: V = 1, every forward pass before the first backward pass.
  bool all_forward_first = false;
};

// `weight` is the part of the backward pass that computes the gradients of weights, where a schedule runs it
// separately; otherwise it belongs to `backward`.
enum class Work : uint8_t { forward, backward, weight };
struct PipelineAction {
  Work work;
  int32_t micro_batch, chunk;
  bool operator==(const PipelineAction&) const = default;
};
// By rank.
using Schedule = std::vector<std::vector<PipelineAction>>;

// V = 1: GPipe (Huang et al. 2019), or 1F1B (Narayanan et al. 2021; rank r begins with min(P - r - 1, M)
// forward passes, then one forward and one backward in turns). V > 1: interleaved, with 2 (P - r - 1) + (V -
// 1) group forward passes first, chunks taking turns after `group` micro-batches. ErrorCode::config for sizes
// that are not positive, and for a group, the last one too, of fewer than P micro-batches, which would wait
// for itself.
Schedule make_schedule(const PipelineShape& shape);

// Ticks that a step takes.
struct Ticks {
  int64_t forward = 1, backward = 2, weight = 0;
};
struct ScheduleRun {
  Ticks lengths;
  // Empty, or what is wrong: an action missing, twice, or waiting forever.
  std::string problem;
  // Until the last rank has ended.
  int64_t ticks = 0;
  // Tick at which each action of each rank starts.
  std::vector<std::vector<int64_t>> start;
  // Ticks that each rank waits, of `ticks`.
  std::vector<int64_t> idle;
  // The most (micro-batch, chunk) pairs that a rank holds between forward and backward.
  std::vector<int64_t> live;
};
// Runs it by the clock: an action begins when its rank is free and what it needs has arrived; sends take no
// time and never wait.
ScheduleRun simulate(const PipelineShape& shape, const Schedule& schedule, Ticks ticks = {});

// A row for each rank, a column for each tick: `0` … for the forward pass of a micro-batch, the same in
// brackets for its backward pass, `w0` for weights, with the chunk as a letter where there are several;
// `columns` at most.
std::string draw(const PipelineShape& shape, const Schedule& schedule, const ScheduleRun& run,
                 int64_t columns);

}  // namespace capstan::parallel
