// The regions of a parameter's global tensor that this rank's shard consists of.
#pragma once

#include <vector>

#include "ops/shard.hpp"
#include "parallel/bucket.hpp"
#include "tensor/region.hpp"

namespace capstan::train {

struct ShardRegion {
  // The region in the global tensor.
  Region where;
  // The same elements in the local shard (row-major), in the order of the region's elements.
  FlatRange elements;
  // False: another rank, which holds the same elements, counts and saves them.
  bool owned = true;
};

// The elements `range` of the local shard, in their order. `global`: the parameter's full shape.
std::vector<ShardRegion> shard_regions(const Shape& global, const Shard& shard, const FlatRange& range);

// Divides a range into parts of at most `most` elements, because values are computed and read through a
// buffer of that size.
inline constexpr int64_t kChunkElements = int64_t{1} << 20;
std::vector<FlatRange> chunks_of(const FlatRange& range, int64_t most = kChunkElements);

}  // namespace capstan::train
