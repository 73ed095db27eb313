// Attention of one block of queries and keys: visible intervals, packing, the GEMMs on either unit (Vectors,
// fp32, or Tiles, bf16 on the tile unit), dropout and logits. A Highway "-inl" header of
// attention_core-inl.hpp.
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
#if defined(CAPSTAN_KERNELS_CPU_ATTENTION_BLOCK_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef CAPSTAN_KERNELS_CPU_ATTENTION_BLOCK_INL
#undef CAPSTAN_KERNELS_CPU_ATTENTION_BLOCK_INL
#else
#define CAPSTAN_KERNELS_CPU_ATTENTION_BLOCK_INL
#endif

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
#if defined(CAPSTAN_AMX_EMULATION)
inline constexpr bool kTilesHere = true;
#elif defined(CAPSTAN_AMX_CODE)
// Every processor with the AMX tile unit runs the target AVX3.
inline constexpr bool kTilesHere = HWY_TARGET == HWY_AVX3;
#else
inline constexpr bool kTilesHere = false;
#endif

// Elements of a query and key head, and of a value and output head.
struct HeadDims {
  int64_t qk, v;
  explicit HeadDims(const AttentionShape& a) : qk(a.qk_dim), v(a.v_dim) {}
};

// Row r of a matrix inside a larger array lies at base[offset + r * stride].
struct Rows {
  In base;
  int64_t offset, stride;
  // The rows of one head, from token `token` on.
  static HWY_INLINE Rows of(const HeadsIn& x, int64_t token, int64_t group, int64_t head = 0) {
    return {x.data, x.strides.at(token, group, head), x.strides.token};
  }
  HWY_INLINE bool narrow() const { return base.dtype != DType::f32; }
  HWY_INLINE Rows from(int64_t row) const { return {base, offset + row * stride, stride}; }
};
// Rows [0, n) as fp32: in place, or widened into buffer.
HWY_INLINE const float* wide_rows(const Rows& x, int64_t n, int64_t cols, float* buffer, int64_t& ld) {
  if (!x.narrow()) {
    ld = x.stride;
    return x.base.as<float>() + x.offset;
  }
  for (int64_t r = 0; r < n; ++r) widen(x.base, x.offset + r * x.stride, buffer + r * cols, cols);
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

// The documents of the query rows of one sequence, in the form that the launch has.
struct SequenceDocuments {
  // For each query row, the global position at which its document begins; or null.
  const int32_t* start = nullptr;
  // Documents::cu_seqlens if `start` is null; or null, for one document.
  const int32_t* bounds = nullptr;
  // Number of documents, and first row of the sequence, in `bounds`.
  int64_t count = 0, first_row = 0;

  // One document.
  SequenceDocuments() = default;
  // Sequence b, whose first query row is `query_row`.
  SequenceDocuments(const Documents& d, int64_t batch, int64_t b, int64_t query_row)
      : start(d.start ? d.start + query_row : nullptr), bounds(d.start ? nullptr : d.cu_seqlens) {
    if (!bounds) return;
    count = d.count;
    first_row = b * (bounds[count] / batch);
  }
  // The global position at which the document of the query in `row` with that global position begins.
  HWY_INLINE int64_t start_of(int64_t row, int64_t position) const {
    if (start) return start[row];
    return bounds ? *(std::upper_bound(bounds, bounds + count, first_row + position) - 1) - first_row : 0;
  }
};

// The visibility of keys, of which key 0 has global position first_key.
struct Mask {
  bool causal;
  int64_t window, keys;
  SequenceDocuments documents;
  int64_t first_key = 0;
  // Keys [low, high) of the query in `row` with that global position.
  HWY_INLINE int64_t low(int64_t row, int64_t position) const {
    int64_t l = documents.start_of(row, position);
    if (window > 0) l = std::max(l, position - window + 1);
    return std::clamp<int64_t>(l - first_key, 0, keys);
  }
  HWY_INLINE int64_t high(int64_t position) const {
    return causal ? std::clamp<int64_t>(position + 1 - first_key, 0, keys) : keys;
  }
};

// The intervals of a block of queries, and of the queries and keys of one block of scores relative to its
// corner.
template <class Gemms>
struct Block {
  // Queries.
  int64_t q0, nq;
  // All keys visible to any of them; begin is a multiple of kPanel.
  int64_t begin, end;
  // Keys of each query.
  int64_t low[Gemms::kQueries], high[Gemms::kQueries];
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
    begin = begin / Gemms::kPanel * Gemms::kPanel;
  }
  void at_keys(int64_t first) {
    k0 = first;
    nk = std::min(Gemms::kKeys, end - k0);
    width = round_up(nk, Gemms::kUnit);
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
  // Queries that attend to any of the keys [j, j + n).
  HWY_INLINE bool queries_of(int64_t j, int64_t n, int64_t& from, int64_t& to) const {
    auto attends = [&](int64_t i) { return low[i] - k0 < j + n && high[i] - k0 > j; };
    for (from = 0; from < nq && !attends(from);) ++from;
    for (to = nq; to > from && !attends(to - 1);) --to;
    return from < to;
  }
};

// ---- GEMMs: packing of operands, and three kinds of GEMMs of a block
// Vectors and Tiles both have these members, for heads of d values; sums have padded(d) columns:
//   kFuses                attend() and backward_block() have shorter ways, attend_block and backward_keys,
//                         where there is no dropout and no cap
//   kKeys, kPanel, kUnit  keys of a block; rows of X in a panel; multiple to which a row of scores is padded
//   pack_columns          X^T for scores: columns are rows of X, depth is d
//   pack_depth            X for weighted_rows: depth is the rows of X, columns are its d columns
//   pack_query_rows       X for weighted_columns: rows of queries or of dO
//   scores                scores[nq, kKeys] = X Y^T for visible pairs; others are not written
//   weighted_rows         out[nq, padded(d)] += S Y; Y: pack_depth of all keys. S has the width of the
//                         block, and zeros for keys that the query does not attend to. `weights`: S holds
//                         probabilities, or their gradients
//   weighted_columns      sums += S^T X for the block's keys; X: pack_query_rows of all `queries`
//   key_rows              rows [first, first + kSlab) of the sums of weighted_columns: a pointer into the
//                         sums, or a copy in buffer[kSlab, padded(d)]
// Packing of rows [first, first + n) of `rows` goes to the packed array of all; first is a multiple of
// kPanel.

inline constexpr int64_t kSlab = 32;
enum class Weights { probabilities, gradients };

struct Vectors {
  // Element type of packed arrays.
  using Value = float;
  // The caller of GEMMs holds a TileConfig. Vectors need no configuration.
  struct TileConfig {};
  static constexpr bool kFuses = false;

  static constexpr int64_t kQueries = 64, kKeys = 144, kPanel = kNr;
  // Full panels of 12, 24 or 48 keys.
  static constexpr int64_t kUnit = kStep;
  static_assert(kKeys % kPanel == 0 && kQueries % kMr == 0);

  static int64_t padded(int64_t d) { return d; }
  static int64_t columns_size(int64_t rows, int64_t d) { return round_up(rows, kStep) * d; }
  static int64_t depth_size(int64_t rows, int64_t d) { return rows * round_up(d, kStep); }
  static int64_t query_rows_size(int64_t rows, int64_t d) { return depth_size(rows, d); }
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
      at_element(r.base, r.offset, [&](const auto* rows_at) HWY_ATTR {
        pack_transposed(rows_at, r.stride, d, count, width, to + j * d);
      });
    }
  }
  // Width of the panel that begins at column j of d: 64 columns are 24, 24 and 16, but 32 are 16 and 16,
  // because a panel of one vector leaves half of the multipliers idle.
  static HWY_INLINE int64_t depth_panel(int64_t d, int64_t j) {
    const int64_t vectors = ceil_div(d - j, kStep), panels = ceil_div(vectors, kNv);
    return ceil_div(vectors, panels) * kStep;
  }
  static HWY_INLINE void pack_depth(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d,
                                    float* to) {
    const Rows r = x.from(first);
    for (int64_t j = 0, width; j < d; j += width) {
      width = depth_panel(d, j);
      const int64_t cols = std::min(width, d - j);
      float* panel = to + j * rows + first * width;
      at_element(r.base, r.offset + j, [&](const auto* columns_at) HWY_ATTR {
        pack_straight(columns_at, r.stride, n, cols, width, panel);
      });
    }
  }
  static HWY_INLINE void pack_query_rows(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d,
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
        panel_gemm_of<PanelLayout::rows, false>(
            panel_width(keys, b.k0 + j), d, x.at + i * x.stride, x.stride, y_columns + (b.k0 + j) * d, 1.0f,
            0.0f, scores + i * kKeys + j, kKeys, rows, std::min(kNr, std::min(keys - b.k0, kKeys) - j));
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
        panel_gemm_of<PanelLayout::rows, false>(width, to - from, s + i * kKeys + from, kKeys,
                                                y_depth + j * keys + (b.k0 + from) * width, 1.0f, 1.0f,
                                                out + i * d + j, d, rows, std::min(width, d - j));
      }
    }
  }
  static HWY_INLINE void weighted_columns(const Block<Vectors>& b, Weights /*weights*/, const float* s,
                                          const float* x_rows, int64_t queries, int64_t d, float* /*narrow*/,
                                          float* sums) {
    for (int64_t i = 0; i < b.nk; i += kMr) {
      const int64_t rows = std::min<int64_t>(kMr, b.nk - i);
      int64_t from, to;
      if (!b.queries_of(i, rows, from, to)) continue;
      for (int64_t j = 0, width; j < d; j += width) {
        width = depth_panel(d, j);
        panel_gemm_of<PanelLayout::columns, false>(
            width, to - from, s + from * kKeys + i, kKeys, x_rows + j * queries + (b.q0 + from) * width, 1.0f,
            1.0f, sums + (b.k0 + i) * d + j, d, rows, std::min(width, d - j));
      }
    }
  }
  static const float* key_rows(const float* sums, int64_t first, int64_t d, float* /*buffer*/) {
    return sums + first * d;
  }
};

// bf16 operands; scores, sums and what lies between them are fp32. dS is rounded to bf16 for its GEMMs. P
// is split into two bf16 numbers: with one, the error of outputs with few keys would be three times that of
// rounding outputs. Zeros pad rows and columns to full panels of 32, and d to full steps of 32
// (amx_core.hpp).
struct Tiles {
  using Value = bf16;
  using TileConfig = amx::TileConfig;
  static constexpr bool kFuses = true;
  static constexpr int64_t kQueries = 128, kKeys = 128, kPanel = 32, kUnit = 32;
  static_assert(kKeys % kPanel == 0 && kQueries % kPanel == 0 && kPanel == kSlab);

  static int64_t padded(int64_t n) { return round_up(n, 32); }
  static int64_t columns_size(int64_t rows, int64_t d) { return padded(rows) * padded(d); }
  static int64_t depth_size(int64_t rows, int64_t d) { return columns_size(rows, d); }
  static int64_t query_rows_size(int64_t rows, int64_t d) { return columns_size(rows, d); }
  static int64_t sums_size(int64_t keys, int64_t d) { return columns_size(keys, d); }
  // Weights of a block.
  static constexpr int64_t kRounded = kQueries * kKeys;
  static constexpr int64_t narrow_size() { return 4 * kRounded; }

  using LeftOperand = const bf16*;
  static LeftOperand pack_left(const Rows& x, int64_t n, int64_t d, bf16* buffer) {
    amx::pack(amx::Panels::rows, x.base.as<bf16>() + x.offset, x.stride, n, d, buffer, 32 * padded(d));
    return buffer;
  }
  static void pack_columns(const Rows& x, int64_t first, int64_t n, int64_t /*rows*/, int64_t d, bf16* to) {
    const Rows r = x.from(first);
    amx::pack(amx::Panels::columns_of_rows, r.base.as<bf16>() + r.offset, r.stride, n, d,
              to + first * padded(d), 32 * padded(d));
  }
  static void pack_depth(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d, bf16* to) {
    const Rows r = x.from(first);
    amx::pack(amx::Panels::columns, r.base.as<bf16>() + r.offset, r.stride, d, n, to + first * 32,
              32 * padded(rows));
  }
  // Computes X^T S, because S is cheaper to pack as the right operand than as the left one. The sums have
  // that layout: for each panel of keys the blocks of 32 of d, each [32 of d][32 keys].
  static void pack_query_rows(const Rows& x, int64_t first, int64_t n, int64_t rows, int64_t d, bf16* to) {
    const Rows r = x.from(first);
    amx::pack(amx::Panels::rows_of_columns, r.base.as<bf16>() + r.offset, r.stride, d, n, to + first * 32,
              32 * padded(rows));
  }

  static void scores(const Block<Tiles>& b, LeftOperand x, const bf16* y_columns, int64_t /*keys*/, int64_t d,
                     float* scores) {
    const int64_t depth = padded(d);
    for (int64_t i = 0; i < b.nq; i += 32) {
      int64_t from, to;
      if (!b.keys_of_rows(i, std::min<int64_t>(32, b.nq - i), from, to)) continue;
      for (int64_t j = from / 32 * 32; j < to; j += 32)
        amx::gemm(x + i * depth, y_columns + (b.k0 + j) * depth, depth, false, scores + i * kKeys + j, kKeys);
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
      amx::pack_rounded_rows(s + i * kKeys + from, kKeys, rows, depth, narrow, rest);
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
        amx::gemm_split_a(weights, rest, y, depth, out + j, width);
      else
        amx::gemm(weights, y, depth, true, out + j, width);
    }
  }
  static void weighted_columns(const Block<Tiles>& b, Weights weights, const float* s, const bf16* x_rows,
                               int64_t queries, int64_t d, bf16* narrow, float* sums) {
    for (int64_t j = 0; j < b.nk; j += 32) {
      int64_t from, to;
      if (!b.queries_of(j, std::min<int64_t>(32, b.nk - j), from, to)) continue;
      from = from / 32 * 32;
      const int64_t depth = padded(to - from);
      bf16* rest = weights == Weights::probabilities ? narrow + kRounded : nullptr;
      amx::pack_rounded_columns(s + from * kKeys + j, kKeys, std::min(depth, b.nq - from), narrow, rest);
      add_columns(narrow, rest, x_rows + (b.q0 + from) * 32, depth, queries, d,
                  sums + (b.k0 + j) * padded(d));
    }
  }
  // The sums of 32 keys += X^T times a right panel and its rest.
  static void add_columns(const bf16* weights, const bf16* rest, const bf16* x_rows, int64_t depth,
                          int64_t queries, int64_t d, float* sums) {
    for (int64_t i = 0; i < padded(d); i += 32) {
      const bf16* x = x_rows + i * padded(queries);
      if (rest)
        amx::gemm_split_b(x, weights, rest, depth, sums + i * 32, 32);
      else
        amx::gemm(x, weights, depth, true, sums + i * 32, 32);
    }
  }

  // The keys of a block that are visible to 32 rows: of `width` keys from `first` on, [from[i], to[i]) to row
  // i.
  struct VisibleKeys {
    int64_t first, width = 0, from[32], to[32];
    bool full = true;
    VisibleKeys(const Block<Tiles>& b, int64_t row) {
      const int64_t rows = std::min<int64_t>(32, b.nq - row);
      int64_t last;
      if (!b.keys_of_rows(row, rows, first, last)) return;
      first = first / 32 * 32;
      width = padded(last - first);
      for (int64_t i = 0; i < 32; ++i) {
        from[i] = to[i] = 0;
        if (i < rows) b.keys_of(row + i, from[i], to[i]), from[i] -= first, to[i] -= first;
        full = full && from[i] <= 0 && to[i] == width;
      }
    }
    amx::ScoreRows rows(const float* scores, float scale) const {
      return {scores, kKeys, width, from, to, full, scale};
    }
  };
  // scores[32][kKeys] of a left panel and those keys.
  static void scores_of(const VisibleKeys& seen, const bf16* x, const bf16* y_columns, int64_t depth,
                        float* scores) {
    for (int64_t j = 0; j < seen.width; j += 32)
      amx::gemm(x, y_columns + (seen.first + j) * depth, depth, false, scores + j, kKeys);
  }

  template <class Scratch, class Keys>
  static void attend_block(const Scratch& s, Block<Tiles>& b, LeftOperand q, const Keys& kv, HeadDims d,
                           float scale) {
    const int64_t depth = padded(d.qk), out_width = padded(d.v);
    for (int64_t k0 = b.begin; k0 < b.end; k0 += kKeys) {
      b.at_keys(k0);
      for (int64_t i = 0; i < b.nq; i += 32) {
        const VisibleKeys seen(b, i);
        if (seen.width == 0) continue;
        float* out = s.out + i * out_width;
        scores_of(seen, q + i * depth, kv.k_columns + b.k0 * depth, depth, s.scores);
        bf16* rest = s.narrow + kRounded;
        if (amx::softmax_rows(seen.rows(s.scores, scale), s.max + i, s.sum + i, s.correction, s.narrow, rest))
          for (int64_t r = 0; r < 32; ++r) {
            const VF f = splat(s.correction[r]);
            for (int64_t j = r * out_width; j < (r + 1) * out_width; j += kStep)
              store(hn::Mul(load(out + j), f), out + j);
          }
        add_rows(s.narrow, rest, kv.v_depth + (b.k0 + seen.first) * 32, seen.width, kv.keys, d.v, out);
      }
    }
  }

  template <class Scratch>
  static void backward_keys(const Scratch& s, const Block<Tiles>& b, LeftOperand q, LeftOperand dout,
                            const float* lse, int64_t queries, int64_t keys, HeadDims d, float scale) {
    // Number of values in a right panel of 32 keys.
    constexpr int64_t kPanelValues = kQueries * 32;
    bf16 *p_columns = s.narrow, *p_rest = p_columns + kRounded;
    bf16 *ds_columns = p_rest + kRounded, *ds_rows = ds_columns + kRounded;
    const int64_t depth = padded(d.qk), v_depth = padded(d.v);
    // The keys that 32 rows attend to.
    int64_t first[kQueries / 32] = {}, last[kQueries / 32] = {};
    for (int64_t i = 0; i < b.nq; i += 32) {
      const VisibleKeys seen(b, i);
      if (seen.width == 0) continue;
      first[i / 32] = seen.first, last[i / 32] = seen.first + seen.width;
      scores_of(seen, q + i * depth, s.k_columns + b.k0 * depth, depth, s.p);
      scores_of(seen, dout + i * v_depth, s.v_columns + b.k0 * v_depth, v_depth, s.dp);
      float own_lse[32] = {};
      std::copy_n(lse + b.q0 + i, std::min<int64_t>(32, b.nq - i), own_lse);
      const int64_t at = seen.first / 32 * kPanelValues + i * 32;
      amx::score_gradient_rows(seen.rows(s.p, scale), s.dp, own_lse, s.delta + i, ds_rows, p_columns + at,
                               p_rest + at, ds_columns + at, kPanelValues);
      add_rows(ds_rows, nullptr, s.k_depth + (b.k0 + seen.first) * 32, seen.width, keys, d.qk,
               s.dq + i * depth);
    }
    for (int64_t j = 0; j < b.nk; j += 32)
      for (int64_t from = 0, to; from < b.nq; from = to + 32) {
        const auto attends = [&](int64_t i) { return i < b.nq && first[i / 32] <= j && j < last[i / 32]; };
        for (to = from; attends(to);) to += 32;
        if (from == to) continue;
        const int64_t at = j / 32 * kPanelValues + from * 32, row = (b.q0 + from) * 32, key = b.k0 + j;
        add_columns(p_columns + at, p_rest + at, s.dout_rows + row, to - from, queries, d.v,
                    s.dv + key * v_depth);
        add_columns(ds_columns + at, nullptr, s.q_rows + row, to - from, queries, d.qk, s.dk + key * depth);
      }
  }

  static const float* key_rows(const float* sums, int64_t first, int64_t d, float* buffer) {
    amx::transpose_sums(sums + first * padded(d), padded(d), buffer);
    return buffer;
  }
};

// body(Gemms()) with the implementation for arrays of that type.
HWY_INLINE bool on_tiles(DType type) {
  return kTilesHere && type == DType::bf16 && runs_amx();
}
template <class Body>
HWY_INLINE auto with_gemms(bool tiles, Body&& body) {
  if constexpr (kTilesHere)
    if (tiles) return body(Tiles());
  return body(Vectors());
}

struct DropoutMask {
  float p = 0;
  PhiloxKey key{};
  // Global index.
  uint64_t head = 0;
  // Global position of key 0.
  int64_t first_key = 0;
};
// The words of keys [first, first + n) (common/dropout.hpp), within `words`: blocks of four begin at
// multiples of 4.
HWY_INLINE const uint32_t* dropout_words(const DropoutMask& drop, int64_t dropout_row, int64_t first,
                                         int64_t n, uint32_t* words) {
  const int64_t position = drop.first_key + first, before = position % 4;
  for (int64_t i = 0; i < before + n; i += 4 * kStep)
    philox_words(drop.key, static_cast<uint64_t>(dropout_row),
                 drop.head << 40 | static_cast<uint64_t>(position - before + i) >> 2, words + i);
  return words + before;
}
HWY_INLINE VF dropped(VF v, const uint32_t* words, hn::Vec<DU> threshold, VF factor) {
  const auto w = hn::LoadU(DU(), words);
  return hn::IfThenElseZero(hn::RebindMask(DF(), hn::Eq(hn::Max(w, threshold), w)), hn::Mul(v, factor));
}
// Number of random words for a block of keys, with up to three words before its first one.
template <class Gemms>
inline constexpr int64_t kWords = Gemms::kKeys + 4 * kStep;

HWY_INLINE float exp_one(float x) {
  return hn::GetLane(exp(splat(x)));
}

// Masks a row of scores to the keys [from, to): -infinity beside them up to full vectors, which are then
// [begin, end), zeros further out.
HWY_INLINE void mask_row(float* row, int64_t from, int64_t to, int64_t width, int64_t& begin, int64_t& end) {
  begin = from / kStep * kStep;
  end = round_up(to, kStep);
  for (int64_t j = begin; j < from; ++j) row[j] = -kInfinity;
  for (int64_t j = to; j < end; ++j) row[j] = -kInfinity;
  std::memset(row, 0, static_cast<size_t>(begin) * sizeof(float));
  std::memset(row + end, 0, static_cast<size_t>(width - end) * sizeof(float));
}

// Converts the dot product of a query and a key to a logit. scale is positive.
struct Logits {
  float scale, softcap;
};

// Converts the dot products [from, to) of a row, and their neighbors up to full vectors, into capped logits,
// before mask_row hides the neighbors.
HWY_INLINE void cap_row(float* row, int64_t from, int64_t to, Logits logits) {
  const VF most = splat(logits.softcap), inverse = splat(logits.scale / logits.softcap);
  for (int64_t j = from / kStep * kStep; j < to; j += kStep)
    store(softcap(load(row + j), most, inverse), row + j);
}

// Divides a worker's workspace sequentially, in floats or GEMM operand values.
struct ScratchAllocator {
  // Null: computes the size only.
  float* base;
  size_t floats = 0;
  template <class T = float>
  T* take(int64_t n) {
    float* here = base ? base + floats : nullptr;
    floats += static_cast<size_t>(round_up(n * static_cast<int64_t>(sizeof(T)), 64)) / sizeof(float);
    return reinterpret_cast<T*>(here);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#endif
