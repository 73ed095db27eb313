// Attention in blocks of queries and keys ("flash"): scores exist for one block at a time, in scratch. The two products
// of the forward pass and the five of the backward pass are small matrix products; the softmax between them is SIMD.
//
// Masks are intervals: query i sees the keys [low(i), high(i)), whatever combination of causality, window and document
// start made them. Blocks that nobody sees are skipped, blocks are cut where nobody sees further.
#include "kernels/attention.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/common/dropout.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/serial_gemm.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kQueries = 64, kKeys = 128;  // a block of scores: 32 KiB in fp32
constexpr int64_t kAlign = 64;                 // keys: a whole number of dropout words for every vector length
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Row r of a matrix inside a larger array lies at base[offset + r * stride].
struct Rows {
  In base;
  int64_t offset, stride;
};
// Rows [first, first + n) as fp32: where they lie, or widened into buffer.
HWY_INLINE const float* view(const Rows& x, int64_t first, int64_t n, int64_t cols, float* buffer, int64_t& ld) {
  const int64_t at = x.offset + first * x.stride;
  if (x.base.dtype == DType::f32) {
    ld = x.stride;
    return x.base.as<float>() + at;
  }
  for (int64_t r = 0; r < n; ++r) widen({x.base.as<bf16>() + at + r * x.stride, DType::bf16}, buffer + r * cols, cols);
  ld = cols;
  return buffer;
}
HWY_INLINE void write_row(Out y, int64_t at, const float* from, float factor, int64_t cols) {
  const auto out = array_of<Any>(y);
  const VF f = splat(factor);
  for_vectors(cols, [&](int64_t i) HWY_ATTR { out.put(at + i, hn::Mul(load(from + i), f)); },
              [&](int64_t i, int64_t n) HWY_ATTR { out.put_part(at + i, hn::Mul(load_part(from + i, n), f), n); });
}

// What query `i` (a position in its sequence) may see.
struct Mask {
  bool causal;
  int64_t window, keys;
  const int32_t* document_start;  // of this sequence, or null
  HWY_INLINE int64_t low(int64_t i) const {
    int64_t l = document_start ? document_start[i] : 0;
    if (window > 0) l = std::max(l, i - window + 1);
    return std::max<int64_t>(l, 0);
  }
  HWY_INLINE int64_t high(int64_t i) const { return causal ? std::min(i + 1, keys) : keys; }
};

struct Dropping {
  float p = 0;
  PhiloxKey key{};
  uint64_t head = 0;  // global index
};

// Sets words[i] for keys [first, first + n), first a multiple of kAlign.
HWY_INLINE void dropout_words(const Dropping& drop, int64_t row_id, int64_t first, int64_t n, uint32_t* words) {
  for (int64_t i = 0; i < n; i += 4 * kStep)
    philox_words(drop.key, static_cast<uint64_t>(row_id), drop.head << 40 | static_cast<uint64_t>(first + i) >> 2, words + i);
}
HWY_INLINE VF dropped(VF v, const uint32_t* words, hn::Vec<DU> threshold, VF factor) {
  const auto w = hn::LoadU(DU(), words);
  return hn::IfThenElseZero(hn::RebindMask(DF(), hn::Eq(hn::Max(w, threshold), w)), hn::Mul(v, factor));
}

HWY_INLINE float exp_one(float x) { return hn::GetLane(exp(splat(x))); }

// ---- forward

struct ForwardScratch {
  float *q, *k, *v, *scores, *out, *max, *sum;
  uint32_t* words;
  static size_t floats(int64_t d) {
    return static_cast<size_t>((2 * kQueries + 2 * kKeys) * d + kQueries * kKeys + 2 * kQueries + kKeys + 64);
  }
  ForwardScratch(float* base, int64_t d) {
    scores = base;
    out = scores + kQueries * kKeys;
    q = out + kQueries * d;
    k = q + kQueries * d;
    v = k + kKeys * d;
    max = v + kKeys * d;
    sum = max + kQueries;
    words = reinterpret_cast<uint32_t*>(sum + kQueries);
  }
};

// Queries [q0, q0 + nq) of one head, at positions `past` later, against all keys that they see.
void forward_block(const ForwardScratch& s, const Rows& q_rows, const Rows& k_rows, const Rows& v_rows, int64_t d,
                   float scale, const Mask& mask, int64_t past, const Dropping& drop, const int64_t* row_ids, int64_t q0,
                   int64_t nq, Out out, int64_t out_offset, int64_t out_stride, float* lse) {
  int64_t begin = mask.keys, end = 0;
  for (int64_t i = 0; i < nq; ++i) {
    const int64_t low = mask.low(past + q0 + i), high = mask.high(past + q0 + i);
    if (low >= high) continue;
    begin = std::min(begin, low);
    end = std::max(end, high);
  }
  begin = begin / kAlign * kAlign;
  std::memset(s.out, 0, static_cast<size_t>(nq * d) * sizeof(float));
  for (int64_t i = 0; i < nq; ++i) s.max[i] = -kInfinity, s.sum[i] = 0;

  int64_t ldq, ldk, ldv;
  const float* q = view(q_rows, q0, nq, d, s.q, ldq);
  const auto threshold = hn::Set(DU(), dropout_threshold(drop.p));
  const VF keep_factor = splat(drop.p > 0 ? 1.0f / (1.0f - drop.p) : 1.0f);
  for (int64_t k0 = begin; k0 < end; k0 += kKeys) {
    const int64_t nk = std::min(kKeys, end - k0);
    const int64_t width = (nk + kStep - 1) / kStep * kStep;
    const float* k = view(k_rows, k0, nk, d, s.k, ldk);
    const float* v = view(v_rows, k0, nk, d, s.v, ldv);
    serial_sgemm(false, true, nq, nk, d, scale, q, ldq, k, ldk, 0.0f, s.scores, kKeys);
    for (int64_t i = 0; i < nq; ++i) {
      float* row = s.scores + i * kKeys;
      const int64_t low = std::max<int64_t>(0, mask.low(past + q0 + i) - k0);
      const int64_t high = std::min(nk, mask.high(past + q0 + i) - k0);
      if (low >= high) {
        std::memset(row, 0, static_cast<size_t>(width) * sizeof(float));
        continue;
      }
      for (int64_t j = 0; j < low; ++j) row[j] = -kInfinity;
      for (int64_t j = high; j < width; ++j) row[j] = -kInfinity;
      VF m = load(row);
      for (int64_t j = kStep; j < width; j += kStep) m = hn::Max(m, load(row + j));
      const float highest = std::max(s.max[i], max_lanes(m));
      const VF top = splat(highest);
      VF total = hn::Zero(DF());
      for (int64_t j = 0; j < width; j += kStep) {
        const VF p = exp(hn::Sub(load(row + j), top));
        total = hn::Add(total, p);
        store(p, row + j);
      }
      if (highest != s.max[i]) {
        const float correction = exp_one(s.max[i] - highest);
        const VF f = splat(correction);
        s.sum[i] *= correction;
        float* o = s.out + i * d;
        for_vectors(d, [&](int64_t j) HWY_ATTR { store(hn::Mul(load(o + j), f), o + j); },
                    [&](int64_t j, int64_t n) HWY_ATTR { store_part(hn::Mul(load_part(o + j, n), f), o + j, n); });
        s.max[i] = highest;
      }
      s.sum[i] += sum_lanes(total);
      if (drop.p > 0) {
        dropout_words(drop, row_ids[q0 + i], k0, width, s.words);
        for (int64_t j = 0; j < width; j += kStep)
          store(dropped(load(row + j), s.words + j, threshold, keep_factor), row + j);
      }
    }
    serial_sgemm(false, false, nq, d, nk, 1.0f, s.scores, kKeys, v, ldv, 1.0f, s.out, d);
  }
  for (int64_t i = 0; i < nq; ++i) {
    const float factor = s.max[i] == -kInfinity ? 0.0f : 1.0f / s.sum[i];
    write_row(out, out_offset + (q0 + i) * out_stride, s.out + i * d, factor, d);
    if (lse) lse[q0 + i] = s.max[i] == -kInfinity ? -kInfinity : s.max[i] + std::log(s.sum[i]);
  }
}

void forward(Context& c, AttentionShape a, In qkv, const int32_t* document_start, const int64_t* row_ids, Out out,
             float* lse) {
  const int64_t heads = a.qkv.heads(), d = a.qkv.head_dim, row = a.qkv.row();
  const int64_t blocks = blocks_of(a.seq, kQueries);
  reserve_scratch(c, ForwardScratch::floats(d) * sizeof(float));
  c.pool->parallel_for(a.batch * heads * blocks, [&](int64_t tile, int worker) HWY_ATTR {
    // Later blocks see more keys: they go first, so that the last tiles are short ones.
    const int64_t head = tile % heads, b = tile / heads % a.batch, block = blocks - 1 - tile / heads / a.batch;
    const int64_t first = b * a.seq, q0 = block * kQueries, group = head / a.qkv.heads_per_group;
    const ForwardScratch s(c.scratch_of<float>(worker, ForwardScratch::floats(d)), d);
    const Mask mask{a.causal, a.window, a.seq, document_start ? document_start + first : nullptr};
    const Dropping drop{a.dropout, a.dropout_key, static_cast<uint64_t>(a.head_offset + head)};
    forward_block(s, {qkv, first * row + a.qkv.query(head), row}, {qkv, first * row + a.qkv.key(group), row},
                  {qkv, first * row + a.qkv.value(group), row}, d, a.scale, mask, 0, drop, row_ids ? row_ids + first : nullptr,
                  q0, std::min(kQueries, a.seq - q0), out, first * heads * d + head * d, heads * d,
                  lse ? lse + (b * heads + head) * a.seq : nullptr);
  });
}

// ---- backward
//
// P = exp(scale q k^T - lse); with dropout M (0 or 1/(1-p)): dV = (P M)^T dO, dP = (dO V^T) M, dS = P (dP - D), D = rowsum(dO O),
// dQ = scale dS K, dK = scale dS^T Q. One tile does all heads of one group of one sequence, so that no two tiles add to
// the same place; the order of its sums is fixed.

struct BackwardScratch {
  float *q, *k, *v, *dout, *dq, *dk, *dv, *delta, *p, *dp;
  uint32_t* words;
  static size_t floats(int64_t seq, int64_t d, bool wide) {
    return static_cast<size_t>((wide ? 3 : 7) * seq * d + seq + 64 + 2 * kQueries * kKeys + kKeys);
  }
  BackwardScratch(float* base, int64_t seq, int64_t d, bool wide) {
    p = base;
    dp = p + kQueries * kKeys;
    words = reinterpret_cast<uint32_t*>(dp + kQueries * kKeys);
    dq = dp + kQueries * kKeys + kKeys;
    dk = dq + seq * d;
    dv = dk + seq * d;
    delta = dv + seq * d;
    q = wide ? nullptr : delta + (seq + 15) / 16 * 16;
    k = wide ? nullptr : q + seq * d;
    v = wide ? nullptr : k + seq * d;
    dout = wide ? nullptr : v + seq * d;
  }
};

void backward(Context& c, AttentionShape a, In qkv, In out, const float* lse, In dout, const int32_t* document_start,
              const int64_t* row_ids, Out dqkv) {
  const int64_t heads = a.qkv.heads(), per_group = a.qkv.heads_per_group, d = a.qkv.head_dim, row = a.qkv.row(), seq = a.seq;
  const bool wide = qkv.dtype == DType::f32 && dout.dtype == DType::f32;
  const size_t floats = BackwardScratch::floats(seq, d, wide);
  reserve_scratch(c, floats * sizeof(float));
  const auto o_array = array_of<Any>(out), do_array = array_of<Any>(dout);

  c.pool->parallel_for(a.batch * a.qkv.groups, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t b = tile / a.qkv.groups, group = tile % a.qkv.groups, first = b * seq;
    const BackwardScratch s(c.scratch_of<float>(worker, floats), seq, d, wide);
    const Mask mask{a.causal, a.window, seq, document_start ? document_start + first : nullptr};
    int64_t ldq, ldk, ldv, ldo;
    const float* k = view({qkv, first * row + a.qkv.key(group), row}, 0, seq, d, s.k, ldk);
    const float* v = view({qkv, first * row + a.qkv.value(group), row}, 0, seq, d, s.v, ldv);
    std::memset(s.dk, 0, static_cast<size_t>(2 * seq * d) * sizeof(float));

    for (int64_t h = 0; h < per_group; ++h) {
      const int64_t head = group * per_group + h, out_at = first * heads * d + head * d;
      const Dropping drop{a.dropout, a.dropout_key, static_cast<uint64_t>(a.head_offset + head)};
      const auto threshold = hn::Set(DU(), dropout_threshold(drop.p));
      const VF keep_factor = splat(drop.p > 0 ? 1.0f / (1.0f - drop.p) : 1.0f);
      const float* head_lse = lse + (b * heads + head) * seq;
      const float* q = view({qkv, first * row + a.qkv.query(head), row}, 0, seq, d, s.q, ldq);
      const float* dov = view({dout, out_at, heads * d}, 0, seq, d, s.dout, ldo);
      std::memset(s.dq, 0, static_cast<size_t>(seq * d) * sizeof(float));
      for (int64_t i = 0; i < seq; ++i) {
        const int64_t at = out_at + i * heads * d;
        VF sum = hn::Zero(DF());
        for_vectors(d, [&](int64_t j) HWY_ATTR { sum = hn::MulAdd(o_array.at(at + j), do_array.at(at + j), sum); },
                    [&](int64_t j, int64_t n) HWY_ATTR {
                      sum = hn::MulAdd(o_array.part(at + j, n), do_array.part(at + j, n), sum);
                    });
        s.delta[i] = sum_lanes(sum);
      }

      for (int64_t q0 = 0; q0 < seq; q0 += kQueries) {
        const int64_t nq = std::min(kQueries, seq - q0);
        int64_t begin = seq, end = 0;
        for (int64_t i = q0; i < q0 + nq; ++i) {
          if (mask.low(i) >= mask.high(i)) continue;
          begin = std::min(begin, mask.low(i));
          end = std::max(end, mask.high(i));
        }
        begin = begin / kAlign * kAlign;
        for (int64_t k0 = begin; k0 < end; k0 += kKeys) {
          const int64_t nk = std::min(kKeys, end - k0);
          const int64_t width = (nk + kStep - 1) / kStep * kStep;
          serial_sgemm(false, true, nq, nk, d, a.scale, q + q0 * ldq, ldq, k + k0 * ldk, ldk, 0.0f, s.p, kKeys);
          serial_sgemm(false, true, nq, nk, d, 1.0f, dov + q0 * ldo, ldo, v + k0 * ldv, ldv, 0.0f, s.dp, kKeys);
          for (int64_t i = 0; i < nq; ++i) {
            float* p = s.p + i * kKeys;
            float* dp = s.dp + i * kKeys;
            const int64_t low = std::max<int64_t>(0, mask.low(q0 + i) - k0);
            const int64_t high = std::min(nk, mask.high(q0 + i) - k0);
            if (low >= high) {
              std::memset(p, 0, static_cast<size_t>(width) * sizeof(float));
              std::memset(dp, 0, static_cast<size_t>(width) * sizeof(float));
              continue;
            }
            for (int64_t j = 0; j < low; ++j) p[j] = -kInfinity;
            for (int64_t j = high; j < width; ++j) p[j] = -kInfinity;
            for (int64_t j = nk; j < width; ++j) dp[j] = 0;
            const VF l = splat(head_lse[q0 + i]), delta = splat(s.delta[q0 + i]);
            if (drop.p > 0) dropout_words(drop, row_ids[first + q0 + i], k0, width, s.words);
            for (int64_t j = 0; j < width; j += kStep) {
              const VF pv = exp(hn::Sub(load(p + j), l));
              VF dpv = load(dp + j);
              if (drop.p > 0) {
                dpv = dropped(dpv, s.words + j, threshold, keep_factor);
                store(dropped(pv, s.words + j, threshold, keep_factor), p + j);
              } else {
                store(pv, p + j);
              }
              store(hn::Mul(pv, hn::Sub(dpv, delta)), dp + j);
            }
          }
          serial_sgemm(true, false, nk, d, nq, 1.0f, s.p, kKeys, dov + q0 * ldo, ldo, 1.0f, s.dv + k0 * d, d);
          serial_sgemm(true, false, nk, d, nq, a.scale, s.dp, kKeys, q + q0 * ldq, ldq, 1.0f, s.dk + k0 * d, d);
          serial_sgemm(false, false, nq, d, nk, a.scale, s.dp, kKeys, k + k0 * ldk, ldk, 1.0f, s.dq + q0 * d, d);
        }
      }
      for (int64_t i = 0; i < seq; ++i) write_row(dqkv, (first + i) * row + a.qkv.query(head), s.dq + i * d, 1.0f, d);
    }
    for (int64_t i = 0; i < seq; ++i) {
      write_row(dqkv, (first + i) * row + a.qkv.key(group), s.dk + i * d, 1.0f, d);
      write_row(dqkv, (first + i) * row + a.qkv.value(group), s.dv + i * d, 1.0f, d);
    }
  });
}

// ---- generation

void decode(Context& c, AttentionShape a, In qkv, Out k_cache, Out v_cache, int64_t past, int64_t capacity, Out out) {
  const int64_t heads = a.qkv.heads(), d = a.qkv.head_dim, row = a.qkv.row(), groups = a.qkv.groups;
  const auto x = array_of<Any>(qkv), kc = array_of<Any>(k_cache), vc = array_of<Any>(v_cache);
  const int64_t blocks = blocks_of(a.seq, kQueries);
  reserve_scratch(c, ForwardScratch::floats(d) * sizeof(float));
  // One tile a group: it appends the new keys and values and then attends, so that it reads what it wrote.
  c.pool->parallel_for(a.batch * groups, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t b = tile / groups, group = tile % groups, cache = (b * groups + group) * capacity * d;
    for (int64_t t = 0; t < a.seq; ++t) {
      const int64_t from = (b * a.seq + t) * row, to = cache + (past + t) * d;
      for (int64_t i = 0; i < d; i += kStep) {
        const int64_t n = std::min(kStep, d - i);
        kc.put_part(to + i, x.part(from + a.qkv.key(group) + i, n), n);
        vc.put_part(to + i, x.part(from + a.qkv.value(group) + i, n), n);
      }
    }
    const ForwardScratch s(c.scratch_of<float>(worker, ForwardScratch::floats(d)), d);
    const Mask mask{a.causal, a.window, past + a.seq, nullptr};
    for (int64_t h = 0; h < a.qkv.heads_per_group; ++h) {
      const int64_t head = group * a.qkv.heads_per_group + h;
      for (int64_t block = 0; block < blocks; ++block)
        forward_block(s, {qkv, b * a.seq * row + a.qkv.query(head), row}, {k_cache, cache, d}, {v_cache, cache, d}, d,
                      a.scale, mask, past, Dropping{}, nullptr, block * kQueries,
                      std::min(kQueries, a.seq - block * kQueries), out, b * a.seq * heads * d + head * d, heads * d, nullptr);
    }
  });
}

// ---- rotary embedding

template <class T>
HWY_INLINE void rotate_head(const Array<T>& x, int64_t at, const float* cos, const float* sin, int64_t half, bool interleaved,
                            VF sign) {
  if (!interleaved) {
    for (int64_t i = 0; i < half; i += kStep) {
      const int64_t n = std::min(kStep, half - i);
      const bool whole = n == kStep;
      const VF a = whole ? x.at(at + i) : x.part(at + i, n);
      const VF b = whole ? x.at(at + half + i) : x.part(at + half + i, n);
      const VF c = whole ? load(cos + i) : load_part(cos + i, n);
      const VF s = hn::Mul(sign, whole ? load(sin + i) : load_part(sin + i, n));
      const VF first = hn::NegMulAdd(b, s, hn::Mul(a, c)), second = hn::MulAdd(a, s, hn::Mul(b, c));
      if (whole) {
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
    // Two vectors of pairs are separated into first and second members and put together again.
    HWY_ALIGN float pairs[2 * kLanes] = {};
    for (int64_t j = 0; j < 2; ++j)
      if (const int64_t m = std::min(kStep, 2 * n - j * kStep); m > 0) store(x.part(at + 2 * i + j * kStep, m), pairs + j * kStep);
    VF a, b;
    hn::LoadInterleaved2(DF(), pairs, a, b);
    const VF c = load_part(cos + i, n), s = hn::Mul(sign, load_part(sin + i, n));
    hn::StoreInterleaved2(hn::NegMulAdd(b, s, hn::Mul(a, c)), hn::MulAdd(a, s, hn::Mul(b, c)), DF(), pairs);
    for (int64_t j = 0; j < 2; ++j)
      if (const int64_t m = std::min(kStep, 2 * n - j * kStep); m > 0) x.put_part(at + 2 * i + j * kStep, load(pairs + j * kStep), m);
  }
}

void rope(Context& c, QkvLayout layout, Out qkv, const float* cos, const float* sin, const int32_t* positions, int64_t rows,
          int64_t rotary_dim, bool interleaved, bool inverse) {
  const int64_t half = rotary_dim / 2, width = layout.row(), d = layout.head_dim;
  by_type({qkv}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(qkv);
    parallel_blocks(c, rows, rows_per_block(width), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      const VF sign = splat(inverse ? -1.0f : 1.0f);
      for (int64_t r = begin; r < end; ++r) {
        const int64_t table = int64_t{positions[r]} * half;
        for (int64_t g = 0; g < layout.groups; ++g)
          for (int64_t h = 0; h <= layout.heads_per_group; ++h)  // the query heads and the key head
            rotate_head(x, r * width + (g * (layout.heads_per_group + 2) + h) * d, cos + table, sin + table, half,
                        interleaved, sign);
      }
    });
  });
}

Attention attention_family() { return {rope, forward, backward, decode}; }

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace capstan::kernels {
HWY_EXPORT(attention_family);
const Attention& cpu_attention() {
  static const Attention family = HWY_DYNAMIC_DISPATCH(attention_family)();
  return family;
}
}  // namespace capstan::kernels
#endif
