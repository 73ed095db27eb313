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
  // seq: queries.rows().
  AttentionShape shape;
  PositionSegments queries, keys;

  // True where causality and window let any of these queries attend to any of these keys.
  bool attends_to(PositionSegment q, PositionSegment k) const {
    if (q.count == 0 || k.count == 0) return false;
    const bool future = shape.causal && k.begin >= q.end();
    const bool past = shape.window > 0 && k.end() <= q.begin - shape.window + 1;
    return !future && !past;
  }
  bool attends_to_any() const {
    return std::any_of(queries.segments.begin(), queries.segments.end(), [&](PositionSegment q) {
      return std::any_of(keys.segments.begin(), keys.segments.end(),
                         [&](PositionSegment k) { return attends_to(q, k); });
    });
  }
};

// Tokens are rows b * queries.rows() + s of q, out, dout and dq, and b * keys.rows() + s of k, v, dk and dv.
// q, k and v have one type.
struct ContextAttention {
  // out (fp32) and lse, fp32 [batch, heads, seq], as Attention::forward gives them, for these keys alone;
  // with `accumulate` combined with the keys that out and lse already include, in any order. Documents::start
  // is that of the queries' rows, as global positions; cu_seqlens describes the full sequences. dropout_rows,
  // i64 [batch*seq], only with dropout.
  void (*forward)(Context&, AttentionBlock, HeadsIn q, HeadsIn k, HeadsIn v, Documents,
                  const int64_t* dropout_rows, bool accumulate, HeadsOut out, float* lse);
  // `out` and `lse` cover all keys. dq, dk and dv are fp32. Adds the queries' gradient to dq; overwrites dk
  // and dv with these queries' contribution.
  void (*backward)(Context&, AttentionBlock, HeadsIn q, HeadsIn k, HeadsIn v, HeadsIn out, const float* lse,
                   HeadsIn dout, Documents, const int64_t* dropout_rows, HeadsOut dq, HeadsOut dk,
                   HeadsOut dv);

  // documents: Documents::count.
  WorkspaceSize (*forward_workspace)(AttentionBlock, int64_t documents);
  WorkspaceSize (*backward_workspace)(AttentionBlock, int64_t documents);
};

}  // namespace capstan::kernels
