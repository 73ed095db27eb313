// Data parallelism: how gradients are reduced and what is sharded over data-parallel ranks.
#pragma once

#include <cstdint>
#include <optional>

#include "config/sections/common.hpp"

namespace capstan::config {

struct DdpConfig {
  ShardingStrategy data_parallel_sharding_strategy = ShardingStrategy::no_shard;
  ShardingStrategy outer_dp_sharding_strategy = ShardingStrategy::no_shard;
  int64_t num_distributed_optimizer_instances = 1;
  bool overlap_grad_reduce = false;
  bool overlap_param_gather = false;
  bool align_param_gather = false;
  // Derived: max(40 000 000, 1 000 000 * data-parallel size).
  std::optional<int64_t> bucket_size;
};

}  // namespace capstan::config
