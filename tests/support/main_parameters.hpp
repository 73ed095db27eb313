// A parameter in a store whose shards are full parameters: one rank, or ddp.data_parallel_sharding_strategy
// no_shard.
#pragma once

#include "base/error.hpp"
#include "parallel/flat_store.hpp"

namespace capstan::test {

inline Tensor main_of(const parallel::FlatStore& store, const Parameter& parameter) {
  for (const auto& shard : store.parameter_shards())
    if (shard.parameter == &parameter && shard.range.count == parameter.shape().elements())
      return shard.values();
  fail(ErrorCode::internal, "`" + parameter.name() + "` is sharded on this rank");
}

}  // namespace capstan::test
