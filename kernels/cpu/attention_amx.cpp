#include "kernels/cpu/attention_amx.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include "kernels/cpu/amx_core.hpp"

namespace capstan::kernels::amx {

CAPSTAN_AMX_CALLED void set_up_tiles() {
  configure();
}
CAPSTAN_AMX_CALLED void give_back_tiles() {
  release();
}

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

CAPSTAN_AMX_CALLED void product(const bf16* a, const bf16* b, int64_t depth, bool add, float* sums,
                                int64_t ld) {
  multiply(a, b, depth / kDepth, add, sums, ld);
}
CAPSTAN_AMX_CALLED void product_of_sum(const bf16* a, const bf16* rest, const bf16* b, int64_t depth,
                                       float* sums, int64_t ld) {
  multiply_both<false>(a, b, rest, depth / kDepth, sums, ld);
}
CAPSTAN_AMX_CALLED void product_with_sum(const bf16* a, const bf16* b, const bf16* rest, int64_t depth,
                                         float* sums, int64_t ld) {
  multiply_both<true>(a, b, rest, depth / kDepth, sums, ld);
}

namespace {
// 32 values rounded to nearest even: those of `low`, then those of `high`.
CAPSTAN_AMX __m512i narrow32(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
CAPSTAN_AMX __m512 widened(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
// The values of two rows by turns.
CAPSTAN_AMX __m512i narrow_pairs(__m512 even, __m512 odd) {
  alignas(64) static constexpr uint16_t kTurns[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kTurns), narrow32(even, odd));
}
}  // namespace

CAPSTAN_AMX_CALLED void narrow_rows(const float* s, int64_t ld, int64_t rows, int64_t depth, bf16* to,
                                    bf16* rest) {
  for (int64_t j = 0; j < depth; j += kDepth)
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t at = j * kPanel + i * kDepth;
      __m512 low = _mm512_setzero_ps(), high = low;
      if (i < rows) {
        low = _mm512_loadu_ps(s + i * ld + j);
        high = _mm512_loadu_ps(s + i * ld + j + 16);
      }
      const __m512i rounded = narrow32(low, high);
      _mm512_store_si512(to + at, rounded);
      if (!rest) continue;
      low = _mm512_sub_ps(low, widened(_mm512_castsi512_si256(rounded)));
      high = _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64(rounded, 1)));
      _mm512_store_si512(rest + at, narrow32(low, high));
    }
}

CAPSTAN_AMX_CALLED void narrow_columns(const float* s, int64_t ld, int64_t depth, bf16* to, bf16* rest) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int64_t p = 0; p < (depth + kDepth - 1) / kDepth * kDepth; p += 2)
    for (int64_t j = 0; j < kPanel; j += 16) {
      const int64_t at = p / kDepth * kStepValues + j / 16 * kTileValues + p % kDepth * 16;
      const float* row = s + p * ld + j;
      __m512 even = _mm512_setzero_ps(), odd = even;
      if (p < depth) even = _mm512_loadu_ps(row);
      if (p + 1 < depth) odd = _mm512_loadu_ps(row + ld);
      const __m512i rounded = narrow_pairs(even, odd);
      _mm512_store_si512(to + at, rounded);
      if (!rest) continue;
      even = _mm512_sub_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(rounded, 16)));
      odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(rounded, upper)));
      _mm512_store_si512(rest + at, narrow_pairs(even, odd));
    }
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
