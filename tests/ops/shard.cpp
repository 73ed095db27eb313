// The sharding of parameters over tensor-parallel ranks: every slice is held, owned once, and where it should
// be.
#include "ops/shard.hpp"

#include <doctest/doctest.h>

#include <string>

#include "base/error.hpp"

using namespace capstan;

namespace {
std::vector<std::pair<int64_t, int64_t>> ranges(const Shard& shard) {
  std::vector<std::pair<int64_t, int64_t>> result;
  for (const ShardSegment& segment : shard.segments) result.emplace_back(segment.global, segment.count);
  return result;
}
using Ranges = std::vector<std::pair<int64_t, int64_t>>;
}  // namespace

TEST_CASE("an even split, by rows and by columns, and one of two blocks") {
  const Sharding rows{ShardingAxis::tensor, 0, 1}, columns{ShardingAxis::tensor, 1, 1},
      gated{ShardingAxis::tensor, 0, 2};
  const Shape shape{12, 8};
  CHECK(ranges(shard_of("w", shape, rows, {.tensor = {1, 3}})) == Ranges{{4, 4}});
  CHECK(shard_of("w", shape, rows, {.tensor = {1, 3}}).shape == Shape{4, 8});
  CHECK(ranges(shard_of("w", shape, columns, {.tensor = {3, 4}})) == Ranges{{6, 2}});
  CHECK(shard_of("w", shape, columns, {.tensor = {3, 4}}).shape == Shape{12, 2});
  CHECK(ranges(shard_of("w", shape, gated, {.tensor = {1, 3}})) == Ranges{{2, 2}, {8, 2}});
  CHECK(shard_of("w", shape, gated, {.tensor = {1, 3}}).shape == Shape{4, 8});
  CHECK(ranges(shard_of("w", shape, {}, {.tensor = {2, 3}})) == Ranges{{0, 12}});  // held by everybody
  CHECK_THROWS_AS(shard_of("w", shape, rows, {.tensor = {0, 5}}), Error);
  CHECK_THROWS_AS(shard_of("w", shape, gated, {.tensor = {0, 4}}), Error);
}

TEST_CASE("experts over one axis, their width over another") {
  const Shape shape{6, 8, 5};
  const Sharding fc1{{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 1, 2}},
      fc2{{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 2}}, bias{ShardingAxis::expert, 0};
  const ShardRanks ranks{.tensor = {3, 4}, .expert = {2, 3}, .expert_tensor = {1, 2}};
  const Shard gated = shard_of("fc1", shape, fc1, ranks);
  CHECK(gated.shape == Shape{2, 4, 5});
  CHECK(gated.first == 4);
  CHECK(gated.dim == 1);
  CHECK(ranges(gated) == Ranges{{2, 2}, {6, 2}});
  CHECK_THROWS_WITH(shard_of("fc2", shape, fc2, ranks),
                    "`fc2`: 5 slices cannot be divided over 2 expert tensor-parallel ranks");
  CHECK_THROWS_WITH(shard_of("fc1", {7, 8, 5}, fc1, ranks),
                    "`fc1`: 7 experts cannot be divided over 3 expert-parallel ranks");
  const Shard columns = shard_of("fc2", {6, 5, 8}, fc2, ranks);
  CHECK(columns.shape == Shape{2, 5, 4});
  CHECK(columns.first == 4);
  CHECK(ranges(columns) == Ranges{{4, 4}});
  const Shard vectors = shard_of("bias", {6, 5}, bias, ranks);
  CHECK(vectors.shape == Shape{2, 5});
  CHECK(ranges(vectors) == Ranges{{4, 2}});
  CHECK(vectors.first == 0);
  // A dimension on one rank is complete, in one segment.
  const Shard wide = shard_of("fc1", shape, fc1, {.expert = {1, 3}});
  CHECK(ranges(wide) == Ranges{{0, 8}});
  CHECK(wide.first == 2);
  CHECK(fc1.grid() == ParameterGrid::expert);
  CHECK(fc1.over_tensor_ranks());
  CHECK(bias.grid() == ParameterGrid::expert);
  CHECK_FALSE(bias.over_tensor_ranks());
  CHECK(Sharding(ShardingAxis::tensor, 0).grid() == ParameterGrid::dense);
  CHECK(Sharding().dims().empty());
}

TEST_CASE("groups of heads: full ones, or one shared by several ranks") {
  // 3 groups of 4 query heads, a key head and a value head, 2 elements each.
  const Sharding groups{ShardingAxis::tensor, 0, 1, 3, 4};
  const Shape shape{36, 5};
  CHECK(ranges(shard_of("qkv", shape, groups, {.tensor = {1, 3}})) == Ranges{{12, 12}});
  for (const int size : {1, 3, 6, 12}) {
    std::vector<int> owners(36, 0);
    for (int rank = 0; rank < size; ++rank) {
      const Shard shard = shard_of("qkv", shape, groups, {.tensor = {rank, size}});
      int64_t local = 0;
      for (const ShardSegment& segment : shard.segments) {
        local += segment.count;
        for (int64_t i = 0; i < segment.count; ++i)
          if (segment.owned()) ++owners[static_cast<size_t>(segment.global + i)];
      }
      CHECK(local == shard.shape[0]);
      CHECK(local == (size <= 3 ? 36 / size : 24 / size + 4));
    }
    for (const int owner : owners) CHECK(owner == 1);
  }
  // The second half of group 1.
  const Shard second = shard_of("qkv", shape, groups, {.tensor = {3, 6}});
  CHECK(ranges(second) == Ranges{{16, 4}, {20, 4}});
  CHECK(second.segments[1].replicas == 2);
  CHECK(second.segments[1].replica == 1);
  CHECK_THROWS_AS(shard_of("qkv", shape, groups, {.tensor = {0, 2}}), Error);
  CHECK_THROWS_AS(shard_of("qkv", shape, groups, {.tensor = {0, 4}}), Error);
  CHECK_THROWS_AS(shard_of("qkv", shape, groups, {.tensor = {0, 9}}), Error);  // 8 rows of queries over 3
}
