// Rotary embedding and scaled dot-product attention on packed QKV.
#pragma once

#include "base/philox.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

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
};

struct AttentionShape {
  QkvLayout qkv;
  int64_t batch = 0, seq = 0;  // tokens are rows b * seq + s
  // Of the logits, above 0, usually 1/sqrt(head_dim).
  float scale = 0;
  // C > 0: scaled logits become c tanh(logit / c) before the mask.
  float softcap = 0;
  // > 0: keys in (position - window, position] are visible; 0: all earlier keys.
  int64_t window = 0;
  bool causal = true;
  float dropout = 0;  // probability; 0 = none
  // Per layer; common/dropout.hpp says at which positions.
  PhiloxKey dropout_key{};
  // Global index of the first local head.
  int64_t head_offset = 0;
};

struct Attention {
  // Rotates the query and key heads in place. cos, sin: fp32 [max_positions, rotary_dim / 2]; position of row
  // r is positions[r]. Pairs are (i, i + rotary_dim/2) (the half-split form), or (2i, 2i+1) when interleaved.
  // inverse: the transposed rotation, which is the backward pass. Rotates only the first rotary_dim elements
  // of each head.
  void (*rope)(Context&, QkvLayout, Out qkv, const float* cos, const float* sin, const int32_t* positions,
               int64_t rows, int64_t rotary_dim, bool interleaved, bool inverse);

  // out [batch*seq, heads*head_dim] = softmax(softcap(scale * q k^T) + mask) v per head; lse [batch, heads,
  // seq] is saved (natural log of the sum of exponentials of the scaled and capped logits). Allocates no seq
  // x seq matrix. document_start [batch*seq]: index within its sequence of the first token of this token's
  // document (0 everywhere = no packing), null = none; keys before it are masked. dropout_rows [batch*seq]
  // only with dropout.
  void (*forward)(Context&, AttentionShape, In qkv, const int32_t* document_start,
                  const int64_t* dropout_rows, Out out, float* lse);
  // dqkv in the layout of qkv, overwritten completely. dout has the type of qkv.
  void (*backward)(Context&, AttentionShape, In qkv, In out, const float* lse, In dout,
                   const int32_t* document_start, const int64_t* dropout_rows, Out dqkv);

  // One step of generation with a cache: appends k and v of the new tokens (qkv [batch*new_tokens, row]) at
  // position `past`, then attends. k_cache, v_cache: [batch, groups, capacity, head_dim]. out
  // [batch*new_tokens, heads*head_dim].
  void (*decode)(Context&, AttentionShape /* seq = new tokens */, In qkv, Out k_cache, Out v_cache,
                 int64_t past, int64_t capacity, Out out);

  WorkspaceSize (*forward_workspace)(AttentionShape, DType qkv);
  WorkspaceSize (*backward_workspace)(AttentionShape, DType qkv);
  WorkspaceSize (*decode_workspace)(AttentionShape, DType qkv, DType cache, int64_t past);
};

}  // namespace capstan::kernels
