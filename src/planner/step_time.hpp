// Time of a training step by formula: kernels of each stage, communication with what hides it, and the
// trainer's own pipeline schedule. Formulas: docs/planning.md, Time.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "planner/cluster.hpp"
#include "planner/run_shape.hpp"

namespace capstan::planner {

// Seconds of computation, and of communication that delays it (exposed) or not (hidden).
struct WorkTime {
  double gemm = 0, attention = 0, memory = 0;
  double tensor = 0, context = 0, expert = 0, offload = 0;
  double tensor_hidden = 0, context_hidden = 0, expert_hidden = 0, offload_hidden = 0;
  double compute() const { return gemm + attention + memory; }
  // Without what is hidden.
  double total() const { return compute() + tensor + context + expert + offload; }
  WorkTime& operator+=(const WorkTime& other);
  WorkTime scaled(double factor) const;
};

// One micro-batch of one pipeline stage.
struct StageTime {
  WorkTime forward, input_gradients, weight_gradients, recompute;
  WorkTime total() const;
};
std::vector<StageTime> stage_times(const RunShape& shape, const Cluster& cluster);

// A step. Its parts are those of the pipeline rank that works longest, and add up to `seconds`.
struct StepTime {
  WorkTime work;                     // of all micro-batches, without recomputation
  WorkTime recompute;                // of all micro-batches
  double transfers = 0;              // between stages, as far as they delay the pipeline
  double bubble = 0;                 // the rank waits for other stages
  double data = 0, data_hidden = 0;  // gradients and parameters of data parallelism
  double optimizer = 0;              // update, gradient norm, copies of offloaded state
  double other = 0;                  // Cluster::other_fraction
  double seconds = 0;
  // The same with Cluster::uncertainty() less and more.
  double fastest = 0, slowest = 0;
};
// How the time of a pipeline is found: from the trainer's schedule, or for searches by a formula that is
// never more. It is the time of equal stages without transfers: a bubble of (p - 1)/v micro-batches for 1F1B
// and interleaved 1F1B, and of p - 1 times F + B - W for ZB-H1.
enum class PipelineModel : uint8_t { simulated, formula };
// Throws ErrorCode::config for a schedule that cannot run (parallel::make_schedule), and for a format without
// a figure in the cluster.
StepTime step_time(const RunShape& shape, const Cluster& cluster,
                   PipelineModel pipeline = PipelineModel::simulated);

// Seconds of communication and computation by part, with the names of TimePart in plan.hpp.
std::vector<std::pair<std::string, double>> exposed_parts(const StepTime& time);

// Figures that follow from the time of a step.
double tokens_per_second(const RunShape& shape, double seconds);
// Model TFLOP/s of one GPU, with causal attention (FlopConvention::causal).
double tflops_per_gpu(const RunShape& shape, double seconds);
// Fraction of the dense peak of the GEMM format.
double model_flops_utilization(const RunShape& shape, const Cluster& cluster, double seconds);

}  // namespace capstan::planner
