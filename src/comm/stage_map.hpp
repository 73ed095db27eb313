// Which pipeline rank holds which stage: any array of ranks, one for each stage in the order of the forward
// pass.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace capstan::comm {

// The stages that a rank holds are its chunks 0, 1, …, in the order of the forward pass.
class StageMap {
 public:
  // ErrorCode::config if there is no stage, if the ranks are not 0 … P-1, or if they do not hold the same
  // number of stages each.
  explicit StageMap(std::vector<int64_t> rank_of_stage) : rank_of_(std::move(rank_of_stage)) {
    if (rank_of_.empty()) fail(ErrorCode::config, "a pipeline needs at least one stage");
    for (size_t stage = 0; stage < rank_of_.size(); ++stage) {
      const int64_t rank = rank_of_[stage];
      if (rank < 0 || rank >= stages())
        fail(ErrorCode::config, "pipeline stage " + std::to_string(stage) + " is on rank " +
                                    std::to_string(rank) + ", not in 0 … " + std::to_string(stages() - 1));
      if (std::ssize(stages_of_) <= rank) stages_of_.resize(static_cast<size_t>(rank + 1));
      chunk_of_.push_back(std::ssize(stages_of_[static_cast<size_t>(rank)]));
      stages_of_[static_cast<size_t>(rank)].push_back(static_cast<int64_t>(stage));
    }
    for (const auto& held : stages_of_)
      if (std::ssize(held) != chunks())
        fail(ErrorCode::config, std::to_string(stages()) + " pipeline stages are not divided evenly over " +
                                    std::to_string(ranks()) + " ranks");
  }
  // Stage s on rank s % ranks.
  static StageMap looped(int64_t ranks, int64_t chunks) {
    std::vector<int64_t> rank_of_stage;
    for (int64_t stage = 0; stage < ranks * chunks; ++stage) rank_of_stage.push_back(stage % ranks);
    return StageMap(std::move(rank_of_stage));
  }

  int64_t stages() const { return std::ssize(rank_of_); }
  int64_t ranks() const { return std::ssize(stages_of_); }
  // Stages of each rank.
  int64_t chunks() const { return std::ssize(stages_of_.front()); }
  int64_t rank_of(int64_t stage) const { return rank_of_[static_cast<size_t>(stage)]; }
  int64_t chunk_of(int64_t stage) const { return chunk_of_[static_cast<size_t>(stage)]; }
  int64_t stage_of(int64_t rank, int64_t chunk) const {
    return stages_of_[static_cast<size_t>(rank)][static_cast<size_t>(chunk)];
  }

 private:
  std::vector<int64_t> rank_of_, chunk_of_;
  std::vector<std::vector<int64_t>> stages_of_;
};

}  // namespace capstan::comm
