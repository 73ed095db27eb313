#include "train/setup/shard_regions.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace capstan::train {

std::vector<FlatRange> chunks_of(const FlatRange& range, int64_t most) {
  std::vector<FlatRange> chunks;
  for (int64_t at = range.begin; at < range.end(); at += most)
    chunks.push_back({at, std::min(most, range.end() - at)});
  return chunks;
}

std::vector<ShardRegion> shard_regions(const Shape& global, const Shard& shard, const FlatRange& range) {
  CAPSTAN_ASSERT(global.rank() == shard.shape.rank(),
                 "a shard " + shard.shape.text() + " of a tensor " + global.text());
  std::vector<ShardRegion> result;
  int64_t at = range.begin;
  for (const Region& local : flat_range_as_regions(shard.shape, range.begin, range.count)) {
    const int64_t elements = local.sizes.elements();
    // A scalar.
    if (shard.segments.empty()) {
      result.push_back({local, {at, elements}});
      at += elements;
      continue;
    }
    const auto dim = static_cast<size_t>(shard.dim);
    // The region in the global tensor, without its offset in `dim`.
    Region in_global = local;
    if (dim > 0) in_global.offsets[0] += shard.first;
    // Split along the shard's dimension at the borders of its segments. With several slices, each index of
    // the dimensions before it is a region of its own, whose elements are contiguous.
    const int64_t begin = local.offsets[dim], end = begin + local.sizes[dim];
    int64_t outer = 1, inner = 1, first = 0;
    for (size_t d = 0; d < dim; ++d) outer *= local.sizes[d];
    for (size_t d = dim + 1; d < local.sizes.size(); ++d) inner *= local.sizes[d];
    struct RunSlice {
      int64_t global, count;
      bool owned;
    };
    std::vector<RunSlice> slices;
    for (const ShardSegment& segment : shard.segments) {
      const int64_t from = std::max(begin, first), to = std::min(end, first + segment.count);
      if (from < to) slices.push_back({segment.global + from - first, to - from, segment.owned()});
      first += segment.count;
    }
    const bool one = slices.size() == 1;
    for (int64_t o = 0; o < (one ? 1 : outer); ++o)
      for (const RunSlice& slice : slices) {
        ShardRegion region{in_global, {at, slice.count * inner * (one ? outer : 1)}, slice.owned};
        region.where.offsets[dim] = slice.global;
        region.where.sizes[dim] = slice.count;
        int64_t rest = o;
        for (size_t d = dim; !one && d-- > 0;) {
          region.where.offsets[d] = in_global.offsets[d] + rest % local.sizes[d];
          region.where.sizes[d] = 1;
          rest /= local.sizes[d];
        }
        at += region.elements.count;
        result.push_back(region);
      }
  }
  return result;
}

}  // namespace capstan::train
