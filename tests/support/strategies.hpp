// The sharding strategies of data parallelism, for tests that take each of them.
#pragma once

#include "config/sections/config.hpp"

namespace capstan::test {

inline constexpr config::ShardingStrategy kStrategies[] = {
    config::ShardingStrategy::no_shard, config::ShardingStrategy::optim,
    config::ShardingStrategy::optim_grads, config::ShardingStrategy::optim_grads_params};
inline constexpr config::ShardingStrategy kShardedStrategies[] = {
    config::ShardingStrategy::optim, config::ShardingStrategy::optim_grads,
    config::ShardingStrategy::optim_grads_params};

}  // namespace capstan::test
