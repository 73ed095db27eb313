// The ranks among which the layers of a model are cut, as layers see them.
#pragma once

#include <vector>

#include "ops/context_attention.hpp"
#include "ops/tensor_parallel.hpp"

namespace capstan::nn {

struct Parallel {
  ops::TensorParallel tensor;
  ops::ContextParallel context;
  std::vector<ops::ContextExchange> exchange_of_layer;  // where layers differ; empty: all as `context` says

  ops::ContextParallel context_of(int layer) const {
    ops::ContextParallel result = context;
    if (!exchange_of_layer.empty()) result.exchange = exchange_of_layer.at(static_cast<size_t>(layer));
    return result;
  }
};

}  // namespace capstan::nn
