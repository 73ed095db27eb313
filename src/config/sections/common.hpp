// Closed choices that more than one section uses.
#pragma once

#include <cstdint>

namespace capstan::config {

// Element type of a stored or computed number, as a recipe names it.
enum class Precision : uint8_t { fp32, bf16, fp16 };

// How parameters, gradients and optimizer state are split over data-parallel ranks (ZeRO 0, 1, 2, 3).
enum class ShardingStrategy : uint8_t { no_shard, optim, optim_grads, optim_grads_params };

}  // namespace capstan::config
