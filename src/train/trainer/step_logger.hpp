// Reports a run's model and steps: log lines, rows of metrics.jsonl, TensorBoard scalars.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/world.hpp"
#include "config/sections/batch_ramp.hpp"
#include "config/sections/config.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/run_log.hpp"
#include "train/trainer/run_recorder.hpp"
#include "train/trainer/step_runner.hpp"

namespace capstan::train {

// Throughput over the steps of an interval. docs/files.md defines the values.
struct Throughput {
  // Mean time of a step.
  double step_seconds = 0;
  // Sum over all ranks.
  double tokens_per_second = 0;
  // tokens_per_second, divided by the number of ranks.
  double rank_tokens_per_second = 0;
  // Model TFLOP/s, divided by the number of ranks.
  double rank_tflops = 0;
  // rank_tflops as a fraction of the peak GEMM throughput, at most 1; 0: not measured
  double mfu = 0;
};

// The greatest known GEMM throughput of a machine, in FLOP/s. Other programs may use the machine at the same
// time.
class PeakThroughput {
 public:
  explicit PeakThroughput(std::function<double()> measure) : measure_(std::move(measure)) {}
  // Measures the throughput at most four times; the greatest measurement counts.
  void measure();
  // Called with the throughput of a training step. A step cannot be faster than its GEMMs, so a smaller peak
  // was measured while the machine was busy. The peak is then measured again, and is at least as high as the
  // step's throughput. Returns whether the peak has become greater.
  bool reached(double flops_per_second);
  // 0: not measured yet.
  double value() const { return value_; }

 private:
  std::function<double()> measure_;
  double value_ = 0;
  int measurements_ = 0;
};

class StepLogger {
 public:
  StepLogger(const config::Config& config, comm::World& world, StepRunner& runner, StepTimers& timers,
             RunRecorder& recorder, RunLog& log, int64_t total_steps);

  // Collective. Reports parameters, FLOPs, estimated memory and estimated time. measure_gemm: measures the
  // peak GEMM throughput, without which there is no MFU.
  void report_model(const StepEstimate& estimate, bool measure_gemm);
  // Sets the estimated time of a step, with which the third one is compared.
  void expect_time(std::optional<TimeEstimate> time) { expected_time_ = std::move(time); }
  // Called after each step: ends the time of the step, and writes its log line and rows when they are due.
  void log_step(const StepResult& result);
  // `row_step`: after a rewind, the step from which the run continues; rows in metrics.jsonl get this step.
  void report_anomalies(int64_t step, const std::vector<Anomaly>& anomalies,
                        std::optional<int64_t> row_step = {});
  // split: "validation" or "test".
  void report_evaluation(const std::string& split, double loss, double seconds);
  // Restarts the means of a log interval.
  void reset_intervals() { log_seconds_ = {}, events_seconds_ = {}; }

  // Seconds of the last step, or of the steps before a resume; 0: not known.
  double step_seconds() const { return step_seconds_; }
  // Estimated seconds of the matrix products of a step; 0: not known.
  double estimated_step_seconds() const { return estimated_step_seconds_; }
  // Loss of the last step. Null: no step has run.
  std::optional<double> last_loss() const { return last_loss_; }

 private:
  void report_estimated_time(const StepEstimate& estimate);
  // Raises the peak GEMM throughput if a step was faster, and reports it.
  void raise_peak(double flops_per_second);
  Throughput throughput(const IntervalSeconds& seconds) const;
  // Number of steps that the rest of the run would take with this global batch size.
  double steps_left(double samples) const;
  std::string step_text(const StepResult& result, const Throughput& speed) const;
  // Memory use of the device; if it shares the host's memory, with the data that the host holds.
  MemoryUse memory() const;
  void log_memory(int64_t step);
  // Compares memory and time of the first steps with their estimates.
  void compare_estimates(int64_t step);
  void write_step_row(const StepResult& result, const Throughput& speed);
  void write_step_events(const StepResult& result);

  const config::Config& config_;
  const config::BatchRamp batch_ramp_;
  comm::World& world_;
  StepRunner& runner_;
  StepTimers& timers_;
  RunRecorder& recorder_;
  RunLog& log_;
  int64_t total_steps_, first_step_;
  // StepEstimate::resident_data.
  int64_t resident_data_ = 0;
  // Requests to the system for memory up to the last step.
  int64_t memory_requests_ = 0;
  // Peak GEMM throughput of this rank, and the value that the log has named last.
  PeakThroughput gemm_peak_;
  double reported_peak_ = 0;
  // FLOPs of a sample on all ranks, without recomputation.
  double flops_per_sample_ = 0;
  double step_seconds_ = 0, estimated_step_seconds_ = 0;
  // Estimated memory of a step, and its estimated time on a known cluster.
  int64_t estimated_memory_ = 0;
  std::optional<TimeEstimate> expected_time_;
  // Steps of this start after the first one, which is slower, until they are compared.
  IntervalSeconds compared_seconds_;
  std::optional<double> last_loss_;
  std::chrono::steady_clock::time_point last_line_;
  IntervalSeconds log_seconds_, events_seconds_;
};

}  // namespace capstan::train
