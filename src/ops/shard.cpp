#include "ops/shard.hpp"

#include "base/error.hpp"

namespace capstan {

namespace {
[[noreturn]] void fail_indivisible(const std::string& name, int64_t count, const char* what, int size) {
  fail(ErrorCode::config, "`" + name + "`: " + std::to_string(count) + " " + what +
                              " cannot be divided over " + std::to_string(size) + " tensor-parallel ranks");
}
}  // namespace

Shard shard_of(const std::string& name, const Shape& global, const Sharding& sharding, int rank, int size) {
  Shard shard{global, sharding.dim, {}};
  if (global.rank() == 0) return shard;
  const int64_t slices = global[sharding.dim];
  if (sharding.axis != ShardingAxis::tensor || size == 1) {
    shard.segments = {{0, slices}};
    return shard;
  }
  if (sharding.groups > 0 && size > sharding.groups) {
    const int64_t group_slices = slices / sharding.groups, queries = group_slices - sharding.shared;
    if (size % sharding.groups != 0) fail_indivisible(name, sharding.groups, "groups of heads", size);
    const int sharers = size / static_cast<int>(sharding.groups), part_index = rank % sharers;
    if (queries % sharers != 0) fail_indivisible(name, queries, "rows of queries in a group", sharers);
    const int64_t begin = rank / sharers * group_slices, part = queries / sharers;
    if (part > 0) shard.segments.push_back({begin + part_index * part, part});
    shard.segments.push_back({begin + queries, sharding.shared, sharers, part_index});
  } else {
    if (sharding.groups > 0 && sharding.groups % size != 0)
      fail_indivisible(name, sharding.groups, "groups of heads", size);
    if (slices % (sharding.blocks * size) != 0)
      fail_indivisible(name, slices / sharding.blocks, "slices", size);
    const int64_t block = slices / sharding.blocks, part = block / size;
    for (int64_t b = 0; b < sharding.blocks; ++b) shard.segments.push_back({b * block + rank * part, part});
  }
  int64_t local = 0;
  for (const ShardSegment& segment : shard.segments) local += segment.count;
  shard.shape[sharding.dim] = local;
  return shard;
}

}  // namespace capstan
