// A parameter in a store whose pieces are whole: one rank, or ddp.data_parallel_sharding_strategy no_shard.
#pragma once

#include "base/error.hpp"
#include "parallel/flat_store.hpp"

namespace capstan::test {

inline Tensor main_of(const parallel::FlatStore& store, const Parameter& parameter) {
  for (const auto& piece : store.pieces())
    if (piece.parameter == &parameter && piece.range.count == parameter.shape().elements())
      return piece.values;
  fail(ErrorCode::internal, "`" + parameter.name() + "` is not whole on this rank");
}

}  // namespace capstan::test
