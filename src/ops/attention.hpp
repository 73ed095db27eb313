#pragma once

#include "kernels/attention.hpp"
#include "ops/heads.hpp"
#include "ops/rope.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// A further logit of each head in the denominator of its softmax, without a value
// (kernels/attention_sink.hpp).
struct AttentionSink {
  bool present = false;
  // The logits [heads]; null: all are 0.
  const Parameter* logits = nullptr;

  // Changes the output of attention and its statistic lse, fp32 [batch, heads, seq]. shape: that of
  // attention; its heads are those of the parameter from `first_head` on.
  void apply(StepContext& context, const kernels::AttentionShape& shape, int64_t first_head, const Heads& out,
             const Tensor& lse) const;
  // Schedules the gradient of the logits, from the saved results of apply().
  void backward(BackwardContext& ctx, const kernels::AttentionShape& shape, int64_t first_head,
                const Heads& out, const Tensor& lse, const Heads& dout) const;
};

struct AttentionOptions {
  // Sets groups, heads and their dimensions in `shape`. Queries and keys, or values, may be narrower than the
  // heads of the layout: attention then reads their first shape.qk_dim or shape.v_dim elements, and the
  // gradient of the others is zero.
  explicit AttentionOptions(const kernels::QkvLayout& qkv);

  kernels::QkvLayout layout;
  // qkv has batch * seq rows.
  kernels::AttentionShape shape;
  // Norm and rotation of queries and keys before attention.
  QueryKeyTransform transform;
  AttentionSink sink;
  // The documents of these rows; cu_seqlens describes the full sequences.
  Documents documents;
  // i64 [N], only with dropout.
  Tensor dropout_rows;

  // Those of the transform and of the sink.
  std::vector<const Parameter*> parameters() const;
};

// Memory for packed rows of which attention writes queries, keys and values: zeros where they leave gaps.
Tensor packed_rows(Device& device, const Shape& rows, DType type, const kernels::QkvLayout& layout,
                   const kernels::AttentionShape& shape);

// FLOPs of the forward pass over these rows of sequences of `seq` tokens: 2 (qk_dim + v_dim) for each query
// head and visible key, on average half of seq when causal. The backward pass counts twice that, the
// convention of model FLOPs.
double attention_flops(const AttentionOptions& options, int64_t seq);

// Scaled dot-product attention: out[N, heads * v_dim] of qkv[N, row]. Saves qkv, out and one fp32
// statistic for each (head, token); the backward pass recomputes the scores, and the transformed queries and
// keys unless they replaced those of qkv. Move qkv in, so that a rotation without a norm happens in place.
Var attention(Tape& tape, Var qkv, const AttentionOptions& options);

// Cached keys [batch, groups, capacity, qk_dim] and values [batch, groups, capacity, v_dim] of one layer.
struct LayerKvCache {
  Tensor k, v;
  static LayerKvCache empty(Device& device, const kernels::AttentionShape& shape, int64_t capacity,
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
