// Attention between a block of queries and a block of keys and values, for sequences that are sharded over
// ranks (context parallelism). Masks, documents and dropout use the tokens' global positions, so that all
// blocks together give attention over the full sequence.
#pragma once

#include <algorithm>
#include <array>

#include "kernels/attention.hpp"

namespace capstan::kernels {

struct PositionSegment {
  int64_t begin = 0, count = 0;
  int64_t end() const { return begin + count; }
};
// The global positions of a rank's rows of one sequence, in the order of the rows: at most two segments
// (count 0: no segment).
struct PositionSegments {
  std::array<PositionSegment, 2> segments;
  int64_t rows() const { return segments[0].count + segments[1].count; }
};

struct AttentionBlock {
  // Seq: queries.rows(); qkv: the queries' array.
  AttentionShape shape;
  PositionSegments queries, keys;

  // The array of keys and values: [batch * keys.rows()][groups][2][head_dim], packed QKV without query heads.
  QkvLayout kv() const { return {shape.qkv.groups, 0, shape.qkv.head_dim}; }

  // True where causality and window let any of these queries attend to any of these keys.
  bool sees(PositionSegment q, PositionSegment k) const {
    if (q.count == 0 || k.count == 0) return false;
    const bool future = shape.causal && k.begin >= q.end();
    const bool past = shape.window > 0 && k.end() <= q.begin - shape.window + 1;
    return !future && !past;
  }
  bool sees_anything() const {
    return std::any_of(queries.segments.begin(), queries.segments.end(), [&](PositionSegment q) {
      return std::any_of(keys.segments.begin(), keys.segments.end(),
                         [&](PositionSegment k) { return sees(q, k); });
    });
  }
};

struct ContextAttention {
  // qkv: packed as for Attention::forward; only the query heads are read. kv: AttentionBlock::kv(). out, fp32
  // [batch*seq, heads*head_dim], and lse, fp32 [batch, heads, seq], as Attention::forward gives them, for
  // these keys alone; with `accumulate` combined with the keys that out and lse already include, in any
  // order. document_start, i32 [batch*seq] or null: global position of the first token of the query's
  // document. dropout_rows, i64 [batch*seq], only with dropout.
  void (*forward)(Context&, AttentionBlock, In qkv, In kv, const int32_t* document_start,
                  const int64_t* dropout_rows, bool accumulate, float* out, float* lse);
  // `out` and `lse` cover all keys. Adds the queries' gradient to the query heads of dqkv (fp32, layout of
  // qkv) and does not change its other heads. Overwrites dkv (fp32, layout of kv) with these queries'
  // contribution.
  void (*backward)(Context&, AttentionBlock, In qkv, In kv, In out, const float* lse, In dout,
                   const int32_t* document_start, const int64_t* dropout_rows, float* dqkv, float* dkv);

  WorkspaceSize (*forward_workspace)(AttentionBlock);
  WorkspaceSize (*backward_workspace)(AttentionBlock);
};

}  // namespace capstan::kernels
