// Tiles of the AMX unit: packing, and the multiplication of a panel of A by a panel of B. Each function is
// compiled for the unit by its attribute; only code that runs_amx() allows may call them.
//
// A panel is 32 rows of A or 32 columns of B and is divided along k into steps of 32. A step is two
// consecutive tiles of 1 KiB: of A 16 rows of 32 values; of B 16 columns, in 16 rows of the two values 2p and
// 2p + 1 of each column.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/checked.hpp"
#include "kernels/cpu/amx.hpp"
#include "tensor/dtype.hpp"

#ifdef CAPSTAN_AMX_CODE

#ifdef CAPSTAN_AMX_EMULATION
#include CAPSTAN_AMX_EMULATION
#define CAPSTAN_AMX static inline
#define CAPSTAN_AMX_CALLED
#else
#include <immintrin.h>
#define CAPSTAN_AMX                                                                         \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"), \
                 always_inline)) static inline
#define CAPSTAN_AMX_CALLED \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")))
#endif

namespace capstan::kernels::amx {

// Rows or columns of a panel, k of a step.
constexpr int64_t kPanel = 32, kDepth = 32;
// bf16 of a step.
constexpr int64_t kStepValues = kPanel * kDepth;
constexpr int64_t kTileValues = kStepValues / 2;

inline int64_t steps_of(int64_t k) {
  return ceil_div(k, kDepth);
}

CAPSTAN_AMX __mmask16 first16(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << std::max<int64_t>(n, 0)) - 1);
}
CAPSTAN_AMX __mmask32 first32(int64_t n) {
  return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << std::max<int64_t>(n, 0)) - 1;
}

// 16 x 16 words of four bytes: x[i][j] becomes x[j][i].
CAPSTAN_AMX void transpose(__m512i* x) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int half = 0; half < 16; half += 8)
    for (int i = half; i < half + 4; ++i) {
      t[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// A tile from `rows` rows with `depth` values each, padded with zeros. `full`: 16 rows of 32 values.
template <bool full>
CAPSTAN_AMX void load_rows(const bf16* from, int64_t ld, int64_t rows, int64_t depth, __m512i* x) {
  const __mmask32 mask = full ? ~__mmask32{0} : first32(depth);
  for (int64_t r = 0; r < 16; ++r)
    x[r] = full || r < rows ? _mm512_maskz_loadu_epi16(mask, from + r * ld) : _mm512_setzero_si512();
}
// Two tiles of pairs of rows 2p, 2p + 1 for 32 columns of an array with k as its rows.
template <bool full>
CAPSTAN_AMX void load_pairs(const bf16* from, int64_t ld, int64_t depth, int64_t cols, __m512i* x) {
  const __mmask32 mask = full ? ~__mmask32{0} : first32(cols);
  // 16-bit words of both rows, interleaved: 0, 32, 1, 33, …
  alignas(64) static constexpr uint16_t kLower[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                      37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                      11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i lower = _mm512_load_si512(kLower), upper = _mm512_add_epi16(lower, _mm512_set1_epi16(16));
  for (int64_t p = 0; p < 16; ++p) {
    __m512i even = _mm512_setzero_si512(), odd = even;
    if (full || 2 * p < depth) even = _mm512_maskz_loadu_epi16(mask, from + 2 * p * ld);
    if (full || 2 * p + 1 < depth) odd = _mm512_maskz_loadu_epi16(mask, from + (2 * p + 1) * ld);
    x[p] = _mm512_permutex2var_epi16(even, lower, odd);
    x[16 + p] = _mm512_permutex2var_epi16(even, upper, odd);
  }
}
CAPSTAN_AMX void store_tile(const __m512i* x, bf16* to) {
  for (int64_t p = 0; p < 16; ++p) _mm512_store_si512(to + p * 32, x[p]);
}

// One step of a panel: rows (columns) [0, n) of up to 32 and k [0, depth). `k_inside`: k runs along a row of
// the array. Tiles of A have k along their rows, tiles of B pairs of k across.
template <bool full>
CAPSTAN_AMX void pack_step(bool for_a, bool k_inside, const bf16* from, int64_t ld, int64_t n, int64_t depth,
                           bf16* to) {
  const bool transposed = for_a != k_inside;
  if (k_inside) {
    for (int64_t half = 0; half < 2; ++half) {
      __m512i x[16];
      load_rows<full>(from + half * 16 * ld, ld, n - half * 16, depth, x);
      if (transposed) transpose(x);
      store_tile(x, to + half * kTileValues);
    }
    return;
  }
  __m512i x[32];
  load_pairs<full>(from, ld, depth, n, x);
  for (int64_t half = 0; half < 2; ++half) {
    if (transposed) transpose(x + half * 16);
    store_tile(x + half * 16, to + half * kTileValues);
  }
}

// Panels of rows (columns) [0, n) and k [0, k), `stride` values from panel to panel. The array is read along
// its rows.
CAPSTAN_AMX void pack_panels(bool for_a, bool k_inside, const bf16* from, int64_t ld, int64_t n, int64_t k,
                             bf16* to, int64_t stride) {
  const int64_t panels = ceil_div(n, kPanel), steps = steps_of(k);
  for (int64_t j = 0; j < panels * steps; ++j) {
    const int64_t i = k_inside ? j / steps : j % panels, s = k_inside ? j % steps : j / panels;
    const bf16* at = from + (k_inside ? i * kPanel * ld + s * kDepth : s * kDepth * ld + i * kPanel);
    const int64_t width = std::min(kPanel, n - i * kPanel), depth = std::min(kDepth, k - s * kDepth);
    bf16* step = to + i * stride + s * kStepValues;
    if (width == kPanel && depth == kDepth)
      pack_step<true>(for_a, k_inside, at, ld, width, depth, step);
    else
      pack_step<false>(for_a, k_inside, at, ld, width, depth, step);
  }
}

// Tiles 0 to 3 are sums[32][32], rows of `ld` floats; 4 and 5 hold a step of A, 6 and 7 one of B.
CAPSTAN_AMX void load_sums(const float* sums, int64_t ld) {
  const auto stride = static_cast<long>(ld) * 4;
  _tile_loadd(0, sums, stride);
  _tile_loadd(1, sums + 16, stride);
  _tile_loadd(2, sums + 16 * ld, stride);
  _tile_loadd(3, sums + 16 * ld + 16, stride);
}
CAPSTAN_AMX void store_sums(float* sums, int64_t ld) {
  const auto stride = static_cast<long>(ld) * 4;
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + 16, stride);
  _tile_stored(2, sums + 16 * ld, stride);
  _tile_stored(3, sums + 16 * ld + 16, stride);
}
CAPSTAN_AMX void multiply_step(const bf16* a, const bf16* b) {
  _tile_loadd(6, b, 64);
  _tile_loadd(4, a, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, b + kTileValues, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, a + kTileValues, 64);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// sums[32][32] (+)= panel of A times panel of B over `steps` steps; rows of `ld` floats. Each step prefetches
// `lines` cache lines from `next` into the L2 cache.
CAPSTAN_AMX void multiply(const bf16* a, const bf16* b, int64_t steps, bool add, float* sums, int64_t ld,
                          const bf16* next = nullptr, int64_t lines = 0) {
  if (add) {
    load_sums(sums, ld);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s, a += kStepValues, b += kStepValues) {
    for (int64_t l = 0; l < lines; ++l, next += 32)
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
    multiply_step(a, b);
  }
  store_sums(sums, ld);
}

// The same by AVX-512's instructions for bf16. The sums of eight rows stay in registers, and the processor
// loads an operand of A for each two instructions.
CAPSTAN_AMX void multiply_on_vectors(const bf16* a, const bf16* b, int64_t steps, bool add, float* sums,
                                     int64_t ld, const bf16* next = nullptr, int64_t lines = 0) {
  constexpr int64_t kRows = 8;
  for (int64_t l = 0; l < lines * steps; ++l)
    _mm_prefetch(reinterpret_cast<const char*>(next + l * 32), _MM_HINT_T1);
  for (int64_t first = 0; first < kPanel; first += kRows) {
    __m512 low[kRows], high[kRows];
#pragma GCC unroll 8
    for (int64_t r = 0; r < kRows; ++r) {
      const float* from = sums + (first + r) * ld;
      low[r] = add ? _mm512_loadu_ps(from) : _mm512_setzero_ps();
      high[r] = add ? _mm512_loadu_ps(from + 16) : _mm512_setzero_ps();
    }
    for (int64_t s = 0; s < steps; ++s) {
      const bf16 *left = a + s * kStepValues + first * kDepth, *right = b + s * kStepValues;
      for (int64_t k = 0; k < kDepth; k += 2, right += 32) {
        const auto b_low = (__m512bh)_mm512_load_si512(right),
                   b_high = (__m512bh)_mm512_load_si512(right + kTileValues);
#pragma GCC unroll 8
        for (int64_t r = 0; r < kRows; ++r) {
          int32_t pair;
          std::memcpy(&pair, left + r * kDepth + k, sizeof(pair));
          // Not _mm512_set1_epi32(), at which clang 16 crashes.
          const auto both = (__m512bh)_mm512_broadcastd_epi32(_mm_cvtsi32_si128(pair));
          low[r] = _mm512_dpbf16_ps(low[r], both, b_low);
          high[r] = _mm512_dpbf16_ps(high[r], both, b_high);
        }
      }
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < kRows; ++r) {
      float* to = sums + (first + r) * ld;
      _mm512_storeu_ps(to, low[r]);
      _mm512_storeu_ps(to + 16, high[r]);
    }
  }
}

// sums[32][32] += (a + a2) b, or with `right` a (b + b2); loads the other operand's tiles once. `second` is
// a2 or b2.
template <bool right>
CAPSTAN_AMX void multiply_both(const bf16* a, const bf16* b, const bf16* second, int64_t steps, float* sums,
                               int64_t ld) {
  load_sums(sums, ld);
  for (int64_t s = 0; s < steps; ++s, a += kStepValues, b += kStepValues, second += kStepValues) {
    multiply_step(a, b);
    if constexpr (right) {
      _tile_loadd(6, second, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, second + kTileValues, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_loadd(4, second, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, second + kTileValues, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  store_sums(sums, ld);
}

// Rounded to nearest even; subnormal numbers become 0, as in the unit. Of 32 values those of `low` come
// first.
CAPSTAN_AMX __m256i narrow(__m512 v) {
  return (__m256i)_mm512_cvtneps_pbh(v);
}
CAPSTAN_AMX __m512i narrow32(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
CAPSTAN_AMX __m512 widen16(const bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

}  // namespace capstan::kernels::amx

#endif
