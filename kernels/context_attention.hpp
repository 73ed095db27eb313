// Attention when the tokens of a sequence are cut over ranks (context parallelism): some rows' queries against some rows' keys and
// values, as parts of the whole. Masks, documents and dropout go by the tokens' global positions, so that all parts together
// are attention of the whole sequence.
#pragma once

#include <algorithm>
#include <array>

#include "kernels/attention.hpp"

namespace capstan::kernels {

struct PositionRun {
  int64_t begin = 0, count = 0;
  int64_t end() const { return begin + count; }
};
// The global positions of a rank's rows of one sequence, in the order of the rows: at most two runs (count 0: no run).
struct PositionRuns {
  std::array<PositionRun, 2> runs;
  int64_t rows() const { return runs[0].count + runs[1].count; }
};

struct AttentionPart {
  AttentionShape shape;  // seq: rows of queries of each sequence, queries.rows(); qkv: of the queries' array
  PositionRuns queries, keys;

  // The array of keys and values: [batch * keys.rows()][groups][2][head_dim], packed QKV without query heads.
  QkvLayout kv() const { return {shape.qkv.groups, 0, shape.qkv.head_dim}; }

  // Whether any of these queries sees any of these keys, as far as causality and window say.
  bool sees(PositionRun q, PositionRun k) const {
    if (q.count == 0 || k.count == 0) return false;
    const bool future = shape.causal && k.begin >= q.end();
    const bool past = shape.window > 0 && k.end() <= q.begin - shape.window + 1;
    return !future && !past;
  }
  bool sees_anything() const {
    return std::any_of(queries.runs.begin(), queries.runs.end(), [&](PositionRun q) {
      return std::any_of(keys.runs.begin(), keys.runs.end(), [&](PositionRun k) { return sees(q, k); });
    });
  }
};

struct ContextAttention {
  // Packed QKV as Attention::forward has it, of which the query heads are read; kv: AttentionPart::kv().
  // out, fp32 [batch*seq, heads*head_dim], and lse, fp32 [batch, heads, seq], as Attention::forward gives them, of these
  // keys alone; with `accumulate` of these keys and those that out and lse hold already: parts in any order are the whole.
  // document_start, i32 [batch*seq] or null: global position of the first token of the query's document. row_ids,
  // i64 [batch*seq], only with dropout.
  void (*forward)(Context&, AttentionPart, In qkv, In kv, const int32_t* document_start,
                  const int64_t* row_ids, bool accumulate, float* out, float* lse);
  // From the out and lse of all keys. Adds the queries' gradient to the query heads of dqkv, fp32 in the layout of qkv, and
  // leaves its other heads alone. dkv, fp32 in the layout of kv, is these queries' part of the gradient, overwritten completely.
  void (*backward)(Context&, AttentionPart, In qkv, In kv, In out, const float* lse, In dout,
                   const int32_t* document_start, const int64_t* row_ids, float* dqkv, float* dkv);

  // What `forward` and `backward` take of Context::scratch.
  WorkspaceSize (*forward_scratch)(AttentionPart);
  WorkspaceSize (*backward_scratch)(AttentionPart);
};

}  // namespace capstan::kernels
