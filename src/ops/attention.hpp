#pragma once

#include "kernels/attention.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// The layout of packed QKV whose row has `row` elements; a tensor-parallel shard holds a consecutive range of
// groups.
kernels::QkvLayout qkv_layout(int64_t row, int64_t heads_per_group, int64_t head_dim);

struct AttentionOptions {
  kernels::QkvLayout layout;
  // Qkv has batch * seq rows.
  int64_t batch = 0, seq = 0;
  float scale = 0;
  // c > 0: scores become c tanh(score / c).
  float softcap = 0;
  int64_t window = 0;  // 0: none
  bool causal = true;
  float dropout = 0;
  PhiloxKey dropout_key{};
  // Global index of the first query head here.
  int64_t head_offset = 0;
  Tensor document_start;  // i32 [N] or undefined
  // i64 [N], only with dropout.
  Tensor dropout_rows;
};

kernels::AttentionShape attention_shape(const AttentionOptions& options);
// FLOPs of the forward pass over these rows of sequences of `seq` tokens: 4 head_dim for each query head and
// visible key, on average half of seq when causal. The backward pass counts twice that, the convention of
// model FLOPs.
double attention_flops(const AttentionOptions& options, int64_t seq);

// Scaled dot-product attention: out[N, heads * head_dim] of qkv[N, row]. Saves qkv, out and one fp32
// statistic for each (head, token); the backward pass recomputes the scores.
Var attention(Tape& tape, const Var& qkv, const AttentionOptions& options);

// Cached keys and values of one layer: [batch, groups, capacity, head_dim] each.
struct KvCache {
  Tensor k, v;
  static KvCache empty(Device& device, kernels::QkvLayout layout, int64_t batch, int64_t capacity,
                       DType type);
};
// One step of generation: appends the new tokens' keys and values at position `past` and attends. options.seq
// is the number of new tokens of each sequence. Records nothing.
Var attention_decode(Tape& tape, const Var& qkv, const AttentionOptions& options, const KvCache& cache,
                     int64_t past);

}  // namespace capstan::ops
