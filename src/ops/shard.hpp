// The shard of a parameter that one rank holds. ParamSpec describes the global parameter; initialization,
// checkpoints and gradient sums all use the same arithmetic to find a rank's shard.
//
// A parameter belongs to one of two grids of ranks (comm/mesh.hpp). Dense parameters are sharded over the
// tensor-parallel ranks. Expert parameters, whose dimension 0 are the experts, are sharded over the
// expert-parallel ranks, and the width of each expert over the expert tensor-parallel ranks: fc1 [experts,
// out, in] as {{expert, 0}, {expert_tensor, 1, 2}} if it is gated, fc2 [experts, out, in] as {{expert, 0},
// {expert_tensor, 2}}.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "tensor/tensor.hpp"

namespace capstan {

// The kind of parallelism that divides a dimension of a parameter.
enum class ShardingAxis : uint8_t { tensor, expert, expert_tensor };

// The grid of ranks over which a parameter is sharded and its gradients are summed.
enum class ParameterGrid : uint8_t { dense, expert };
inline constexpr ParameterGrid kParameterGrids[] = {ParameterGrid::dense, ParameterGrid::expert};

// How a dimension of the global tensor is sharded over the ranks of `axis`: dimension `dim` consists of
// `blocks` equal blocks (gate and up of a gated MLP are two), and each block is divided evenly.
//
// Grouped attention (`groups` > 0, one block): the dimension consists of `groups` groups, each with its query
// slices and then `shared` slices of keys and values. Up to `groups` ranks hold complete groups. A larger
// number of ranks is a multiple of `groups`: the ranks that share a group hold equal shares of its queries
// and all of its keys and values.
struct DimSharding {
  ShardingAxis axis = ShardingAxis::tensor;
  int dim = 0;
  int64_t blocks = 1;
  int64_t groups = 0, shared = 0;
};

// The sharding of a parameter: different dimensions over different axes, in ascending order of the
// dimensions. At most two dimensions are sharded, of which the first is then dimension 0, in one block.
class Sharding {
 public:
  // Every rank holds the full parameter.
  Sharding() = default;
  Sharding(ShardingAxis axis, int dim, int64_t blocks = 1, int64_t groups = 0, int64_t shared = 0)
      : dims_{{axis, dim, blocks, groups, shared}} {}
  Sharding(std::initializer_list<DimSharding> dims) : dims_(dims) {}

  std::span<const DimSharding> dims() const { return dims_; }
  // Null: not sharded over this axis.
  const DimSharding* over(ShardingAxis axis) const {
    for (const DimSharding& dim : dims_)
      if (dim.axis == axis) return &dim;
    return nullptr;
  }
  ParameterGrid grid() const {
    return over(ShardingAxis::expert) ? ParameterGrid::expert : ParameterGrid::dense;
  }
  // Whether the tensor-parallel ranks of the parameter's grid hold different parts of it.
  bool over_tensor_ranks() const {
    return over(grid() == ParameterGrid::expert ? ShardingAxis::expert_tensor : ShardingAxis::tensor) !=
           nullptr;
  }

 private:
  std::vector<DimSharding> dims_;
};

// The index of this rank among the ranks of each axis, and their number.
struct ShardRanks {
  struct AxisRank {
    int rank = 0, size = 1;
  };
  AxisRank tensor, expert, expert_tensor;

  const AxisRank& of(ShardingAxis axis) const {
    if (axis == ShardingAxis::tensor) return tensor;
    return axis == ShardingAxis::expert ? expert : expert_tensor;
  }
};

// Consecutive slices of a sharded dimension of the global tensor.
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
  // The last sharded dimension.
  int dim = 0;
  // In local order, covering `shape[dim]`; empty for a scalar.
  std::vector<ShardSegment> segments;
  // Global index of the first slice of dimension 0, if that is sharded and is not `dim`.
  int64_t first = 0;
};

// The shard of the rank with these indices. ErrorCode::config naming `name` when a dimension does not divide.
Shard shard_of(const std::string& name, const Shape& global, const Sharding& sharding,
               const ShardRanks& ranks);

}  // namespace capstan
