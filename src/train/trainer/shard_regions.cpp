#include "train/trainer/shard_regions.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace capstan::train {

std::vector<parallel::FlatRange> chunks_of(const parallel::FlatRange& range, int64_t most) {
  std::vector<parallel::FlatRange> chunks;
  for (int64_t at = range.begin; at < range.end(); at += most)
    chunks.push_back({at, std::min(most, range.end() - at)});
  return chunks;
}

std::vector<ShardRegion> shard_regions(const Shape& global, const Shard& shard,
                                       const parallel::FlatRange& range) {
  CAPSTAN_ASSERT(global.rank() == shard.shape.rank(),
                 "a shard " + shard.shape.text() + " of a tensor " + global.text());
  std::vector<ShardRegion> result;
  int64_t at = range.begin;
  for (const Region& local : flat_range_as_regions(shard.shape, range.begin, range.count)) {
    const int64_t cells = local.sizes.elements();
    if (shard.runs.empty()) {  // a scalar
      result.push_back({local, {at, cells}});
      at += cells;
      continue;
    }
    const auto dim = static_cast<size_t>(shard.dim);
    // Split along the shard's dimension at the borders of its runs. With several parts, each index of the
    // dimensions before it is a region of its own, whose elements are contiguous.
    const int64_t begin = local.offsets[dim], end = begin + local.sizes[dim];
    int64_t outer = 1, inner = 1, first = 0;
    for (size_t d = 0; d < dim; ++d) outer *= local.sizes[d];
    for (size_t d = dim + 1; d < local.sizes.size(); ++d) inner *= local.sizes[d];
    struct Part {
      int64_t global, count;
      bool owned;
    };
    std::vector<Part> parts;
    for (const ShardRun& run : shard.runs) {
      const int64_t from = std::max(begin, first), to = std::min(end, first + run.count);
      if (from < to) parts.push_back({run.global + from - first, to - from, run.owned()});
      first += run.count;
    }
    const bool one = parts.size() == 1;
    for (int64_t o = 0; o < (one ? 1 : outer); ++o)
      for (const Part& part : parts) {
        ShardRegion piece{local, {at, part.count * inner * (one ? outer : 1)}, part.owned};
        piece.where.offsets[dim] = part.global;
        piece.where.sizes[dim] = part.count;
        int64_t rest = o;
        for (size_t d = dim; !one && d-- > 0;) {
          piece.where.offsets[d] = local.offsets[d] + rest % local.sizes[d];
          piece.where.sizes[d] = 1;
          rest /= local.sizes[d];
        }
        at += piece.elements.count;
        result.push_back(std::move(piece));
      }
  }
  return result;
}

}  // namespace capstan::train
