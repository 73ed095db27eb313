// Shared by attention over full sequences (attention.cpp) and over shards of them (context_attention.cpp), a
// Highway "-inl" header: panels of keys and values, intervals of visible keys, one block of queries against
// all keys, forward and backward. Templates over the GEMM implementation: Vectors, fp32, or Tiles, bf16 on
// the tile unit.
//
// Masks are intervals: keys [low(i), high(i)) are visible to query i, from causality, window and document
// start. Invisible blocks are skipped, partly visible blocks are shortened.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/attention.hpp"
#include "kernels/common/dropout.hpp"
#include "kernels/cpu/amx.hpp"
#include "kernels/cpu/attention_amx.hpp"
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

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
#if defined(CAPSTAN_AMX_EMULATION)
inline constexpr bool kTilesHere = true;
#elif defined(CAPSTAN_AMX_CODE)
// Every processor with the tile unit runs that one.
inline constexpr bool kTilesHere = HWY_TARGET == HWY_AVX3;
#else
inline constexpr bool kTilesHere = false;
#endif

HWY_INLINE int64_t whole(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}
HWY_INLINE int64_t whole_vectors(int64_t n) {
  return whole(n, kStep);
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
// Rows [0, n) as fp32: in place, or widened into buffer.
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
HWY_INLINE void write_row(Out y, int64_t to, const float* from, float factor, int64_t cols) {
  const auto out = array_of<Any>(y);
  const VF f = splat(factor);
  for_vectors(
      cols, [&](int64_t i) HWY_ATTR { out.put(to + i, hn::Mul(load(from + i), f)); },
      [&](int64_t i, int64_t n) HWY_ATTR { out.put_part(to + i, hn::Mul(load_part(from + i, n), f), n); });
}

// The visibility of keys, of which key 0 has global position first_key.
struct Mask {
  bool causal;
  int64_t window, keys;
  // Of query row 0 and those after it, as global positions; or null.
  const int32_t* document_start;
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

// The intervals of a block of queries, and of the queries and keys of one block of scores relative to its
// corner.
template <class Products>
struct Block {
  int64_t q0, nq;  // queries
  // All keys visible to any of them; begin is a multiple of kPanel.
  int64_t begin, end;
  int64_t low[Products::kQueries], high[Products::kQueries];  // keys of each query
  // The current keys; width: a multiple of kUnit.
  int64_t k0 = 0, nk = 0, width = 0;
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
    begin = begin / Products::kPanel * Products::kPanel;
  }
  void at_keys(int64_t first) {
    k0 = first;
    nk = std::min(Products::kKeys, end - k0);
    width = whole(nk, Products::kUnit);
  }
  // Keys of the current block that are visible to query i, as [from, to).
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

// ---- GEMMs: packing of operands, and three kinds of GEMMs of a block
// Vectors and Tiles both have these members, for heads of d values; sums have padded(d) columns:
//   kFuses                attend() and backward_block() have shorter ways, attend_block and backward_keys,
//                         where there is no dropout and no cap
//   kKeys, kPanel, kUnit  keys of a block; rows of X in a panel; what a row of scores is padded to
//   pack_columns          X^T for scores: columns are rows of X, depth is d
//   pack_depth            X for weighted_rows: depth is the rows of X, columns are its d columns
//   pack_other            X for weighted_columns
//   scores                scores[nq, kKeys] = X Y^T for visible pairs; others are not written
//   weighted_rows         out[nq, padded(d)] += S Y; Y: pack_depth of all keys. A row of S holds zeros, up to
//                         the block's width, where the query does not see. `weights` says what S is
//   weighted_columns      sums += S^T X for the block's keys; X: pack_other of all `queries`
//   key_rows              rows [first, first + kSlab) of those sums, where they lie or in
//                         buffer[kSlab, padded(d)]
// Packing of rows [first, first + n) of `rows` goes to the packed array of all; first is a multiple of
// kPanel.

inline constexpr int64_t kSlab = 32;
enum class Weights { probabilities, gradients };

struct Vectors {
  using Value = float;  // of packed arrays
  struct Unit {};       // held by the caller of GEMMs
  static constexpr bool kFuses = false;

  static constexpr int64_t kQueries = 64, kKeys = 144, kPanel = kNr,
                           kUnit = kStep;  // full panels of 12, 24 or 48 keys
  static_assert(kKeys % kPanel == 0 && kQueries % kMr == 0);

  static int64_t padded(int64_t d) { return d; }
  static int64_t columns_size(int64_t rows, int64_t d) { return whole_vectors(rows) * d; }
  static int64_t depth_size(int64_t rows, int64_t d) { return rows * whole_vectors(d); }
  static int64_t other_size(int64_t rows, int64_t d) { return depth_size(rows, d); }
  static int64_t sums_size(int64_t keys, int64_t d) { return keys * d; }
  static constexpr int64_t narrow_size() { return 0; }

  // The left operand of scores: n rows of queries.
  struct LeftOperand {
    const float* at;
    int64_t stride;
  };
  static HWY_INLINE LeftOperand pack_left(const Rows& x, int64_t n, int64_t d, float* buffer) {
    int64_t stride;
    const float* at = wide_rows(x, n, d, buffer, stride);
    return {at, stride};
  }

  static HWY_INLINE void pack_columns(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d,
                                      float* to) {
    for (int64_t j = first; j < first + n; j += kNr) {
      const Rows r = x.from(j);
      const int64_t width = panel_width(rows, j), count = std::min(kNr, rows - j);
      if (x.narrow())
        pack_transposed(at<bf16>(r.base, r.offset), r.stride, d, count, width, to + j * d);
      else
        pack_transposed(at<float>(r.base, r.offset), r.stride, d, count, width, to + j * d);
    }
  }
  // Width of the panel that begins at column j of d: 64 columns are 24, 24 and 16, but 32 are 16 and 16,
  // because a panel of one vector leaves half of the multipliers idle.
  static HWY_INLINE int64_t depth_panel(int64_t d, int64_t j) {
    const int64_t vectors = (d - j + kStep - 1) / kStep, panels = (vectors + kNv - 1) / kNv;
    return (vectors + panels - 1) / panels * kStep;
  }
  static HWY_INLINE void pack_depth(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d,
                                    float* to) {
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
  static HWY_INLINE void pack_other(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d,
                                    float* to) {
    pack_depth(x, first, n, rows, d, to);
  }

  static HWY_INLINE void scores(const Block<Vectors>& b, const LeftOperand& x, const float* y_columns,
                                int64_t keys, int64_t d, float* scores) {
    for (int64_t i = 0; i < b.nq; i += kMr) {
      const int64_t rows = std::min<int64_t>(kMr, b.nq - i);
      int64_t from, to;
      if (!b.keys_of_rows(i, rows, from, to)) continue;
      for (int64_t j = from / kNr * kNr; j < to; j += kNr)
        panel_product_of<From::rows, false>(panel_width(keys, b.k0 + j), d, x.at + i * x.stride, x.stride,
                                            y_columns + (b.k0 + j) * d, 1.0f, 0.0f, scores + i * kKeys + j,
                                            kKeys, rows, std::min(kNr, std::min(keys - b.k0, kKeys) - j));
    }
  }
  static HWY_INLINE void weighted_rows(const Block<Vectors>& b, Weights /*weights*/, const float* s,
                                       const float* y_depth, int64_t keys, int64_t d, float* /*narrow*/,
                                       float* out) {
    for (int64_t i = 0; i < b.nq; i += kMr) {
      const int64_t rows = std::min<int64_t>(kMr, b.nq - i);
      int64_t from, to;
      if (!b.keys_of_rows(i, rows, from, to)) continue;
      for (int64_t j = 0, width; j < d; j += width) {
        width = depth_panel(d, j);
        panel_product_of<From::rows, false>(width, to - from, s + i * kKeys + from, kKeys,
                                            y_depth + j * keys + (b.k0 + from) * width, 1.0f, 1.0f,
                                            out + i * d + j, d, rows, std::min(width, d - j));
      }
    }
  }
  static HWY_INLINE void weighted_columns(const Block<Vectors>& b, Weights /*weights*/, const float* s,
                                          const float* x_other, int64_t queries, int64_t d, float* /*narrow*/,
                                          float* sums) {
    for (int64_t i = 0; i < b.nk; i += kMr) {
      const int64_t rows = std::min<int64_t>(kMr, b.nk - i);
      int64_t from, to;
      if (!b.queries_of(i, rows, from, to)) continue;
      for (int64_t j = 0, width; j < d; j += width) {
        width = depth_panel(d, j);
        panel_product_of<From::columns, false>(width, to - from, s + from * kKeys + i, kKeys,
                                               x_other + j * queries + (b.q0 + from) * width, 1.0f, 1.0f,
                                               sums + (b.k0 + i) * d + j, d, rows, std::min(width, d - j));
      }
    }
  }
  static const float* key_rows(const float* sums, int64_t first, int64_t d, float* /*buffer*/) {
    return sums + first * d;
  }
};

// bf16 operands; scores, sums and what lies between them are fp32. dS is rounded to bf16 for its products. P
// is split into two bf16 numbers: with one, the error of outputs with few keys would be three times that of
// rounding outputs. Zeros pad rows and columns to full panels of 32, and d to full steps of 32
// (amx_core.hpp).
struct Tiles {
  using Value = bf16;
  using Unit = amx::Unit;
  static constexpr bool kFuses = true;
  static constexpr int64_t kQueries = 128, kKeys = 128, kPanel = 32, kUnit = 32;
  static_assert(kKeys % kPanel == 0 && kQueries % kPanel == 0 && kPanel == kSlab);

  static int64_t padded(int64_t n) { return whole(n, 32); }
  static int64_t columns_size(int64_t rows, int64_t d) { return padded(rows) * padded(d); }
  static int64_t depth_size(int64_t rows, int64_t d) { return columns_size(rows, d); }
  static int64_t other_size(int64_t rows, int64_t d) { return columns_size(rows, d); }
  static int64_t sums_size(int64_t keys, int64_t d) { return columns_size(keys, d); }
  static constexpr int64_t kRounded = kQueries * kKeys;  // weights of a block
  static constexpr int64_t narrow_size() { return 4 * kRounded; }

  using LeftOperand = const bf16*;
  static LeftOperand pack_left(const Rows& x, int64_t n, int64_t d, bf16* buffer) {
    amx::pack(amx::Panels::rows, at<bf16>(x.base, x.offset), x.stride, n, d, buffer, 32 * padded(d));
    return buffer;
  }
  static void pack_columns(const Rows& x, int64_t first, int64_t n, int64_t /*rows*/, int64_t d, bf16* to) {
    const Rows r = x.from(first);
    amx::pack(amx::Panels::columns_of_rows, at<bf16>(r.base, r.offset), r.stride, n, d,
              to + first * padded(d), 32 * padded(d));
  }
  static void pack_depth(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d, bf16* to) {
    const Rows r = x.from(first);
    amx::pack(amx::Panels::columns, at<bf16>(r.base, r.offset), r.stride, d, n, to + first * 32,
              32 * padded(rows));
  }
  // Computes X^T S, because S is cheaper to pack as the right operand than as the left one. The sums have
  // that layout: for each panel of keys the blocks of 32 of d, each [32 of d][32 keys].
  static void pack_other(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d, bf16* to) {
    const Rows r = x.from(first);
    amx::pack(amx::Panels::rows_of_columns, at<bf16>(r.base, r.offset), r.stride, d, n, to + first * 32,
              32 * padded(rows));
  }

  static void scores(const Block<Tiles>& b, LeftOperand x, const bf16* y_columns, int64_t /*keys*/, int64_t d,
                     float* scores) {
    const int64_t depth = padded(d);
    for (int64_t i = 0; i < b.nq; i += 32) {
      int64_t from, to;
      if (!b.keys_of_rows(i, std::min<int64_t>(32, b.nq - i), from, to)) continue;
      for (int64_t j = from / 32 * 32; j < to; j += 32)
        amx::product(x + i * depth, y_columns + (b.k0 + j) * depth, depth, false, scores + i * kKeys + j,
                     kKeys);
    }
  }
  static void weighted_rows(const Block<Tiles>& b, Weights weights, const float* s, const bf16* y_depth,
                            int64_t keys, int64_t d, bf16* narrow, float* out) {
    for (int64_t i = 0; i < b.nq; i += 32) {
      const int64_t rows = std::min<int64_t>(32, b.nq - i);
      int64_t from, to;
      if (!b.keys_of_rows(i, rows, from, to)) continue;
      from = from / 32 * 32;
      const int64_t depth = padded(to - from);
      bf16* rest = weights == Weights::probabilities ? narrow + kRounded : nullptr;
      amx::narrow_rows(s + i * kKeys + from, kKeys, rows, depth, narrow, rest);
      add_rows(narrow, rest, y_depth + (b.k0 + from) * 32, depth, keys, d, out + i * padded(d));
    }
  }
  // out[32][padded(d)] += a left panel, and its rest if there is one, times rows of Y.
  static void add_rows(const bf16* weights, const bf16* rest, const bf16* y_depth, int64_t depth,
                       int64_t keys, int64_t d, float* out) {
    const int64_t width = padded(d);
    for (int64_t j = 0; j < width; j += 32) {
      const bf16* y = y_depth + j * padded(keys);
      if (rest)
        amx::product_of_sum(weights, rest, y, depth, out + j, width);
      else
        amx::product(weights, y, depth, true, out + j, width);
    }
  }
  static void weighted_columns(const Block<Tiles>& b, Weights weights, const float* s, const bf16* x_other,
                               int64_t queries, int64_t d, bf16* narrow, float* sums) {
    for (int64_t j = 0; j < b.nk; j += 32) {
      int64_t from, to;
      if (!b.queries_of(j, std::min<int64_t>(32, b.nk - j), from, to)) continue;
      from = from / 32 * 32;
      const int64_t depth = padded(to - from);
      bf16* rest = weights == Weights::probabilities ? narrow + kRounded : nullptr;
      amx::narrow_columns(s + from * kKeys + j, kKeys, std::min(depth, b.nq - from), narrow, rest);
      add_columns(narrow, rest, x_other + (b.q0 + from) * 32, depth, queries, d,
                  sums + (b.k0 + j) * padded(d));
    }
  }
  // The sums of 32 keys += X^T times a right panel and its rest.
  static void add_columns(const bf16* weights, const bf16* rest, const bf16* x_other, int64_t depth,
                          int64_t queries, int64_t d, float* sums) {
    for (int64_t i = 0; i < padded(d); i += 32) {
      const bf16* x = x_other + i * padded(queries);
      if (rest)
        amx::product_with_sum(x, weights, rest, depth, sums + i * 32, 32);
      else
        amx::product(x, weights, depth, true, sums + i * 32, 32);
    }
  }

  // The keys of a block that are visible to 32 rows: of `width` keys from `first` on, [from[i], to[i]) to row
  // i.
  struct VisibleKeys {
    int64_t first, width = 0, from[32], to[32];
    bool whole = true;
    VisibleKeys(const Block<Tiles>& b, int64_t row) {
      const int64_t rows = std::min<int64_t>(32, b.nq - row);
      int64_t last;
      if (!b.keys_of_rows(row, rows, first, last)) return;
      first = first / 32 * 32;
      width = padded(last - first);
      for (int64_t i = 0; i < 32; ++i) {
        from[i] = to[i] = 0;
        if (i < rows) b.keys_of(row + i, from[i], to[i]), from[i] -= first, to[i] -= first;
        whole = whole && from[i] <= 0 && to[i] == width;
      }
    }
    amx::ScoreRows rows(const float* scores, float scale) const {
      return {scores, kKeys, width, from, to, whole, scale};
    }
  };
  // scores[32][kKeys] of a left panel and those keys.
  static void scores_of(const VisibleKeys& seen, const bf16* x, const bf16* y_columns, int64_t depth,
                        float* scores) {
    for (int64_t j = 0; j < seen.width; j += 32)
      amx::product(x, y_columns + (seen.first + j) * depth, depth, false, scores + j, kKeys);
  }

  template <class Scratch, class Keys>
  static void attend_block(const Scratch& s, Block<Tiles>& b, LeftOperand q, const Keys& kv, int64_t d,
                           float scale) {
    const int64_t depth = padded(d);
    for (int64_t k0 = b.begin; k0 < b.end; k0 += kKeys) {
      b.at_keys(k0);
      for (int64_t i = 0; i < b.nq; i += 32) {
        const VisibleKeys seen(b, i);
        if (seen.width == 0) continue;
        float* out = s.out + i * depth;
        scores_of(seen, q + i * depth, kv.k_columns + b.k0 * depth, depth, s.scores);
        bf16* rest = s.narrow + kRounded;
        if (amx::softmax_rows(seen.rows(s.scores, scale), s.max + i, s.sum + i, s.correction, s.narrow, rest))
          for (int64_t r = 0; r < 32; ++r) {
            const VF f = splat(s.correction[r]);
            for (int64_t j = r * depth; j < (r + 1) * depth; j += kStep)
              store(hn::Mul(load(out + j), f), out + j);
          }
        add_rows(s.narrow, rest, kv.v_depth + (b.k0 + seen.first) * 32, seen.width, kv.keys, d, out);
      }
    }
  }

  template <class Scratch>
  static void backward_keys(const Scratch& s, const Block<Tiles>& b, LeftOperand q, LeftOperand dout,
                            const float* lse, int64_t queries, int64_t keys, int64_t d, float scale) {
    constexpr int64_t kPanelValues = kQueries * 32;  // of a right panel of 32 keys
    bf16 *p_columns = s.narrow, *p_rest = p_columns + kRounded;
    bf16 *ds_columns = p_rest + kRounded, *ds_rows = ds_columns + kRounded;
    const int64_t depth = padded(d);
    int64_t first[kQueries / 32] = {}, last[kQueries / 32] = {};  // keys that 32 rows see
    for (int64_t i = 0; i < b.nq; i += 32) {
      const VisibleKeys seen(b, i);
      if (seen.width == 0) continue;
      first[i / 32] = seen.first, last[i / 32] = seen.first + seen.width;
      scores_of(seen, q + i * depth, s.k_columns + b.k0 * depth, depth, s.p);
      scores_of(seen, dout + i * depth, s.v_columns + b.k0 * depth, depth, s.dp);
      float own_lse[32] = {};
      std::copy_n(lse + b.q0 + i, std::min<int64_t>(32, b.nq - i), own_lse);
      const int64_t at = seen.first / 32 * kPanelValues + i * 32;
      amx::score_gradient_rows(seen.rows(s.p, scale), s.dp, own_lse, s.delta + i, ds_rows, p_columns + at,
                               p_rest + at, ds_columns + at, kPanelValues);
      add_rows(ds_rows, nullptr, s.k_depth + (b.k0 + seen.first) * 32, seen.width, keys, d, s.dq + i * depth);
    }
    for (int64_t j = 0; j < b.nk; j += 32)
      for (int64_t from = 0, to; from < b.nq; from = to + 32) {
        const auto sees = [&](int64_t i) { return i < b.nq && first[i / 32] <= j && j < last[i / 32]; };
        for (to = from; sees(to);) to += 32;
        if (from == to) continue;
        const int64_t at = j / 32 * kPanelValues + from * 32, other = (b.q0 + from) * 32,
                      sums = (b.k0 + j) * depth;
        add_columns(p_columns + at, p_rest + at, s.dout_other + other, to - from, queries, d, s.dv + sums);
        add_columns(ds_columns + at, nullptr, s.q_other + other, to - from, queries, d, s.dk + sums);
      }
  }

  static const float* key_rows(const float* sums, int64_t first, int64_t d, float* buffer) {
    amx::transpose_sums(sums + first * padded(d), padded(d), buffer);
    return buffer;
  }
};

// body(Products()) with the implementation for arrays of that type.
HWY_INLINE bool on_tiles(DType type) {
  return kTilesHere && type == DType::bf16 && runs_amx();
}
template <class Body>
HWY_INLINE auto with_products(bool tiles, Body&& body) {
  if constexpr (kTilesHere)
    if (tiles) return body(Tiles());
  return body(Vectors());
}

struct DropoutMask {
  float p = 0;
  PhiloxKey key{};
  uint64_t head = 0;      // global index
  int64_t first_key = 0;  // global position of key 0
};
// The words of keys [first, first + n) (common/dropout.hpp), within `words`: blocks of four begin at
// multiples of 4.
HWY_INLINE const uint32_t* dropout_words(const DropoutMask& drop, int64_t row_id, int64_t first, int64_t n,
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
// Of a block of keys: up to three words before its first.
template <class Products>
inline constexpr int64_t kWords = Products::kKeys + 4 * kStep;

HWY_INLINE float exp_one(float x) {
  return hn::GetLane(exp(splat(x)));
}

// Masks a row of scores to the keys [from, to): -infinity beside them up to whole vectors, which are then
// [begin, end), zeros further out.
HWY_INLINE void cut_row(float* row, int64_t from, int64_t to, int64_t width, int64_t& begin, int64_t& end) {
  begin = from / kStep * kStep;
  end = whole_vectors(to);
  for (int64_t j = begin; j < from; ++j) row[j] = -kInfinity;
  for (int64_t j = to; j < end; ++j) row[j] = -kInfinity;
  std::memset(row, 0, static_cast<size_t>(begin) * sizeof(float));
  std::memset(row + end, 0, static_cast<size_t>(width - end) * sizeof(float));
}

// Converts the dot product of a query and a key to a logit. scale is positive.
struct Logits {
  float scale, softcap;
};

// Converts the dot products [from, to) of a row, and their neighbors up to whole vectors, into capped logits,
// before cut_row hides the neighbors.
HWY_INLINE void cap_row(float* row, int64_t from, int64_t to, Logits logits) {
  const VF most = splat(logits.softcap), inverse = splat(logits.scale / logits.softcap);
  for (int64_t j = from / kStep * kStep; j < to; j += kStep)
    store(softcap(load(row + j), most, inverse), row + j);
}

// Allocates scratch memory sequentially, in floats or GEMM operand values (Context::scratch).
struct ScratchAllocator {
  float* base;  // null: computes the size only
  size_t floats = 0;
  template <class T = float>
  T* take(int64_t n) {
    float* here = base ? base + floats : nullptr;
    floats += static_cast<size_t>(whole(n * static_cast<int64_t>(sizeof(T)), 64)) / sizeof(float);
    return reinterpret_cast<T*>(here);
  }
};

// ---- forward

// A worker's scratch memory: one block of scores, its output rows, and packed queries where needed.
template <class Products>
struct ForwardScratch {
  using Value = typename Products::Value;
  float *scores, *out, *max, *sum;
  float *highest, *correction;  // of the current block of keys
  Value *q, *narrow;
  uint32_t* words;
  size_t floats;
  ForwardScratch(float* base, int64_t d) {
    ScratchAllocator t{base};
    scores = t.take(Products::kQueries * Products::kKeys);
    out = t.take(Products::kQueries * Products::padded(d));
    max = t.take(Products::kQueries);
    sum = t.take(Products::kQueries);
    highest = t.take(Products::kQueries);
    correction = t.take(Products::kQueries);
    q = t.template take<Value>(Products::kQueries * Products::padded(d));
    narrow = t.template take<Value>(Products::narrow_size());
    words = t.template take<uint32_t>(kWords<Products>);
    floats = t.floats;
  }
};

// Keys [0, keys) of one head, packed.
template <class Products>
struct PackedKeys {
  const typename Products::Value *k_columns, *v_depth;
  int64_t keys;
};

// The initial state of a block of queries.
template <class Products>
HWY_INLINE void begin_rows(const ForwardScratch<Products>& s, const Block<Products>& b, int64_t d) {
  std::memset(s.out, 0, static_cast<size_t>(b.nq * Products::padded(d)) * sizeof(float));
  for (int64_t i = 0; i < Products::kQueries; ++i) s.max[i] = -kInfinity, s.sum[i] = 0;
}

// Attends from the block of queries to the visible ones of these keys: s.max and s.sum are the running
// maximum and sum of the exponentials, s.out the weighted sum of values.
template <class Products>
HWY_INLINE void attend(const ForwardScratch<Products>& s, Block<Products>& b,
                       const typename Products::LeftOperand& q, const PackedKeys<Products>& kv, int64_t d,
                       Logits logits, const DropoutMask& drop, const int64_t* row_ids) {
  constexpr int64_t kKeys = Products::kKeys;
  const auto threshold = hn::Set(DU(), dropout_threshold(drop.p));
  const VF keep_factor = splat(drop.p > 0 ? 1.0f / (1.0f - drop.p) : 1.0f);
  const VF scale = splat(logits.softcap > 0 ? 1.0f : logits.scale);  // capped logits are scaled already
  const int64_t width = Products::padded(d);

  if constexpr (Products::kFuses)
    if (drop.p == 0 && logits.softcap == 0) return Products::attend_block(s, b, q, kv, d, logits.scale);
  for (int64_t k0 = b.begin; k0 < b.end; k0 += kKeys) {
    b.at_keys(k0);
    Products::scores(b, q, kv.k_columns, kv.keys, d, s.scores);
    // Separate passes over all rows, because within one row each step would wait for the previous one.
    for (int64_t i = 0; i < Products::kQueries; ++i) s.highest[i] = -kInfinity;
    for (int64_t i = 0; i < b.nq; ++i) {
      float* row = s.scores + i * kKeys;
      int64_t from, to, begin, end;
      b.keys_of(i, from, to);
      if (from == to) {
        std::memset(row, 0, static_cast<size_t>(b.width) * sizeof(float));
        continue;
      }
      if (logits.softcap > 0) cap_row(row, from, to, logits);
      cut_row(row, from, to, b.width, begin, end);
      VF m = load(row + begin);
      for (int64_t j = begin + kStep; j < end; j += kStep) m = hn::Max(m, load(row + j));
      s.highest[i] = max_lanes(hn::Mul(m, scale));
    }
    for (int64_t i = 0; i < Products::kQueries; i += kStep) {
      const VF before = load(s.max + i), top = hn::Max(before, load(s.highest + i));
      const VF correction =
          hn::IfThenElse(hn::Eq(before, top), splat(1.0f), exp_not_positive(hn::Sub(before, top)));
      store(top, s.max + i);
      store(correction, s.correction + i);
      store(hn::Mul(load(s.sum + i), correction), s.sum + i);
    }
    for (int64_t i = 0; i < b.nq; ++i) {
      float *row = s.scores + i * kKeys, *o = s.out + i * width;
      int64_t from, to;
      b.keys_of(i, from, to);
      if (from == to) continue;
      const int64_t begin = from / kStep * kStep, end = whole_vectors(to);
      const VF f = splat(s.correction[i]), top = splat(s.max[i]);
      for_vectors(
          d, [&](int64_t j) HWY_ATTR { store(hn::Mul(load(o + j), f), o + j); },
          [&](int64_t j, int64_t n) HWY_ATTR { store_part(hn::Mul(load_part(o + j, n), f), o + j, n); });
      VF total = hn::Zero(DF());
      for (int64_t j = begin; j < end; j += kStep) {
        const VF p = exp_not_positive(hn::MulSub(load(row + j), scale, top));
        total = hn::Add(total, p);
        store(p, row + j);
      }
      s.sum[i] += sum_lanes(total);
      if (drop.p > 0) {
        const uint32_t* words = dropout_words(drop, row_ids[b.q0 + i], k0, b.width, s.words);
        for (int64_t j = begin; j < end; j += kStep)
          store(dropped(load(row + j), words + j, threshold, keep_factor), row + j);
      }
    }
    Products::weighted_rows(b, Weights::probabilities, s.scores, kv.v_depth, kv.keys, d, s.narrow, s.out);
  }
}

// ---- backward
//
// P = exp(scale q k^T - lse); with dropout M (0 or 1/(1-p)): dV = (P M)^T dO, dP = (dO V^T) M, dS = P (dP -
// D), D = rowsum(dO O), dQ = scale dS K, dK = scale dS^T Q. With capped logits L = c tanh(scale q k^T / c) in
// place of scale q k^T, dS also times 1 - (L / c)².

// One worker's scratch memory for `queries` rows of queries and `keys` keys: key panels serve all heads of
// the group, query panels one head. dq and dk are not scaled yet.
template <class Products>
struct BackwardScratch {
  using Value = typename Products::Value;
  float *p, *dp, *dq, *delta, *dk, *dv;
  Value *q, *dout, *narrow, *k_columns, *v_columns, *k_depth, *q_other, *dout_other;
  uint32_t* words;
  size_t floats;
  BackwardScratch(float* base, int64_t queries, int64_t keys, int64_t d) {
    ScratchAllocator t{base};
    p = t.take(Products::kQueries * Products::kKeys);
    dp = t.take(Products::kQueries * Products::kKeys);
    dq = t.take(Products::kQueries * Products::padded(d));
    delta = t.take(Products::kQueries);
    dk = t.take(Products::sums_size(keys, d));
    dv = t.take(Products::sums_size(keys, d));
    q = t.template take<Value>(Products::kQueries * Products::padded(d));
    dout = t.template take<Value>(Products::kQueries * Products::padded(d));
    narrow = t.template take<Value>(Products::narrow_size());
    k_columns = t.template take<Value>(Products::columns_size(keys, d));
    v_columns = t.template take<Value>(Products::columns_size(keys, d));
    k_depth = t.template take<Value>(Products::depth_size(keys, d));
    q_other = t.template take<Value>(Products::other_size(queries, d));
    dout_other = t.template take<Value>(Products::other_size(queries, d));
    words = t.template take<uint32_t>(kWords<Products>);
    floats = t.floats;
  }
};

// P and dS of the current block of scores from Q K^T in s.p and dO V^T in s.dp; s.p then holds P with
// dropout.
template <bool kCapped, class Products>
HWY_INLINE void score_gradients(const BackwardScratch<Products>& s, const Block<Products>& b,
                                const float* lse, Logits logits, const DropoutMask& drop,
                                const int64_t* row_ids) {
  constexpr int64_t kKeys = Products::kKeys;
  const auto threshold = hn::Set(DU(), dropout_threshold(drop.p));
  const VF keep_factor = splat(drop.p > 0 ? 1.0f / (1.0f - drop.p) : 1.0f);
  const VF scale = splat(kCapped ? 1.0f : logits.scale),
           inverse_cap = splat(kCapped ? 1.0f / logits.softcap : 0.0f);
  for (int64_t i = 0; i < b.nq; ++i) {
    float *p = s.p + i * kKeys, *dp = s.dp + i * kKeys;
    int64_t from, to, begin, end;
    b.keys_of(i, from, to);
    if (from == to) {
      std::memset(p, 0, static_cast<size_t>(b.width) * sizeof(float));
      std::memset(dp, 0, static_cast<size_t>(b.width) * sizeof(float));
      continue;
    }
    if constexpr (kCapped) cap_row(p, from, to, logits);
    cut_row(p, from, to, b.width, begin, end);
    std::memset(dp, 0, static_cast<size_t>(from) * sizeof(float));
    std::memset(dp + to, 0, static_cast<size_t>(b.width - to) * sizeof(float));
    const VF l = splat(lse[b.q0 + i]), delta = splat(s.delta[i]);
    const uint32_t* words =
        drop.p > 0 ? dropout_words(drop, row_ids[b.q0 + i], b.k0, b.width, s.words) : nullptr;
    for (int64_t j = begin; j < end; j += kStep) {
      const VF logit = load(p + j), pv = exp_not_positive(hn::MulSub(logit, scale, l));
      VF dpv = load(dp + j);
      if (drop.p > 0) {
        dpv = dropped(dpv, words + j, threshold, keep_factor);
        store(dropped(pv, words + j, threshold, keep_factor), p + j);
      } else {
        store(pv, p + j);
      }
      VF ds = hn::Mul(pv, hn::Sub(dpv, delta));
      if constexpr (kCapped) {  // hidden logits are -infinity: as if at the cap, their slope is 0
        const VF t = hn::Max(hn::Mul(logit, inverse_cap), splat(-1.0f));
        ds = hn::Mul(ds, hn::NegMulAdd(t, t, splat(1.0f)));
      }
      store(ds, dp + j);
    }
  }
}

// The rows of one head's queries, outputs and output gradients, and the saved statistics of the forward pass.
struct QueryRows {
  Rows q, out, dout;
  const float* lse;
  const int64_t* row_ids;  // only with dropout
  int64_t count;           // rows in s.q_other and s.dout_other
};

template <class Products>
HWY_INLINE void pack_queries(const BackwardScratch<Products>& s, const QueryRows& rows, int64_t d) {
  Products::pack_other(rows.q, 0, rows.count, rows.count, d, s.q_other);
  Products::pack_other(rows.dout, 0, rows.count, rows.count, d, s.dout_other);
}
template <class Products>
HWY_INLINE void pack_keys(const BackwardScratch<Products>& s, const Rows& k, const Rows& v, int64_t keys,
                          int64_t d) {
  Products::pack_columns(k, 0, keys, keys, d, s.k_columns);
  Products::pack_columns(v, 0, keys, keys, d, s.v_columns);
  Products::pack_depth(k, 0, keys, keys, d, s.k_depth);
  std::memset(s.dk, 0, static_cast<size_t>(Products::sums_size(keys, d)) * sizeof(float));
  std::memset(s.dv, 0, static_cast<size_t>(Products::sums_size(keys, d)) * sizeof(float));
}

// One block of queries against the packed keys: s.dq becomes its unscaled gradient, and its contributions are
// added to s.dk and s.dv.
template <class Products>
HWY_INLINE void backward_block(const BackwardScratch<Products>& s, Block<Products>& block,
                               const QueryRows& rows, int64_t keys, int64_t d, Logits logits,
                               const DropoutMask& drop) {
  const auto o_array = array_of<Any>(rows.out.base), do_array = array_of<Any>(rows.dout.base);
  const int64_t q0 = block.q0;
  const auto q = Products::pack_left(rows.q.from(q0), block.nq, d, s.q);
  const auto dout = Products::pack_left(rows.dout.from(q0), block.nq, d, s.dout);
  std::memset(s.dq, 0, static_cast<size_t>(block.nq * Products::padded(d)) * sizeof(float));
  for (int64_t i = 0; i < block.nq; ++i) {
    const int64_t o = rows.out.from(q0 + i).offset, g = rows.dout.from(q0 + i).offset;
    VF sum = hn::Zero(DF());
    for_vectors(
        d, [&](int64_t j) HWY_ATTR { sum = hn::MulAdd(o_array.at(o + j), do_array.at(g + j), sum); },
        [&](int64_t j, int64_t n)
            HWY_ATTR { sum = hn::MulAdd(o_array.part(o + j, n), do_array.part(g + j, n), sum); });
    s.delta[i] = sum_lanes(sum);
  }
  for (int64_t k0 = block.begin; k0 < block.end; k0 += Products::kKeys) {
    block.at_keys(k0);
    if constexpr (Products::kFuses)
      if (drop.p == 0 && logits.softcap == 0) {
        Products::backward_keys(s, block, q, dout, rows.lse, rows.count, keys, d, logits.scale);
        continue;
      }
    Products::scores(block, q, s.k_columns, keys, d, s.p);
    Products::scores(block, dout, s.v_columns, keys, d, s.dp);
    if (logits.softcap > 0)
      score_gradients<true>(s, block, rows.lse, logits, drop, rows.row_ids);
    else
      score_gradients<false>(s, block, rows.lse, logits, drop, rows.row_ids);
    Products::weighted_columns(block, Weights::probabilities, s.p, s.dout_other, rows.count, d, s.narrow,
                               s.dv);
    Products::weighted_columns(block, Weights::gradients, s.dp, s.q_other, rows.count, d, s.narrow, s.dk);
    Products::weighted_rows(block, Weights::gradients, s.dp, s.k_depth, keys, d, s.narrow, s.dq);
  }
}

// put(i, dk, dv) for the rows of all keys. dk is not scaled yet; overwrites s.dq.
template <class Products, class Put>
HWY_INLINE void for_key_rows(const BackwardScratch<Products>& s, int64_t keys, int64_t d, Put&& put) {
  const int64_t width = Products::padded(d);
  for (int64_t first = 0; first < keys; first += kSlab) {
    const float* dk = Products::key_rows(s.dk, first, d, s.dq);
    const float* dv = Products::key_rows(s.dv, first, d, s.dq + kSlab * width);
    for (int64_t i = 0; i < std::min(kSlab, keys - first); ++i)
      put(first + i, dk + i * width, dv + i * width);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#endif
