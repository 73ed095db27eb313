// Anomalies of a step (section `resilience`): spikes of loss and gradient norm, the origin of a NaN or an
// infinity, and machines that compute different bits the second time. All ranks decide from the same numbers.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/hash.hpp"
#include "comm/communicator.hpp"
#include "config/core/config.hpp"
#include "ops/tape.hpp"
#include "parallel/flat_store.hpp"
#include "train/trainer/state.hpp"

namespace capstan::train {

// One finding; a row of metrics.jsonl and a warning.
struct Anomaly {
  std::string event, text;
  std::string action;  // what is done about it; empty: nothing
  std::vector<std::pair<std::string, double>> numbers;
  std::vector<std::pair<std::string, std::string>> texts;
};

struct AnomalyDecision {
  config::SpikeAction action = config::SpikeAction::off;  // the most severe of the findings
  std::vector<Anomaly> events;
};

// Compares the step's numbers with the means of those before it (TrainState::recent_*). Nothing is a spike
// before min(spike_window, 16) steps are known. Values that are not finite are ignored here.
AnomalyDecision detect_anomalies(const config::ResilienceConfig& config, const TrainState& state, double loss,
                                 double norm);
// Adds the step's numbers to the means, where they are watched.
void remember(const config::ResilienceConfig& config, TrainState& state, double loss, double norm);

// Finds the first value that is not finite among what operations give, in the order in which they run.
class FiniteCheck final : public TapeObserver {
 public:
  void observe(const TapeEvent&) override {}
  void values(char phase, const std::string& name, std::span<const Parameter* const> parameters,
              std::span<const Tensor> tensors) override;
  void micro_batch(int64_t index) override { current_ = index; }
  const std::string& found() const { return found_; }   // empty: all finite
  int64_t micro_batch() const { return micro_batch_; }  // of the finding, from 0

 private:
  std::string found_, last_parameter_;
  int64_t current_ = 0, micro_batch_ = 0;
};

bool all_finite(const Tensor& tensor);

// The first parameter that is not finite among what this rank holds, and the last one whose gradient is not,
// which is the first in the order of the backward pass; null: none is.
const Parameter* first_nonfinite_parameter(const parallel::FlatStore& store);
const Parameter* first_nonfinite_gradient(const parallel::FlatStore& store);

// A rank's own numbers of a step before they are reduced: equal bits mean that the machine did the same
// thing.
class Fingerprint {
 public:
  void take(const Tensor& tensor);  // waits for the device
  std::string finish() { return hasher_.finish().full; }

 private:
  checkpoint::Hasher hasher_;
  std::vector<std::byte> bytes_;
};

}  // namespace capstan::train
