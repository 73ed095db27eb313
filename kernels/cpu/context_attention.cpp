// Attention between shards of a sequence. A segment of queries and a segment of keys, both at consecutive
// positions, are computed as in attention.cpp; a shard has up to two segments of each.
#include "kernels/context_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/context_attention.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention_core-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// The first row of a segment in a sequence's shard.
HWY_INLINE int64_t first_row(const PositionSegments& rows, int segment) {
  return segment == 0 ? 0 : rows.segments[0].count;
}
HWY_INLINE bool seen(const AttentionBlock& a, PositionSegment keys) {
  return a.sees(a.queries.segments[0], keys) || a.sees(a.queries.segments[1], keys);
}
HWY_INLINE Mask mask_of(const AttentionBlock& a, PositionSegment keys, const int32_t* document_start,
                        int64_t first_query) {
  return {a.shape.causal, a.shape.window, keys.count, document_start ? document_start + first_query : nullptr,
          keys.begin};
}
HWY_INLINE DropoutMask dropout_mask(const AttentionBlock& a, PositionSegment keys, int64_t head) {
  return {a.shape.dropout, a.shape.dropout_key, static_cast<uint64_t>(a.shape.head_offset + head),
          keys.begin};
}
template <class T>
HWY_INLINE T* moved(T* p, int64_t by) {
  return p ? p + by : nullptr;
}

// ---- forward

// Offsets of the panels of each segment of keys in those of one group of one sequence: keys, then values.
// Segments invisible to all queries have none.
struct RunPanels {
  int64_t at[2], values[2], floats = 0;
  explicit RunPanels(const AttentionBlock& a) {
    const int64_t d = a.shape.qkv.head_dim;
    for (int r = 0; r < 2; ++r) {
      const PositionSegment segment = a.keys.segments[static_cast<size_t>(r)];
      at[r] = floats;
      values[r] = floats + Vectors::columns_size(segment.count, d);
      if (seen(a, segment)) floats = values[r] + Vectors::depth_size(segment.count, d);
    }
  }
};

WorkspaceSize forward_workspace(AttentionBlock a) {
  return {static_cast<size_t>(a.shape.batch * a.shape.qkv.groups * RunPanels(a).floats) * sizeof(float),
          ForwardScratch<Vectors>(nullptr, a.shape.qkv.head_dim).floats * sizeof(float)};
}

// Resumes a block of queries from an earlier call: the sum of its exponentials is that of one key with the
// logit lse.
HWY_INLINE void resume_rows(const ForwardScratch<Vectors>& s, const Block<Vectors>& b, int64_t d,
                            const float* out, int64_t out_stride, const float* lse) {
  init_softmax_rows(s, b, d);
  for (int64_t i = 0; i < b.nq; ++i) {
    std::memcpy(s.out + i * d, out + i * out_stride, static_cast<size_t>(d) * sizeof(float));
    s.max[i] = lse[i];
    s.sum[i] = lse[i] == -kInfinity ? 0.0f : 1.0f;
  }
}

void forward(Context& c, AttentionBlock a, In qkv, In kv, const int32_t* document_start,
             const int64_t* dropout_rows, bool accumulate, float* out, float* lse) {
  const QkvLayout layout = a.shape.qkv, kv_layout = a.kv();
  const int64_t heads = layout.heads(), groups = layout.groups, per_group = layout.heads_per_group,
                d = layout.head_dim, row = layout.row(), kv_row = kv_layout.row(), seq = a.queries.rows(),
                keys = a.keys.rows();
  const RunPanels panels(a);
  const WorkspaceParts workspace(c, forward_workspace(a));
  if (!workspace) return;
  auto* packed = workspace.shared<float>();

  for (int r = 0; r < 2; ++r) {
    const PositionSegment segment = a.keys.segments[static_cast<size_t>(r)];
    if (!seen(a, segment)) continue;
    const int64_t slab = 8 * kNr, slabs = ceil_div(segment.count, slab);
    c.pool->parallel_for(a.shape.batch * groups * slabs, [&](int64_t tile, int) HWY_ATTR {
      const int64_t first = tile % slabs * slab, n = std::min(slab, segment.count - first),
                    group = tile / slabs % groups;
      const int64_t token = tile / slabs / groups * keys + first_row(a.keys, r);
      float* to = packed + tile / slabs * panels.floats;
      Vectors::pack_columns({kv, token * kv_row + kv_layout.key(group), kv_row}, first, n, segment.count, d,
                            to + panels.at[r]);
      Vectors::pack_depth({kv, token * kv_row + kv_layout.value(group), kv_row}, first, n, segment.count, d,
                          to + panels.values[r]);
    });
  }

  // As in attention.cpp: neighboring tiles share keys and values, later blocks run first.
  const int64_t blocks_before = ceil_div(a.queries.segments[0].count, Vectors::kQueries),
                blocks = blocks_before + ceil_div(a.queries.segments[1].count, Vectors::kQueries);
  c.pool->parallel_for(a.shape.batch * heads * blocks, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t head_in_group = tile % per_group, block = blocks - 1 - tile / per_group % blocks;
    const int64_t group = tile / per_group / blocks % groups, b = tile / per_group / blocks / groups;
    const int64_t head = group * per_group + head_in_group;
    const int query_segment = block < blocks_before ? 0 : 1;
    const PositionSegment queries = a.queries.segments[static_cast<size_t>(query_segment)];
    const int64_t q0 = (block - (query_segment ? blocks_before : 0)) * Vectors::kQueries,
                  n = std::min(Vectors::kQueries, queries.count - q0),
                  first_query = b * seq + first_row(a.queries, query_segment) + q0;  // row of all queries
    const ForwardScratch<Vectors> s(workspace.worker<float>(worker), d);
    float* out_rows = out + first_query * heads * d + head * d;
    float* lse_rows = lse + (b * heads + head) * seq + first_query - b * seq;

    Vectors::LeftOperand q{nullptr, 0};
    for (int r = 0; r < 2; ++r) {
      const PositionSegment segment = a.keys.segments[static_cast<size_t>(r)];
      if (!a.sees({queries.begin + q0, n}, segment)) continue;
      Block<Vectors> scores(mask_of(a, segment, document_start, first_query), 0, n, queries.begin + q0);
      if (scores.begin >= scores.end) continue;
      if (!q.at) {
        q = Vectors::pack_left({qkv, first_query * row + layout.query(head), row}, n, d, s.q);
        if (accumulate)
          resume_rows(s, scores, d, out_rows, heads * d, lse_rows);
        else
          init_softmax_rows(s, scores, d);
      }
      const float* group_panels = packed + (b * groups + group) * panels.floats;
      attend(s, scores, q, {group_panels + panels.at[r], group_panels + panels.values[r], segment.count}, d,
             {a.shape.scale, a.shape.softcap}, dropout_mask(a, segment, head),
             moved(dropout_rows, first_query));
    }
    if (!q.at) {  // no visible keys
      for (int64_t i = 0; i < n && !accumulate; ++i) {
        std::memset(out_rows + i * heads * d, 0, static_cast<size_t>(d) * sizeof(float));
        lse_rows[i] = -kInfinity;
      }
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      const bool nothing = s.max[i] == -kInfinity;
      write_row({out_rows, DType::f32}, i * heads * d, s.out + i * d, nothing ? 0.0f : 1.0f / s.sum[i], d);
      lse_rows[i] = nothing ? -kInfinity : s.max[i] + std::log(s.sum[i]);
    }
  });
}

// ---- backward

struct LongestRuns {
  int64_t queries, keys;
  explicit LongestRuns(const AttentionBlock& a)
      : queries(std::max(a.queries.segments[0].count, a.queries.segments[1].count)),
        keys(std::max(a.keys.segments[0].count, a.keys.segments[1].count)) {}
};

WorkspaceSize backward_workspace(AttentionBlock a) {
  const LongestRuns longest(a);
  return {0, BackwardScratch<Vectors>(nullptr, longest.queries, longest.keys, a.shape.qkv.head_dim).floats *
                 sizeof(float)};
}

HWY_INLINE void add_row(float* to, const float* from, float factor, int64_t cols) {
  const VF f = splat(factor);
  for_vectors(
      cols, [&](int64_t i) HWY_ATTR { store(hn::MulAdd(f, load(from + i), load(to + i)), to + i); },
      [&](int64_t i, int64_t n)
          HWY_ATTR { store_part(hn::MulAdd(f, load_part(from + i, n), load_part(to + i, n)), to + i, n); });
}

// One tile computes all heads of one group of one sequence, one segment of keys after the other.
void backward(Context& c, AttentionBlock a, In qkv, In kv, In out, const float* lse, In dout,
              const int32_t* document_start, const int64_t* dropout_rows, float* dqkv, float* dkv) {
  const QkvLayout layout = a.shape.qkv, kv_layout = a.kv();
  const int64_t heads = layout.heads(), groups = layout.groups, per_group = layout.heads_per_group,
                d = layout.head_dim, row = layout.row(), kv_row = kv_layout.row(), seq = a.queries.rows(),
                keys = a.keys.rows();
  const WorkspaceParts workspace(c, backward_workspace(a));
  if (!workspace) return;
  const LongestRuns longest(a);

  c.pool->parallel_for(a.shape.batch * groups, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t b = tile / groups, group = tile % groups;
    const BackwardScratch<Vectors> s(workspace.worker<float>(worker), longest.queries, longest.keys, d);
    for (int r = 0; r < 2; ++r) {
      const PositionSegment segment = a.keys.segments[static_cast<size_t>(r)];
      if (segment.count == 0) continue;
      const int64_t key_at = (b * keys + first_row(a.keys, r)) * kv_row + kv_layout.key(group);
      if (!seen(a, segment)) {
        for (int64_t i = 0; i < segment.count; ++i)
          std::memset(dkv + key_at + i * kv_row, 0, static_cast<size_t>(2 * d) * sizeof(float));
        continue;
      }
      pack_keys(s, {kv, key_at, kv_row}, {kv, key_at + d, kv_row}, segment.count, d);
      for (int64_t h = 0; h < per_group; ++h)
        for (int query_segment = 0; query_segment < 2; ++query_segment) {
          const PositionSegment queries = a.queries.segments[static_cast<size_t>(query_segment)];
          if (!a.sees(queries, segment)) continue;
          const int64_t head = group * per_group + h, first = first_row(a.queries, query_segment),
                        first_query = b * seq + first, query_at = first_query * row + layout.query(head),
                        out_at = first_query * heads * d + head * d;
          const QueryRows rows{{qkv, query_at, row},
                               {out, out_at, heads * d},
                               {dout, out_at, heads * d},
                               lse + (b * heads + head) * seq + first,
                               moved(dropout_rows, first_query),
                               queries.count};
          const Mask mask = mask_of(a, segment, document_start, first_query);
          pack_queries(s, rows, d);
          for (int64_t q0 = 0; q0 < queries.count; q0 += Vectors::kQueries) {
            Block<Vectors> block(mask, q0, std::min(Vectors::kQueries, queries.count - q0),
                                 queries.begin + q0);
            if (block.begin >= block.end) continue;
            backward_block(s, block, rows, segment.count, d, {a.shape.scale, a.shape.softcap},
                           dropout_mask(a, segment, head));
            for (int64_t i = 0; i < block.nq; ++i)
              add_row(dqkv + query_at + (q0 + i) * row, s.dq + i * d, a.shape.scale, d);
          }
        }
      for_key_rows(s, segment.count, d, [&](int64_t i, const float* dk, const float* dv) HWY_ATTR {
        const int64_t to = key_at + i * kv_row;
        write_row({dkv, DType::f32}, to, dk, a.shape.scale, d);
        write_row({dkv, DType::f32}, to + d, dv, 1.0f, d);
      });
    }
  });
}

ContextAttention context_attention_family() {
  return {.forward = forward,
          .backward = backward,
          .forward_workspace = forward_workspace,
          .backward_workspace = backward_workspace};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(ContextAttention, context_attention)
#endif
