// The inner loops of GEMM (a Highway "-inl" header): packing into panels, and the register-tiled
// multiplication of two panels. gemm.cpp and attention.cpp use them.
//
// The layout is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): a
// panel of A holds kMr rows, a panel of B up to kNr columns, both with k as the outer index, so that the
// inner loop reads them in order. kMr x kNr sums stay in registers: 4 x 24 with AVX2 (12 of 16 registers), 8
// x 48 with AVX-512 (24 of 32).

#include "kernels/cpu/simd-inl.hpp"

#if defined(CAPSTAN_KERNELS_CPU_GEMM_CORE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef CAPSTAN_KERNELS_CPU_GEMM_CORE_INL
#undef CAPSTAN_KERNELS_CPU_GEMM_CORE_INL
#else
#define CAPSTAN_KERNELS_CPU_GEMM_CORE_INL
#endif

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

inline constexpr int kMr = HWY_TARGET == HWY_AVX3 ? 8 : 4;
inline constexpr int kNv = 3;
inline constexpr int64_t kNr = kNv * kStep;
// k of one pass: a panel of B (36 or 48 KiB) about fills the L1 cache, through which panels of A are
// read.
inline constexpr int64_t kKc = HWY_TARGET == HWY_AVX3 ? 256 : 384;

using D4 = hn::Full128<float>;
using V4 = hn::Vec<D4>;
HWY_INLINE V4 load4(const float* p) {
  return hn::LoadU(D4(), p);
}
HWY_INLINE V4 load4(const bf16* p) {
  const hn::Rebind<uint16_t, D4> d16;
  const hn::RebindToUnsigned<D4> du;
  return hn::BitCast(
      D4(), hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)))));
}
HWY_INLINE V4 load4(const f16* p) {
  return load_half(D4(), p);
}
template <class T>
HWY_INLINE float one(const T* p) {
  return static_cast<float>(*p);
}

// to[p * width + j] = from[p * ld + j] for p < k, j < n; zeros for n <= j < width. width is a multiple of 4.
template <class T>
HWY_INLINE void pack_straight(const T* from, int64_t ld, int64_t k, int64_t n, int64_t width, float* to) {
  if (n == width && width % kStep == 0) {
    for (int64_t p = 0; p < k; ++p)
      for (int64_t j = 0; j < width; j += kStep) hn::Store(load(from + p * ld + j), DF(), to + p * width + j);
  } else if (n == width) {
    for (int64_t p = 0; p < k; ++p)
      for (int64_t j = 0; j < width; j += 4) hn::Store(load4(from + p * ld + j), D4(), to + p * width + j);
  } else {
    for (int64_t p = 0; p < k; ++p) {
      for (int64_t j = 0; j < n; ++j) to[p * width + j] = one(from + p * ld + j);
      for (int64_t j = n; j < width; ++j) to[p * width + j] = 0;
    }
  }
}
// to[p * width + j] = from[j * ld + p] for p < k, j < n; zeros for n <= j < width.
template <class T>
HWY_INLINE void pack_transposed(const T* from, int64_t ld, int64_t k, int64_t n, int64_t width, float* to) {
  const D4 d;
  const hn::RepartitionToWide<D4> d2;
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) {
    const T* r = from + j * ld;
    float* t = to + j;
    int64_t p = 0;
    for (; p + 4 <= k; p += 4) {
      const V4 a = load4(r + p), b = load4(r + ld + p), c = load4(r + 2 * ld + p), e = load4(r + 3 * ld + p);
      const auto ab0 = hn::BitCast(d2, hn::InterleaveLower(d, a, b)),
                 ab1 = hn::BitCast(d2, hn::InterleaveUpper(d, a, b));
      const auto ce0 = hn::BitCast(d2, hn::InterleaveLower(d, c, e)),
                 ce1 = hn::BitCast(d2, hn::InterleaveUpper(d, c, e));
      hn::Store(hn::BitCast(d, hn::InterleaveLower(d2, ab0, ce0)), d, t + p * width);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(d2, ab0, ce0)), d, t + (p + 1) * width);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(d2, ab1, ce1)), d, t + (p + 2) * width);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(d2, ab1, ce1)), d, t + (p + 3) * width);
    }
    for (; p < k; ++p)
      for (int64_t i = 0; i < 4; ++i) t[p * width + i] = one(r + i * ld + p);
  }
  for (; j < width; ++j)
    for (int64_t p = 0; p < k; ++p) to[p * width + j] = j < n ? one(from + j * ld + p) : 0.0f;
}

// Width of the panel of B that begins at column j of n, in full vectors.
HWY_INLINE int64_t panel_width(int64_t n, int64_t j) {
  return std::min(kNr, round_up(n - j, kStep));
}

// The layout of kMr rows of A. Columns: element (i, p) at a[p * step + i], a packed panel (step = kMr) or a
// transposed matrix in place. Rows: at a[i * step + p], a matrix in place; rows from m on repeat row m - 1.
enum class PanelLayout { columns, rows };

// Memory up to `end` to prefetch into the L2 cache: `lines` cache lines for every kFetchDepth of k, because
// all at once would stall.
struct Prefetch {
  const float *next = nullptr, *end = nullptr;
  int64_t lines = 0;
};
inline constexpr int64_t kFetchDepth = 8;

// C[m, n] = alpha * A * (panel of B) + beta * C for m <= kMr rows, n <= NV * kLanes columns and depth k.
// kFetch: C is in memory, not in a cache, and the memory of `prefetch` is prefetched.
template <int NV, PanelLayout kFrom, bool kFetch>
HWY_NOINLINE void panel_gemm(int64_t k, const float* HWY_RESTRICT a, int64_t step,
                             const float* HWY_RESTRICT b, float alpha, float beta, float* HWY_RESTRICT c,
                             int64_t ldc, int64_t m, int64_t n, Prefetch* prefetch) {
  const DF d;
  const float* row[kMr];
  if (kFrom == PanelLayout::rows)
    for (int i = 0; i < kMr; ++i) row[i] = a + std::min<int64_t>(i, m - 1) * step;
  VF sum[kMr][NV];
#pragma GCC unroll 8
  for (int i = 0; i < kMr; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) sum[i][j] = hn::Zero(d);
  const auto add_step = [&](int64_t p) HWY_ATTR {
    VF vb[NV];
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) vb[j] = hn::Load(d, b + j * kStep);
#pragma GCC unroll 8
    for (int i = 0; i < kMr; ++i) {
      const VF va = hn::Set(d, kFrom == PanelLayout::rows ? row[i][p] : a[i]);
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) sum[i][j] = hn::MulAdd(va, vb[j], sum[i][j]);
    }
    if (kFrom == PanelLayout::columns) a += step;
    b += NV * kStep;
  };
  int64_t done = 0;
  if constexpr (kFetch) {
    // Cache lines in a row of C.
    constexpr int64_t kLines = ceil_div(NV * kStep, 16);
    const int64_t c_lines = m * kLines, each = ceil_div(c_lines, std::max<int64_t>(1, k / kFetchDepth));
    int64_t line = 0;
    const float* next = prefetch->next;
    // Prefetches the lines of C, which are needed at the end, and the next lines of `prefetch`.
    for (; done + kFetchDepth <= k; done += kFetchDepth) {
      for (const int64_t stop = std::min(c_lines, line + each); line < stop; ++line)
        hwy::Prefetch(c + line / kLines * ldc + line % kLines * 16);
      for (int64_t l = 0; l < prefetch->lines && next < prefetch->end; ++l, next += 16)
        __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 2
      for (int64_t q = 0; q < kFetchDepth; ++q) add_step(done + q);
    }
    prefetch->next = next;
  }
#pragma GCC unroll 2
  for (int64_t p = done; p < k; ++p) add_step(p);
  const VF va = splat(alpha), vb = splat(beta);
  if (m == kMr && n == NV * kStep) {
#pragma GCC unroll 8
    for (int i = 0; i < kMr; ++i)
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) {
        float* at = c + i * ldc + j * kStep;
        const VF v = hn::Mul(va, sum[i][j]);
        store(beta == 0 ? v : hn::MulAdd(vb, load(at), v), at);
      }
  } else {
    HWY_ALIGN float tile[kMr * NV * kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kMr; ++i)
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) hn::Store(hn::Mul(va, sum[i][j]), d, tile + (i * NV + j) * kStep);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        float& at = c[i * ldc + j];
        at = beta == 0 ? tile[i * NV * kStep + j] : tile[i * NV * kStep + j] + beta * at;
      }
  }
}
template <PanelLayout kFrom, bool kFetch>
HWY_INLINE void panel_gemm_of(int64_t width, int64_t k, const float* a, int64_t step, const float* b,
                              float alpha, float beta, float* c, int64_t ldc, int64_t m, int64_t n,
                              Prefetch* prefetch = nullptr) {
  if (width == 3 * kStep)
    panel_gemm<3, kFrom, kFetch>(k, a, step, b, alpha, beta, c, ldc, m, n, prefetch);
  else if (width == 2 * kStep)
    panel_gemm<2, kFrom, kFetch>(k, a, step, b, alpha, beta, c, ldc, m, n, prefetch);
  else
    panel_gemm<1, kFrom, kFetch>(k, a, step, b, alpha, beta, c, ldc, m, n, prefetch);
}

// Packed operands. Panel i of A begins at a + i * a_stride and holds k rows. Panel j of B begins at b + j *
// b_stride; the GEMM uses its rows [b_first, b_first + k).
struct Packed {
  const float *a, *b;
  int64_t a_stride, b_stride, b_first;
};

// C[m, n] = alpha * A * B + beta * C.
HWY_INLINE void packed_gemm(const Packed& x, int64_t m, int64_t n, int64_t k, float alpha, float beta,
                            float* c, int64_t ldc) {
  const float* b = x.b;
  for (int64_t j = 0; j < n; j += kNr, b += x.b_stride) {
    const int64_t width = panel_width(n, j), cols = std::min(kNr, n - j);
    const float* pb = b + x.b_first * width;
    const float* pa = x.a;
    // Prefetches the beginning of the next panel of A, and gradually the next panel of B into the L2 cache.
    Prefetch prefetch;
    if (j + kNr < n) {
      const int64_t steps = ceil_div(m, kMr) * std::max<int64_t>(1, k / kFetchDepth);
      const float* next = b + x.b_stride + x.b_first * kNr;
      prefetch = {next, next + k * kNr, ceil_div(k * kNr / 16, steps)};
    }
    for (int64_t i = 0; i < m; i += kMr, pa += x.a_stride) {
      const int64_t rows = std::min<int64_t>(kMr, m - i);
      if (i + kMr < m)
        for (int64_t q = 0; q < 128; q += 16) hwy::Prefetch(pa + x.a_stride + q);
      panel_gemm_of<PanelLayout::columns, true>(width, k, pa, kMr, pb, alpha, beta, c + i * ldc + j, ldc,
                                                rows, cols, &prefetch);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#endif
