#include "ops/shard.hpp"

#include "base/error.hpp"

namespace capstan {

namespace {

const char* name_of_ranks(ShardingAxis axis) {
  switch (axis) {
    case ShardingAxis::tensor:
      break;
    case ShardingAxis::expert:
      return " expert-parallel ranks";
    case ShardingAxis::expert_tensor:
      return " expert tensor-parallel ranks";
  }
  return " tensor-parallel ranks";
}

[[noreturn]] void fail_indivisible(const std::string& name, int64_t count, const char* what,
                                   ShardingAxis axis, int size) {
  fail(ErrorCode::config, "`" + name + "`: " + std::to_string(count) + " " + what +
                              " cannot be divided over " + std::to_string(size) + name_of_ranks(axis));
}

// The segments of a dimension with `slices` slices.
std::vector<ShardSegment> segments_of(const std::string& name, int64_t slices, const DimSharding& sharding,
                                      const ShardRanks::AxisRank& on_axis) {
  const auto [rank, size] = on_axis;
  if (size == 1) return {{0, slices}};
  std::vector<ShardSegment> segments;
  if (sharding.groups > 0 && size > sharding.groups) {
    const int64_t group_slices = slices / sharding.groups, queries = group_slices - sharding.shared;
    if (size % sharding.groups != 0)
      fail_indivisible(name, sharding.groups, "groups of heads", sharding.axis, size);
    const int sharers = size / static_cast<int>(sharding.groups), part_index = rank % sharers;
    if (queries % sharers != 0)
      fail_indivisible(name, queries, "rows of queries in a group", sharding.axis, sharers);
    const int64_t begin = rank / sharers * group_slices, part = queries / sharers;
    if (part > 0) segments.push_back({begin + part_index * part, part});
    segments.push_back({begin + queries, sharding.shared, sharers, part_index});
    return segments;
  }
  if (sharding.groups > 0 && sharding.groups % size != 0)
    fail_indivisible(name, sharding.groups, "groups of heads", sharding.axis, size);
  if (slices % (sharding.blocks * size) != 0)
    fail_indivisible(name, slices / sharding.blocks,
                     sharding.axis == ShardingAxis::expert ? "experts" : "slices", sharding.axis, size);
  const int64_t block = slices / sharding.blocks, part = block / size;
  for (int64_t b = 0; b < sharding.blocks; ++b) segments.push_back({b * block + rank * part, part});
  return segments;
}

}  // namespace

Shard shard_of(const std::string& name, const Shape& global, const Sharding& sharding,
               const ShardRanks& ranks) {
  const std::span<const DimSharding> dims = sharding.dims();
  Shard shard{global, dims.empty() ? 0 : dims.back().dim, {}};
  if (global.rank() == 0) return shard;
  if (dims.empty()) {
    shard.segments = {{0, global[0]}};
    return shard;
  }
  CAPSTAN_ASSERT(dims.size() == 1 || (dims.size() == 2 && dims[0].dim == 0 && dims[1].dim > 0 &&
                                      dims[0].blocks == 1 && dims[0].groups == 0),
                 "`" + name + "`: a sharding of more than dimension 0 and one other");
  for (const DimSharding& dim : dims) {
    const auto segments = segments_of(name, global[dim.dim], dim, ranks.of(dim.axis));
    int64_t local = 0;
    for (const ShardSegment& segment : segments) local += segment.count;
    shard.shape[dim.dim] = local;
    if (dim.dim == shard.dim)
      shard.segments = segments;
    else
      shard.first = segments[0].global;
  }
  return shard;
}

}  // namespace capstan
