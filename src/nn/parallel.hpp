// The ranks over which the layers of a model are sharded.
#pragma once

#include <vector>

#include "ops/context_attention.hpp"
#include "ops/tensor_parallel.hpp"

namespace capstan::nn {

struct Parallel {
  ops::TensorParallel tensor;
  ops::ContextParallel context;
  // Exchange of each layer; empty: context.exchange for all layers.
  std::vector<ops::ContextExchange> exchange_of_layer;

  ops::ContextParallel context_of(int layer) const {
    ops::ContextParallel result = context;
    if (!exchange_of_layer.empty()) result.exchange = exchange_of_layer.at(static_cast<size_t>(layer));
    return result;
  }
};

}  // namespace capstan::nn
