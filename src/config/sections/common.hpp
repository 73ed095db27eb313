// Closed choices that more than one section uses.
#pragma once

#include <cstdint>

#include "config/core/types.hpp"

namespace capstan::config {

// Element type of a stored or computed number, as a recipe names it.
enum class Precision : uint8_t { fp32, bf16, fp16 };

// How parameters, gradients and optimizer state are split over data-parallel ranks (ZeRO 0, 1, 2, 3).
enum class ShardingStrategy : uint8_t { no_shard, optim, optim_grads, optim_grads_params };

template <>
struct EnumNames<Precision> {
  static constexpr EnumEntry<Precision> list[] = {
      {Precision::fp32, "fp32", "32-bit floating point", "float32 torch.float32 32"},
      {Precision::bf16, "bf16", "bfloat16: 8 exponent bits, 7 mantissa bits", "bfloat16 torch.bfloat16"},
      {Precision::fp16, "fp16", "IEEE half precision: 5 exponent bits, 10 mantissa bits",
       "float16 half torch.float16"},
  };
};

template <>
struct EnumNames<ShardingStrategy> {
  static constexpr EnumEntry<ShardingStrategy> list[] = {
      {ShardingStrategy::no_shard, "no_shard", "all state is replicated (ZeRO-0)"},
      {ShardingStrategy::optim, "optim", "optimizer state is sharded (ZeRO-1)", "zero1"},
      {ShardingStrategy::optim_grads, "optim_grads", "optimizer state and gradients are sharded (ZeRO-2)",
       "zero2"},
      {ShardingStrategy::optim_grads_params, "optim_grads_params",
       "optimizer state, gradients and parameters are sharded (ZeRO-3, FSDP)", "zero3"},
  };
};

}  // namespace capstan::config
