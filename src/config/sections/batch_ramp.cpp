#include "config/sections/batch_ramp.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace capstan::config {

namespace {
// A run has no more samples (the range of train.train_samples).
constexpr int64_t kMaxSamples = int64_t{1} << 60;
// Steps are counted one size at a time.
constexpr int64_t kMaxIncrements = 1'000'000;

// The divisor of sizes that are rounded down: 1 where they are used as given.
int64_t divisor(const Config& config, int64_t micro_batch_size) {
  if (!config.train.decrease_batch_size_if_needed) return 1;
  return micro_batch_size * config.dist.data_parallel_size.value_or(1);
}
}  // namespace

std::string BatchRamp::problem(const TrainConfig& config) {
  const std::vector<int64_t>& ramp = config.rampup_batch_size;
  if (ramp.empty()) return {};
  if (ramp.size() != 3) return "has " + std::to_string(ramp.size()) + " values, not three";
  if (ramp[0] <= 0 || ramp[1] <= 0 || ramp[2] <= 0) return "has a value that is not positive";
  if (ramp[2] > kMaxSamples)
    return "grows over " + std::to_string(ramp[2]) + " samples, more than " + std::to_string(kMaxSamples);
  if (!config.global_batch_size) return {};
  const int64_t last = *config.global_batch_size;
  if (ramp[0] >= last)
    return "starts with " + std::to_string(ramp[0]) + " samples, not below global_batch_size " +
           std::to_string(last);
  if ((last - ramp[0]) % ramp[1] != 0)
    return "does not reach global_batch_size " + std::to_string(last) + " from " + std::to_string(ramp[0]) +
           " in increments of " + std::to_string(ramp[1]);
  if (const int64_t increments = (last - ramp[0]) / ramp[1]; increments > kMaxIncrements)
    return "grows in " + std::to_string(increments) + " increments, more than " +
           std::to_string(kMaxIncrements);
  return {};
}

std::optional<BatchRamp> BatchRamp::of(const Config& config) {
  const TrainConfig& train = config.train;
  if (train.global_batch_size.value_or(0) <= 0 || !problem(train).empty()) return std::nullopt;
  const int64_t first =
      train.rampup_batch_size.empty() ? *train.global_batch_size : train.rampup_batch_size[0];
  if (first < divisor(config, train.micro_batch_size)) return std::nullopt;
  return BatchRamp(config);
}

BatchRamp::BatchRamp(const Config& config)
    : unit_(divisor(config, config.train.micro_batch_size)),
      final_(rounded(config.train.global_batch_size.value_or(0))) {
  CAPSTAN_ASSERT(final_ > 0, "a recipe without a global batch size");
  if (const std::string text = problem(config.train); !text.empty())
    fail(ErrorCode::config, "train.rampup_batch_size " + text);
  const std::vector<int64_t>& ramp = config.train.rampup_batch_size;
  if (ramp.empty()) return;
  start_ = ramp[0], increment_ = ramp[1], samples_ = ramp[2];
  increments_ = (*config.train.global_batch_size - start_) / increment_;
}

int64_t BatchRamp::size_at(int64_t consumed) const {
  if (!grows() || consumed > samples_) return final_;
  // In floating point, as Megatron divides.
  const double interval = static_cast<double>(samples_) / static_cast<double>(increments());
  const auto complete = static_cast<int64_t>(static_cast<double>(consumed) / interval);
  return std::min(final_, size(complete));
}

int64_t BatchRamp::steps_of_size_at(int64_t consumed) const {
  const int64_t size = size_at(consumed);
  // After `high` steps, more than `samples_` samples are consumed, and the size is the last one.
  int64_t low = 1, high = (samples_ - consumed) / size + 1;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (size_at(consumed + middle * size) == size)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

int64_t BatchRamp::steps_in(int64_t samples, int64_t consumed) const {
  int64_t steps = 0;
  for (int64_t size = size_at(consumed); size < final_; size = size_at(consumed)) {
    const int64_t fitting = (samples - consumed) / size, count = steps_of_size_at(consumed);
    if (fitting < count) return steps + fitting;
    steps += count, consumed += count * size;
  }
  return steps + (samples - consumed) / final_;
}

int64_t BatchRamp::samples_of(int64_t steps, int64_t consumed) const {
  const int64_t before = consumed;
  for (int64_t size = size_at(consumed); size < final_ && steps > 0; size = size_at(consumed)) {
    const int64_t count = std::min(steps, steps_of_size_at(consumed));
    steps -= count, consumed += count * size;
  }
  return consumed - before + steps * final_;
}

int64_t full_batch_size(const Config& config) {
  const int64_t size = *config.train.global_batch_size, unit = divisor(config, config.train.micro_batch_size);
  return size / unit * unit;
}

int64_t eval_batch_size(const Config& config) {
  const ValidationConfig& v = config.validation;
  const int64_t unit = divisor(config, v.eval_micro_batch_size.value_or(config.train.micro_batch_size));
  return v.eval_global_batch_size.value_or(*config.train.global_batch_size) / unit * unit;
}

}  // namespace capstan::config
