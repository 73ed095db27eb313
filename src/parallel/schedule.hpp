// A pipeline schedule as data: for each rank the list of its actions, in order. A pure function makes it from
// a few numbers; the trainer runs it, and it can be drawn and checked without other processes.
//
// P ranks hold P * V stages of layers, stage s on rank s % P as its chunk s / P. A micro-batch goes forward
// through stages 0 … PV - 1 and backward through them in the opposite order. All schedules here flush: a step
// ends after the backward pass of its last micro-batch, so that the gradients are those of one rank.
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

// Zero-bubble schedules (Qi et al. 2023) divide the backward pass of a stage into its input gradients (B,
// here `backward`) and its weight gradients (W). In other schedules `backward` computes both.
enum class ActionKind : uint8_t { forward, backward, weight_gradients };
struct PipelineAction {
  ActionKind kind;
  int32_t micro_batch, chunk;
  bool operator==(const PipelineAction&) const = default;
};
// The actions of each rank, in order.
using Schedule = std::vector<std::vector<PipelineAction>>;

// V = 1: GPipe (Huang et al. 2019), or 1F1B (Narayanan et al. 2021; rank r begins with min(P - r - 1, M)
// forward passes, then one forward and one backward in turns). V > 1: interleaved, with 2 (P - r - 1) + (V -
// 1) group forward passes first, chunks taking turns after `group` micro-batches. ErrorCode::config for sizes
// that are not positive, and for a group (the last one included) of fewer than P micro-batches, which would
// deadlock.
Schedule make_schedule(const PipelineShape& shape);

// Duration of each kind of action, in ticks.
struct ActionTicks {
  int64_t forward = 1, backward = 2, weight_gradients = 0;
};
struct ScheduleRun {
  ActionTicks lengths;
  // An error of the schedule: an action is missing, occurs twice, or waits forever. Empty: no error.
  std::string problem;
  // Ticks until the last rank has ended.
  int64_t ticks = 0;
  // Tick at which each action of each rank starts.
  std::vector<std::vector<int64_t>> start;
  // Ticks that each rank waits, of `ticks`.
  std::vector<int64_t> idle;
  // For each rank, the greatest number of (micro-batch, chunk) pairs between forward and backward pass.
  std::vector<int64_t> live;
};
// Simulates the schedule: an action begins when its rank is idle and its inputs have arrived. Sends take no
// time and never wait.
ScheduleRun simulate(const PipelineShape& shape, const Schedule& schedule, ActionTicks ticks = {});

// A diagram with a row for each rank and a column for each tick, at most `columns`. `0` … is the forward pass
// of a micro-batch, the number in brackets its backward pass, `w0` its weight gradients. With several chunks
// a letter names the chunk.
std::string draw(const PipelineShape& shape, const Schedule& schedule, const ScheduleRun& run,
                 int64_t columns);

}  // namespace capstan::parallel
