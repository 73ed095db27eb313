// The layout of parameters in buckets. It follows from the list of parameters alone, so that ranks with the
// same list have the same layout.
//
// A bucket is a flat array of full parameters, each aligned to 64 elements, padded to a multiple of 64 x the
// ranks that it may be sharded over, so that the shards are equal. Buckets are filled from the end of the
// list, which is the order in which gradients become ready. Dense and expert parameters are in different
// buckets, because they are sharded over different ranks; so are trainable and frozen parameters, those that
// are updated by a matrix optimizer (Muon) and other trainable ones, and those that ranks all-gather as FP8
// codes and others. A tied parameter has a bucket of its own, so that it is sharded in the same way on both
// of its stages.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/parameter.hpp"
#include "tensor/flat_range.hpp"

namespace capstan::parallel {

struct BucketPlan {
  ParameterGrid grid = ParameterGrid::dense;
  bool trainable = true;
  // Holds parameters that are updated by a matrix optimizer (Muon).
  bool matrices = false;
  // Holds parameters that ranks all-gather as FP8 codes.
  bool codes = false;
  // Index of the block of its last parameter (with by_block, of all its parameters).
  size_t block = 0;
  // Elements, padding included.
  int64_t elements = 0;
  std::vector<const Parameter*> parameters;
  // Offset of each parameter in the bucket, elements.
  std::vector<int64_t> begins;
};

struct BucketLayout {
  std::vector<BucketPlan> buckets;
  // ParamSpec::block, in the order of the list.
  std::vector<std::string> blocks;
  struct Position {
    size_t bucket;
    int64_t begin;
  };
  static constexpr size_t kNoBucket = static_cast<size_t>(-1);
  // Position of each parameter, by Parameter::index(). Bucket kNoBucket: the parameter is in no bucket, as
  // those with ParamSpec::buffer.
  std::vector<Position> positions;
  // Number of elements of all parameters, without padding.
  int64_t elements = 0;
};

struct BucketOptions {
  // A bucket is full when it has this number of elements.
  int64_t bucket_elements = 40'000'000;
  // Ranks that a bucket of dense parameters may be sharded over, and one of expert parameters.
  int64_t shards = 1, expert_shards = 1;
  // Ranks that each hold a copy of a tied parameter, and sum its gradients, each a part of them; null: one.
  std::function<int64_t(const Parameter&)> holders;
  // A bucket ends where its ParamSpec::block does.
  bool by_block = false;
  // Trainable parameters; null: all.
  std::function<bool(const Parameter&)> trainable;
  // Parameters that are updated by a matrix optimizer (Muon); null: none.
  std::function<bool(const Parameter&)> matrices;
  // Trainable parameters that ranks all-gather as FP8 codes; null: none.
  std::function<bool(const Parameter&)> codes;
  // Other parameters that are in no bucket; null: none.
  std::function<bool(const Parameter&)> excluded;
};

// Elements of a bucket with sharded gradients unless they are given: a sixteenth of those that a rank trains,
// so that the buffers of the buckets that are computed and reduced take less than sharding saves; from
// 1 million to 40 million, or to 1 million for each of the ranks.
int64_t default_bucket_elements(int64_t trained, int64_t shards);

BucketLayout plan_buckets(std::span<const std::unique_ptr<Parameter>> parameters,
                          const BucketOptions& options);

// The elements of a local shard, row-major, that lie in its `segment`-th segment, as ranges in their order.
std::vector<FlatRange> elements_of_segment(const Shard& shard, size_t segment);

// The slice of `range` that replica `replica` writes, where `replicas` ranks hold the same elements. The
// slices are disjoint and cover the range. They have a minimum size, so that small ranges have fewer slices
// than replicas; `rotation` rotates them: replica r gets slice (r + rotation) % replicas.
FlatRange replica_slice(const FlatRange& range, int64_t replica, int64_t replicas, int64_t rotation);

}  // namespace capstan::parallel
