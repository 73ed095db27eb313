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
  // Returns why train.rampup_batch_size is invalid; empty if it is valid, or if global_batch_size is unset.
  static std::string problem(const TrainConfig& config);
  // Returns nullopt if global_batch_size is unset or train.rampup_batch_size is invalid.
  static std::optional<BatchRamp> of(const TrainConfig& config);
  // Requires a global_batch_size. Throws ErrorCode::config if train.rampup_batch_size is invalid.
  explicit BatchRamp(const TrainConfig& config);

  bool grows() const { return increment_ > 0; }
  // Samples of the step that begins after `consumed` samples.
  int64_t size_at(int64_t consumed) const;
  // Number of full steps in the first `samples` samples of a run, and the samples of its first `steps` steps.
  // The time that they take grows with the number of increments, not with that of steps.
  int64_t steps_in(int64_t samples) const;
  int64_t samples_of(int64_t steps) const;
  // Number of times that the batch grows, and its size after `i` of them.
  int64_t increments() const { return grows() ? (final_ - start_) / increment_ : 0; }
  int64_t size(int64_t i) const { return grows() ? start_ + i * increment_ : final_; }

 private:
  // Number of consecutive steps after `consumed` samples whose size is size_at(consumed), below the last
  // size.
  int64_t steps_of_size_at(int64_t consumed) const;

  int64_t final_, start_ = 0, increment_ = 0, samples_ = 0;
};

}  // namespace capstan::config
