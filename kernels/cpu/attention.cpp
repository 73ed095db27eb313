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
                   const PackedKeys<Gemms>& kv, int64_t d, Logits logits, const DropoutMask& drop,
                   const int64_t* dropout_rows, Out out, int64_t out_at, int64_t out_stride, float* lse) {
  init_softmax_rows(s, b, d);
  attend(s, b, Gemms::pack_left(q_rows.from(b.q0), b.nq, d, s.q), kv, d, logits, drop, dropout_rows);
  for (int64_t i = 0; i < b.nq; ++i) {
    const bool nothing = s.max[i] == -kInfinity;
    write_row(out, out_at + (b.q0 + i) * out_stride, s.out + i * Gemms::padded(d),
              nothing ? 0.0f : 1.0f / s.sum[i], d);
    if (lse) lse[b.q0 + i] = nothing ? -kInfinity : s.max[i] + std::log(s.sum[i]);
  }
}

template <class Gemms>
WorkspaceSize forward_workspace_of(const AttentionShape& a) {
  const int64_t d = a.qkv.head_dim, size = Gemms::columns_size(a.seq, d) + Gemms::depth_size(a.seq, d);
  return {static_cast<size_t>(a.batch * a.qkv.groups * size) * sizeof(typename Gemms::Value),
          ForwardScratch<Gemms>(nullptr, d).floats * sizeof(float)};
}
WorkspaceSize forward_workspace(AttentionShape a, DType type) {
  return with_gemms(on_tiles(type), [&](auto gemms) { return forward_workspace_of<decltype(gemms)>(a); });
}

// First, all threads together pack the keys and values of all groups, because every block of queries uses
// them.
template <class Gemms>
void forward_with(Context& c, const AttentionShape& a, In qkv, const int32_t* document_start,
                  const int64_t* dropout_rows, Out out, float* lse) {
  using Value = typename Gemms::Value;
  const int64_t heads = a.qkv.heads(), groups = a.qkv.groups, per_group = a.qkv.heads_per_group,
                d = a.qkv.head_dim, row = a.qkv.row(), seq = a.seq;
  const int64_t k_size = Gemms::columns_size(seq, d), size = k_size + Gemms::depth_size(seq, d);
  const WorkspaceParts workspace(c, forward_workspace_of<Gemms>(a));
  if (!workspace) return;
  auto* packed = workspace.shared<Value>();

  const int64_t slab = 8 * Gemms::kPanel, slabs = ceil_div(seq, slab);
  c.pool->parallel_for(a.batch * groups * slabs, [&](int64_t tile, int) HWY_ATTR {
    const int64_t first = tile % slabs * slab, n = std::min(slab, seq - first), group = tile / slabs % groups;
    const int64_t token = tile / slabs / groups * seq;
    Value* to = packed + tile / slabs * size;
    Gemms::pack_columns({qkv, token * row + a.qkv.key(group), row}, first, n, seq, d, to);
    Gemms::pack_depth({qkv, token * row + a.qkv.value(group), row}, first, n, seq, d, to + k_size);
  });

  // Neighboring tiles share keys and values. Later blocks see more keys and run first, so that the last tiles
  // are short.
  const int64_t blocks = ceil_div(seq, Gemms::kQueries);
  c.pool->parallel_for(a.batch * heads * blocks, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t head_in_group = tile % per_group, block = blocks - 1 - tile / per_group % blocks;
    const int64_t group = tile / per_group / blocks % groups, b = tile / per_group / blocks / groups;
    const int64_t head = group * per_group + head_in_group, token = b * seq, q0 = block * Gemms::kQueries;
    const ForwardScratch<Gemms> s(workspace.worker<float>(worker), d);
    [[maybe_unused]] const typename Gemms::Unit unit;
    const Value* keys = packed + (b * groups + group) * size;
    Block<Gemms> scores({a.causal, a.window, seq, document_start ? document_start + token : nullptr}, q0,
                        std::min(Gemms::kQueries, seq - q0), q0);
    forward_block(s, scores, {qkv, token * row + a.qkv.query(head), row}, {keys, keys + k_size, seq}, d,
                  {a.scale, a.softcap},
                  {a.dropout, a.dropout_key, static_cast<uint64_t>(a.head_offset + head)},
                  dropout_rows ? dropout_rows + token : nullptr, out, token * heads * d + head * d, heads * d,
                  lse ? lse + (b * heads + head) * seq : nullptr);
  });
}
void forward(Context& c, AttentionShape a, In qkv, const int32_t* document_start, const int64_t* dropout_rows,
             Out out, float* lse) {
  with_gemms(on_tiles(qkv.dtype), [&](auto gemms) {
    forward_with<decltype(gemms)>(c, a, qkv, document_start, dropout_rows, out, lse);
  });
}

// ---- backward

template <class Gemms>
WorkspaceSize backward_workspace_of(const AttentionShape& a) {
  return {0, BackwardScratch<Gemms>(nullptr, a.seq, a.seq, a.qkv.head_dim).floats * sizeof(float)};
}
WorkspaceSize backward_workspace(AttentionShape a, DType type) {
  return with_gemms(on_tiles(type), [&](auto gemms) { return backward_workspace_of<decltype(gemms)>(a); });
}

// One tile computes all heads of one group of one sequence, so that no two tiles add to the same elements;
// the order of its sums is fixed.
template <class Gemms>
void backward_with(Context& c, const AttentionShape& a, In qkv, In out, const float* lse, In dout,
                   const int32_t* document_start, const int64_t* dropout_rows, Out dqkv) {
  const int64_t heads = a.qkv.heads(), per_group = a.qkv.heads_per_group, d = a.qkv.head_dim,
                row = a.qkv.row(), seq = a.seq;
  const WorkspaceParts workspace(c, backward_workspace_of<Gemms>(a));
  if (!workspace) return;

  c.pool->parallel_for(a.batch * a.qkv.groups, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t b = tile / a.qkv.groups, group = tile % a.qkv.groups, token = b * seq;
    const BackwardScratch<Gemms> s(workspace.worker<float>(worker), seq, seq, d);
    [[maybe_unused]] const typename Gemms::Unit unit;
    const Mask mask{a.causal, a.window, seq, document_start ? document_start + token : nullptr};
    pack_keys(s, {qkv, token * row + a.qkv.key(group), row}, {qkv, token * row + a.qkv.value(group), row},
              seq, d);
    for (int64_t h = 0; h < per_group; ++h) {
      const int64_t head = group * per_group + h, out_at = token * heads * d + head * d;
      const QueryRows rows{{qkv, token * row + a.qkv.query(head), row},
                           {out, out_at, heads * d},
                           {dout, out_at, heads * d},
                           lse + (b * heads + head) * seq,
                           dropout_rows ? dropout_rows + token : nullptr,
                           seq};
      const DropoutMask drop{a.dropout, a.dropout_key, static_cast<uint64_t>(a.head_offset + head)};
      pack_queries(s, rows, d);
      for (int64_t q0 = 0; q0 < seq; q0 += Gemms::kQueries) {
        Block<Gemms> block(mask, q0, std::min(Gemms::kQueries, seq - q0), q0);
        backward_block(s, block, rows, seq, d, {a.scale, a.softcap}, drop);
        for (int64_t i = 0; i < block.nq; ++i)
          write_row(dqkv, (token + q0 + i) * row + a.qkv.query(head), s.dq + i * Gemms::padded(d), a.scale,
                    d);
      }
    }
    for_key_rows(s, seq, d, [&](int64_t i, const float* dk, const float* dv) HWY_ATTR {
      write_row(dqkv, (token + i) * row + a.qkv.key(group), dk, a.scale, d);
      write_row(dqkv, (token + i) * row + a.qkv.value(group), dv, 1.0f, d);
    });
  });
}
void backward(Context& c, AttentionShape a, In qkv, In out, const float* lse, In dout,
              const int32_t* document_start, const int64_t* dropout_rows, Out dqkv) {
  with_gemms(on_tiles(qkv.dtype), [&](auto gemms) {
    backward_with<decltype(gemms)>(c, a, qkv, out, lse, dout, document_start, dropout_rows, dqkv);
  });
}

// ---- generation

// One query against keys [low, high) of a cache, without packing, because the keys are read once.
template <class T>
HWY_INLINE void decode_query(const float* q, const T* k, const T* v, int64_t d, Logits logits, int64_t low,
                             int64_t high, float* scores, float* out) {
  float highest = -kInfinity;
  for (int64_t j = low; j < high; ++j) {
    VF sum = hn::Zero(DF());
    for_vectors(
        d, [&](int64_t i) HWY_ATTR { sum = hn::MulAdd(load(q + i), load(k + j * d + i), sum); },
        [&](int64_t i, int64_t n)
            HWY_ATTR { sum = hn::MulAdd(load_part(q + i, n), load_part(k + j * d + i, n), sum); });
    scores[j - low] = sum_lanes(sum) * logits.scale;
    highest = std::max(highest, scores[j - low]);
  }
  // Monotonic: the highest stays the highest.
  if (logits.softcap > 0 && high > low) {
    cap_row(scores, 0, high - low, {1.0f, logits.softcap});
    highest = hn::GetLane(softcap(splat(highest), splat(logits.softcap), splat(1.0f / logits.softcap)));
  }
  float total = 0;
  std::memset(out, 0, static_cast<size_t>(d) * sizeof(float));
  for (int64_t j = low; j < high; ++j) {
    const float p = exp_one(scores[j - low] - highest);
    const VF weight = splat(p);
    total += p;
    for_vectors(
        d,
        [&](int64_t i) HWY_ATTR { store(hn::MulAdd(weight, load(v + j * d + i), load(out + i)), out + i); },
        [&](int64_t i, int64_t n) HWY_ATTR {
          store_part(hn::MulAdd(weight, load_part(v + j * d + i, n), load_part(out + i, n)), out + i, n);
        });
  }
  const float factor = high > low ? 1.0f / total : 0.0f;
  for (int64_t i = 0; i < d; ++i) out[i] *= factor;
}

// A worker's memory.
template <class Gemms>
struct DecodeScratch {
  using Value = typename Gemms::Value;
  ForwardScratch<Gemms> rows;
  // For few queries, one at a time.
  float *query, *scores;
  Value *k, *v;  // for many queries
  size_t floats;
  DecodeScratch(float* base, bool few, int64_t keys, int64_t d) : rows(base, d) {
    ScratchAllocator t{base, rows.floats};
    query = t.take(few ? d : 0);
    scores = t.take(few ? keys : 0);
    k = t.template take<Value>(few ? 0 : Gemms::columns_size(keys, d));
    v = t.template take<Value>(few ? 0 : Gemms::depth_size(keys, d));
    floats = t.floats;
  }
};

bool decodes_few(const AttentionShape& a) {
  return a.seq < kMr;
}
template <class Gemms>
WorkspaceSize decode_workspace_of(const AttentionShape& a, int64_t past) {
  const DecodeScratch<Gemms> scratch(nullptr, decodes_few(a), past + a.seq, a.qkv.head_dim);
  return {0, scratch.floats * sizeof(float)};
}
bool decodes_on_tiles(const AttentionShape& a, DType qkv, DType cache) {
  return !decodes_few(a) && cache == DType::bf16 && on_tiles(qkv);
}
WorkspaceSize decode_workspace(AttentionShape a, DType qkv, DType cache, int64_t past) {
  return with_gemms(decodes_on_tiles(a, qkv, cache),
                    [&](auto gemms) { return decode_workspace_of<decltype(gemms)>(a, past); });
}

template <class Gemms>
void decode_with(Context& c, const AttentionShape& a, In qkv, Out k_cache, Out v_cache, int64_t past,
                 int64_t capacity, Out out) {
  const int64_t heads = a.qkv.heads(), d = a.qkv.head_dim, row = a.qkv.row(), groups = a.qkv.groups,
                keys = past + a.seq;
  const auto x = array_of<Any>(qkv), kc = array_of<Any>(k_cache), vc = array_of<Any>(v_cache);
  const bool few = decodes_few(a);
  const WorkspaceParts workspace(c, decode_workspace_of<Gemms>(a, past));
  if (!workspace) return;
  // One tile per group appends the new keys and values and then attends to them.
  c.pool->parallel_for(a.batch * groups, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t b = tile / groups, group = tile % groups, cache = (b * groups + group) * capacity * d,
                  token = b * a.seq;
    for (int64_t t = 0; t < a.seq; ++t) {
      const int64_t from = (token + t) * row, to = cache + (past + t) * d;
      for (int64_t i = 0; i < d; i += kStep) {
        const int64_t n = std::min(kStep, d - i);
        kc.put_part(to + i, x.part(from + a.qkv.key(group) + i, n), n);
        vc.put_part(to + i, x.part(from + a.qkv.value(group) + i, n), n);
      }
    }
    const DecodeScratch<Gemms> panels(workspace.worker<float>(worker), few, keys, d);
    const ForwardScratch<Gemms>& s = panels.rows;
    [[maybe_unused]] const typename Gemms::Unit unit;
    const Mask mask{a.causal, a.window, keys, nullptr};
    if (!few) {
      Gemms::pack_columns({k_cache, cache, d}, 0, keys, keys, d, panels.k);
      Gemms::pack_depth({v_cache, cache, d}, 0, keys, keys, d, panels.v);
    }
    for (int64_t h = 0; h < a.qkv.heads_per_group; ++h) {
      const int64_t head = group * a.qkv.heads_per_group + h, out_at = token * heads * d + head * d;
      const Rows q{qkv, token * row + a.qkv.query(head), row};
      if (few) {
        for (int64_t t = 0; t < a.seq; ++t) {
          int64_t ld;
          const float* query = wide_rows(q.from(t), 1, d, panels.query, ld);
          const int64_t low = mask.low(t, past + t), high = mask.high(past + t);
          if (k_cache.dtype == DType::bf16)
            decode_query(query, k_cache.as<bf16>() + cache, v_cache.as<bf16>() + cache, d,
                         {a.scale, a.softcap}, low, high, panels.scores, s.out);
          else
            decode_query(query, k_cache.as<float>() + cache, v_cache.as<float>() + cache, d,
                         {a.scale, a.softcap}, low, high, panels.scores, s.out);
          write_row(out, out_at + t * heads * d, s.out, 1.0f, d);
        }
        continue;
      }
      for (int64_t q0 = 0; q0 < a.seq; q0 += Gemms::kQueries) {
        Block<Gemms> block(mask, q0, std::min(Gemms::kQueries, a.seq - q0), past + q0);
        forward_block(s, block, q, {panels.k, panels.v, keys}, d, {a.scale, a.softcap}, DropoutMask{},
                      nullptr, out, out_at, heads * d, nullptr);
      }
    }
  });
}
void decode(Context& c, AttentionShape a, In qkv, Out k_cache, Out v_cache, int64_t past, int64_t capacity,
            Out out) {
  with_gemms(decodes_on_tiles(a, qkv.dtype, k_cache.dtype), [&](auto gemms) {
    decode_with<decltype(gemms)>(c, a, qkv, k_cache, v_cache, past, capacity, out);
  });
}

// ---- rotary embedding

template <class T>
HWY_INLINE void rotate_head(const Array<T>& x, int64_t at, const float* cos, const float* sin, int64_t half,
                            bool interleaved, VF sign) {
  if (!interleaved) {
    for (int64_t i = 0; i < half; i += kStep) {
      const int64_t n = std::min(kStep, half - i);
      const bool full = n == kStep;
      const VF a = full ? x.at(at + i) : x.part(at + i, n);
      const VF b = full ? x.at(at + half + i) : x.part(at + half + i, n);
      const VF c = full ? load(cos + i) : load_part(cos + i, n);
      const VF s = hn::Mul(sign, full ? load(sin + i) : load_part(sin + i, n));
      const VF first = hn::NegMulAdd(b, s, hn::Mul(a, c)), second = hn::MulAdd(a, s, hn::Mul(b, c));
      if (full) {
        x.put(at + i, first);
        x.put(at + half + i, second);
      } else {
        x.put_part(at + i, first, n);
        x.put_part(at + half + i, second, n);
      }
    }
    return;
  }
  for (int64_t i = 0; i < half; i += kStep) {
    const int64_t n = std::min(kStep, half - i);
    // Separates two vectors of pairs into first and second members, and interleaves them again.
    HWY_ALIGN float pairs[2 * kLanes] = {};
    for (int64_t j = 0; j < 2; ++j)
      if (const int64_t m = std::min(kStep, 2 * n - j * kStep); m > 0)
        store(x.part(at + 2 * i + j * kStep, m), pairs + j * kStep);
    VF a, b;
    hn::LoadInterleaved2(DF(), pairs, a, b);
    const VF c = load_part(cos + i, n), s = hn::Mul(sign, load_part(sin + i, n));
    hn::StoreInterleaved2(hn::NegMulAdd(b, s, hn::Mul(a, c)), hn::MulAdd(a, s, hn::Mul(b, c)), DF(), pairs);
    for (int64_t j = 0; j < 2; ++j)
      if (const int64_t m = std::min(kStep, 2 * n - j * kStep); m > 0)
        x.put_part(at + 2 * i + j * kStep, load(pairs + j * kStep), m);
  }
}

void rope(Context& c, QkvLayout layout, Out qkv, const float* cos, const float* sin, const int32_t* positions,
          int64_t rows, int64_t rotary_dim, bool interleaved, bool inverse) {
  const int64_t half = rotary_dim / 2, width = layout.row(), d = layout.head_dim;
  by_type({qkv}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(qkv);
    parallel_blocks(c, rows, rows_per_block(width), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      const VF sign = splat(inverse ? -1.0f : 1.0f);
      for (int64_t r = begin; r < end; ++r) {
        const int64_t table = int64_t{positions[r]} * half;
        for (int64_t g = 0; g < layout.groups; ++g)
          for (int64_t h = 0; h <= layout.heads_per_group; ++h)  // the query heads and the key head
            rotate_head(x, r * width + (g * (layout.heads_per_group + 2) + h) * d, cos + table, sin + table,
                        half, interleaved, sign);
      }
    });
  });
}

Attention attention_family() {
  return {.rope = rope,
          .forward = forward,
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
