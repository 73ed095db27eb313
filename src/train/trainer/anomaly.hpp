// Anomalies of a step (section `resilience`): spikes of loss and gradient norm, the origin of a NaN or an
// infinity, and machines that do not reproduce their results. All ranks decide from the same numbers.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.hpp"
#include "config/sections/config.hpp"
#include "ops/tape.hpp"
#include "parallel/flat_store.hpp"
#include "train/setup/state.hpp"

namespace capstan::train {

// One finding; a row of metrics.jsonl and a warning.
struct Anomaly {
  std::string event, text;
  // The action that follows. Empty: none.
  std::string action;
  std::vector<std::pair<std::string, double>> numbers;
  std::vector<std::pair<std::string, std::string>> texts;
};

struct AnomalyDecision {
  // The most severe of the findings.
  config::SpikeAction action = config::SpikeAction::off;
  std::vector<Anomaly> anomalies;
};

// The thresholds of loss and gradient norm above which the next step has a spike: the factor times the mean
// of recent steps (TrainState::recent_*). Not known before min(spike_window, 16) steps, or without detection.
struct SpikeLimits {
  std::optional<double> loss, norm;
};
SpikeLimits spike_limits(const config::ResilienceConfig& config, const TrainState& state);

// Compares the step's loss and gradient norm with their spike limits. Values that are not finite are ignored
// here.
AnomalyDecision detect_anomalies(const config::ResilienceConfig& config, const TrainState& state, double loss,
                                 double norm);
// Adds the step's loss and gradient norm to the recent values in `state`, if the recipe detects spikes in
// them.
void append_recent(const config::ResilienceConfig& config, TrainState& state, double loss, double norm);

// Finds the first value that is not finite in the outputs and input gradients of operations, in the order in
// which the operations run.
class FiniteCheck final : public TapeObserver {
 public:
  void observe(const TapeEvent&) override {}
  bool waits() const override { return false; }
  bool reads_values() const override { return true; }
  void values(char phase, const std::string& name, std::span<const Parameter* const> parameters,
              std::span<const Tensor> tensors) override;
  void micro_batch(int64_t index) override { current_ = index; }
  // Describes the first value that is not finite. Empty: all values are finite.
  const std::string& found() const { return found_; }
  // Index of the micro-batch in which it was found, from 0.
  int64_t micro_batch() const { return micro_batch_; }

 private:
  std::string found_, last_parameter_;
  int64_t current_ = 0, micro_batch_ = 0;
};

bool all_finite(const Tensor& tensor);

// The first parameter of this rank's shard with a value that is not finite, and the last parameter with a
// gradient that is not finite, which is the first one in the order of the backward pass. Null: all are
// finite.
const Parameter* first_nonfinite_parameter(const parallel::FlatStore& store);
const Parameter* first_nonfinite_gradient(const parallel::FlatStore& store);

}  // namespace capstan::train
