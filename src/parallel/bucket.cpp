#include "parallel/bucket.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/checked.hpp"

namespace capstan::parallel {

namespace {
// Elements: a cache line of any type, and equal slices over ranks.
constexpr int64_t kAlignment = 64;
constexpr int64_t kMinSlice = 16384;
}  // namespace

int64_t default_bucket_elements(int64_t trained, int64_t shards) {
  constexpr int64_t kMost = 40'000'000, kLeast = 1'000'000, kParts = 16;
  return std::clamp(trained / kParts, kLeast, std::max(kMost, kLeast * shards));
}

BucketLayout plan_buckets(std::span<const std::unique_ptr<Parameter>> parameters,
                          const BucketOptions& options) {
  BucketLayout layout;
  std::vector<size_t> block_of;
  for (const auto& parameter : parameters) {
    const std::string& block = parameter->spec().block;
    auto found = std::find(layout.blocks.begin(), layout.blocks.end(), block);
    if (found == layout.blocks.end()) found = layout.blocks.insert(found, block);
    block_of.push_back(static_cast<size_t>(found - layout.blocks.begin()));
  }
  layout.positions.resize(parameters.size());
  // The open bucket of frozen parameters, and of each kind of those that train, for both grids.
  constexpr size_t kKinds = 5;
  std::optional<size_t> open[2 * kKinds];
  for (size_t i = parameters.size(); i-- > 0;) {
    const Parameter& parameter = *parameters[i];
    CAPSTAN_ASSERT(parameter.index() == static_cast<int>(i),
                   "parameters are indexed by their position in the list");
    layout.elements += parameter.shape().elements();
    if (parameter.spec().buffer || (options.excluded && options.excluded(parameter))) {
      layout.positions[i] = {BucketLayout::kNoBucket, 0};
      continue;
    }
    const bool trainable = !options.trainable || options.trainable(parameter);
    const bool tied = parameter.spec().tied != ParamSpec::Tied::no;
    const bool matrix = trainable && options.matrices && options.matrices(parameter);
    const bool codes = trainable && options.codes && options.codes(parameter);
    const ParameterGrid grid = parameter.spec().grid();
    const size_t kind = trainable ? 1 + (matrix ? 1 : 0) + (codes ? 2 : 0) : 0;
    auto& current = open[(grid == ParameterGrid::expert ? kKinds : 0) + kind];
    const auto full = [&] {
      const BucketPlan& bucket = layout.buckets[*current];
      return bucket.elements >= options.bucket_elements || (options.by_block && bucket.block != block_of[i]);
    };
    if (tied || !current || full()) {
      current = layout.buckets.size();
      layout.buckets.push_back(
          {.grid = grid, .trainable = trainable, .matrices = matrix, .codes = codes, .block = block_of[i]});
    }
    BucketPlan& bucket = layout.buckets[*current];
    layout.positions[i] = {*current, bucket.elements};
    bucket.parameters.push_back(&parameter);
    bucket.begins.push_back(bucket.elements);
    bucket.elements += round_up(parameter.shape().elements(), kAlignment);
    if (tied) current.reset();
  }
  for (BucketPlan& bucket : layout.buckets) {
    const int64_t shards = bucket.grid == ParameterGrid::expert ? options.expert_shards : options.shards;
    const Parameter& first = *bucket.parameters.front();
    const bool tied = first.spec().tied != ParamSpec::Tied::no;
    const int64_t holders = tied && options.holders ? options.holders(first) : 1;
    bucket.elements = round_up(bucket.elements, std::lcm(kAlignment, holders) * shards);
  }
  return layout;
}

std::vector<FlatRange> elements_of_segment(const Shard& shard, size_t segment) {
  int64_t outer = 1, inner = 1, first = 0;
  for (int d = 0; d < shard.shape.rank(); ++d) {
    if (d < shard.dim) outer *= shard.shape[d];
    if (d > shard.dim) inner *= shard.shape[d];
  }
  for (size_t r = 0; r < segment; ++r) first += shard.segments[r].count;
  const int64_t slices = shard.shape[shard.dim], count = shard.segments[segment].count;
  if (count == slices) return {{0, outer * slices * inner}};
  std::vector<FlatRange> ranges;
  for (int64_t o = 0; o < outer; ++o) ranges.push_back({(o * slices + first) * inner, count * inner});
  return ranges;
}

FlatRange replica_slice(const FlatRange& range, int64_t replica, int64_t replicas, int64_t rotation) {
  const int64_t size = std::max(round_up(ceil_div(range.count, replicas), kAlignment), kMinSlice);
  const int64_t begin = std::min(range.count, (replica + rotation) % replicas * size);
  return {range.begin + begin, std::min(size, range.count - begin)};
}

}  // namespace capstan::parallel
