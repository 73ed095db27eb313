// The global batch size over a run: constant, or grown as Megatron's train.rampup_batch_size. Readers of
// train.global_batch_size that count samples ask here, since train.decrease_batch_size_if_needed may round it
// down.
//
// With [start, increment, samples] it is start + i * increment, where i counts the intervals of
// samples / ((global_batch_size - start) / increment) consumed samples that are complete, and
// global_batch_size once more than `samples` are consumed. With decrease_batch_size_if_needed each of these
// sizes is then rounded down to a multiple of micro-batch size * data parallelism, as Megatron rounds it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/sections/config.hpp"

namespace capstan::config {

class BatchRamp {
 public:
  // Returns why train.rampup_batch_size is invalid; empty if it is valid, or if global_batch_size is unset.
  static std::string problem(const TrainConfig& config);
  // Returns nullopt if global_batch_size is unset, train.rampup_batch_size is invalid, or a size is rounded
  // down to nothing.
  static std::optional<BatchRamp> of(const Config& config);
  // Requires a global_batch_size. Throws ErrorCode::config if train.rampup_batch_size is invalid.
  explicit BatchRamp(const Config& config);

  bool grows() const { return increment_ > 0; }
  // Samples of the step that begins after `consumed` samples.
  int64_t size_at(int64_t consumed) const;
  // Number of full steps after `consumed` samples until `samples` are consumed, and the samples of the
  // `steps` steps after `consumed` samples. The time that they take grows with the number of increments, not
  // with that of steps.
  int64_t steps_in(int64_t samples, int64_t consumed = 0) const;
  int64_t samples_of(int64_t steps, int64_t consumed = 0) const;
  // Number of times that the batch grows, and its size after `i` of them.
  int64_t increments() const { return increments_; }
  int64_t size(int64_t i) const { return grows() ? rounded(start_ + i * increment_) : final_; }

 private:
  int64_t rounded(int64_t size) const { return size / unit_ * unit_; }
  // Number of consecutive steps after `consumed` samples whose size is size_at(consumed), below the last
  // size.
  int64_t steps_of_size_at(int64_t consumed) const;

  // Sizes are multiples of `unit_`; `start_` and `increment_` are as given.
  int64_t unit_, final_, start_ = 0, increment_ = 0, increments_ = 0, samples_ = 0;
};

// Samples of a step of full size: train.global_batch_size, rounded down if the recipe allows it.
int64_t full_batch_size(const Config& config);
// Samples of an evaluation batch, rounded down in the same way.
int64_t eval_batch_size(const Config& config);

}  // namespace capstan::config
