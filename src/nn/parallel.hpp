// The ranks over which the layers of a model are sharded.
#pragma once

#include <vector>

#include "ops/context_attention.hpp"
#include "ops/row_exchange.hpp"
#include "ops/shard.hpp"
#include "ops/tensor_parallel.hpp"

namespace capstan::nn {

struct Parallel {
  ops::TensorParallel tensor;
  ops::ContextParallel context;
  ops::ExpertParallel experts;
  // The ranks with other tokens of the global batch: `dp-cp`. Null: those of `context`.
  comm::Communicator* data = nullptr;
  // Exchange of each layer; empty: context.exchange for all layers.
  std::vector<ops::ContextExchange> exchange_of_layer;

  ops::ContextParallel context_of(int layer) const {
    ops::ContextParallel result = context;
    if (!exchange_of_layer.empty()) result.exchange = exchange_of_layer.at(static_cast<size_t>(layer));
    return result;
  }
  // The indices by which a parameter's shard is found.
  ShardRanks shard_ranks() const {
    const auto in = [](const comm::Communicator* group) {
      return ShardRanks::AxisRank{static_cast<int>(comm::rank_in(group)),
                                  static_cast<int>(comm::ranks_of(group))};
    };
    return {in(tensor.group), in(experts.expert), in(experts.tensor)};
  }
};

}  // namespace capstan::nn
