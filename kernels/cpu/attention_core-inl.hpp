// What attention over whole sequences (attention.cpp) and over parts of them (context_attention.cpp) share (a Highway "-inl"
// header): panels of keys and values, intervals of visible keys, one block of queries against all keys, forward and back.
//
// Masks are intervals: query i sees the keys [low(i), high(i)), whatever combination of causality, window and document
// start made them. Blocks that nobody sees are skipped, blocks are cut where nobody sees further.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/attention.hpp"
#include "kernels/common/dropout.hpp"
#include "kernels/cpu/gemm_core-inl.hpp"

#if defined(CAPSTAN_KERNELS_CPU_ATTENTION_CORE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef CAPSTAN_KERNELS_CPU_ATTENTION_CORE_INL
#undef CAPSTAN_KERNELS_CPU_ATTENTION_CORE_INL
#else
#define CAPSTAN_KERNELS_CPU_ATTENTION_CORE_INL
#endif

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

inline constexpr int64_t kQueries = 64;  // a block of queries
inline constexpr int64_t kKeys =
    144;  // a block of keys: whole panels for every vector length (12, 24 or 48 keys)
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
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

// What a query may see of the keys here: key 0 is that of global position first_key.
struct Mask {
  bool causal;
  int64_t window, keys;
  const int32_t* document_start;  // of query row 0 and those after it, as global positions; or null
  int64_t first_key = 0;
  // Keys [low, high) of the query in `row` with that global position.
  HWY_INLINE int64_t low(int64_t row, int64_t position) const {
    int64_t l = document_start ? document_start[row] : 0;
    if (window > 0) l = std::max(l, position - window + 1);
    return std::clamp<int64_t>(l - first_key, 0, keys);
  }
  HWY_INLINE int64_t high(int64_t position) const {
    return causal ? std::clamp<int64_t>(position + 1 - first_key, 0, keys) : keys;
  }
};

// The intervals of a block of queries, and of the queries and keys of one block of scores relative to its corner.
struct Block {
  int64_t q0, nq;                         // queries
  int64_t begin, end;                     // all keys that any of them sees; begin is a multiple of kNr
  int64_t low[kQueries], high[kQueries];  // keys of each query
  int64_t k0 = 0, nk = 0, width = 0;      // the current keys; width: whole vectors
  // Query rows [first, first + count); `position` is the global one of the first.
  Block(const Mask& mask, int64_t first, int64_t count, int64_t position)
      : q0(first), nq(count), begin(mask.keys), end(0) {
    for (int64_t i = 0; i < nq; ++i) {
      low[i] = mask.low(q0 + i, position + i);
      high[i] = std::max(low[i], mask.high(position + i));
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
  uint64_t head = 0;      // global index
  int64_t first_key = 0;  // global position of key 0
};
// The words of keys [first, first + n) (common/dropout.hpp), within `words`: blocks of four begin at multiples of 4.
HWY_INLINE const uint32_t* dropout_words(const Dropping& drop, int64_t row_id, int64_t first, int64_t n,
                                         uint32_t* words) {
  const int64_t position = drop.first_key + first, before = position % 4;
  for (int64_t i = 0; i < before + n; i += 4 * kStep)
    philox_words(drop.key, static_cast<uint64_t>(row_id),
                 drop.head << 40 | static_cast<uint64_t>(position - before + i) >> 2, words + i);
  return words + before;
}
HWY_INLINE VF dropped(VF v, const uint32_t* words, hn::Vec<DU> threshold, VF factor) {
  const auto w = hn::LoadU(DU(), words);
  return hn::IfThenElseZero(hn::RebindMask(DF(), hn::Eq(hn::Max(w, threshold), w)), hn::Mul(v, factor));
}
inline constexpr size_t kWords = kKeys + 4 * kLanes;  // up to three words before a block's first

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

// Caps the logits [from, to) of a row, and their neighbours up to whole vectors, before cut_row hides those.
HWY_INLINE void cap_row(float* row, int64_t from, int64_t to, float cap) {
  const VF most = splat(cap), inverse = splat(1.0f / cap);
  for (int64_t j = from / kStep * kStep; j < to; j += kStep)
    store(softcap(load(row + j), most, inverse), row + j);
}

// How a product of a query and a key becomes a logit.
struct Logits {
  float scale, softcap;
};

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

// Keys [0, keys) of one head, packed.
struct PackedKeys {
  const float *k_columns, *v_depth;
  int64_t keys;
};

// A block of queries before it has seen a key.
HWY_INLINE void begin_rows(const ForwardScratch& s, const Block& b, int64_t d) {
  std::memset(s.out, 0, static_cast<size_t>(b.nq * d) * sizeof(float));
  for (int64_t i = 0; i < b.nq; ++i) s.max[i] = -kInfinity, s.sum[i] = 0;
}

// The block of queries against the keys that it sees of these: s.max and s.sum are the running maximum and sum of the
// exponentials, s.out the sum of values so weighted.
HWY_INLINE void attend(const ForwardScratch& s, Block& b, const float* q, int64_t ldq, const PackedKeys& kv,
                       int64_t d, Logits logits, const Dropping& drop, const int64_t* row_ids) {
  const auto threshold = hn::Set(DU(), dropout_threshold(drop.p));
  const VF keep_factor = splat(drop.p > 0 ? 1.0f / (1.0f - drop.p) : 1.0f);

  for (int64_t k0 = b.begin; k0 < b.end; k0 += kKeys) {
    b.at_keys(k0);
    score_products(b, q, ldq, kv.k_columns, kv.keys, d, logits.scale, s.scores);
    for (int64_t i = 0; i < b.nq; ++i) {
      float* row = s.scores + i * kKeys;
      int64_t from, to, begin, end;
      b.keys_of(i, from, to);
      if (from == to) {
        std::memset(row, 0, static_cast<size_t>(b.width) * sizeof(float));
        continue;
      }
      if (logits.softcap > 0) cap_row(row, from, to, logits.softcap);
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
        const uint32_t* words = dropout_words(drop, row_ids[b.q0 + i], k0, b.width, s.words);
        for (int64_t j = begin; j < end; j += kStep)
          store(dropped(load(row + j), words + j, threshold, keep_factor), row + j);
      }
    }
    weighted_rows(b, s.scores, kv.v_depth, kv.keys, d, 1.0f, s.out);
  }
}

// ---- backward
//
// P = exp(scale q k^T - lse); with dropout M (0 or 1/(1-p)): dV = (P M)^T dO, dP = (dO V^T) M, dS = P (dP - D), D = rowsum(dO O),
// dQ = scale dS K, dK = scale dS^T Q. With capped logits L = c tanh(scale q k^T / c) in place of scale q k^T, dS also
// times 1 - (L / c)².

// What one worker needs for `queries` rows of queries and `keys` keys: the keys' panels serve all heads of the group, those of
// the queries one head.
struct BackwardScratch {
  float *p, *dp, *dq, *q, *dout, *delta, *k_columns, *v_columns, *k_depth, *q_depth, *dout_depth, *dk, *dv;
  uint32_t* words;
  size_t floats = 0;
  BackwardScratch(float* base, int64_t queries, int64_t keys, int64_t d) {
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
    k_columns = take(columns_floats(keys, d));
    v_columns = take(columns_floats(keys, d));
    k_depth = take(depth_floats(keys, d));
    q_depth = take(depth_floats(queries, d));
    dout_depth = take(depth_floats(queries, d));
    dk = take(keys * d);
    dv = take(keys * d);
  }
};

// P and dS of the current block of scores from logits in s.p and dO V^T in s.dp; s.p then holds P with dropout.
template <bool kCapped>
HWY_INLINE void score_gradients(const BackwardScratch& s, const Block& b, const float* lse, float cap,
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
    if constexpr (kCapped) cap_row(p, from, to, cap);
    cut_row(p, from, to, b.width, begin, end);
    std::memset(dp, 0, static_cast<size_t>(from) * sizeof(float));
    std::memset(dp + to, 0, static_cast<size_t>(b.width - to) * sizeof(float));
    const VF l = splat(lse[b.q0 + i]), delta = splat(s.delta[i]);
    const uint32_t* words =
        drop.p > 0 ? dropout_words(drop, row_ids[b.q0 + i], b.k0, b.width, s.words) : nullptr;
    for (int64_t j = begin; j < end; j += kStep) {
      const VF logit = load(p + j), pv = exp_not_positive(hn::Sub(logit, l));
      VF dpv = load(dp + j);
      if (drop.p > 0) {
        dpv = dropped(dpv, words + j, threshold, keep_factor);
        store(dropped(pv, words + j, threshold, keep_factor), p + j);
      } else {
        store(pv, p + j);
      }
      VF ds = hn::Mul(pv, hn::Sub(dpv, delta));
      if constexpr (kCapped) {  // hidden logits are -infinity: as if at the cap, their slope is 0
        const VF t = hn::Max(hn::Mul(logit, splat(1.0f / cap)), splat(-1.0f));
        ds = hn::Mul(ds, hn::NegMulAdd(t, t, splat(1.0f)));
      }
      store(ds, dp + j);
    }
  }
}

// Where the rows of one head's queries, outputs and output gradients lie, and what the forward pass kept of them.
struct QueryRows {
  Rows q, out, dout;
  const float* lse;
  const int64_t* row_ids;  // only with dropout
  int64_t count;           // rows in s.q_depth and s.dout_depth
};

HWY_INLINE void pack_queries(const BackwardScratch& s, const QueryRows& rows, int64_t d) {
  pack_as_depth(rows.q, 0, rows.count, rows.count, d, s.q_depth);
  pack_as_depth(rows.dout, 0, rows.count, rows.count, d, s.dout_depth);
}
HWY_INLINE void pack_keys(const BackwardScratch& s, const Rows& k, const Rows& v, int64_t keys, int64_t d) {
  pack_as_columns(k, 0, keys, keys, d, s.k_columns);
  pack_as_columns(v, 0, keys, keys, d, s.v_columns);
  pack_as_depth(k, 0, keys, keys, d, s.k_depth);
  std::memset(s.dk, 0, static_cast<size_t>(keys * d) * sizeof(float));
  std::memset(s.dv, 0, static_cast<size_t>(keys * d) * sizeof(float));
}

// One block of queries against the packed keys: s.dq is its gradient, s.dk and s.dv grow by its part.
HWY_INLINE void backward_block(const BackwardScratch& s, Block& block, const QueryRows& rows, int64_t keys,
                               int64_t d, Logits logits, const Dropping& drop) {
  const auto o_array = array_of<Any>(rows.out.base), do_array = array_of<Any>(rows.dout.base);
  const int64_t q0 = block.q0;
  int64_t ldq, ldo;
  const float* q_wide = wide_rows(rows.q.from(q0), block.nq, d, s.q, ldq);
  const float* do_wide = wide_rows(rows.dout.from(q0), block.nq, d, s.dout, ldo);
  std::memset(s.dq, 0, static_cast<size_t>(block.nq * d) * sizeof(float));
  for (int64_t i = 0; i < block.nq; ++i) {
    const int64_t o = rows.out.from(q0 + i).offset, g = rows.dout.from(q0 + i).offset;
    VF sum = hn::Zero(DF());
    for_vectors(
        d, [&](int64_t j) HWY_ATTR { sum = hn::MulAdd(o_array.at(o + j), do_array.at(g + j), sum); },
        [&](int64_t j, int64_t n)
            HWY_ATTR { sum = hn::MulAdd(o_array.part(o + j, n), do_array.part(g + j, n), sum); });
    s.delta[i] = sum_lanes(sum);
  }
  for (int64_t k0 = block.begin; k0 < block.end; k0 += kKeys) {
    block.at_keys(k0);
    score_products(block, q_wide, ldq, s.k_columns, keys, d, logits.scale, s.p);
    score_products(block, do_wide, ldo, s.v_columns, keys, d, 1.0f, s.dp);
    if (logits.softcap > 0)
      score_gradients<true>(s, block, rows.lse, logits.softcap, drop, rows.row_ids);
    else
      score_gradients<false>(s, block, rows.lse, 0, drop, rows.row_ids);
    weighted_columns(block, s.p, s.dout_depth, rows.count, d, 1.0f, s.dv);
    weighted_columns(block, s.dp, s.q_depth, rows.count, d, logits.scale, s.dk);
    weighted_rows(block, s.dp, s.k_depth, keys, d, logits.scale, s.dq);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#endif
