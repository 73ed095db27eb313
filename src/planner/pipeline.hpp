// The pipeline of a step as the planner simulates it: the trainer's schedule with the times of each stage.
// And the bytes of a step by link.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/schedule.hpp"
#include "planner/step_time.hpp"

namespace capstan::planner {

// Ticks of a simulated schedule.
inline int64_t nanoseconds(double seconds) {
  return std::llround(1e9 * seconds);
}

// The schedule of the shape, and the duration of the actions of each stage in nanoseconds.
parallel::PipelineShape pipeline_of(const RunShape& shape);
std::vector<parallel::ActionTicks> action_ticks(const parallel::PipelineShape& pipeline,
                                                const std::vector<StageTime>& stages);
// Bytes of the hidden states of a micro-batch that a stage sends to the next one, and their seconds.
double transfer_bytes(const RunShape& shape);
double stage_transfer_seconds(const RunShape& shape, const Cluster& cluster);
// From each stage to the next, in nanoseconds, those of multi-token prediction included.
std::vector<int64_t> transfer_ticks(const RunShape& shape, const Cluster& cluster);

// What a pipeline rank does in a step.
struct Span {
  enum class Kind : uint8_t { forward, backward, weight_gradients, data_parallel, optimizer, other };
  Kind kind = Kind::forward;
  int64_t micro_batch = 0, chunk = 0;  // of the first three kinds
  double begin = 0, end = 0;           // seconds since the step began
  // Exposed communication of tensor, context and expert parallelism, and of offload, in the span.
  double communication = 0;
};
std::string_view name_of(Span::Kind kind);

struct Timeline {
  // Of each pipeline rank, in the order of time.
  std::vector<std::vector<Span>> ranks;
  // Seconds of a step, those of StepTime.
  double seconds = 0;
  // Seconds that each rank waits for other stages.
  std::vector<double> idle;
};
// Simulates all micro-batches. Data parallelism (what nothing hides), the optimizer and other time follow the
// pipeline, as in step_time().
Timeline simulate_timeline(const RunShape& shape, const Cluster& cluster, const StepTime& time);

// Bytes that one GPU sends in a step for a kind of parallelism, within its fast domain (NVLink) and over the
// network, and their seconds, of the pipeline rank that sends the most.
struct LinkTraffic {
  // "tensor_parallel", "context_parallel", "expert_parallel", "pipeline_transfers", "data_parallel".
  std::string part;
  double fast_bytes = 0, network_bytes = 0;
  double exposed = 0, hidden = 0;  // seconds
};
// Without kinds that send nothing.
std::vector<LinkTraffic> link_traffic(const RunShape& shape, const Cluster& cluster, const StepTime& time);

// The step if all GPUs shared one fast domain: what a group that leaves its domain costs is the difference.
StepTime time_within_one_domain(const RunShape& shape, Cluster cluster);

}  // namespace capstan::planner
