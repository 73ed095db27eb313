// The global batch size over a run: constant, or grown as Megatron's train.rampup_batch_size.
//
// With [start, increment, samples] it is start + i * increment, where i counts the intervals of
// samples / ((global_batch_size - start) / increment) consumed samples that are complete, and
// global_batch_size once more than `samples` are consumed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/sections/train.hpp"

namespace capstan::config {

class BatchRamp {
 public:
  // What is wrong with train.rampup_batch_size; empty: nothing, or a batch size is not known.
  static std::string problem(const TrainConfig& config);
  // Nothing where a batch size is not known, or there is a problem.
  static std::optional<BatchRamp> of(const TrainConfig& config);
  // A configuration with a batch size and without a problem.
  explicit BatchRamp(const TrainConfig& config);

  bool grows() const { return increment_ > 0; }
  // Samples of the step that begins after `consumed` samples.
  int64_t size_at(int64_t consumed) const;
  // Number of full steps in the first `samples` samples of a run, and the samples of its first `steps` steps.
  int64_t steps_in(int64_t samples) const;
  int64_t samples_of(int64_t steps) const;
  // How often the batch grows, and its size after `i` times.
  int64_t increments() const { return grows() ? (final_ - start_) / increment_ : 0; }
  int64_t size(int64_t i) const { return grows() ? start_ + i * increment_ : final_; }

 private:
  int64_t final_, start_ = 0, increment_ = 0, samples_ = 0;
};

}  // namespace capstan::config
