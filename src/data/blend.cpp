#include "data/blend.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::data {

SplitShares parse_split(std::string_view text) {
  std::vector<double> proportions;
  for (const auto part : split(text, ',')) {
    const auto proportion = parse_double(trim(part));
    if (!proportion || !std::isfinite(*proportion) || *proportion < 0)
      fail(ErrorCode::config,
           "split `" + std::string(text) + "`: `" + std::string(trim(part)) + "` is not a proportion",
           "write the proportions of train, validation and test as in `969,30,1`");
    proportions.push_back(*proportion);
  }
  if (proportions.size() > 3)
    fail(ErrorCode::config, "split `" + std::string(text) + "` has " + std::to_string(proportions.size()) +
                                " proportions, not three");
  proportions.resize(3, 0.0);
  const double sum = proportions[0] + proportions[1] + proportions[2];
  if (!(sum > 0) || !std::isfinite(sum))
    fail(ErrorCode::config, "split `" + std::string(text) + "` has no positive proportion");

  SplitShares result;
  double begin = 0;
  for (size_t i = 0; i < 3; ++i) {
    const double end = begin + proportions[i] / sum;
    if (end > begin) result[i] = {begin, end};
    begin = end;
  }
  return result;
}

std::pair<int64_t, int64_t> split_range(std::pair<double, double> share, int64_t count) {
  const auto at = [&](double x) {
    return std::min(count, static_cast<int64_t>(std::nearbyint(x * static_cast<double>(count))));
  };
  return {at(share.first), at(share.second)};
}

BlendOrder::BlendOrder(std::vector<double> weights, std::vector<int64_t> limits)
    : weights_(std::move(weights)), limits_(std::move(limits)), counts_(weights_.size(), 0) {
  CAPSTAN_ASSERT(limits_.empty() || limits_.size() == weights_.size(), "a limit for each dataset");
  if (weights_.empty() || weights_.size() > 32767)
    fail(ErrorCode::config, "a blend has 1 to 32767 datasets, this one " + std::to_string(weights_.size()));
  for (const double weight : weights_)
    if (!std::isfinite(weight) || weight < 0)
      fail(ErrorCode::config, "the weight " + to_text(weight) + " in a blend is not a non-negative number");
  const double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  if (!(sum > 0) || !std::isfinite(sum))
    fail(ErrorCode::config, "the weights of a blend sum to " + to_text(sum));
  for (double& weight : weights_) weight /= sum;
}

void BlendOrder::advance(Counts& counts, int64_t block, std::vector<Choice>* choices) const {
  for (int64_t k = block * kBlock; k < (block + 1) * kBlock; ++k) {
    const double at = std::max(static_cast<double>(k), 1.0);
    int32_t best = -1;
    double furthest = std::numeric_limits<double>::lowest();
    for (size_t i = 0; i < weights_.size(); ++i) {
      if (!limits_.empty() && counts[i] >= limits_[i]) continue;
      const double behind = weights_[i] * at - static_cast<double>(counts[i]);
      if (behind > furthest) furthest = behind, best = static_cast<int32_t>(i);
    }
    if (choices) choices->push_back({best, best < 0 ? 0 : counts[static_cast<size_t>(best)]});
    if (best >= 0) ++counts[static_cast<size_t>(best)];
  }
}

BlendOrder::Choice BlendOrder::at(int64_t k) const {
  const int64_t block = k / kBlock;
  std::lock_guard lock(*mutex_);
  Decoded& slot = decoded_[static_cast<size_t>(block) % decoded_.size()];
  if (slot.block != block) {
    if (block < next_block_) {
      const auto before = std::prev(kept_.upper_bound(block));
      next_block_ = before->first;
      counts_ = before->second;
    }
    for (;; ++next_block_) {
      if (next_block_ % kKeptEvery == 0) kept_.try_emplace(next_block_, counts_);
      if (next_block_ == block) break;
      advance(counts_, next_block_, nullptr);
    }
    slot.choices.clear();
    slot.choices.reserve(kBlock);
    advance(counts_, block, &slot.choices);
    ++next_block_;
    slot.block = block;
  }
  return slot.choices[static_cast<size_t>(k % kBlock)];
}

BlendedSource::BlendedSource(std::vector<std::shared_ptr<const SampleSource>> parts, BlendOrder order,
                             int64_t samples)
    : parts_(std::move(parts)), order_(std::move(order)), samples_(samples) {
  CAPSTAN_ASSERT(parts_.size() == order_.weights().size(), "a weight for each dataset");
}

int64_t BlendedSource::epoch_samples() const {
  int64_t sum = 0;
  for (const auto& part : parts_) sum += part->epoch_samples();
  return sum;
}

std::vector<DatasetShare> BlendedSource::parts() const {
  std::vector<DatasetShare> result;
  for (size_t i = 0; i < parts_.size(); ++i)
    for (DatasetShare part : parts_[i]->parts()) {
      part.share *= order_.weights()[i];
      result.push_back(std::move(part));
    }
  return result;
}

void BlendedSource::read(int64_t number, std::span<int32_t> text) const {
  const auto choice = order_.at(number);
  if (number >= samples_ || choice.dataset < 0)
    fail(ErrorCode::failed, "sample " + std::to_string(number) +
                                " of a blend was asked for, but it was built for " +
                                std::to_string(samples_));
  parts_[static_cast<size_t>(choice.dataset)]->read(choice.sample, text);
}

}  // namespace capstan::data
