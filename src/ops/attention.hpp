#pragma once

#include "kernels/attention.hpp"
#include "ops/heads.hpp"
#include "ops/rope.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

struct AttentionOptions {
  // Sets groups, heads and their dimensions in `shape`.
  explicit AttentionOptions(const kernels::QkvLayout& qkv);

  kernels::QkvLayout layout;
  // qkv has batch * seq rows.
  kernels::AttentionShape shape;
  // Norm and rotation of queries and keys before attention.
  QueryKeyTransform transform;
  // The documents of these rows; cu_seqlens describes the full sequences.
  Documents documents;
  // i64 [N], only with dropout.
  Tensor dropout_rows;
};

// FLOPs of the forward pass over these rows of sequences of `seq` tokens: 4 head_dim for each query head and
// visible key, on average half of seq when causal. The backward pass counts twice that, the convention of
// model FLOPs.
double attention_flops(const AttentionOptions& options, int64_t seq);

// Scaled dot-product attention: out[N, heads * head_dim] of qkv[N, row]. Saves qkv, out and one fp32
// statistic for each (head, token); the backward pass recomputes the scores, and the transformed queries and
// keys unless they replaced those of qkv. Move qkv in, so that a rotation without a norm happens in place.
Var attention(Tape& tape, Var qkv, const AttentionOptions& options);

// Cached keys and values of one layer: [batch, groups, capacity, head_dim] each.
struct LayerKvCache {
  Tensor k, v;
  static LayerKvCache empty(Device& device, kernels::QkvLayout layout, int64_t batch, int64_t capacity,
                            DType type);
};
// One step of generation: appends the new tokens' keys and values after the `past` cached ones and attends.
// options.shape.seq is the number of new tokens of each sequence; past: i32 [1], at most capacity - seq.
// Records nothing; its FLOPs depend on `past`, which the host does not know. Move qkv in, as for attention().
Var attention_decode(Tape& tape, Var qkv, const AttentionOptions& options, const LayerKvCache& cache,
                     const Tensor& past);

// Whether attention reads the queries and keys of qkv where they are: nothing is to be done, or a rotation,
// whose backward pass needs no input, may overwrite them. The norm's backward pass reads them as they were.
bool transforms_in_place(const Tensor& qkv, const QueryKeyTransform& transform);

}  // namespace capstan::ops
