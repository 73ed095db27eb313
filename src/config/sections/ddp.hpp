// Data parallelism: how gradients are reduced and what is sharded over data-parallel ranks.
#pragma once

#include <cstdint>
#include <optional>

#include "config/sections/common.hpp"

namespace capstan::config {

struct DdpConfig {
  ShardingStrategy data_parallel_sharding_strategy = ShardingStrategy::no_shard;
  ShardingStrategy outer_dp_sharding_strategy =
      ShardingStrategy::no_shard;                   // between groups (HSDP): no_shard | optim
  int64_t num_distributed_optimizer_instances = 1;  // HSDP: groups that each hold a whole copy of the state
  bool overlap_grad_reduce = false;                 // reduce buckets while backward runs
  bool overlap_param_gather = false;                // gather parameters under the forward
  bool align_param_gather = false;
  std::optional<int64_t> bucket_size;  // parameters; derived: max(40 000 000, 1 000 000 * data-parallel size)
};

}  // namespace capstan::config
