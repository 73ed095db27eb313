// Heads of queries, keys, values and outputs as views of larger arrays.
#pragma once

#include "base/host_device.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

// Strides of heads, in elements. Head h of group g of token t begins at element t * token + g * group + h *
// head; the elements of a head are consecutive. Keys and values have one head per group, h = 0.
struct HeadStrides {
  int64_t token = 0, group = 0, head = 0;
  CAPSTAN_HOST_DEVICE int64_t at(int64_t t, int64_t g, int64_t h = 0) const {
    return t * token + g * group + h * head;
  }
};
// The first element of head 0 of group 0 of token 0, and the strides from there.
struct HeadsIn {
  In data;
  HeadStrides strides;
};
struct HeadsOut {
  Out data;
  HeadStrides strides;
  operator HeadsIn() const { return {data, strides}; }  // NOLINT: an implicit conversion on purpose
};

// Packed QKV, Megatron's order: each token's row holds, group by group, the group's query heads, its key head
// and its value head: [groups][heads_per_group + 2][head_dim]. A tensor-parallel shard is a contiguous run of
// groups.
struct QkvLayout {
  int64_t groups = 0, heads_per_group = 0, head_dim = 0;
  int64_t heads() const { return groups * heads_per_group; }
  int64_t row() const { return groups * (heads_per_group + 2) * head_dim; }  // elements per token
  int64_t query(int64_t head) const {
    return (head / heads_per_group * (heads_per_group + 2) + head % heads_per_group) * head_dim;
  }
  int64_t key(int64_t group) const { return (group * (heads_per_group + 2) + heads_per_group) * head_dim; }
  int64_t value(int64_t group) const { return key(group) + head_dim; }
  // Strides of queries, keys and values alike, from query(0), key(0) and value(0).
  HeadStrides strides() const { return {row(), (heads_per_group + 2) * head_dim, head_dim}; }
};

}  // namespace capstan::kernels
