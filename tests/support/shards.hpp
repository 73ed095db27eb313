// Full tensors and their shards, as host values: the plain arithmetic that parallel layers
// are held to.
#pragma once

#include <vector>

#include "nn/initialize.hpp"
#include "ops/parameter.hpp"

namespace capstan::test {

// Calls visit(index in the local shard, index in the global tensor, the segment) for every element.
template <class Visit>
void for_each_element(const Parameter& parameter, Visit&& visit) {
  const Shard& shard = parameter.shard();
  const Shape &local = shard.shape, &global = parameter.spec().shape;
  int64_t inner = 1, outer = 1;
  for (int d = shard.dim + 1; d < local.rank(); ++d) inner *= local[d];
  for (int d = 0; d < shard.dim; ++d) outer *= local[d];
  // Index of the shard's first slice of dimension 0, over all dimensions before `dim`.
  const int64_t first = shard.dim > 0 ? shard.first * (outer / local[0]) : 0;
  for (int64_t o = 0; o < outer; ++o) {
    int64_t slice = 0;
    for (const ShardSegment& segment : shard.segments)
      for (int64_t s = 0; s < segment.count; ++s, ++slice)
        for (int64_t i = 0; i < inner; ++i)
          visit((o * local[shard.dim] + slice) * inner + i,
                ((first + o) * global[shard.dim] + segment.global + s) * inner + i, segment);
  }
}

inline std::vector<float> shard_of(const Parameter& parameter, const std::vector<float>& full) {
  std::vector<float> part(static_cast<size_t>(parameter.shape().elements()));
  for_each_element(parameter, [&](int64_t local, int64_t global, const ShardSegment&) {
    part[static_cast<size_t>(local)] = full[static_cast<size_t>(global)];
  });
  return part;
}

inline std::vector<float> initial_values(const ParamSpec& spec, uint64_t seed) {
  ThreadPool pool(1);
  std::vector<float> values(static_cast<size_t>(spec.shape.elements()));
  nn::initialize(spec, seed, full_region(spec.shape), values, pool);
  return values;
}

}  // namespace capstan::test
