// Scaled dot-product attention on views of queries, keys and values.
//
// Bytes moved, besides the sums that stay in fast memory, of e-byte elements and T = batch * seq tokens; Q =
// heads * qk_dim, K = groups * qk_dim, V = groups * v_dim, O = heads * v_dim elements of a token: forward
// reads e T (Q + K + V) and writes e T O and 4 T heads; backward reads e T (Q + K + V + 2 O) and 4 T heads
// and writes e T (Q + K + V). A step of decode reads 2 e groups * head_dim for every cached token.
#pragma once

#include "base/philox.hpp"
#include "kernels/heads.hpp"

namespace capstan::kernels {

struct AttentionShape {
  // Each group of query heads shares one key head and one value head.
  int64_t groups = 0, heads_per_group = 0;
  // Elements of a query head and a key head; of a value head and an output head.
  int64_t qk_dim = 0, v_dim = 0;
  // Tokens are rows b * seq + s.
  int64_t batch = 0, seq = 0;
  // Factor of the logits, above 0, usually 1/sqrt(qk_dim).
  float scale = 0;
  // c > 0: scaled logits become c tanh(logit / c) before the mask.
  float softcap = 0;
  // > 0: a token attends to the keys in (position - window, position]; 0: to all earlier keys.
  int64_t window = 0;
  bool causal = true;
  // Probability; 0 = none.
  float dropout = 0;
  // Per layer; common/dropout.hpp says at which positions.
  PhiloxKey dropout_key{};
  // Global index of the first local head.
  int64_t head_offset = 0;
  int64_t heads() const { return groups * heads_per_group; }
};

// Documents packed into the sequences of a batch, in two equivalent forms; a kernel uses one of them. All
// null: each sequence is one document. Tokens attend to no keys of other documents. The CPU's kernels use
// `start`, and `cu_seqlens` where `start` is null.
struct Documents {
  // [batch * seq]: index within its sequence of the first token of this token's document.
  const int32_t* start = nullptr;
  // [count + 1]: the row of the first token of each document, ascending, and batch * seq at the end. Every
  // sequence begins a document.
  const int32_t* cu_seqlens = nullptr;
  int64_t count = 0;
  // Tokens of the longest document.
  int64_t max_seqlen = 0;
};

// q, k, v, out, dout and the caches have one type. Heads of out and dout are [batch * seq, heads, v_dim] in
// any strides.
struct Attention {
  // out = softmax(softcap(scale * q k^T) + mask) v per head; lse [batch, heads, seq] is saved (natural log of
  // the sum of exponentials of the scaled and capped logits). Allocates no seq x seq matrix. dropout_rows
  // [batch*seq] only with dropout.
  void (*forward)(Context&, AttentionShape, HeadsIn q, HeadsIn k, HeadsIn v, Documents,
                  const int64_t* dropout_rows, HeadsOut out, float* lse);
  // Overwrites every head of dq, dk and dv, whose type may be another one.
  void (*backward)(Context&, AttentionShape, HeadsIn q, HeadsIn k, HeadsIn v, HeadsIn out, const float* lse,
                   HeadsIn dout, Documents, const int64_t* dropout_rows, HeadsOut dq, HeadsOut dk,
                   HeadsOut dv);

  // One step of generation with a cache: appends the keys and values of the new tokens (seq of each sequence)
  // at position `past`, then attends to all of them. k_cache [batch, groups, capacity, qk_dim], v_cache
  // [batch, groups, capacity, v_dim]. past [1], at most capacity - seq, is read when the kernel runs, so that
  // a captured step can be replayed. lse as in `forward`; null: not written.
  void (*decode)(Context&, AttentionShape /* seq = new tokens */, HeadsIn q, HeadsIn k, HeadsIn v,
                 Out k_cache, Out v_cache, const int32_t* past, int64_t capacity, HeadsOut out, float* lse);

  // Workspace for q, k, v and caches of that type; documents: Documents::count.
  WorkspaceSize (*forward_workspace)(AttentionShape, DType, int64_t documents);
  WorkspaceSize (*backward_workspace)(AttentionShape, DType, int64_t documents);
  WorkspaceSize (*decode_workspace)(AttentionShape, DType, int64_t capacity);
};

}  // namespace capstan::kernels
