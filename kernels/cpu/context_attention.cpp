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
HWY_INLINE bool is_visible(const AttentionBlock& a, PositionSegment keys) {
  return a.attends_to(a.queries.segments[0], keys) || a.attends_to(a.queries.segments[1], keys);
}
// Mask for queries of sequence b whose first row is `first_query`.
HWY_INLINE Mask mask_of(const AttentionBlock& a, PositionSegment keys, const Documents& documents, int64_t b,
                        int64_t first_query) {
  return {a.shape.causal, a.shape.window, keys.count, {documents, a.shape.batch, b, first_query}, keys.begin};
}
HWY_INLINE DropoutMask dropout_mask(const AttentionBlock& a, PositionSegment keys, int64_t head) {
  return {a.shape.dropout, a.shape.dropout_key, static_cast<uint64_t>(a.shape.head_offset + head),
          keys.begin};
}
template <class T>
HWY_INLINE T* offset_or_null(T* p, int64_t by) {
  return p ? p + by : nullptr;
}

// ---- forward

// Offsets of the panels of each segment of keys in those of one group of one sequence: keys, then values.
// Segments invisible to all queries have none.
struct SegmentPanels {
  int64_t at[2], values[2], floats = 0;
  explicit SegmentPanels(const AttentionBlock& a) {
    for (int r = 0; r < 2; ++r) {
      const PositionSegment segment = a.keys.segments[static_cast<size_t>(r)];
      at[r] = floats;
      values[r] = floats + Vectors::columns_size(segment.count, a.shape.qk_dim);
      if (is_visible(a, segment)) floats = values[r] + Vectors::depth_size(segment.count, a.shape.v_dim);
    }
  }
};

WorkspaceSize forward_workspace(AttentionBlock a, int64_t) {
  return {static_cast<size_t>(a.shape.batch * a.shape.groups * SegmentPanels(a).floats) * sizeof(float),
          ForwardScratch<Vectors>(nullptr, HeadDims(a.shape)).floats * sizeof(float)};
}

// Resumes a block of queries from an earlier call: the sum of its exponentials is that of one key with the
// logit lse.
HWY_INLINE void resume_rows(const ForwardScratch<Vectors>& s, const Block<Vectors>& b, int64_t v_dim,
                            const float* out, int64_t out_stride, const float* lse) {
  init_softmax_rows(s, b, v_dim);
  for (int64_t i = 0; i < b.nq; ++i) {
    std::memcpy(s.out + i * v_dim, out + i * out_stride, static_cast<size_t>(v_dim) * sizeof(float));
    s.max[i] = lse[i];
    s.sum[i] = lse[i] == -kInfinity ? 0.0f : 1.0f;
  }
}

void forward(Context& c, AttentionBlock a, HeadsIn q_heads, HeadsIn k, HeadsIn v, Documents documents,
             const int64_t* dropout_rows, bool accumulate, HeadsOut out, float* lse) {
  const int64_t heads = a.shape.heads(), groups = a.shape.groups, per_group = a.shape.heads_per_group,
                seq = a.queries.rows(), keys = a.keys.rows(), out_stride = out.strides.token;
  const HeadDims d(a.shape);
  const SegmentPanels panels(a);
  const WorkspaceParts workspace(c, forward_workspace(a, documents.count));
  if (!workspace) return;
  auto* packed = workspace.shared<float>();

  for (int r = 0; r < 2; ++r) {
    const PositionSegment segment = a.keys.segments[static_cast<size_t>(r)];
    if (!is_visible(a, segment)) continue;
    const int64_t slab = 8 * kNr, slabs = ceil_div(segment.count, slab);
    c.pool->parallel_for(a.shape.batch * groups * slabs, [&](int64_t tile, int) HWY_ATTR {
      const int64_t first = tile % slabs * slab, n = std::min(slab, segment.count - first),
                    group = tile / slabs % groups;
      const int64_t token = tile / slabs / groups * keys + first_row(a.keys, r);
      float* to = packed + tile / slabs * panels.floats;
      Vectors::pack_columns(Rows::of(k, token, group), first, n, segment.count, d.qk, to + panels.at[r]);
      Vectors::pack_depth(Rows::of(v, token, group), first, n, segment.count, d.v, to + panels.values[r]);
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
    // first_query: row among the queries of all sequences.
    const int64_t q0 = (block - (query_segment ? blocks_before : 0)) * Vectors::kQueries,
                  n = std::min(Vectors::kQueries, queries.count - q0),
                  first_query = b * seq + first_row(a.queries, query_segment) + q0;
    const ForwardScratch<Vectors> s(workspace.worker<float>(worker), d);
    float* out_rows = out.data.as<float>() + out.strides.at(first_query, group, head_in_group);
    float* lse_rows = lse + (b * heads + head) * seq + first_query - b * seq;

    Vectors::LeftOperand q{nullptr, 0};
    for (int r = 0; r < 2; ++r) {
      const PositionSegment segment = a.keys.segments[static_cast<size_t>(r)];
      if (!a.attends_to({queries.begin + q0, n}, segment)) continue;
      Block<Vectors> scores(mask_of(a, segment, documents, b, first_query), 0, n, queries.begin + q0);
      if (scores.begin >= scores.end) continue;
      if (!q.at) {
        q = Vectors::pack_left(Rows::of(q_heads, first_query, group, head_in_group), n, d.qk, s.q);
        if (accumulate)
          resume_rows(s, scores, d.v, out_rows, out_stride, lse_rows);
        else
          init_softmax_rows(s, scores, d.v);
      }
      const float* group_panels = packed + (b * groups + group) * panels.floats;
      attend(s, scores, q, {group_panels + panels.at[r], group_panels + panels.values[r], segment.count}, d,
             {a.shape.scale, a.shape.softcap}, dropout_mask(a, segment, head),
             offset_or_null(dropout_rows, first_query));
    }
    // No key is visible.
    if (!q.at) {
      for (int64_t i = 0; i < n && !accumulate; ++i) {
        std::memset(out_rows + i * out_stride, 0, static_cast<size_t>(d.v) * sizeof(float));
        lse_rows[i] = -kInfinity;
      }
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      const bool nothing = s.max[i] == -kInfinity;
      write_row({out_rows, DType::f32}, i * out_stride, s.out + i * d.v, nothing ? 0.0f : 1.0f / s.sum[i],
                d.v);
      lse_rows[i] = nothing ? -kInfinity : s.max[i] + std::log(s.sum[i]);
    }
  });
}

// ---- backward

struct LongestSegments {
  int64_t queries, keys;
  explicit LongestSegments(const AttentionBlock& a)
      : queries(std::max(a.queries.segments[0].count, a.queries.segments[1].count)),
        keys(std::max(a.keys.segments[0].count, a.keys.segments[1].count)) {}
};

WorkspaceSize backward_workspace(AttentionBlock a, int64_t) {
  const LongestSegments longest(a);
  return {0, BackwardScratch<Vectors>(nullptr, longest.queries, longest.keys, HeadDims(a.shape)).floats *
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
void backward(Context& c, AttentionBlock a, HeadsIn q, HeadsIn k, HeadsIn v, HeadsIn out, const float* lse,
              HeadsIn dout, Documents documents, const int64_t* dropout_rows, HeadsOut dq, HeadsOut dk,
              HeadsOut dv) {
  const int64_t heads = a.shape.heads(), groups = a.shape.groups, per_group = a.shape.heads_per_group,
                seq = a.queries.rows(), keys = a.keys.rows();
  const HeadDims d(a.shape);
  const auto zero_row = [](const HeadsOut& x, int64_t token, int64_t group, int64_t cols) {
    std::memset(x.data.as<float>() + x.strides.at(token, group), 0,
                static_cast<size_t>(cols) * sizeof(float));
  };
  const WorkspaceParts workspace(c, backward_workspace(a, documents.count));
  if (!workspace) return;
  const LongestSegments longest(a);

  c.pool->parallel_for(a.shape.batch * groups, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t b = tile / groups, group = tile % groups;
    const BackwardScratch<Vectors> s(workspace.worker<float>(worker), longest.queries, longest.keys, d);
    for (int r = 0; r < 2; ++r) {
      const PositionSegment segment = a.keys.segments[static_cast<size_t>(r)];
      if (segment.count == 0) continue;
      const int64_t first_key = b * keys + first_row(a.keys, r);
      if (!is_visible(a, segment)) {
        for (int64_t i = 0; i < segment.count; ++i) {
          zero_row(dk, first_key + i, group, d.qk);
          zero_row(dv, first_key + i, group, d.v);
        }
        continue;
      }
      pack_keys(s, Rows::of(k, first_key, group), Rows::of(v, first_key, group), segment.count, d);
      for (int64_t h = 0; h < per_group; ++h)
        for (int query_segment = 0; query_segment < 2; ++query_segment) {
          const PositionSegment queries = a.queries.segments[static_cast<size_t>(query_segment)];
          if (!a.attends_to(queries, segment)) continue;
          const int64_t head = group * per_group + h, first = first_row(a.queries, query_segment),
                        first_query = b * seq + first;
          const QueryRows rows{
              Rows::of(q, first_query, group, h),        Rows::of(out, first_query, group, h),
              Rows::of(dout, first_query, group, h),     lse + (b * heads + head) * seq + first,
              offset_or_null(dropout_rows, first_query), queries.count};
          const Mask mask = mask_of(a, segment, documents, b, first_query);
          pack_queries(s, rows, d);
          for (int64_t q0 = 0; q0 < queries.count; q0 += Vectors::kQueries) {
            Block<Vectors> block(mask, q0, std::min(Vectors::kQueries, queries.count - q0),
                                 queries.begin + q0);
            if (block.begin >= block.end) continue;
            backward_block(s, block, rows, segment.count, d, {a.shape.scale, a.shape.softcap},
                           dropout_mask(a, segment, head));
            for (int64_t i = 0; i < block.nq; ++i)
              add_row(dq.data.as<float>() + dq.strides.at(first_query + q0 + i, group, h), s.dq + i * d.qk,
                      a.shape.scale, d.qk);
          }
        }
      for_key_rows(s, segment.count, d, [&](int64_t i, const float* dk_row, const float* dv_row) HWY_ATTR {
        write_row(dk.data, dk.strides.at(first_key + i, group), dk_row, a.shape.scale, d.qk);
        write_row(dv.data, dv.strides.at(first_key + i, group), dv_row, 1.0f, d.v);
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
