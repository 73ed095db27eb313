// A pipeline schedule as data: for each rank the list of its actions, in order. A pure function makes it from
// a few numbers; the trainer runs it, and it can be drawn and checked without other processes.
//
// P ranks hold P * V stages of layers, V each; which rank holds which stage is a map (comm/stage_map.hpp). A
// micro-batch goes forward through stages 0 … PV - 1 and backward through them in the opposite order. All
// schedules here flush: a step ends after the backward pass of its last micro-batch, so that the gradients
// are those of one rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/stage_map.hpp"
#include "config/sections/dist.hpp"

namespace capstan::parallel {

struct PipelineShape {
  int64_t ranks = 1;  // P
  // V: virtual stages of each rank.
  int64_t chunks = 1;
  int64_t micro_batches = 1;  // M
  // Micro-batches that pass through a chunk before the next chunk's turn; V > 1: at least P.
  int64_t group = 1;
  config::PipelineSchedule order = config::PipelineSchedule::one_f_one_b;
  // The rank of each stage; empty: stage s on rank s % P.
  std::vector<int64_t> stage_ranks = {};

  comm::StageMap stages() const {
    return stage_ranks.empty() ? comm::StageMap::looped(ranks, chunks) : comm::StageMap(stage_ranks);
  }
  // Zero-bubble schedules (Qi et al. 2023) divide the backward pass of a stage into its input gradients (B)
  // and its weight gradients (W).
  bool separates_weight_gradients() const {
    return order == config::PipelineSchedule::zb_h1 || order == config::PipelineSchedule::zb_v;
  }
};

// With separate weight gradients `backward` computes the input gradients only, else both.
enum class ActionKind : uint8_t { forward, backward, weight_gradients };
struct PipelineAction {
  ActionKind kind;
  int32_t micro_batch, chunk;
  bool operator==(const PipelineAction&) const = default;
};
// The actions of each rank, in order.
using Schedule = std::vector<std::vector<PipelineAction>>;

// V = 1: GPipe (Huang et al. 2019), or 1F1B (Narayanan et al. 2021; rank r begins with min(P - r - 1, M)
// forward passes, then one forward and one backward in turns), or ZB-H1 (Qi et al. 2023: the order of 1F1B,
// in which rank r computes weight gradients r micro-batches later, so that as many micro-batches are held as
// on rank 0 of 1F1B). V > 1: interleaved 1F1B, with 2 (P - r - 1) + (V - 1) group forward passes first,
// chunks taking turns after `group` micro-batches. V = 2 with stage r and stage 2P - 1 - r on rank r: ZB-V
// (Qi et al. 2024), which holds as much and has no bubble but the first P - 1 forward passes of a chunk,
// where F, B and W take equal times and M >= 2P - 1.
//
// The weight gradients of a stage are computed in the order of the micro-batches in every schedule.
//
// ErrorCode::config for sizes that are not positive, for chunks or a map of stages that the schedule is not
// made for, and for a group (the last one included) of fewer than P micro-batches, which would deadlock.
Schedule make_schedule(const PipelineShape& shape);
// The actions of one rank.
std::vector<PipelineAction> make_actions(const PipelineShape& shape, int64_t rank);

// A step of fewer micro-batches that has all that a rank does in a longer one: between warm-up and cool-down
// the same actions come again for the next micro-batches.
struct ShorterStep {
  int64_t micro_batches = 0;
  // The longer step has the actions [begin, begin + length) `times` more, for the next `group` micro-batches
  // each time. They are the last such period before the forward passes of the last micro-batches.
  int64_t begin = 0, length = 0, group = 1, times = 0;
};
// The shortest such step in which the micro-batches that are under way at `begin`, and in the period before,
// began in such periods, not in the warm-up; `more`: that many periods later. Where none is shorter it is
// `shape` itself, with times = 0, as with GPipe.
ShorterStep shorter_step(const PipelineShape& shape, int64_t rank, int64_t more = 0);

// Duration of each kind of action, in ticks.
struct ActionTicks {
  int64_t forward = 1, backward = 2, weight_gradients = 0;
  int64_t of(ActionKind kind) const {
    return kind == ActionKind::forward ? forward : kind == ActionKind::backward ? backward : weight_gradients;
  }
};
// Durations where a backward pass takes twice the time of a forward pass, divided equally between its two
// actions where the schedule has weight gradients of their own.
ActionTicks usual_ticks(const PipelineShape& shape);
struct ScheduleRun {
  // Durations of the actions of each stage.
  std::vector<ActionTicks> lengths;
  // An error of the schedule: an action is missing, occurs twice, or waits forever, or a rank receives in
  // another order than its neighbor sends. Empty: no error.
  std::string problem;
  // Ticks until the last rank has ended.
  int64_t ticks = 0;
  // Tick at which each action of each rank starts.
  std::vector<std::vector<int64_t>> start;
  // Ticks that each rank waits: of `ticks`, and between its first and its last action.
  std::vector<int64_t> idle, idle_between;
  // Tick at which the last action of each rank ends.
  std::vector<int64_t> end;
  // For each rank, the greatest number of (micro-batch, chunk) pairs between forward and backward pass, and
  // between forward pass and weight gradients.
  std::vector<int64_t> live, held;
  // Idle time of rank 0 as a fraction of its work.
  double bubble() const { return static_cast<double>(idle[0]) / static_cast<double>(ticks - idle[0]); }
};
// Simulates the schedule: an action begins when its rank is idle and its inputs have arrived. Sends never
// wait and take no time of the sender. ticks: durations of the actions of each stage. transfers: ticks from
// each stage to the next one, where another rank has it, and back; empty: none.
ScheduleRun simulate(const PipelineShape& shape, const Schedule& schedule, std::vector<ActionTicks> ticks,
                     const std::vector<int64_t>& transfers = {});
// Every stage takes the same time, and transfers take none.
ScheduleRun simulate(const PipelineShape& shape, const Schedule& schedule, ActionTicks ticks);
inline ScheduleRun simulate(const PipelineShape& shape, const Schedule& schedule) {
  return simulate(shape, schedule, usual_ticks(shape));
}

// A diagram with a row for each rank and a column for each tick, at most `columns`. `0` … is the forward pass
// of a micro-batch, the number in brackets its backward pass, `w0` its weight gradients. With several chunks
// a letter names the chunk.
std::string draw(const PipelineShape& shape, const Schedule& schedule, const ScheduleRun& run,
                 int64_t columns);

}  // namespace capstan::parallel
