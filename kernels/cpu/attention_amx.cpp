#include "kernels/cpu/attention_amx.hpp"

#include <cmath>

#include "kernels/common/exp2.hpp"
#include "kernels/cpu/amx_core.hpp"

#ifdef CAPSTAN_AMX_CODE

namespace capstan::kernels::amx {

CAPSTAN_AMX_CALLED void pack(Panels panels, const bf16* from, int64_t ld, int64_t n, int64_t k, bf16* to,
                             int64_t stride) {
  switch (panels) {
    case Panels::rows:
      pack_panels(true, true, from, ld, n, k, to, stride);
      break;
    case Panels::rows_of_columns:
      pack_panels(true, false, from, ld, n, k, to, stride);
      break;
    case Panels::columns:
      pack_panels(false, false, from, ld, n, k, to, stride);
      break;
    case Panels::columns_of_rows:
      pack_panels(false, true, from, ld, n, k, to, stride);
      break;
  }
}

CAPSTAN_AMX_CALLED void gemm(const bf16* a, const bf16* b, int64_t depth, bool add, float* sums, int64_t ld) {
  multiply(a, b, depth / kDepth, add, sums, ld);
}
CAPSTAN_AMX_CALLED void gemm_split_a(const bf16* a, const bf16* rest, const bf16* b, int64_t depth,
                                     float* sums, int64_t ld) {
  multiply_both<false>(a, b, rest, depth / kDepth, sums, ld);
}
CAPSTAN_AMX_CALLED void gemm_split_b(const bf16* a, const bf16* b, const bf16* rest, int64_t depth,
                                     float* sums, int64_t ld) {
  multiply_both<true>(a, b, rest, depth / kDepth, sums, ld);
}

namespace {
// The values of two rows, interleaved and rounded.
CAPSTAN_AMX __m512i narrow_pairs(__m512 even, __m512 odd) {
  alignas(64) static constexpr uint16_t kTurns[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kTurns), narrow32(even, odd));
}

// v truncated to bf16. split32 and split_pairs store it and the rounded remainder: 16 significant bits.
CAPSTAN_AMX __m512 truncated(__m512 v) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
CAPSTAN_AMX void split32(__m512 low, __m512 high, bf16* to, bf16* rest) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                      23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                      45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  _mm512_store_si512(to, _mm512_permutex2var_epi16(_mm512_castps_si512(low), _mm512_load_si512(kUpper),
                                                   _mm512_castps_si512(high)));
  _mm512_store_si512(rest,
                     narrow32(_mm512_sub_ps(low, truncated(low)), _mm512_sub_ps(high, truncated(high))));
}
CAPSTAN_AMX void split_pairs(__m512 even, __m512 odd, bf16* to, bf16* rest) {
  const __m512 even_part = truncated(even), odd_part = truncated(odd);
  _mm512_store_si512(
      to, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd_part)));
  _mm512_store_si512(rest, narrow_pairs(_mm512_sub_ps(even, even_part), _mm512_sub_ps(odd, odd_part)));
}
}  // namespace

CAPSTAN_AMX_CALLED void pack_rounded_rows(const float* s, int64_t ld, int64_t rows, int64_t depth, bf16* to,
                                          bf16* rest) {
  for (int64_t j = 0; j < depth; j += kDepth)
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t at = j * kPanel + i * kDepth;
      __m512 low = _mm512_setzero_ps(), high = low;
      if (i < rows) {
        low = _mm512_loadu_ps(s + i * ld + j);
        high = _mm512_loadu_ps(s + i * ld + j + 16);
      }
      if (rest)
        split32(low, high, to + at, rest + at);
      else
        _mm512_store_si512(to + at, narrow32(low, high));
    }
}

CAPSTAN_AMX_CALLED void pack_rounded_columns(const float* s, int64_t ld, int64_t depth, bf16* to,
                                             bf16* rest) {
  for (int64_t p = 0; p < round_up(depth, kDepth); p += 2)
    for (int64_t j = 0; j < kPanel; j += 16) {
      const int64_t at = p / kDepth * kStepValues + j / 16 * kTileValues + p % kDepth * 16;
      const float* row = s + p * ld + j;
      __m512 even = _mm512_setzero_ps(), odd = even;
      if (p < depth) even = _mm512_loadu_ps(row);
      if (p + 1 < depth) odd = _mm512_loadu_ps(row + ld);
      if (rest)
        split_pairs(even, odd, to + at, rest + at);
      else
        _mm512_store_si512(to + at, narrow_pairs(even, odd));
    }
}

namespace {

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x <= 0, at least 2^-126: a polynomial for the fraction (common/exp2.hpp). Keeps NaN.
CAPSTAN_AMX __m512 exp2_not_positive(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);
  const __m512 integer = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, integer);
  __m512 p = _mm512_set1_ps(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[i]));
  return _mm512_scalef_ps(p, integer);
}

// The mask of the keys [j, j + 16) that are visible to row i.
CAPSTAN_AMX __mmask16 seen(const ScoreRows& r, int64_t i, int64_t j) {
  return static_cast<__mmask16>(first16(r.to[i] - j) & ~first16(r.from[i] - j));
}

// Lane i is the reduction by `op` of the 16 values of rows[i].
template <class Op>
CAPSTAN_AMX __m512 over_rows(const float (*rows)[16], const Op& op) {
  __m512 x[16];
  for (int i = 0; i < 16; ++i) x[i] = _mm512_load_ps(rows[i]);
  for (int i = 0; i < 8; ++i)
    x[i] = op(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d left = _mm512_castps_pd(x[2 * i]), right = _mm512_castps_pd(x[2 * i + 1]);
    x[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
              _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  }
  for (int n = 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i)
      x[i] = op(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x88),
                _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xdd));
  return x[0];
}
struct Maximum {
  CAPSTAN_AMX_CALLED __attribute__((always_inline)) __m512 operator()(__m512 a, __m512 b) const {
    return _mm512_max_ps(a, b);
  }
};
struct Sum {
  CAPSTAN_AMX_CALLED __attribute__((always_inline)) __m512 operator()(__m512 a, __m512 b) const {
    return _mm512_add_ps(a, b);
  }
};

// Reduces 16 rows together, so that no row waits for its own horizontal maximum or sum.
template <int kVectors, bool kUnmasked>
CAPSTAN_AMX bool softmax_of(const ScoreRows& r, float* max, float* sum, float* correction, bf16* weights,
                            bf16* rest) {
  alignas(64) float lanes[kPanel][16], shift[kPanel];
  const __m512 factor = _mm512_set1_ps(r.scale * kLog2E), nothing = _mm512_set1_ps(-INFINITY);
  for (int64_t i = 0; i < kPanel; ++i) {
    const float* row = r.scores + i * r.ld;
    __m512 top = nothing;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      top = kUnmasked ? _mm512_max_ps(top, _mm512_loadu_ps(row + v * 16))
                      : _mm512_mask_max_ps(top, seen(r, i, v * 16), top, _mm512_loadu_ps(row + v * 16));
    _mm512_store_ps(lanes[i], top);
  }
  __mmask16 changed = 0;
  for (int64_t i = 0; i < kPanel; i += 16) {
    const __m512 before = _mm512_loadu_ps(max + i);
    const __m512 top =
        _mm512_max_ps(before, _mm512_mul_ps(over_rows(lanes + i, Maximum()), _mm512_set1_ps(r.scale)));
    const __mmask16 other = _mm512_cmp_ps_mask(before, top, _CMP_NEQ_UQ),
                    none = _mm512_cmp_ps_mask(top, nothing, _CMP_EQ_OQ);
    const __m512 power = exp2_not_positive(_mm512_mul_ps(_mm512_sub_ps(before, top), _mm512_set1_ps(kLog2E)));
    const __m512 c = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), other, power);
    _mm512_storeu_ps(max + i, top);
    _mm512_storeu_ps(correction + i, c);
    _mm512_storeu_ps(sum + i, _mm512_mul_ps(_mm512_loadu_ps(sum + i), c));
    _mm512_store_ps(shift + i,
                    _mm512_maskz_mul_ps(static_cast<__mmask16>(~none), top, _mm512_set1_ps(kLog2E)));
    changed = static_cast<__mmask16>(changed | other);
  }
  for (int64_t i = 0; i < kPanel; ++i) {
    const float* row = r.scores + i * r.ld;
    const __m512 own = _mm512_set1_ps(shift[i]);
    __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v += 2) {
      __m512 x[2];
      for (int h = 0; h < 2; ++h) {
        const int64_t j = (v + h) * 16;
        x[h] = exp2_not_positive(_mm512_fmsub_ps(_mm512_loadu_ps(row + j), factor, own));
        if constexpr (!kUnmasked) x[h] = _mm512_maskz_mov_ps(seen(r, i, j), x[h]);
        total[h] = _mm512_add_ps(total[h], x[h]);
      }
      const int64_t at = v / 2 * kStepValues + i * kDepth;
      split32(x[0], x[1], weights + at, rest + at);
    }
    _mm512_store_ps(lanes[i], _mm512_add_ps(total[0], total[1]));
  }
  for (int64_t i = 0; i < kPanel; i += 16)
    _mm512_storeu_ps(sum + i, _mm512_add_ps(_mm512_loadu_ps(sum + i), over_rows(lanes + i, Sum())));
  return changed != 0;
}

template <bool kUnmasked>
CAPSTAN_AMX bool softmax_of_width(const ScoreRows& r, float* max, float* sum, float* correction,
                                  bf16* weights, bf16* rest) {
  if (r.width == 32) return softmax_of<2, kUnmasked>(r, max, sum, correction, weights, rest);
  if (r.width == 64) return softmax_of<4, kUnmasked>(r, max, sum, correction, weights, rest);
  if (r.width == 96) return softmax_of<6, kUnmasked>(r, max, sum, correction, weights, rest);
  return softmax_of<8, kUnmasked>(r, max, sum, correction, weights, rest);
}

// P and dS of the keys [j, j + 16) of row i.
template <bool kUnmasked>
CAPSTAN_AMX void gradients_of(const ScoreRows& r, const float* dp, int64_t i, int64_t j, __m512 factor,
                              __m512 lse, __m512 delta, __m512& p, __m512& ds) {
  const int64_t at = i * r.ld + j;
  p = exp2_not_positive(_mm512_fmsub_ps(_mm512_loadu_ps(r.scores + at), factor, lse));
  if constexpr (!kUnmasked) p = _mm512_maskz_mov_ps(seen(r, i, j), p);
  ds = _mm512_mul_ps(p, _mm512_sub_ps(_mm512_loadu_ps(dp + at), delta));
  if constexpr (!kUnmasked) ds = _mm512_maskz_mov_ps(seen(r, i, j), ds);
}
template <bool kUnmasked>
CAPSTAN_AMX void score_gradients_of(const ScoreRows& r, const float* dp, const float* lse, const float* delta,
                                    bf16* ds_rows, bf16* p_columns, bf16* p_rest, bf16* ds_columns,
                                    int64_t panel) {
  const __m512 factor = _mm512_set1_ps(r.scale * kLog2E);
  for (int64_t i = 0; i < kPanel; i += 2) {
    const __m512 l[2] = {_mm512_set1_ps(lse[i] * kLog2E), _mm512_set1_ps(lse[i + 1] * kLog2E)};
    const __m512 d[2] = {_mm512_set1_ps(delta[i]), _mm512_set1_ps(delta[i + 1])};
    for (int64_t j = 0; j < r.width; j += kPanel) {
      // Probabilities and score gradients of two rows, each of two vectors.
      __m512 p[2][2], ds[2][2];
      for (int row = 0; row < 2; ++row)
        for (int v = 0; v < 2; ++v)
          gradients_of<kUnmasked>(r, dp, i + row, j + v * 16, factor, l[row], d[row], p[row][v], ds[row][v]);
      for (int row = 0; row < 2; ++row)
        _mm512_store_si512(ds_rows + j * kPanel + (i + row) * kDepth, narrow32(ds[row][0], ds[row][1]));
      for (int v = 0; v < 2; ++v) {
        const int64_t at = j / kPanel * panel + v * kTileValues + i * 16;
        split_pairs(p[0][v], p[1][v], p_columns + at, p_rest + at);
        _mm512_store_si512(ds_columns + at, narrow_pairs(ds[0][v], ds[1][v]));
      }
    }
  }
}

}  // namespace

CAPSTAN_AMX_CALLED bool softmax_rows(const ScoreRows& r, float* max, float* sum, float* correction,
                                     bf16* weights, bf16* rest) {
  return r.full ? softmax_of_width<true>(r, max, sum, correction, weights, rest)
                : softmax_of_width<false>(r, max, sum, correction, weights, rest);
}

CAPSTAN_AMX_CALLED void score_gradient_rows(const ScoreRows& r, const float* dp, const float* lse,
                                            const float* delta, bf16* ds_rows, bf16* p_columns, bf16* p_rest,
                                            bf16* ds_columns, int64_t panel) {
  if (r.full)
    score_gradients_of<true>(r, dp, lse, delta, ds_rows, p_columns, p_rest, ds_columns, panel);
  else
    score_gradients_of<false>(r, dp, lse, delta, ds_rows, p_columns, p_rest, ds_columns, panel);
}

CAPSTAN_AMX_CALLED void transpose_sums(const float* blocks, int64_t n, float* to) {
  for (int64_t j = 0; j < n; j += 16)
    for (int64_t i = 0; i < 32; i += 16) {
      __m512i x[16];
      for (int64_t r = 0; r < 16; ++r) x[r] = _mm512_loadu_si512(blocks + (j + r) * 32 + i);
      transpose(x);
      for (int64_t r = 0; r < 16; ++r) _mm512_storeu_si512(to + (i + r) * n + j, x[r]);
    }
}

}  // namespace capstan::kernels::amx

#endif
