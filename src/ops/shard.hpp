// The shard of a parameter that one tensor-parallel rank holds. ParamSpec describes the global parameter;
// initialization, checkpoints and gradient sums all use the same arithmetic to find a rank's shard.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/tensor.hpp"

namespace capstan {

// The kind of parallelism that divides a parameter.
enum class ShardingAxis : uint8_t { none, tensor };

// How the global tensor is sharded over the ranks of `axis`: dimension `dim` consists of `blocks` equal
// blocks (gate and up of a gated MLP are two), and each block is divided evenly.
//
// Grouped attention (`groups` > 0, one block): the dimension consists of `groups` groups, each with its query
// slices and then `shared` slices of keys and values. Up to `groups` ranks hold complete groups. A larger
// number of ranks is a multiple of `groups`: the ranks that share a group hold equal shares of its queries
// and all of its keys and values.
struct Sharding {
  ShardingAxis axis = ShardingAxis::none;
  int dim = 0;
  int64_t blocks = 1;
  int64_t groups = 0, shared = 0;
};

// Consecutive slices of the sharded dimension of the global tensor.
struct ShardSegment {
  int64_t global = 0, count = 0;
  // Adjacent ranks that hold the same slices, each with a partial gradient.
  int replicas = 1;
  // Index of this rank among these ranks.
  int replica = 0;
  // Counted in the norm and written to checkpoints here.
  bool owned() const { return replica == 0; }
};

struct Shard {
  // Shape of this rank's shard.
  Shape shape;
  // The sharded dimension.
  int dim = 0;
  // In local order, covering `shape[dim]`; empty for a scalar.
  std::vector<ShardSegment> segments;
};

// The shard of rank `rank` of `size`. ErrorCode::config naming `name` when the dimension does not divide.
Shard shard_of(const std::string& name, const Shape& global, const Sharding& sharding, int rank, int size);

}  // namespace capstan
