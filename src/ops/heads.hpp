// Heads inside tensors, as arguments of attention kernels.
#pragma once

#include "kernels/arguments.hpp"

namespace capstan::ops {

using arguments::contiguous_heads;
using arguments::Documents;
using arguments::Heads;
using arguments::packed_heads;
using arguments::QkvHeads;

// The layout of packed QKV whose row has `row` elements; a tensor-parallel shard holds a consecutive range of
// groups.
inline kernels::QkvLayout qkv_layout(int64_t row, int64_t heads_per_group, int64_t head_dim) {
  const int64_t group = (heads_per_group + 2) * head_dim;
  CAPSTAN_ASSERT(group > 0 && row % group == 0, "attention: a row of " + std::to_string(row) +
                                                    " elements does not consist of full groups of " +
                                                    std::to_string(group));
  return {row / group, heads_per_group, head_dim};
}

// The heads of an output [N, heads * width].
inline Heads output_heads(const Tensor& output, const kernels::QkvLayout& layout, int64_t width) {
  return contiguous_heads(output, layout.groups, layout.heads_per_group, width);
}

}  // namespace capstan::ops
