// FlashAttention over full sequences, in blocks of queries and keys: the workspace holds the scores of one
// block. The two GEMMs of the forward pass and the five of the backward pass use packed panels
// (attention_core-inl.hpp).
#include "kernels/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention_core-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// ---- forward

// The output of one block of queries of one head.
template <class Gemms>
void forward_block(const ForwardScratch<Gemms>& s, Block<Gemms>& b, const Rows& q_rows,
                   const PackedKeys<Gemms>& kv, HeadDims d, Logits logits, const DropoutMask& drop,
                   const int64_t* dropout_rows, Out out, int64_t out_at, int64_t out_stride, float* lse) {
  init_softmax_rows(s, b, d.v);
  attend(s, b, Gemms::pack_left(q_rows.from(b.q0), b.nq, d.qk, s.q), kv, d, logits, drop, dropout_rows);
  for (int64_t i = 0; i < b.nq; ++i) {
    const bool nothing = s.max[i] == -kInfinity;
    write_row(out, out_at + (b.q0 + i) * out_stride, s.out + i * Gemms::padded(d.v),
              nothing ? 0.0f : 1.0f / s.sum[i], d.v);
    if (lse) lse[b.q0 + i] = nothing ? -kInfinity : s.max[i] + std::log(s.sum[i]);
  }
}

// Packed keys and values of one group of one sequence: keys, then values.
template <class Gemms>
struct KeyPanels {
  int64_t values, size;
  explicit KeyPanels(const AttentionShape& a)
      : values(Gemms::columns_size(a.seq, a.qk_dim)), size(values + Gemms::depth_size(a.seq, a.v_dim)) {}
};

template <class Gemms>
WorkspaceSize forward_workspace_of(const AttentionShape& a) {
  const int64_t size = KeyPanels<Gemms>(a).size;
  return {static_cast<size_t>(a.batch * a.groups * size) * sizeof(typename Gemms::Value),
          ForwardScratch<Gemms>(nullptr, HeadDims(a)).floats * sizeof(float)};
}
WorkspaceSize forward_workspace(AttentionShape a, DType type, int64_t) {
  return with_gemms(on_tiles(type), [&](auto gemms) { return forward_workspace_of<decltype(gemms)>(a); });
}

// First, all threads together pack the keys and values of all groups, because every block of queries uses
// them.
template <class Gemms>
void forward_with(Context& c, const AttentionShape& a, const HeadsIn& q, const HeadsIn& k, const HeadsIn& v,
                  const Documents& documents, const int64_t* dropout_rows, const HeadsOut& out, float* lse) {
  using Value = typename Gemms::Value;
  const int64_t heads = a.heads(), groups = a.groups, per_group = a.heads_per_group, seq = a.seq;
  const HeadDims d(a);
  const KeyPanels<Gemms> panels(a);
  const WorkspaceParts workspace(c, forward_workspace_of<Gemms>(a));
  if (!workspace) return;
  auto* packed = workspace.shared<Value>();

  const int64_t slab = 8 * Gemms::kPanel, slabs = ceil_div(seq, slab);
  c.pool->parallel_for(a.batch * groups * slabs, [&](int64_t tile, int) HWY_ATTR {
    const int64_t first = tile % slabs * slab, n = std::min(slab, seq - first), group = tile / slabs % groups;
    const int64_t token = tile / slabs / groups * seq;
    Value* to = packed + tile / slabs * panels.size;
    Gemms::pack_columns(Rows::of(k, token, group), first, n, seq, d.qk, to);
    Gemms::pack_depth(Rows::of(v, token, group), first, n, seq, d.v, to + panels.values);
  });

  // Neighboring tiles share keys and values. Later blocks attend to more keys and run first, so that the last
  // tiles are short.
  const int64_t blocks = ceil_div(seq, Gemms::kQueries);
  c.pool->parallel_for(a.batch * heads * blocks, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t head_in_group = tile % per_group, block = blocks - 1 - tile / per_group % blocks;
    const int64_t group = tile / per_group / blocks % groups, b = tile / per_group / blocks / groups;
    const int64_t head = group * per_group + head_in_group, token = b * seq, q0 = block * Gemms::kQueries;
    const ForwardScratch<Gemms> s(workspace.worker<float>(worker), d);
    [[maybe_unused]] const typename Gemms::TileConfig tiles;
    const Value* keys = packed + (b * groups + group) * panels.size;
    Block<Gemms> scores({a.causal, a.window, seq, {documents, a.batch, b, token}}, q0,
                        std::min(Gemms::kQueries, seq - q0), q0);
    forward_block(
        s, scores, Rows::of(q, token, group, head_in_group), {keys, keys + panels.values, seq}, d,
        {a.scale, a.softcap}, {a.dropout, a.dropout_key, static_cast<uint64_t>(a.head_offset + head)},
        dropout_rows ? dropout_rows + token : nullptr, out.data, out.strides.at(token, group, head_in_group),
        out.strides.token, lse ? lse + (b * heads + head) * seq : nullptr);
  });
}
void forward(Context& c, AttentionShape a, HeadsIn q, HeadsIn k, HeadsIn v, Documents documents,
             const int64_t* dropout_rows, HeadsOut out, float* lse) {
  with_gemms(on_tiles(q.data.dtype), [&](auto gemms) {
    forward_with<decltype(gemms)>(c, a, q, k, v, documents, dropout_rows, out, lse);
  });
}

// ---- backward

template <class Gemms>
WorkspaceSize backward_workspace_of(const AttentionShape& a) {
  return {0, BackwardScratch<Gemms>(nullptr, a.seq, a.seq, HeadDims(a)).floats * sizeof(float)};
}
WorkspaceSize backward_workspace(AttentionShape a, DType type, int64_t) {
  return with_gemms(on_tiles(type), [&](auto gemms) { return backward_workspace_of<decltype(gemms)>(a); });
}

// The views of one call.
struct BackwardArrays {
  HeadsIn q, k, v, out, dout;
  const float* lse;
  Documents documents;
  const int64_t* dropout_rows;
  HeadsOut dq, dk, dv;
};

// One tile computes all heads of one group of one sequence, so that no two tiles add to the same elements;
// the order of its sums is fixed.
template <class Gemms>
void backward_with(Context& c, const AttentionShape& a, const BackwardArrays& x) {
  const int64_t heads = a.heads(), per_group = a.heads_per_group, seq = a.seq;
  const HeadDims d(a);
  const WorkspaceParts workspace(c, backward_workspace_of<Gemms>(a));
  if (!workspace) return;

  c.pool->parallel_for(a.batch * a.groups, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t b = tile / a.groups, group = tile % a.groups, token = b * seq;
    const BackwardScratch<Gemms> s(workspace.worker<float>(worker), seq, seq, d);
    [[maybe_unused]] const typename Gemms::TileConfig tiles;
    const Mask mask{a.causal, a.window, seq, {x.documents, a.batch, b, token}};
    pack_keys(s, Rows::of(x.k, token, group), Rows::of(x.v, token, group), seq, d);
    for (int64_t h = 0; h < per_group; ++h) {
      const int64_t head = group * per_group + h;
      const QueryRows rows{Rows::of(x.q, token, group, h),
                           Rows::of(x.out, token, group, h),
                           Rows::of(x.dout, token, group, h),
                           x.lse + (b * heads + head) * seq,
                           x.dropout_rows ? x.dropout_rows + token : nullptr,
                           seq};
      const DropoutMask drop{a.dropout, a.dropout_key, static_cast<uint64_t>(a.head_offset + head)};
      pack_queries(s, rows, d);
      for (int64_t q0 = 0; q0 < seq; q0 += Gemms::kQueries) {
        Block<Gemms> block(mask, q0, std::min(Gemms::kQueries, seq - q0), q0);
        backward_block(s, block, rows, seq, d, {a.scale, a.softcap}, drop);
        for (int64_t i = 0; i < block.nq; ++i)
          write_row(x.dq.data, x.dq.strides.at(token + q0 + i, group, h), s.dq + i * Gemms::padded(d.qk),
                    a.scale, d.qk);
      }
    }
    for_key_rows(s, seq, d, [&](int64_t i, const float* dk, const float* dv) HWY_ATTR {
      write_row(x.dk.data, x.dk.strides.at(token + i, group), dk, a.scale, d.qk);
      write_row(x.dv.data, x.dv.strides.at(token + i, group), dv, 1.0f, d.v);
    });
  });
}
void backward(Context& c, AttentionShape a, HeadsIn q, HeadsIn k, HeadsIn v, HeadsIn out, const float* lse,
              HeadsIn dout, Documents documents, const int64_t* dropout_rows, HeadsOut dq, HeadsOut dk,
              HeadsOut dv) {
  with_gemms(on_tiles(q.data.dtype), [&](auto gemms) {
    backward_with<decltype(gemms)>(c, a, {q, k, v, out, dout, lse, documents, dropout_rows, dq, dk, dv});
  });
}

// ---- generation

// One query against keys [low, high) of a cache, without packing, because the keys are read once.
template <class T>
HWY_INLINE void decode_query(const float* q, const T* k, const T* v, HeadDims d, Logits logits, int64_t low,
                             int64_t high, float* scores, float* out, float* lse) {
  float highest = -kInfinity;
  for (int64_t j = low; j < high; ++j) {
    VF sum = hn::Zero(DF());
    for_vectors(
        d.qk, [&](int64_t i) HWY_ATTR { sum = hn::MulAdd(load(q + i), load(k + j * d.qk + i), sum); },
        [&](int64_t i, int64_t n)
            HWY_ATTR { sum = hn::MulAdd(load_part(q + i, n), load_part(k + j * d.qk + i, n), sum); });
    scores[j - low] = sum_lanes(sum) * logits.scale;
    highest = std::max(highest, scores[j - low]);
  }
  // Monotonic: the highest stays the highest.
  if (logits.softcap > 0 && high > low) {
    cap_row(scores, 0, high - low, {1.0f, logits.softcap});
    highest = hn::GetLane(softcap(splat(highest), splat(logits.softcap), splat(1.0f / logits.softcap)));
  }
  float total = 0;
  std::memset(out, 0, static_cast<size_t>(d.v) * sizeof(float));
  for (int64_t j = low; j < high; ++j) {
    const float p = exp_one(scores[j - low] - highest);
    const VF weight = splat(p);
    total += p;
    for_vectors(
        d.v,
        [&](int64_t i) HWY_ATTR { store(hn::MulAdd(weight, load(v + j * d.v + i), load(out + i)), out + i); },
        [&](int64_t i, int64_t n) HWY_ATTR {
          store_part(hn::MulAdd(weight, load_part(v + j * d.v + i, n), load_part(out + i, n)), out + i, n);
        });
  }
  const float factor = high > low ? 1.0f / total : 0.0f;
  for (int64_t i = 0; i < d.v; ++i) out[i] *= factor;
  if (lse) *lse = high > low ? highest + std::log(total) : -kInfinity;
}

// Copies head rows of a view to rows [first, first + n) of a cache's head.
HWY_INLINE void append_rows(const Rows& from, int64_t n, Out cache, int64_t head, int64_t first,
                            int64_t cols) {
  const auto x = array_of<Any>(from.base), y = array_of<Any>(cache);
  for (int64_t t = 0; t < n; ++t)
    for (int64_t i = 0; i < cols; i += kStep) {
      const int64_t m = std::min(kStep, cols - i);
      y.put_part(head + (first + t) * cols + i, x.part(from.offset + t * from.stride + i, m), m);
    }
}

// A worker's memory of decode, for up to `keys` keys.
template <class Gemms>
struct DecodeScratch {
  using Value = typename Gemms::Value;
  ForwardScratch<Gemms> rows;
  // Used for few queries, which are computed one at a time.
  float *query, *scores;
  // Packed keys and values, used for many queries.
  Value *k, *v;
  size_t floats;
  DecodeScratch(float* base, bool few, int64_t keys, HeadDims d) : rows(base, d) {
    ScratchAllocator t{base, rows.floats};
    query = t.take(few ? d.qk : 0);
    scores = t.take(few ? keys : 0);
    k = t.template take<Value>(few ? 0 : Gemms::columns_size(keys, d.qk));
    v = t.template take<Value>(few ? 0 : Gemms::depth_size(keys, d.v));
    floats = t.floats;
  }
};
HWY_INLINE bool decodes_few(const AttentionShape& a) {
  return a.seq < kMr;
}
template <class Body>
HWY_INLINE auto with_decode_gemms(const AttentionShape& a, DType type, Body&& body) {
  return with_gemms(!decodes_few(a) && on_tiles(type), body);
}
template <class Gemms>
WorkspaceSize decode_workspace_of(const AttentionShape& a, int64_t capacity) {
  return {0, DecodeScratch<Gemms>(nullptr, decodes_few(a), capacity, HeadDims(a)).floats * sizeof(float)};
}
WorkspaceSize decode_workspace(AttentionShape a, DType type, int64_t capacity) {
  return with_decode_gemms(a, type,
                           [&](auto gemms) { return decode_workspace_of<decltype(gemms)>(a, capacity); });
}

template <class Gemms>
void decode_with(Context& c, const AttentionShape& a, const HeadsIn& q, const HeadsIn& k, const HeadsIn& v,
                 Out k_cache, Out v_cache, int64_t past, int64_t capacity, const HeadsOut& out, float* lse) {
  const int64_t groups = a.groups, keys = past + a.seq;
  const HeadDims d(a);
  const bool few = decodes_few(a);
  const WorkspaceParts workspace(c, decode_workspace_of<Gemms>(a, capacity));
  if (!workspace) return;
  // One tile per group appends the new keys and values and then attends to them.
  c.pool->parallel_for(a.batch * groups, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t b = tile / groups, group = tile % groups, token = b * a.seq;
    const int64_t k_at = tile * capacity * d.qk, v_at = tile * capacity * d.v;
    append_rows(Rows::of(k, token, group), a.seq, k_cache, k_at, past, d.qk);
    append_rows(Rows::of(v, token, group), a.seq, v_cache, v_at, past, d.v);
    const DecodeScratch<Gemms> panels(workspace.worker<float>(worker), few, keys, d);
    const ForwardScratch<Gemms>& s = panels.rows;
    [[maybe_unused]] const typename Gemms::TileConfig tiles;
    const Mask mask{a.causal, a.window, keys, {}};
    if (!few) {
      Gemms::pack_columns({k_cache, k_at, d.qk}, 0, keys, keys, d.qk, panels.k);
      Gemms::pack_depth({v_cache, v_at, d.v}, 0, keys, keys, d.v, panels.v);
    }
    for (int64_t h = 0; h < a.heads_per_group; ++h) {
      const Rows queries = Rows::of(q, token, group, h);
      float* const sums = lse ? lse + (tile * a.heads_per_group + h) * a.seq : nullptr;
      if (few) {
        for (int64_t t = 0; t < a.seq; ++t) {
          int64_t ld;
          const float* query = wide_rows(queries.from(t), 1, d.qk, panels.query, ld);
          const int64_t low = mask.low(t, past + t), high = mask.high(past + t);
          at_element(k_cache, k_at, [&]<class T>(const T* keys_at) HWY_ATTR {
            decode_query(query, keys_at, v_cache.as<T>() + v_at, d, {a.scale, a.softcap}, low, high,
                         panels.scores, s.out, sums ? sums + t : nullptr);
          });
          write_row(out.data, out.strides.at(token + t, group, h), s.out, 1.0f, d.v);
        }
        continue;
      }
      for (int64_t q0 = 0; q0 < a.seq; q0 += Gemms::kQueries) {
        Block<Gemms> block(mask, q0, std::min(Gemms::kQueries, a.seq - q0), past + q0);
        forward_block(s, block, queries, {panels.k, panels.v, keys}, d, {a.scale, a.softcap}, DropoutMask{},
                      nullptr, out.data, out.strides.at(token, group, h), out.strides.token, sums);
      }
    }
  });
}
void decode(Context& c, AttentionShape a, HeadsIn q, HeadsIn k, HeadsIn v, Out k_cache, Out v_cache,
            const int32_t* past, int64_t capacity, HeadsOut out, float* lse) {
  with_decode_gemms(a, q.data.dtype, [&](auto gemms) {
    decode_with<decltype(gemms)>(c, a, q, k, v, k_cache, v_cache, *past, capacity, out, lse);
  });
}

Attention attention_family() {
  return {.forward = forward,
          .backward = backward,
          .decode = decode,
          .forward_workspace = forward_workspace,
          .backward_workspace = backward_workspace,
          .decode_workspace = decode_workspace};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Attention, attention)
#endif
