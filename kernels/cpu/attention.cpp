// Attention in blocks of queries and keys ("flash"): scores exist for one block at a time, in scratch. The two products
// of the forward pass and the five of the backward pass run on packed panels (gemm_core-inl.hpp).
//
// Masks are intervals: query i sees the keys [low(i), high(i)), whatever combination of causality, window and document
// start made them. Blocks that nobody sees are skipped, blocks are cut where nobody sees further.
#include "kernels/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/common/dropout.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/gemm_core-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kQueries = 64;  // a block of queries
constexpr int64_t kKeys = 144;    // a block of keys: whole panels for every vector length (12, 24 or 48 keys)
constexpr float kInfinity = std::numeric_limits<float>::infinity();
static_assert(kKeys % kNr == 0 && kQueries % kMr == 0);

HWY_INLINE int64_t whole_vectors(int64_t n) {
  return (n + kStep - 1) / kStep * kStep;
}
template <class T>
HWY_INLINE const T* at(In x, int64_t i) {
  return x.as<T>() + i;
}

// Row r of a matrix inside a larger array lies at base[offset + r * stride].
struct Rows {
  In base;
  int64_t offset, stride;
  HWY_INLINE bool narrow() const { return base.dtype == DType::bf16; }
  HWY_INLINE Rows from(int64_t row) const { return {base, offset + row * stride, stride}; }
};
// Rows [0, n) as fp32: where they lie, or widened into buffer.
HWY_INLINE const float* wide_rows(const Rows& x, int64_t n, int64_t cols, float* buffer, int64_t& ld) {
  if (!x.narrow()) {
    ld = x.stride;
    return at<float>(x.base, x.offset);
  }
  for (int64_t r = 0; r < n; ++r)
    widen({at<bf16>(x.base, x.offset + r * x.stride), DType::bf16}, buffer + r * cols, cols);
  ld = cols;
  return buffer;
}
// Panels of X^T for rows [first, first + n) of X: columns are rows of X, depth is d. first is a multiple of kNr.
HWY_INLINE void pack_as_columns(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d, float* to) {
  for (int64_t j = first; j < first + n; j += kNr) {
    const Rows r = x.from(j);
    const int64_t width = panel_width(rows, j), count = std::min(kNr, rows - j);
    if (x.narrow())
      pack_transposed(at<bf16>(r.base, r.offset), r.stride, d, count, width, to + j * d);
    else
      pack_transposed(at<float>(r.base, r.offset), r.stride, d, count, width, to + j * d);
  }
}
// Width of the panel that begins at column j of d: 64 columns are 24, 24 and 16, but 32 are 16 and 16, because a panel of one
// vector leaves half of the multipliers idle.
HWY_INLINE int64_t depth_panel(int64_t d, int64_t j) {
  const int64_t vectors = (d - j + kStep - 1) / kStep, panels = (vectors + kNv - 1) / kNv;
  return (vectors + panels - 1) / panels * kStep;
}
// Panels of X: columns are its d columns, depth its rows; rows [first, first + n) of `rows`.
HWY_INLINE void pack_as_depth(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d, float* to) {
  const Rows r = x.from(first);
  for (int64_t j = 0, width; j < d; j += width) {
    width = depth_panel(d, j);
    const int64_t cols = std::min(width, d - j);
    float* panel = to + j * rows + first * width;
    if (x.narrow())
      pack_straight(at<bf16>(r.base, r.offset + j), r.stride, n, cols, width, panel);
    else
      pack_straight(at<float>(r.base, r.offset + j), r.stride, n, cols, width, panel);
  }
}
HWY_INLINE int64_t columns_floats(int64_t rows, int64_t d) {
  return whole_vectors(rows) * d;
}
HWY_INLINE int64_t depth_floats(int64_t rows, int64_t d) {
  return rows * whole_vectors(d);
}

HWY_INLINE void write_row(Out y, int64_t to, const float* from, float factor, int64_t cols) {
  const auto out = array_of<Any>(y);
  const VF f = splat(factor);
  for_vectors(
      cols, [&](int64_t i) HWY_ATTR { out.put(to + i, hn::Mul(load(from + i), f)); },
      [&](int64_t i, int64_t n) HWY_ATTR { out.put_part(to + i, hn::Mul(load_part(from + i, n), f), n); });
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

// The intervals of a block of queries, and of the queries and keys of one block of scores relative to its corner.
struct Block {
  int64_t q0, nq;                         // queries
  int64_t begin, end;                     // all keys that any of them sees; begin is a multiple of kNr
  int64_t low[kQueries], high[kQueries];  // keys of each query
  int64_t k0 = 0, nk = 0, width = 0;      // the current keys; width: whole vectors
  Block(const Mask& mask, int64_t past, int64_t first, int64_t count)
      : q0(first), nq(count), begin(mask.keys), end(0) {
    for (int64_t i = 0; i < nq; ++i) {
      low[i] = mask.low(past + q0 + i);
      high[i] = std::max(low[i], mask.high(past + q0 + i));
      if (low[i] == high[i]) continue;
      begin = std::min(begin, low[i]);
      end = std::max(end, high[i]);
    }
    begin = begin / kNr * kNr;
  }
  void at_keys(int64_t first) {
    k0 = first;
    nk = std::min(kKeys, end - k0);
    width = whole_vectors(nk);
  }
  // Keys of the current block that query i sees, as [from, to).
  HWY_INLINE void keys_of(int64_t i, int64_t& from, int64_t& to) const {
    from = std::clamp<int64_t>(low[i] - k0, 0, nk);
    to = std::clamp<int64_t>(high[i] - k0, from, nk);
  }
  // The same for queries [i, i + n) together; false when there are none.
  HWY_INLINE bool keys_of_rows(int64_t i, int64_t n, int64_t& from, int64_t& to) const {
    from = nk, to = 0;
    for (int64_t r = i; r < i + n; ++r) {
      int64_t f, t;
      keys_of(r, f, t);
      if (f < t) from = std::min(from, f), to = std::max(to, t);
    }
    return from < to;
  }
  // Queries that see any of the keys [j, j + n).
  HWY_INLINE bool queries_of(int64_t j, int64_t n, int64_t& from, int64_t& to) const {
    auto sees = [&](int64_t i) { return low[i] - k0 < j + n && high[i] - k0 > j; };
    for (from = 0; from < nq && !sees(from);) ++from;
    for (to = nq; to > from && !sees(to - 1);) --to;
    return from < to;
  }
};

// scores[nq, kKeys] = alpha X Y^T for the pairs that somebody sees; X: rows at x, Y: panels of columns. Places that nobody
// sees keep what they held.
HWY_INLINE void score_products(const Block& b, const float* x, int64_t ldx, const float* y_columns,
                               int64_t keys, int64_t d, float alpha, float* scores) {
  for (int64_t i = 0; i < b.nq; i += kMr) {
    const int64_t rows = std::min<int64_t>(kMr, b.nq - i);
    int64_t from, to;
    if (!b.keys_of_rows(i, rows, from, to)) continue;
    for (int64_t j = from / kNr * kNr; j < to; j += kNr)
      panel_product_of<From::rows, false>(panel_width(keys, b.k0 + j), d, x + i * ldx, ldx,
                                          y_columns + (b.k0 + j) * d, alpha, 0.0f, scores + i * kKeys + j,
                                          kKeys, rows, std::min(kNr, std::min(keys - b.k0, kKeys) - j));
  }
}
// out[nq, d] += alpha S Y; Y: panels of depth over all keys.
HWY_INLINE void weighted_rows(const Block& b, const float* s, const float* y_depth, int64_t keys, int64_t d,
                              float alpha, float* out) {
  for (int64_t i = 0; i < b.nq; i += kMr) {
    const int64_t rows = std::min<int64_t>(kMr, b.nq - i);
    int64_t from, to;
    if (!b.keys_of_rows(i, rows, from, to)) continue;
    for (int64_t j = 0, width; j < d; j += width) {
      width = depth_panel(d, j);
      panel_product_of<From::rows, false>(width, to - from, s + i * kKeys + from, kKeys,
                                          y_depth + j * keys + (b.k0 + from) * width, alpha, 1.0f,
                                          out + i * d + j, d, rows, std::min(width, d - j));
    }
  }
}
// out[keys, d] += alpha S^T X for the block's keys; X: panels of depth over all `queries`.
HWY_INLINE void weighted_columns(const Block& b, const float* s, const float* x_depth, int64_t queries,
                                 int64_t d, float alpha, float* out) {
  for (int64_t i = 0; i < b.nk; i += kMr) {
    const int64_t rows = std::min<int64_t>(kMr, b.nk - i);
    int64_t from, to;
    if (!b.queries_of(i, rows, from, to)) continue;
    for (int64_t j = 0, width; j < d; j += width) {
      width = depth_panel(d, j);
      panel_product_of<From::columns, false>(width, to - from, s + from * kKeys + i, kKeys,
                                             x_depth + j * queries + (b.q0 + from) * width, alpha, 1.0f,
                                             out + (b.k0 + i) * d + j, d, rows, std::min(width, d - j));
    }
  }
}

struct Dropping {
  float p = 0;
  PhiloxKey key{};
  uint64_t head = 0;  // global index
};
// The words of keys [first, first + n), first a multiple of 4 (common/dropout.hpp).
HWY_INLINE void dropout_words(const Dropping& drop, int64_t row_id, int64_t first, int64_t n,
                              uint32_t* words) {
  for (int64_t i = 0; i < n; i += 4 * kStep)
    philox_words(drop.key, static_cast<uint64_t>(row_id),
                 drop.head << 40 | static_cast<uint64_t>(first + i) >> 2, words + i);
}
HWY_INLINE VF dropped(VF v, const uint32_t* words, hn::Vec<DU> threshold, VF factor) {
  const auto w = hn::LoadU(DU(), words);
  return hn::IfThenElseZero(hn::RebindMask(DF(), hn::Eq(hn::Max(w, threshold), w)), hn::Mul(v, factor));
}
constexpr size_t kWords = kKeys + 4 * kLanes;

HWY_INLINE float exp_one(float x) {
  return hn::GetLane(exp(splat(x)));
}

// Cuts a row of scores to the keys [from, to): -infinity beside them up to whole vectors, which are then [begin, end),
// zeros further out.
HWY_INLINE void cut_row(float* row, int64_t from, int64_t to, int64_t width, int64_t& begin, int64_t& end) {
  begin = from / kStep * kStep;
  end = whole_vectors(to);
  for (int64_t j = begin; j < from; ++j) row[j] = -kInfinity;
  for (int64_t j = to; j < end; ++j) row[j] = -kInfinity;
  std::memset(row, 0, static_cast<size_t>(begin) * sizeof(float));
  std::memset(row + end, 0, static_cast<size_t>(width - end) * sizeof(float));
}

// ---- forward

// A worker's scratch: one block of scores, its output rows, and the queries where they must be widened.
struct ForwardScratch {
  float *scores, *out, *q, *max, *sum;
  uint32_t* words;
  static size_t floats(int64_t d) { return static_cast<size_t>(kQueries * (kKeys + 2 * d + 2)) + kWords; }
  ForwardScratch(float* base, int64_t d)
      : scores(base),
        out(scores + kQueries * kKeys),
        q(out + kQueries * d),
        max(q + kQueries * d),
        sum(max + kQueries),
        words(reinterpret_cast<uint32_t*>(sum + kQueries)) {}
};

struct PackedKeys {
  const float *k_columns, *v_depth;
  int64_t keys;
};

// The output of one block of queries of one head: running maximum and sum over the blocks of keys.
void forward_block(const ForwardScratch& s, Block& b, const Rows& q_rows, const PackedKeys& kv, int64_t d,
                   float scale, const Dropping& drop, const int64_t* row_ids, Out out, int64_t out_at,
                   int64_t out_stride, float* lse) {
  std::memset(s.out, 0, static_cast<size_t>(b.nq * d) * sizeof(float));
  for (int64_t i = 0; i < b.nq; ++i) s.max[i] = -kInfinity, s.sum[i] = 0;
  int64_t ldq;
  const float* q = wide_rows(q_rows.from(b.q0), b.nq, d, s.q, ldq);
  const auto threshold = hn::Set(DU(), dropout_threshold(drop.p));
  const VF keep_factor = splat(drop.p > 0 ? 1.0f / (1.0f - drop.p) : 1.0f);

  for (int64_t k0 = b.begin; k0 < b.end; k0 += kKeys) {
    b.at_keys(k0);
    score_products(b, q, ldq, kv.k_columns, kv.keys, d, scale, s.scores);
    for (int64_t i = 0; i < b.nq; ++i) {
      float* row = s.scores + i * kKeys;
      int64_t from, to, begin, end;
      b.keys_of(i, from, to);
      if (from == to) {
        std::memset(row, 0, static_cast<size_t>(b.width) * sizeof(float));
        continue;
      }
      cut_row(row, from, to, b.width, begin, end);
      VF m = load(row + begin);
      for (int64_t j = begin + kStep; j < end; j += kStep) m = hn::Max(m, load(row + j));
      const float highest = std::max(s.max[i], max_lanes(m));
      const VF top = splat(highest);
      VF total = hn::Zero(DF());
      for (int64_t j = begin; j < end; j += kStep) {
        const VF p = exp_not_positive(hn::Sub(load(row + j), top));
        total = hn::Add(total, p);
        store(p, row + j);
      }
      if (highest != s.max[i]) {
        const float correction = exp_one(s.max[i] - highest);
        const VF f = splat(correction);
        float* o = s.out + i * d;
        s.sum[i] *= correction;
        s.max[i] = highest;
        for_vectors(
            d, [&](int64_t j) HWY_ATTR { store(hn::Mul(load(o + j), f), o + j); },
            [&](int64_t j, int64_t n) HWY_ATTR { store_part(hn::Mul(load_part(o + j, n), f), o + j, n); });
      }
      s.sum[i] += sum_lanes(total);
      if (drop.p > 0) {
        dropout_words(drop, row_ids[b.q0 + i], k0, b.width, s.words);
        for (int64_t j = begin; j < end; j += kStep)
          store(dropped(load(row + j), s.words + j, threshold, keep_factor), row + j);
      }
    }
    weighted_rows(b, s.scores, kv.v_depth, kv.keys, d, 1.0f, s.out);
  }
  for (int64_t i = 0; i < b.nq; ++i) {
    const bool nothing = s.max[i] == -kInfinity;
    write_row(out, out_at + (b.q0 + i) * out_stride, s.out + i * d, nothing ? 0.0f : 1.0f / s.sum[i], d);
    if (lse) lse[b.q0 + i] = nothing ? -kInfinity : s.max[i] + std::log(s.sum[i]);
  }
}

ScratchNeed forward_scratch(AttentionShape a) {
  const int64_t d = a.qkv.head_dim, floats = columns_floats(a.seq, d) + depth_floats(a.seq, d);
  return {static_cast<size_t>(a.batch * a.qkv.groups * floats) * sizeof(float),
          ForwardScratch::floats(d) * sizeof(float)};
}

// Keys and values of all groups are packed first, all threads together, because every block of queries uses them.
void forward(Context& c, AttentionShape a, In qkv, const int32_t* document_start, const int64_t* row_ids,
             Out out, float* lse) {
  const int64_t heads = a.qkv.heads(), groups = a.qkv.groups, per_group = a.qkv.heads_per_group,
                d = a.qkv.head_dim, row = a.qkv.row(), seq = a.seq;
  const int64_t k_floats = columns_floats(seq, d), v_floats = depth_floats(seq, d),
                floats = k_floats + v_floats;
  auto* packed = reinterpret_cast<float*>(reserve_scratch(c, forward_scratch(a)));

  const int64_t slab = 8 * kNr, slabs = blocks_of(seq, slab);
  c.pool->parallel_for(a.batch * groups * slabs, [&](int64_t tile, int) HWY_ATTR {
    const int64_t first = tile % slabs * slab, n = std::min(slab, seq - first), group = tile / slabs % groups;
    const int64_t token = tile / slabs / groups * seq;
    float* to = packed + tile / slabs * floats;
    pack_as_columns({qkv, token * row + a.qkv.key(group), row}, first, n, seq, d, to);
    pack_as_depth({qkv, token * row + a.qkv.value(group), row}, first, n, seq, d, to + k_floats);
  });

  // Neighbouring tiles share keys and values. Later blocks see more keys: they go first, the last tiles are short.
  const int64_t blocks = blocks_of(seq, kQueries);
  c.pool->parallel_for(a.batch * heads * blocks, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t head_in_group = tile % per_group, block = blocks - 1 - tile / per_group % blocks;
    const int64_t group = tile / per_group / blocks % groups, b = tile / per_group / blocks / groups;
    const int64_t head = group * per_group + head_in_group, token = b * seq, q0 = block * kQueries;
    const ForwardScratch s(c.scratch_of<float>(worker, ForwardScratch::floats(d)), d);
    const float* keys = packed + (b * groups + group) * floats;
    Block scores({a.causal, a.window, seq, document_start ? document_start + token : nullptr}, 0, q0,
                 std::min(kQueries, seq - q0));
    forward_block(s, scores, {qkv, token * row + a.qkv.query(head), row}, {keys, keys + k_floats, seq}, d,
                  a.scale, {a.dropout, a.dropout_key, static_cast<uint64_t>(a.head_offset + head)},
                  row_ids ? row_ids + token : nullptr, out, token * heads * d + head * d, heads * d,
                  lse ? lse + (b * heads + head) * seq : nullptr);
  });
}

// ---- backward
//
// P = exp(scale q k^T - lse); with dropout M (0 or 1/(1-p)): dV = (P M)^T dO, dP = (dO V^T) M, dS = P (dP - D), D = rowsum(dO O),
// dQ = scale dS K, dK = scale dS^T Q. One tile does all heads of one group of one sequence, so that no two tiles add to
// the same place; the order of its sums is fixed.

struct BackwardScratch {
  float *p, *dp, *dq, *q, *dout, *delta, *k_columns, *v_columns, *k_depth, *q_depth, *dout_depth, *dk, *dv;
  uint32_t* words;
  size_t floats = 0;
  BackwardScratch(float* base, int64_t seq, int64_t d) {
    auto take = [&](int64_t n) {
      float* here = base ? base + floats : nullptr;
      floats += static_cast<size_t>((n + 15) / 16 * 16);
      return here;
    };
    p = take(kQueries * kKeys);
    dp = take(kQueries * kKeys);
    dq = take(kQueries * d);
    q = take(kQueries * d);
    dout = take(kQueries * d);
    delta = take(kQueries);
    words = reinterpret_cast<uint32_t*>(take(kWords));
    k_columns = take(columns_floats(seq, d));
    v_columns = take(columns_floats(seq, d));
    k_depth = take(depth_floats(seq, d));
    q_depth = take(depth_floats(seq, d));
    dout_depth = take(depth_floats(seq, d));
    dk = take(seq * d);
    dv = take(seq * d);
  }
};

// P and dS of the current block of scores from logits in s.p and dO V^T in s.dp; s.p then holds P with dropout.
HWY_INLINE void score_gradients(const BackwardScratch& s, const Block& b, const float* lse,
                                const Dropping& drop, const int64_t* row_ids) {
  const auto threshold = hn::Set(DU(), dropout_threshold(drop.p));
  const VF keep_factor = splat(drop.p > 0 ? 1.0f / (1.0f - drop.p) : 1.0f);
  for (int64_t i = 0; i < b.nq; ++i) {
    float *p = s.p + i * kKeys, *dp = s.dp + i * kKeys;
    int64_t from, to, begin, end;
    b.keys_of(i, from, to);
    if (from == to) {
      std::memset(p, 0, static_cast<size_t>(b.width) * sizeof(float));
      std::memset(dp, 0, static_cast<size_t>(b.width) * sizeof(float));
      continue;
    }
    cut_row(p, from, to, b.width, begin, end);
    std::memset(dp, 0, static_cast<size_t>(from) * sizeof(float));
    std::memset(dp + to, 0, static_cast<size_t>(b.width - to) * sizeof(float));
    const VF l = splat(lse[b.q0 + i]), delta = splat(s.delta[i]);
    if (drop.p > 0) dropout_words(drop, row_ids[b.q0 + i], b.k0, b.width, s.words);
    for (int64_t j = begin; j < end; j += kStep) {
      const VF pv = exp_not_positive(hn::Sub(load(p + j), l));
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
}

ScratchNeed backward_scratch(AttentionShape a) {
  return {0, BackwardScratch(nullptr, a.seq, a.qkv.head_dim).floats * sizeof(float)};
}

void backward(Context& c, AttentionShape a, In qkv, In out, const float* lse, In dout,
              const int32_t* document_start, const int64_t* row_ids, Out dqkv) {
  const int64_t heads = a.qkv.heads(), per_group = a.qkv.heads_per_group, d = a.qkv.head_dim,
                row = a.qkv.row(), seq = a.seq;
  const size_t floats = BackwardScratch(nullptr, seq, d).floats;
  reserve_scratch(c, backward_scratch(a));
  const auto o_array = array_of<Any>(out), do_array = array_of<Any>(dout);

  c.pool->parallel_for(a.batch * a.qkv.groups, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t b = tile / a.qkv.groups, group = tile % a.qkv.groups, token = b * seq;
    const BackwardScratch s(c.scratch_of<float>(worker, floats), seq, d);
    const Mask mask{a.causal, a.window, seq, document_start ? document_start + token : nullptr};
    const Rows k{qkv, token * row + a.qkv.key(group), row}, v{qkv, token * row + a.qkv.value(group), row};
    pack_as_columns(k, 0, seq, seq, d, s.k_columns);
    pack_as_columns(v, 0, seq, seq, d, s.v_columns);
    pack_as_depth(k, 0, seq, seq, d, s.k_depth);
    std::memset(s.dk, 0, static_cast<size_t>(seq * d) * sizeof(float));
    std::memset(s.dv, 0, static_cast<size_t>(seq * d) * sizeof(float));

    for (int64_t h = 0; h < per_group; ++h) {
      const int64_t head = group * per_group + h, out_at = token * heads * d + head * d;
      const Rows q{qkv, token * row + a.qkv.query(head), row}, o_grad{dout, out_at, heads * d};
      const Dropping drop{a.dropout, a.dropout_key, static_cast<uint64_t>(a.head_offset + head)};
      pack_as_depth(q, 0, seq, seq, d, s.q_depth);
      pack_as_depth(o_grad, 0, seq, seq, d, s.dout_depth);

      for (int64_t q0 = 0; q0 < seq; q0 += kQueries) {
        Block block(mask, 0, q0, std::min(kQueries, seq - q0));
        int64_t ldq, ldo;
        const float* q_wide = wide_rows(q.from(q0), block.nq, d, s.q, ldq);
        const float* do_wide = wide_rows(o_grad.from(q0), block.nq, d, s.dout, ldo);
        std::memset(s.dq, 0, static_cast<size_t>(block.nq * d) * sizeof(float));
        for (int64_t i = 0; i < block.nq; ++i) {
          const int64_t from = out_at + (q0 + i) * heads * d;
          VF sum = hn::Zero(DF());
          for_vectors(
              d,
              [&](int64_t j) HWY_ATTR { sum = hn::MulAdd(o_array.at(from + j), do_array.at(from + j), sum); },
              [&](int64_t j, int64_t n)
                  HWY_ATTR { sum = hn::MulAdd(o_array.part(from + j, n), do_array.part(from + j, n), sum); });
          s.delta[i] = sum_lanes(sum);
        }
        for (int64_t k0 = block.begin; k0 < block.end; k0 += kKeys) {
          block.at_keys(k0);
          score_products(block, q_wide, ldq, s.k_columns, seq, d, a.scale, s.p);
          score_products(block, do_wide, ldo, s.v_columns, seq, d, 1.0f, s.dp);
          score_gradients(s, block, lse + (b * heads + head) * seq, drop,
                          row_ids ? row_ids + token : nullptr);
          weighted_columns(block, s.p, s.dout_depth, seq, d, 1.0f, s.dv);
          weighted_columns(block, s.dp, s.q_depth, seq, d, a.scale, s.dk);
          weighted_rows(block, s.dp, s.k_depth, seq, d, a.scale, s.dq);
        }
        for (int64_t i = 0; i < block.nq; ++i)
          write_row(dqkv, (token + q0 + i) * row + a.qkv.query(head), s.dq + i * d, 1.0f, d);
      }
    }
    for (int64_t i = 0; i < seq; ++i) {
      write_row(dqkv, (token + i) * row + a.qkv.key(group), s.dk + i * d, 1.0f, d);
      write_row(dqkv, (token + i) * row + a.qkv.value(group), s.dv + i * d, 1.0f, d);
    }
  });
}

// ---- generation

// One query against keys [low, high) of a cache, as it lies: read once, nothing to pack.
template <class T>
HWY_INLINE void single_query(const float* q, const T* k, const T* v, int64_t d, float scale, int64_t low,
                             int64_t high, float* scores, float* out) {
  float highest = -kInfinity;
  for (int64_t j = low; j < high; ++j) {
    VF sum = hn::Zero(DF());
    for_vectors(
        d, [&](int64_t i) HWY_ATTR { sum = hn::MulAdd(load(q + i), load(k + j * d + i), sum); },
        [&](int64_t i, int64_t n)
            HWY_ATTR { sum = hn::MulAdd(load_part(q + i, n), load_part(k + j * d + i, n), sum); });
    scores[j - low] = sum_lanes(sum) * scale;
    highest = std::max(highest, scores[j - low]);
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

void decode(Context& c, AttentionShape a, In qkv, Out k_cache, Out v_cache, int64_t past, int64_t capacity,
            Out out) {
  const int64_t heads = a.qkv.heads(), d = a.qkv.head_dim, row = a.qkv.row(), groups = a.qkv.groups,
                keys = past + a.seq;
  const auto x = array_of<Any>(qkv), kc = array_of<Any>(k_cache), vc = array_of<Any>(v_cache);
  const bool few = a.seq < kMr;
  const int64_t k_floats = columns_floats(keys, d), v_floats = depth_floats(keys, d);
  const size_t floats =
      ForwardScratch::floats(d) + static_cast<size_t>(few ? keys : k_floats + v_floats) + 16;
  reserve_scratch(c, floats * sizeof(float));
  // One tile a group: it appends the new keys and values and then attends, so that it reads what it wrote.
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
    float* packed = c.scratch_of<float>(worker, floats);
    const ForwardScratch s(packed + (few ? (keys + 15) / 16 * 16 : k_floats + v_floats), d);
    const Mask mask{a.causal, a.window, keys, nullptr};
    if (!few) {
      pack_as_columns({k_cache, cache, d}, 0, keys, keys, d, packed);
      pack_as_depth({v_cache, cache, d}, 0, keys, keys, d, packed + k_floats);
    }
    for (int64_t h = 0; h < a.qkv.heads_per_group; ++h) {
      const int64_t head = group * a.qkv.heads_per_group + h, out_at = token * heads * d + head * d;
      const Rows q{qkv, token * row + a.qkv.query(head), row};
      if (few) {
        for (int64_t t = 0; t < a.seq; ++t) {
          int64_t ld;
          const float* query = wide_rows(q.from(t), 1, d, s.q, ld);
          const int64_t low = mask.low(past + t), high = mask.high(past + t);
          if (k_cache.dtype == DType::bf16)
            single_query(query, k_cache.as<bf16>() + cache, v_cache.as<bf16>() + cache, d, a.scale, low, high,
                         packed, s.out);
          else
            single_query(query, k_cache.as<float>() + cache, v_cache.as<float>() + cache, d, a.scale, low,
                         high, packed, s.out);
          write_row(out, out_at + t * heads * d, s.out, 1.0f, d);
        }
        continue;
      }
      for (int64_t q0 = 0; q0 < a.seq; q0 += kQueries) {
        Block block(mask, past, q0, std::min(kQueries, a.seq - q0));
        forward_block(s, block, q, {packed, packed + k_floats, keys}, d, a.scale, Dropping{}, nullptr, out,
                      out_at, heads * d, nullptr);
      }
    }
  });
}

// ---- rotary embedding

template <class T>
HWY_INLINE void rotate_head(const Array<T>& x, int64_t at, const float* cos, const float* sin, int64_t half,
                            bool interleaved, VF sign) {
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
  return {rope, forward, backward, decode, forward_scratch, backward_scratch};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace capstan::kernels {
const Attention& cpu_attention() {
  static const Attention family = CAPSTAN_BEST(attention_family)();
  return family;
}
}  // namespace capstan::kernels
#endif
