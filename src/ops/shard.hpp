// The part of a parameter that one tensor-parallel rank holds. Parameters are described whole (ParamSpec) and cut by
// arithmetic: initialization, checkpoints and gradient sums all read the same cut.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/tensor.hpp"

namespace capstan {

enum class MeshAxis : uint8_t { none, tensor, expert_tensor, expert };

// How the global tensor is cut over a mesh axis: dimension `dim` consists of `blocks` equal blocks (gate and up of a gated
// MLP are two), and each block is cut evenly.
//
// Grouped attention (`groups` > 0, one block): the dimension consists of `groups` groups, each with its queries' slices
// and then `shared` slices of keys and values. Up to `groups` ranks hold whole groups. More ranks are a multiple of it:
// those that share a group hold equal parts of its queries, and all of them its keys and values.
struct Sharding {
  MeshAxis axis = MeshAxis::none;
  int dim = 0;
  int64_t blocks = 1;
  int64_t groups = 0, shared = 0;
};

// Slices of the cut dimension that follow one another in the global tensor.
struct ShardRun {
  int64_t global = 0, count = 0;
  int replicas = 1;  // adjacent ranks that hold the same slices, each with a part of their gradient
  int replica = 0;   // this rank's place among them
  bool owned() const { return replica == 0; }  // counted in the norm and written to checkpoints here
};

struct Shard {
  Shape shape;                 // local
  int dim = 0;                 // the cut dimension
  std::vector<ShardRun> runs;  // in local order, covering `shape[dim]`; empty for a scalar
};

// The shard of rank `rank` of `size`. ErrorCode::config naming `name` when the dimension does not divide.
Shard shard_of(const std::string& name, const Shape& global, const Sharding& sharding, int rank, int size);

}  // namespace capstan
