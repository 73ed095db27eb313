#include "kernels/cpu/packed_bf16.hpp"

#include <optional>

#include "kernels/cpu/level.hpp"
#include "kernels/cpu/parallel.hpp"

#include "kernels/cpu/amx_core.hpp"

#ifdef CAPSTAN_AMX_CODE

namespace capstan::kernels {

bool runs_packed_bf16() {
#ifndef CAPSTAN_AMX_EMULATION
  static const bool on_vectors = runs(CpuLevel::avx512) && __builtin_cpu_supports("avx512bf16");
  if (on_vectors) return true;
#endif
  return runs_amx();
}

namespace {

using namespace amx;

// B is packed once, all threads together, in chunks of n and k; a tile is a block of rows times a block of
// columns. It packs its rows of A over the full chunk of k, which stay in the L2 cache, and multiplies one
// panel of B after another; the section of a panel for one pass stays in the L1 cache while all rows use it.
// `sums` keeps the sums of a panel between passes.
constexpr int64_t kPackedValues = int64_t{1} << 22;
constexpr int64_t kMaxDepth = 4096, kPassSteps = 8;
// Number of bf16 values of A that a tile may keep in the L2 cache.
constexpr int64_t kRowValues = int64_t{5} << 17;
constexpr int64_t kMaxRows = 256, kMinRows = 64, kMaxCols = 1024, kMinCols = 128;
// multiply-adds below which a tile is not worth a thread.
constexpr int64_t kTileWork = int64_t{1} << 23;
constexpr int64_t kTiles = 32;
// Results larger than this leave the caches before they are read: non-temporal stores save reading their
// cache lines.
constexpr int64_t kMinNontemporalBytes = int64_t{4} << 20;

struct Plan {
  int64_t chunk_k, chunk_n, rows, cols;
  explicit Plan(const GemmShape& s) : rows(s.m + kPanel), cols(s.n + 2 * kPanel) {
    chunk_k = std::min(s.k, even_size(s.k, ceil_div(s.k, kMaxDepth), kDepth));
    chunk_n =
        std::min(s.n, even_size(s.n, ceil_div(s.n, kPackedValues / (steps_of(chunk_k) * kDepth)), kPanel));
    divide_tiles(s.m, s.k);
  }
  // Size of the tiles of m rows with sums over k, at most what it was.
  void divide_tiles(int64_t m, int64_t k) {
    const double work = static_cast<double>(m) * static_cast<double>(chunk_n) * static_cast<double>(k);
    const auto wanted = static_cast<int64_t>(
        std::clamp(work / static_cast<double>(kTileWork), 1.0, static_cast<double>(kTiles)));
    // Divides rows further only where columns do not give enough tiles, because a panel of B is loaded once
    // for all rows of a tile.
    int64_t down = ceil_div(
        m, std::clamp(kRowValues / (steps_of(chunk_k) * kDepth) / kPanel * kPanel, kMinRows, kMaxRows));
    const int64_t across =
        std::max(ceil_div(chunk_n, kMaxCols), std::min(ceil_div(chunk_n, kMinCols), ceil_div(wanted, down)));
    down = std::max(down, std::min(ceil_div(m, kMinRows), ceil_div(wanted, 2 * across)));
    rows = std::min(rows, even_size(m, down, kPanel));
    cols = std::min(cols, even_size(chunk_n, across, 2 * kPanel));
  }
};

// Header of a worker's packed panels of A, which the next tile reuses if it has the same rows.
struct alignas(64) PackedRows {
  // First row and first k of the packed panels; row < 0: the panels are empty.
  int64_t row, depth;
};

struct PackedWorkspace {
  // bf16 results of several chunks of k are summed in a copy of C's columns.
  bool copy;
  size_t a, sums, b, c_copy;
  PackedWorkspace(const GemmShape& s, const Plan& p, DType out)
      : copy(out == DType::bf16 && p.chunk_k < s.k),
        a(static_cast<size_t>(p.rows * steps_of(p.chunk_k) * kDepth) * sizeof(bf16)),
        sums(static_cast<size_t>(2 * p.rows * kPanel) * sizeof(float)),
        b(static_cast<size_t>(ceil_div(p.chunk_n, kPanel) * kPanel * steps_of(p.chunk_k) * kDepth) *
          sizeof(bf16)),
        c_copy(copy ? static_cast<size_t>(s.m * p.chunk_n) * sizeof(float) : 0) {}
  WorkspaceSize need() const { return {b + c_copy, sizeof(PackedRows) + a + sums}; }
};

// Rows [m0, m0 + m) of op(A) and k [k0, k0 + k).
CAPSTAN_AMX_CALLED void pack_rows(const GemmShape& s, const bf16* a, int64_t m0, int64_t m, int64_t k0,
                                  int64_t k, bf16* to, int64_t stride) {
  pack_panels(true, !s.trans_a, a + (s.trans_a ? k0 * s.lda + m0 : m0 * s.lda + k0), s.lda, m, k, to, stride);
}
// Columns [n0, n0 + n) of op(B), `stride` values from panel to panel.
CAPSTAN_AMX_CALLED void pack_columns(const GemmShape& s, const bf16* b, int64_t n0, int64_t n, int64_t k0,
                                     int64_t k, bf16* to, int64_t stride) {
  pack_panels(false, s.trans_b, b + (s.trans_b ? n0 * s.ldb + k0 : k0 * s.ldb + n0), s.ldb, n, k, to, stride);
}
// The same by all threads together, divided into chunks that are long along the rows of the array.
void pack_together(ThreadPool& pool, const GemmShape& s, const bf16* b, int64_t n0, int64_t n, int64_t k0,
                   int64_t k, bf16* to) {
  const int64_t slab = s.trans_b ? 1024 : 256, group = s.trans_b ? 256 : 1024, slabs = ceil_div(k, slab);
  const int64_t stride = steps_of(k) * kStepValues;
  pool.parallel_for(ceil_div(n, group) * slabs, [&](int64_t tile, int) {
    const int64_t i = tile / slabs * group, from = tile % slabs * slab;
    pack_columns(s, b, n0 + i, std::min(group, n - i), k0 + from, std::min(slab, k - from),
                 to + i / kPanel * stride + from * kPanel, stride);
  });
}

// C[m, n] = sums[m, n] + beta C for n <= 64; the sums of consecutive panels are `stride` floats apart.
CAPSTAN_AMX_CALLED void write(const float* sums, int64_t stride, int64_t m, int64_t n, float beta, Out out,
                              int64_t at, int64_t ldc) {
  for (int64_t r = 0; r < m; ++r)
    for (int64_t j = 0; j < n; j += 16) {
      const __mmask16 mask = first16(n - j);
      __m512 v = _mm512_load_ps(sums + j / kPanel * stride + r * kPanel + j % kPanel);
      const int64_t to = at + r * ldc + j;
      if (out.dtype == DType::f32) {
        float* c = out.as<float>() + to;
        if (beta != 0) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, c));
        _mm512_mask_storeu_ps(c, mask, v);
      } else {
        bf16* c = out.as<bf16>() + to;
        if (beta != 0) v = _mm512_add_ps(v, widen16(c, mask));
        _mm256_mask_storeu_epi16(c, mask, narrow(v));
      }
    }
}

// The same for beta 0 and rows of two full cache lines, with non-temporal stores, which the caller fences.
// Writes pairs of adjacent lines, because memory writes one line as slowly as two.
CAPSTAN_AMX_CALLED void store_non_temporal(const float* sums, int64_t stride, int64_t m, Out out, int64_t at,
                                           int64_t ldc) {
  for (int64_t r = 0; r < m; ++r, sums += kPanel, at += ldc) {
    const __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
    if (out.dtype == DType::f32) {
      float* c = out.as<float>() + at;
      _mm512_stream_ps(c, low);
      _mm512_stream_ps(c + 16, high);
    } else {
      auto* c = reinterpret_cast<__m512i*>(out.as<bf16>() + at);
      _mm512_stream_si512(c, narrow32(low, high));
      _mm512_stream_si512(c + 1, narrow32(_mm512_load_ps(sums + stride), _mm512_load_ps(sums + stride + 16)));
    }
  }
}
bool uses_nontemporal_stores(const GemmShape& s, Out out, float beta) {
  const int64_t size = size_of(out.dtype);
  return beta == 0 && s.m * s.n * size >= kMinNontemporalBytes && s.ldc * size % 64 == 0 &&
         reinterpret_cast<uintptr_t>(out.data) % 64 == 0;
}

// Rows of C that are read after a multiplication; nullptr: none.
struct NextRows {
  const char* begin = nullptr;
  int64_t pitch = 0, bytes = 0;
};
// Loads those of a panel into the L2 cache.
CAPSTAN_AMX_CALLED void prefetch_panel(const NextRows& rows, int64_t panel) {
  if (!rows.begin) return;
  for (int64_t r = panel * kPanel; r < (panel + 1) * kPanel; ++r)
    for (int64_t at = 0; at < rows.bytes; at += 64)
      _mm_prefetch(rows.begin + r * rows.pitch + at, _MM_HINT_T1);
}

// sums = rows of A, panels `stride` values apart, times one panel of B. Prefetches `next`, the panel of B
// that is read after this one, and `result`. tiles: on the tile unit, which is configured.
CAPSTAN_AMX_CALLED void multiply_rows(bool tiles, const bf16* a, int64_t stride, const bf16* b,
                                      const bf16* next, const NextRows& result, int64_t panels, int64_t steps,
                                      float* sums) {
  const int64_t lines = ceil_div(32, panels);
  for (int64_t s = 0; s < steps; s += kPassSteps) {
    const int64_t count = std::min(kPassSteps, steps - s);
    const bf16* fetched = s + count < steps ? b + (s + count) * kStepValues : next;
    for (int64_t i = 0; i < panels; ++i) {
      const bf16 *left = a + i * stride + s * kStepValues, *right = b + s * kStepValues,
                 *prefetched = fetched + i * count * lines * 32;
      float* to = sums + i * kPanel * kPanel;
      if (s == 0) prefetch_panel(result, i);
      if (tiles)
        multiply(left, right, count, s > 0, to, kPanel, prefetched, lines);
      else
        multiply_on_vectors(left, right, count, s > 0, to, kPanel, prefetched, lines);
    }
  }
}

}  // namespace

WorkspaceSize packed_bf16_workspace(const GemmShape& planned, DType out) {
  return PackedWorkspace(planned, Plan(planned), out).need();
}

void packed_bf16_gemm(Context& c, const GemmShape& planned, const GemmShape& s, In a_in, In b_in, Out out,
                      float beta) {
  Plan p(planned);
  const PackedWorkspace sizes(planned, p, out.dtype);
  p.divide_tiles(s.m, s.k);
  const WorkspaceParts workspace(c, sizes.need());
  if (!workspace) return;
  const bf16 *a = a_in.as<bf16>(), *b = b_in.as<bf16>();
  auto* packed_b = workspace.shared<bf16>();
  auto* c_copy = reinterpret_cast<float*>(workspace.shared<std::byte>() + sizes.b);
  for (int worker = 0; worker < c.pool->size(); ++worker) workspace.worker<PackedRows>(worker)->row = -1;

  const bool tiles = runs_amx();
  const bool nontemporal = uses_nontemporal_stores(s, out, beta) && (sizes.copy || p.chunk_k == s.k);
  const int64_t size = size_of(out.dtype);
  // Columns whose rows are two cache lines.
  const int64_t together = out.dtype == DType::f32 ? kPanel : 2 * kPanel;
  for (int64_t n0 = 0; n0 < s.n; n0 += p.chunk_n)
    for (int64_t k0 = 0; k0 < s.k; k0 += p.chunk_k) {
      const int64_t n = std::min(p.chunk_n, s.n - n0), k = std::min(p.chunk_k, s.k - k0), steps = steps_of(k);
      // Values from one panel to the next.
      const int64_t stride = steps * kStepValues;
      const bool last = k0 + k == s.k;
      pack_together(*c.pool, s, b, n0, n, k0, k, packed_b);
      const int64_t across = ceil_div(n, p.cols);
      c.pool->parallel_for(across * ceil_div(s.m, p.rows), [&](int64_t tile, int worker) {
        const int64_t i0 = tile / across * p.rows, j0 = tile % across * p.cols;
        const int64_t rows = std::min(p.rows, s.m - i0), cols = std::min(p.cols, n - j0);
        auto* own = workspace.worker<std::byte>(worker);
        PackedRows& held = *reinterpret_cast<PackedRows*>(own);
        auto* packed_a = reinterpret_cast<bf16*>(own + sizeof(PackedRows));
        auto* sums = reinterpret_cast<float*>(own + sizeof(PackedRows) + sizes.a);
        if (held.row != i0 || held.depth != k0) {
          pack_rows(s, a, i0, rows, k0, k, packed_a, stride);
          held = {i0, k0};
        }
        std::optional<TileConfig> config;
        if (tiles) config.emplace();
        const int64_t sums_apart = p.rows * kPanel;
        for (int64_t j = j0; j < j0 + cols; j += together) {
          const int64_t width = std::min(together, j0 + cols - j), at = i0 * s.ldc + n0 + j;
          for (int64_t q = 0; q * kPanel < width; ++q) {
            const bf16* panel = packed_b + (j / kPanel + q) * stride;
            NextRows result;
            if ((beta != 0 || k0 > 0) && !sizes.copy)
              result = {out.as<char>() + (at + q * kPanel) * size, s.ldc * size, kPanel * size};
            multiply_rows(tiles, packed_a, stride, panel, panel + stride, result, ceil_div(rows, kPanel),
                          steps, sums + q * sums_apart);
          }
          if (sizes.copy) {
            float* copy = c_copy + i0 * n + j;
            write(sums, sums_apart, rows, width, k0 > 0 ? 1.0f : 0.0f, {copy, DType::f32}, 0, n);
            if (!last) continue;
            for (int64_t q = 0; q * kPanel < width; ++q)
              for (int64_t r = 0; r < rows; ++r)
                std::copy_n(copy + r * n + q * kPanel, std::min(kPanel, width - q * kPanel),
                            sums + q * sums_apart + r * kPanel);
          }
          if (nontemporal && width == together)
            store_non_temporal(sums, sums_apart, rows, out, at, s.ldc);
          else
            write(sums, sums_apart, rows, width, k0 == 0 || sizes.copy ? beta : 1.0f, out, at, s.ldc);
        }
        _mm_sfence();
      });
    }
}

}  // namespace capstan::kernels

#else

namespace capstan::kernels {
bool runs_packed_bf16() {
  return false;
}
WorkspaceSize packed_bf16_workspace(const GemmShape&, DType) {
  return {};
}
void packed_bf16_gemm(Context&, const GemmShape&, const GemmShape&, In, In, Out, float) {}
}  // namespace capstan::kernels

#endif
