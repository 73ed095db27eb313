// GEMM with packed panels and a register-tiled kernel (gemm_core-inl.hpp); the tiling depends on the shape
// alone. Packing widens bf16 and fp16 operands and dequantizes those with scales. Where the processor
// multiplies bf16, such GEMMs run on its tile unit (packed_bf16.hpp), or without one by oneDNN (onednn.hpp),
// and groups, whose sizes are new in each step, by packed_bf16.hpp too. The bias is added by a pass over C.
#include "kernels/gemm.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/amx.hpp"
#include "kernels/cpu/dequantize.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/onednn.hpp"
#include "kernels/cpu/packed_bf16.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/gemm_core-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// The tiling of a GEMM, by its shape alone. B is packed once, all threads together, into shared memory, in
// chunks of n and k that fit; a tile is a block of rows times a block of columns, packs its rows of A for one
// pass of kKc and multiplies.
struct GemmTiling {
  // Size of a tile of C.
  int64_t rows, cols;
  // Size of a packed chunk of B.
  int64_t chunk_n, chunk_k;
};

// 4 MiB of packed B at a time: a part of the last-level cache.
constexpr int64_t kPackedFloats = int64_t{1} << 20;
// Number of tiles that is enough to balance threads; GEMMs with more tiles of the largest size have more.
constexpr int64_t kTiles = 32;
// Multiply-adds that a tile should have at least.
constexpr int64_t kTileWork = int64_t{1} << 20;
// A tile packs rows x kKc of A, which shall stay in the second-level cache, and uses each panel of B `rows`
// times: with fewer than 64 rows fetching B would cost more than multiplying.
constexpr int64_t kMaxRows = 128, kMinRows = 64, kMaxCols = 1536, kMinCols = 4 * kNr;

// Size of the tiles of m rows and p.chunk_n columns with sums over k, at most p's.
HWY_INLINE void divide_tiles(GemmTiling& p, int64_t m, int64_t k) {
  const double work = static_cast<double>(m) * static_cast<double>(p.chunk_n) * static_cast<double>(k);
  const auto wanted = static_cast<int64_t>(
      std::clamp(work / static_cast<double>(kTileWork), 1.0, static_cast<double>(kTiles)));
  int64_t across = ceil_div(p.chunk_n, kMaxCols);
  const int64_t down =
      std::max(ceil_div(m, kMaxRows), std::min(ceil_div(m, kMinRows), ceil_div(wanted, across)));
  across = std::max(across, std::min(ceil_div(p.chunk_n, kMinCols), ceil_div(wanted, down)));
  p.rows = std::min(p.rows, even_size(m, down, kMr));
  p.cols = std::min(p.cols, even_size(p.chunk_n, across, kNr));
}

HWY_INLINE GemmTiling tiling_for(const GemmShape& s, bool narrow) {
  GemmTiling p{.rows = s.m + kMr, .cols = s.n + kNr, .chunk_n = 0, .chunk_k = 0};
  // Between two chunks of k the sums lie in C. 16 bits cannot hold them, so there a chunk is as deep as can
  // be.
  p.chunk_k = std::min(s.k, even_size(s.k, ceil_div(s.k, narrow ? 16 * kKc : 2 * kKc), 4));
  p.chunk_n = std::min(s.n, std::max(8 * kNr, kPackedFloats / p.chunk_k / kNr * kNr));
  divide_tiles(p, s.m, s.k);
  return p;
}

// Rows of a matrix with scales, of which a few are dequantized at a time, as a matrix in fp32 that is packed
// next.
template <int64_t kRows, int64_t kDepth>
struct DequantizedRows {
  static constexpr int64_t kStride = kDepth + 16;
  HWY_ALIGN float values[kRows * kStride];
  DequantizedRows(const ScaledMatrix& x, int64_t row, int64_t rows, int64_t k0, int64_t k) {
    for (int64_t r = 0; r < rows; ++r) dequantize(x, row + r, k0, k, values + r * kStride);
  }
};

// Columns [n0, n0 + n) and rows [k0, k0 + k) of op(B), as panels of k rows.
template <class T>
HWY_INLINE void pack_b(Context& c, const GemmShape& s, const T* b, int64_t n0, int64_t n, int64_t k0,
                       int64_t k, float* to) {
  // A tile is a slab of four panels, which are neighbors in memory.
  const int64_t group = 4 * kNr, slab = std::max<int64_t>(256, 65536 / group);
  const int64_t slabs = ceil_div(k, slab);
  c.pool->parallel_for(ceil_div(n, group) * slabs, [&](int64_t tile, int) HWY_ATTR {
    const int64_t first = tile / slabs * group, from_k = tile % slabs * slab,
                  count = std::min(slab, k - from_k);
    // Rows of B read across the panels of the group before going on.
    constexpr int64_t kRun = 32;
    for (int64_t p = from_k; p < from_k + count; p += kRun) {
      const int64_t run = std::min(kRun, from_k + count - p);
      for (int64_t j = first; j < std::min(n, first + group); j += kNr) {
        const int64_t width = panel_width(n, j), cols = std::min(kNr, n - j);
        float* panel = to + j * k + p * width;
        if constexpr (std::is_same_v<T, ScaledMatrix>) {
          const DequantizedRows<kNr, kRun> rows(*b, n0 + j, cols, k0 + p, run);
          pack_transposed(rows.values, rows.kStride, run, cols, width, panel);
        } else if (s.trans_b)
          pack_transposed(b + (n0 + j) * s.ldb + k0 + p, s.ldb, run, cols, width, panel);
        else
          pack_straight(b + (k0 + p) * s.ldb + n0 + j, s.ldb, run, cols, width, panel);
      }
    }
  });
}

// Not a power of two: panels of one block must not fall on the same cache sets.
constexpr int64_t kPanelA = kKc * kMr + 16;

// Rows [m0, m0 + m) and columns [k0, k0 + k) of op(A), k <= kKc, as panels kPanelA apart.
template <class T>
HWY_INLINE void pack_rows(const GemmShape& s, const T* a, int64_t m0, int64_t m, int64_t k0, int64_t k,
                          float* to) {
  // Distance of prefetches. A row is a few lines, too short for the processor to predict the next.
  constexpr int64_t kPrefetchRows = 8;
  if (s.trans_a) {
    // A row of the array holds four (eight) members of every panel: it is read once, in order.
    for (int64_t p = 0; p < k; ++p) {
      const T* row = a + (k0 + p) * s.lda + m0;
      if (p + kPrefetchRows < k)
        for (int64_t q = 0; q < m; q += 64 / static_cast<int64_t>(sizeof(T)))
          hwy::Prefetch(row + kPrefetchRows * s.lda + q);
      float* panel = to + p * kMr;
      int64_t i = 0;
      for (; i + kMr <= m; i += kMr, panel += kPanelA) pack_straight(row + i, s.lda, 1, kMr, kMr, panel);
      if (i < m) pack_straight(row + i, s.lda, 1, m - i, kMr, panel);
    }
    return;
  }
  for (int64_t i = 0; i < m; i += kMr) {
    const int64_t rows = std::min<int64_t>(kMr, m - i);
    const T* from = a + (m0 + i) * s.lda + k0;
    if (i + kMr < m)
      for (int64_t r = 0; r < std::min<int64_t>(kMr, m - i - kMr); ++r)
        for (int64_t q = 0; q < 128; q += 64 / static_cast<int64_t>(sizeof(T)))
          hwy::Prefetch(from + (kMr + r) * s.lda + q);
    pack_transposed(from, s.lda, k, rows, kMr, to + i / kMr * kPanelA);
  }
}

template <class T>
HWY_INLINE void pack_a(const GemmShape& s, const T* a, int64_t m0, int64_t m, int64_t k0, int64_t k,
                       float* to) {
  if constexpr (std::is_same_v<T, ScaledMatrix>) {
    for (int64_t i = 0; i < m; i += kMr) {
      const int64_t rows = std::min<int64_t>(kMr, m - i);
      const DequantizedRows<kMr, kKc> dequantized(*a, m0 + i, rows, k0, k);
      pack_transposed(dequantized.values, dequantized.kStride, k, rows, kMr, to + i / kMr * kPanelA);
    }
  } else {
    pack_rows(s, a, m0, m, k0, k, to);
  }
}

// n values of C below fp32, from element `first` on.
template <class T>
HWY_INLINE void write_row(const float* from, int64_t n, T* c) {
  for_vectors(
      n, [&](int64_t i) HWY_ATTR { store(load(from + i), c + i); },
      [&](int64_t i, int64_t k) HWY_ATTR { store_part(load_part(from + i, k), c + i, k); });
}
HWY_INLINE void write_row(const float* from, int64_t n, Out c, int64_t first) {
  if (c.dtype == DType::bf16)
    write_row(from, n, c.as<bf16>() + first);
  else
    write_row(from, n, c.as<f16>() + first);
}

// A description of the content of a worker's panels of A, in front of them: the next tile is often of the
// same rows and need not pack them again.
struct alignas(64) PackedRows {
  // First row and first k of the packed panels; row < 0: the panels are empty.
  int64_t row, depth;
};
static_assert(sizeof(PackedRows) == 16 * sizeof(float));

// How the workspace of a GEMM is divided, in floats: a worker's PackedRows, panels of A and sums, then all
// workers' B and copy of C.
struct GemmWorkspace {
  static constexpr size_t held = sizeof(PackedRows) / sizeof(float);
  bool copy;
  size_t a, c, b, c_copy;
  GemmWorkspace(const GemmShape& s, const GemmTiling& p, bool narrow)
      // Results below fp32 are summed in fp32: in the tile's memory, or when k comes in several chunks in a
      // copy of C's columns.
      : copy(narrow && p.chunk_k < s.k),
        a(static_cast<size_t>(ceil_div(p.rows, kMr) * kPanelA)),
        c(static_cast<size_t>(narrow && !copy ? p.rows * p.cols : 0)),
        b(static_cast<size_t>((p.chunk_n + kNr) * p.chunk_k)),
        c_copy(static_cast<size_t>(copy ? s.m * p.chunk_n : 0)) {}
  size_t worker() const { return held + a + c; }
  WorkspaceSize need() const { return {(b + c_copy) * sizeof(float), worker() * sizeof(float)}; }
};

// `planned`: a shape that is at least as large, whose chunks and workspace are used. Tiles are those of `s`:
// a group of a grouped GEMM alone has to balance the threads.
template <class T>
void tiled_gemm(Context& c, const GemmShape& planned, const GemmShape& s, const T* a, const T* b, Out out,
                float alpha, float beta) {
  const bool narrow = out.dtype != DType::f32;
  GemmTiling p = tiling_for(planned, narrow);
  const GemmWorkspace sizes(planned, p, narrow);
  divide_tiles(p, s.m, s.k);
  const WorkspaceParts workspace(c, sizes.need());
  if (!workspace) return;
  const bool copy = sizes.copy;
  const auto a_floats = sizes.a, b_floats = sizes.b, held_floats = sizes.held;
  auto* packed_b = workspace.shared<float>();
  for (int worker = 0; worker < c.pool->size(); ++worker) workspace.worker<PackedRows>(worker)->row = -1;
  float* c_copy = packed_b + b_floats;

  for (int64_t n0 = 0; n0 < s.n; n0 += p.chunk_n)
    for (int64_t k0 = 0; k0 < s.k; k0 += p.chunk_k) {
      const int64_t n = std::min(p.chunk_n, s.n - n0), k = std::min(p.chunk_k, s.k - k0);
      pack_b(c, s, b, n0, n, k0, k, packed_b);
      const int64_t across = ceil_div(n, p.cols), down = ceil_div(s.m, p.rows);
      c.pool->parallel_for(across * down, [&](int64_t tile, int worker) HWY_ATTR {
        const int64_t i0 = tile / across * p.rows, j0 = tile % across * p.cols;
        const int64_t rows = std::min(p.rows, s.m - i0), cols = std::min(p.cols, n - j0);
        auto* panel = workspace.worker<float>(worker);
        PackedRows& held = *reinterpret_cast<PackedRows*>(panel);
        panel += held_floats;
        const int64_t at = i0 * s.ldc + n0 + j0;
        float* to = !narrow ? out.as<float>() + at : copy ? c_copy + i0 * n + j0 : panel + a_floats;
        const int64_t ldt = !narrow ? s.ldc : copy ? n : cols;
        if (narrow && beta != 0 && k0 == 0)
          for (int64_t r = 0; r < rows; ++r) widen(out, at + r * s.ldc, to + r * ldt, cols);
        const int64_t deep = even_size(k, ceil_div(k, kKc), 4);
        for (int64_t pass = 0; pass < k; pass += deep) {
          const int64_t depth = std::min(deep, k - pass);
          if (held.row != i0 || held.depth != k0 + pass) {
            pack_a(s, a, i0, rows, k0 + pass, depth, panel);
            held = {i0, k0 + pass};
          }
          packed_gemm({panel, packed_b + j0 * k, kPanelA, kNr * k, pass}, rows, cols, depth, alpha,
                      k0 + pass == 0 ? beta : 1.0f, to, ldt);
        }
        if (narrow && k0 + k == s.k)
          for (int64_t r = 0; r < rows; ++r) write_row(to + r * ldt, cols, out, at + r * s.ldc);
      });
    }
}

// A few rows times a transposed matrix, as in generation: B is read once, in place.
template <class T>
void few_rows(Context& c, const GemmShape& s, const T* a, const T* b, Out out, float alpha, float beta) {
  const auto y = array_of<Any>(out);
  parallel_blocks(
      c, s.n, std::max<int64_t>(4, rows_per_block(s.k)), [&](int64_t begin, int64_t end, int) HWY_ATTR {
        for (int64_t j = begin; j < end; j += 4) {
          const T* column[4];
          for (int64_t q = 0; q < 4; ++q) column[q] = b + std::min(j + q, end - 1) * s.ldb;
          for (int64_t i = 0; i < s.m; ++i) {
            const T* row = a + i * s.lda;
            VF s0 = hn::Zero(DF()), s1 = s0, s2 = s0, s3 = s0;
            auto add = [&](VF x, VF b0, VF b1, VF b2, VF b3) HWY_ATTR {
              s0 = hn::MulAdd(x, b0, s0);
              s1 = hn::MulAdd(x, b1, s1);
              s2 = hn::MulAdd(x, b2, s2);
              s3 = hn::MulAdd(x, b3, s3);
            };
            for_vectors(
                s.k,
                [&](int64_t p) HWY_ATTR {
                  add(load(row + p), load(column[0] + p), load(column[1] + p), load(column[2] + p),
                      load(column[3] + p));
                },
                [&](int64_t p, int64_t n) HWY_ATTR {
                  add(load_part(row + p, n), load_part(column[0] + p, n), load_part(column[1] + p, n),
                      load_part(column[2] + p, n), load_part(column[3] + p, n));
                });
            const float sums[4] = {sum_lanes(s0), sum_lanes(s1), sum_lanes(s2), sum_lanes(s3)};
            for (int64_t q = 0; q < std::min<int64_t>(4, end - j); ++q) {
              const int64_t at = i * s.ldc + j + q;
              const float before = beta == 0 ? 0.0f : beta * hn::GetLane(y.part(at, 1));
              y.put_part(at, splat(alpha * sums[q] + before), 1);
            }
          }
        }
      });
}

// bf16 on a processor that multiplies it: oneDNN on tiles of fixed size, one thread each.
struct NativeTiles {
  int64_t rows, cols, down, across;
  explicit NativeTiles(const GemmShape& s)
      : rows(even_size(s.m, ceil_div(s.m, 256), 32)),
        cols(even_size(s.n, ceil_div(s.n, 768), 64)),
        down(ceil_div(s.m, rows)),
        across(ceil_div(s.n, cols)) {}
  GemmShape at(const GemmShape& s, int64_t row, int64_t column) const {
    GemmShape tile = s;
    tile.m = std::min(rows, s.m - row * rows);
    tile.n = std::min(cols, s.n - column * cols);
    return tile;
  }
};
WorkspaceSize native_workspace(const GemmShape& s, DType c, float beta) {
  const NativeTiles tiles(s);
  size_t most = 0;
  // Only the last row and the last column of tiles may be smaller.
  for (const int64_t row : {int64_t{0}, tiles.down - 1})
    for (const int64_t column : {int64_t{0}, tiles.across - 1})
      most = std::max(most, onednn_workspace(tiles.at(s, row, column), DType::bf16, c, beta));
  return {0, most};
}
void native_gemm(Context& c, const GemmShape& s, In a, In b, Out out, float beta) {
  const WorkspaceParts workspace(c, native_workspace(s, out.dtype, beta));
  if (!workspace) return;
  const NativeTiles tiles(s);
  const int64_t size = size_of(out.dtype);
  c.pool->parallel_for(tiles.down * tiles.across, [&](int64_t tile, int worker) {
    const int64_t row = tile / tiles.across, column = tile % tiles.across;
    const int64_t i = row * tiles.rows, j = column * tiles.cols;
    const GemmShape t = tiles.at(s, row, column);
    onednn_gemm(t, {a.as<bf16>() + (s.trans_a ? i : i * s.lda), DType::bf16},
                {b.as<bf16>() + (s.trans_b ? j * s.ldb : j), DType::bf16},
                {out.as<char>() + (i * s.ldc + j) * size, out.dtype}, beta, workspace.worker<void>(worker));
  });
}

// A few columns, as in the GEMMs with adapter factors: packing A would take as long as the GEMM, so it is
// read in place; B becomes one panel.
constexpr int64_t kThin = 2 * kStep;
bool is_skinny_n(const GemmShape& s) {
  return s.n <= kThin && s.m >= 8 * kMr && (!s.trans_a || s.m % kMr == 0);
}
WorkspaceSize skinny_n_workspace(const GemmShape& s) {
  return {static_cast<size_t>(s.k * panel_width(s.n, 0)) * sizeof(float), 0};
}
void skinny_n(Context& c, const GemmShape& s, const float* a, const float* b, float* out, float alpha,
              float beta, float* panel) {
  const int64_t width = panel_width(s.n, 0);
  if (s.trans_b)
    pack_transposed(b, s.ldb, s.k, s.n, width, panel);
  else
    pack_straight(b, s.ldb, s.k, s.n, width, panel);
  parallel_blocks(c, s.m, 16 * kMr, [&](int64_t begin, int64_t end, int) HWY_ATTR {
    // Rows of A that stay cached for all panels of the block.
    const int64_t deep = s.trans_a ? 64 : s.k;
    for (int64_t p = 0; p < s.k; p += deep)
      for (int64_t i = begin; i < end; i += kMr) {
        const int64_t depth = std::min(deep, s.k - p), rows = std::min<int64_t>(kMr, end - i);
        const float factor = p == 0 ? beta : 1.0f;
        if (s.trans_a)
          panel_gemm_of<PanelLayout::columns, false>(width, depth, a + p * s.lda + i, s.lda,
                                                     panel + p * width, alpha, factor, out + i * s.ldc, s.ldc,
                                                     rows, s.n);
        else
          panel_gemm_of<PanelLayout::rows, false>(width, depth, a + i * s.lda + p, s.lda, panel + p * width,
                                                  alpha, factor, out + i * s.ldc, s.ldc, rows, s.n);
      }
  });
}

// A few rows likewise: C^T = op(B)^T op(A)^T.
GemmShape transposed(const GemmShape& s) {
  return {!s.trans_b, !s.trans_a, s.n, s.m, s.k, s.ldb, s.lda, s.m};
}
WorkspaceSize skinny_m_workspace(const GemmShape& s) {
  return {skinny_n_workspace(transposed(s)).shared + static_cast<size_t>(s.m * s.n) * sizeof(float), 0};
}
void skinny_m(Context& c, const GemmShape& s, const float* a, const float* b, float* out, float alpha,
              float beta, float* workspace) {
  float* sums = workspace + skinny_n_workspace(transposed(s)).shared / sizeof(float);
  skinny_n(c, transposed(s), b, a, sums, alpha, 0, workspace);
  for (int64_t i = 0; i < s.m; ++i)
    for (int64_t j = 0; j < s.n; ++j) {
      float& to = out[i * s.ldc + j];
      to = sums[j * s.m + i] + (beta == 0 ? 0.0f : beta * to);
    }
}

bool has_few_rows(const GemmShape& s, DType a) {
  return s.m <= 8 && s.trans_b && !s.trans_a && size_of(a) > 1;
}

// The types and scales of the GEMMs of the tile unit and of oneDNN.
bool native_types(DType a, DType c, float alpha, float beta) {
  return a == DType::bf16 && c != DType::f16 && alpha == 1.0f && (beta == 0.0f || beta == 1.0f);
}

WorkspaceSize run_workspace(GemmShape s, GemmTypes types, float alpha, float beta) {
  const DType a = types.a, c = types.c;
  const bool narrow = c != DType::f32;
  if (s.m <= 0 || s.n <= 0 || s.k <= 0 || has_few_rows(s, a)) return {};
  if (a == DType::f32 && c == DType::f32 && is_skinny_n(s)) return skinny_n_workspace(s);
  if (a == DType::f32 && c == DType::f32 && is_skinny_n(transposed(s))) return skinny_m_workspace(s);
  const bool native = native_types(a, c, alpha, beta);
  if (native && runs_amx()) return packed_bf16_workspace(s, c);
  if (native && *native_bf16()) return native_workspace(s, c, beta);
  return GemmWorkspace(s, tiling_for(s, narrow), narrow).need();
}
// The groups follow one another in the same memory, for the largest that there can be.
WorkspaceSize run_grouped_workspace(GemmShape s, GemmGroups, int64_t, GemmTypes types, float alpha,
                                    float beta) {
  const bool narrow = types.c != DType::f32;
  if (s.m <= 0 || s.n <= 0 || s.k <= 0) return {};
  if (native_types(types.a, types.c, alpha, beta) && runs_packed_bf16())
    return packed_bf16_workspace(s, types.c);
  return GemmWorkspace(s, tiling_for(s, narrow), narrow).need();
}

// C = beta * C.
void scale_result(const GemmShape& s, Out out, float beta) {
  const auto y = array_of<Any>(out);
  for (int64_t r = 0; r < s.m; ++r)
    for (int64_t j = 0; j < s.n; ++j) {
      const int64_t at = r * s.ldc + j;
      y.put_part(at, beta == 0 ? hn::Zero(DF()) : hn::Mul(splat(beta), y.part(at, 1)), 1);
    }
}

void run_on_vectors(Context& c, const GemmShape& s, bool few, In a, In b, Out out, float alpha, float beta) {
  at_element(a, 0, [&]<class T>(const T* left) {
    if (few)
      few_rows(c, s, left, b.as<T>(), out, alpha, beta);
    else
      tiled_gemm(c, s, s, left, b.as<T>(), out, alpha, beta);
  });
}

// One GEMM of the batch.
void run_one(Context& c, const GemmShape& s, In a, In b, Out out, float alpha, float beta) {
  const bool few = has_few_rows(s, a.dtype);
  const bool wide = a.dtype == DType::f32 && out.dtype == DType::f32 && !few;
  if (wide && (is_skinny_n(s) || is_skinny_n(transposed(s)))) {
    const bool skinny_columns = is_skinny_n(s);
    const WorkspaceParts workspace(c, skinny_columns ? skinny_n_workspace(s) : skinny_m_workspace(s));
    if (!workspace) return;
    (skinny_columns ? skinny_n : skinny_m)(c, s, a.as<float>(), b.as<float>(), out.as<float>(), alpha, beta,
                                           workspace.shared<float>());
    return;
  }
  const bool native = !few && native_types(a.dtype, out.dtype, alpha, beta);
  if (native && runs_amx()) {
    packed_bf16_gemm(c, s, s, a, b, out, beta);
  } else if (native && *native_bf16()) {
    native_gemm(c, s, a, b, out, beta);
  } else {
    run_on_vectors(c, s, few, a, b, out, alpha, beta);
  }
}

void add_bias(Context& c, const GemmShape& s, Out out, In bias_in) {
  by_type({out, bias_in}, [&](auto type) HWY_ATTR {
    const auto y = array_of<decltype(type)>(out), bias = array_of<decltype(type)>(bias_in);
    parallel_blocks(c, s.m, rows_per_block(s.n), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r)
        for_vectors(
            s.n,
            [&](int64_t j)
                HWY_ATTR { y.put(r * s.ldc + j, hn::Add(y.at(r * s.ldc + j), bias.at_without_prefetch(j))); },
            [&](int64_t j, int64_t n) HWY_ATTR {
              y.put_part(r * s.ldc + j, hn::Add(y.part(r * s.ldc + j, n), bias.part(j, n)), n);
            });
    });
  });
}

void run(Context& c, GemmShape s, Operand a, Operand b, Out out, float alpha, float beta, In bias) {
  if (s.m <= 0 || s.n <= 0) return;
  for (int64_t i = 0; i < s.batch; ++i) {
    const Out y = from_element(out, i * s.stride_c);
    if (s.k <= 0) {
      scale_result(s, y, beta);
    } else if (a.layout != ScaleLayout::none) {
      const ScaledMatrix x(a, s.k, i * s.stride_a / s.k), w(b, s.k, i * s.stride_b / s.k);
      tiled_gemm(c, s, s, &x, &w, y, alpha, beta);
    } else {
      run_one(c, s, from_element(a, i * s.stride_a), from_element(b, i * s.stride_b), y, alpha, beta);
    }
    if (bias) add_bias(c, s, y, bias);
  }
}

void run_grouped(Context& c, GemmShape planned, GemmGroups kind, const int64_t* sizes, int64_t count,
                 Operand a, Operand b, Out out, float alpha, float beta, In bias) {
  if (planned.m <= 0 || planned.n <= 0) return;
  const bool rows = kind == GemmGroups::m;
  for (int64_t group = 0, first = 0; group < count; first += sizes[group++]) {
    GemmShape s = planned;
    (rows ? s.m : s.k) = sizes[group];
    const Out y = from_element(out, rows ? first * s.ldc : group * s.stride_c);
    if (s.m == 0) continue;
    const int64_t a_at = first * (rows == s.trans_a ? 1 : s.lda),
                  b_at = rows ? group * s.stride_b : first * (s.trans_b ? 1 : s.ldb);
    if (s.k == 0) {
      scale_result(s, y, beta);
    } else if (a.layout != ScaleLayout::none) {
      const ScaledMatrix x(a, planned.k, rows ? first : 0, rows ? 0 : first),
          w(b, planned.k, rows ? group * s.stride_b / s.k : 0, rows ? 0 : first);
      tiled_gemm(c, planned, s, &x, &w, y, alpha, beta);
    } else if (native_types(a.dtype, out.dtype, alpha, beta) && runs_packed_bf16()) {
      packed_bf16_gemm(c, planned, s, from_element(a, a_at), from_element(b, b_at), y, beta);
    } else {
      at_element({a.data, a.dtype}, a_at, [&]<class T>(const T* left) {
        tiled_gemm(c, planned, s, left, static_cast<const T*>(b.data) + b_at, y, alpha, beta);
      });
    }
    if (bias) add_bias(c, s, y, from_element(bias, group * s.n));
  }
}

// At most 64 partial rows, whose number depends on the shape only, then their sum in order.
struct PartialSums {
  int64_t block, blocks, width;
  PartialSums(int64_t rows, int64_t cols)
      : block(std::max(rows_per_block(cols), ceil_div(std::max<int64_t>(rows, 1), 64))),
        blocks(ceil_div(rows, block)),
        width(round_up(cols, kStep)) {}
  WorkspaceSize need() const {
    return {static_cast<size_t>(std::max<int64_t>(blocks, 1) * width) * sizeof(float), 0};
  }
};
WorkspaceSize column_sum_workspace(int64_t rows, int64_t cols) {
  return cols <= 0 ? WorkspaceSize{} : PartialSums(rows, cols).need();
}
void column_sum(Context& c, In x_in, float* out, int64_t rows, int64_t cols, int64_t row_stride,
                bool accumulate) {
  if (cols <= 0) return;
  const PartialSums parts(rows, cols);
  const int64_t block = parts.block, blocks = parts.blocks, width = parts.width;
  const WorkspaceParts workspace(c, parts.need());
  if (!workspace) return;
  auto* partial = workspace.shared<float>();
  by_type({x_in}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(x_in);
    parallel_blocks(c, rows, block, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      float* sum = partial + begin / block * width;
      std::memset(sum, 0, static_cast<size_t>(width) * sizeof(float));
      for (int64_t r = begin; r < end; ++r)
        for_vectors(
            cols,
            [&](int64_t i) HWY_ATTR { store(hn::Add(load(sum + i), x.at(r * row_stride + i)), sum + i); },
            [&](int64_t i, int64_t n)
                HWY_ATTR { store(hn::Add(load(sum + i), x.part(r * row_stride + i, n)), sum + i); });
    });
  });
  parallel_blocks(c, cols, 4096, [&](int64_t begin, int64_t end, int) HWY_ATTR {
    for (int64_t i = begin; i < end; i += kStep) {
      const int64_t n = std::min(kStep, end - i);
      VF s = accumulate ? load_part(out + i, n) : hn::Zero(DF());
      for (int64_t b = 0; b < blocks; ++b) s = hn::Add(s, load(partial + b * width + i));
      store_part(s, out + i, n);
    }
  });
}

Gemm gemm_family() {
  return {.run = run,
          .run_grouped = run_grouped,
          .column_sum = column_sum,
          .run_workspace = run_workspace,
          .run_grouped_workspace = run_grouped_workspace,
          .column_sum_workspace = column_sum_workspace};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Gemm, gemm)
#endif
