// The AMX tile unit and the AVX-512 instructions that kernels/cpu/amx*.cpp and attention_amx.cpp use, as
// plain C++ by Intel's manual: the same source, compiled a second time with CAPSTAN_AMX_EMULATION, runs on
// any machine and under sanitizers. Misuse that the processor would answer with a fault or with silent
// nonsense throws std::logic_error. The names are those of <immintrin.h>, in this namespace; a file includes
// one or the other.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace capstan::kernels {

namespace emulated {

[[noreturn]] inline void misuse(const std::string& what) {
  throw std::logic_error("tile unit: " + what);
}

struct alignas(64) Register {
  std::array<uint32_t, 16> words;
};
template <class T>
using Lanes = std::array<T, 64 / sizeof(T)>;
template <class T>
Lanes<T> lanes(const Register& r) {
  return std::bit_cast<Lanes<T>>(r);
}
template <class T>
Register packed(const Lanes<T>& lanes) {
  return std::bit_cast<Register>(lanes);
}
// Calls f(i) for every lane.
template <class T, class F>
Register each(const F& f) {
  Lanes<T> y;
  for (size_t i = 0; i < y.size(); ++i) y[i] = f(i);
  return packed<T>(y);
}
template <class T, class F>
Register map(const Register& a, const Register& b, const F& f) {
  const auto x = lanes<T>(a), y = lanes<T>(b);
  return each<T>([&](size_t i) { return static_cast<T>(f(x[i], y[i])); });
}
template <class T>
Register select(uint64_t mask, const Register& yes, const Register& no) {
  const auto x = lanes<T>(yes), y = lanes<T>(no);
  return each<T>([&](size_t i) { return mask >> i & 1 ? x[i] : y[i]; });
}
template <class T>
Register unpack(const Register& a, const Register& b, bool high) {
  constexpr size_t n = 16 / sizeof(T);  // lanes of a block of 128 bits
  const auto x = lanes<T>(a), y = lanes<T>(b);
  return each<T>([&](size_t i) {
    const size_t from = i / n * n + (high ? n / 2 : 0) + i % n / 2;
    return i % 2 ? y[from] : x[from];
  });
}
inline Register shuffle_blocks(const Register& a, const Register& b, int order) {
  const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
  return each<uint32_t>([&](size_t i) {
    const size_t block = i / 4, from = static_cast<size_t>(order >> (2 * block) & 3) * 4 + i % 4;
    return block < 2 ? x[from] : y[from];
  });
}
// Masked lanes are not touched: they may lie outside of the array.
template <class T>
Register load(uint64_t mask, const void* from) {
  Lanes<T> y{};
  for (size_t i = 0; i < y.size(); ++i)
    if (mask >> i & 1) std::memcpy(&y[i], static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
  return packed<T>(y);
}
template <class T>
void store(uint64_t mask, const Register& r, void* to) {
  const auto x = lanes<T>(r);
  for (size_t i = 0; i < x.size(); ++i)
    if (mask >> i & 1) std::memcpy(static_cast<char*>(to) + i * sizeof(T), &x[i], sizeof(T));
}
inline void require_aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) misuse("an aligned load or store at an odd address");
}
inline Register load_all(const void* from) {
  Register r;
  std::memcpy(&r, from, sizeof(r));
  return r;
}
inline Register load_aligned(const void* from) {
  require_aligned(from);
  return load_all(from);
}
inline void store_aligned(void* to, const Register& r) {
  require_aligned(to);
  std::memcpy(to, &r, sizeof(r));
}

// Subnormal numbers count as zeros, before and after an operation of the unit.
inline float flushed(float x) {
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
inline float from_bf16(uint16_t x) {
  return flushed(std::bit_cast<float>(static_cast<uint32_t>(x) << 16));
}
inline uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(flushed(value));
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The tiles of a thread.
struct TileUnit {
  static constexpr int kTiles = 8;
  struct Tile {
    int rows = 0, bytes = 0;  // of a row
    bool filled = false;
    std::array<std::array<uint32_t, 16>, 16> data;
  };
  bool configured = false;
  std::array<Tile, kTiles> tiles;

  static TileUnit& mine() {
    thread_local TileUnit unit;
    return unit;
  }
  Tile& at(int t) {
    if (!configured) misuse("used before it was configured, or after its release");
    if (t < 0 || t >= kTiles) misuse("there is no tile " + std::to_string(t));
    if (tiles[static_cast<size_t>(t)].rows == 0) misuse("tile " + std::to_string(t) + " has no rows");
    return tiles[static_cast<size_t>(t)];
  }
  Tile& read(int t) {
    Tile& tile = at(t);
    if (!tile.filled) misuse("tile " + std::to_string(t) + " is read before anything was loaded into it");
    return tile;
  }
  void configure(const void* memory) {
    std::array<uint8_t, 64> c;
    std::memcpy(c.data(), memory, c.size());
    if (c[0] != 1) misuse("palette " + std::to_string(c[0]));
    for (size_t i = 1; i < c.size(); ++i)  // the start row, reserved bytes, and tiles 8 to 15 of both lists
      if ((i < 16 || (i >= 32 && i < 48) || i >= 56) && c[i] != 0)
        misuse("reserved byte " + std::to_string(i) + " of the configuration is not zero");
    for (size_t t = 0; t < tiles.size(); ++t) {
      Tile& tile = tiles[t];
      tile.bytes = c[16 + 2 * t] | c[17 + 2 * t] << 8, tile.rows = c[48 + t], tile.filled = false;
      if (tile.bytes > 64 || tile.rows > 16 || (tile.bytes == 0) != (tile.rows == 0))
        misuse("tile " + std::to_string(t) + " of " + std::to_string(tile.rows) + " rows of " +
               std::to_string(tile.bytes) + " bytes");
      for (auto& row : tile.data) row.fill(~0u);  // NaN in both types
    }
    configured = true;
  }
  void load(int t, const void* from, int64_t stride) {
    Tile& tile = at(t);
    for (size_t r = 0; r < static_cast<size_t>(tile.rows); ++r)
      std::memcpy(tile.data[r].data(), static_cast<const char*>(from) + static_cast<int64_t>(r) * stride,
                  static_cast<size_t>(tile.bytes));
    tile.filled = true;
  }
  void store(int t, void* to, int64_t stride) {
    const Tile& tile = read(t);
    for (size_t r = 0; r < static_cast<size_t>(tile.rows); ++r)
      std::memcpy(static_cast<char*>(to) + static_cast<int64_t>(r) * stride, tile.data[r].data(),
                  static_cast<size_t>(tile.bytes));
  }
  void zero(int t) {
    Tile& tile = at(t);
    for (auto& row : tile.data) row.fill(0);
    tile.filled = true;
  }
  // c += a b: per element the even and the odd k are summed apart, from zero, and their sum is added.
  void multiply(int c, int a, int b) {
    if (c == a || c == b || a == b) misuse("one tile twice in a product");
    Tile& sum = read(c);
    const Tile &x = read(a), &y = read(b);
    if (x.rows != sum.rows || y.bytes != sum.bytes || x.bytes != 4 * y.rows || sum.bytes % 4 != 0)
      misuse("a product of tiles that do not fit");
    const auto pairs = static_cast<size_t>(y.rows);
    std::array<std::array<float, 16>, 16> right[2];
    for (size_t k = 0; k < pairs; ++k)
      for (size_t n = 0; n < 16; ++n) {
        right[0][k][n] = from_bf16(static_cast<uint16_t>(y.data[k][n]));
        right[1][k][n] = from_bf16(static_cast<uint16_t>(y.data[k][n] >> 16));
      }
    for (size_t m = 0; m < static_cast<size_t>(sum.rows); ++m) {
      std::array<float, 16> even{}, odd{};
      for (size_t k = 0; k < pairs; ++k) {
        const float left[2] = {from_bf16(static_cast<uint16_t>(x.data[m][k])),
                               from_bf16(static_cast<uint16_t>(x.data[m][k] >> 16))};
        for (size_t n = 0; n < 16; ++n) {
          // Products of bf16 numbers are exact in fp32 unless they leave its range; so a fused multiply-add
          // gives this.
          even[n] = flushed(even[n] + flushed(left[0] * right[0][k][n]));
          odd[n] = flushed(odd[n] + flushed(left[1] * right[1][k][n]));
        }
      }
      for (size_t n = 0; n < static_cast<size_t>(sum.bytes) / 4; ++n)
        sum.data[m][n] = std::bit_cast<uint32_t>(
            flushed(flushed(std::bit_cast<float>(sum.data[m][n])) + flushed(even[n] + odd[n])));
    }
  }
};

}  // namespace emulated

// NOLINTBEGIN(bugprone-reserved-identifier): the names are Intel's.
using __m512 = emulated::Register;
using __m512i = emulated::Register;
using __m512d = emulated::Register;
using __m512bh = emulated::Register;
using __m256i = std::array<uint16_t, 16>;
using __m128i = std::array<int32_t, 4>;
using __mmask16 = uint16_t;
using __mmask32 = uint32_t;

inline void _tile_loadconfig(const void* memory) {
  emulated::TileUnit::mine().configure(memory);
}
inline void _tile_release() {
  emulated::TileUnit::mine().configured = false;
}
inline void _tile_loadd(int t, const void* from, int64_t stride) {
  emulated::TileUnit::mine().load(t, from, stride);
}
inline void _tile_stored(int t, void* to, int64_t stride) {
  emulated::TileUnit::mine().store(t, to, stride);
}
inline void _tile_zero(int t) {
  emulated::TileUnit::mine().zero(t);
}
inline void _tile_dpbf16ps(int c, int a, int b) {
  emulated::TileUnit::mine().multiply(c, a, b);
}

// ---- memory

inline constexpr int _MM_HINT_T1 = 2;
inline void _mm_prefetch(const char*, int) {}
inline void _mm_sfence() {}
inline __m512 _mm512_load_ps(const void* p) {
  return emulated::load_aligned(p);
}
inline __m512i _mm512_load_si512(const void* p) {
  return emulated::load_aligned(p);
}
inline __m512 _mm512_loadu_ps(const void* p) {
  return emulated::load_all(p);
}
inline __m512i _mm512_loadu_si512(const void* p) {
  return emulated::load_all(p);
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p) {
  return emulated::load<float>(mask, p);
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* p) {
  return emulated::load<uint16_t>(mask, p);
}
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* p) {
  const auto wide = emulated::lanes<uint16_t>(emulated::load<uint16_t>(mask, p));
  __m256i y;
  std::copy_n(wide.begin(), y.size(), y.begin());
  return y;
}
inline void _mm512_store_ps(void* p, const __m512& v) {
  emulated::store_aligned(p, v);
}
inline void _mm512_store_si512(void* p, const __m512i& v) {
  emulated::store_aligned(p, v);
}
inline void _mm512_stream_ps(void* p, const __m512& v) {
  emulated::store_aligned(p, v);
}
inline void _mm512_stream_si512(void* p, const __m512i& v) {
  emulated::store_aligned(p, v);
}
inline void _mm512_storeu_ps(void* p, const __m512& v) {
  std::memcpy(p, &v, sizeof(v));
}
inline void _mm512_storeu_si512(void* p, const __m512i& v) {
  std::memcpy(p, &v, sizeof(v));
}
inline void _mm512_mask_storeu_ps(void* p, __mmask16 mask, const __m512& v) {
  emulated::store<float>(mask, v, p);
}
inline void _mm256_mask_storeu_epi16(void* p, __mmask16 mask, const __m256i& v) {
  for (size_t i = 0; i < v.size(); ++i)
    if (mask >> i & 1) std::memcpy(static_cast<char*>(p) + 2 * i, &v[i], 2);
}

// ---- bits and lanes

inline __m512 _mm512_castsi512_ps(const __m512i& v) {
  return v;
}
inline __m512i _mm512_castps_si512(const __m512& v) {
  return v;
}
inline __m512d _mm512_castps_pd(const __m512& v) {
  return v;
}
inline __m512 _mm512_castpd_ps(const __m512d& v) {
  return v;
}
inline __m512i _mm512_setzero_si512() {
  return {};
}
inline __m512 _mm512_setzero_ps() {
  return {};
}
inline __m512i _mm512_set1_epi16(int16_t x) {
  return emulated::each<int16_t>([&](size_t) { return x; });
}
inline __m512i _mm512_set1_epi32(int32_t x) {
  return emulated::each<int32_t>([&](size_t) { return x; });
}
inline __m128i _mm_cvtsi32_si128(int32_t x) {
  return {x};
}
inline __m512i _mm512_broadcastd_epi32(const __m128i& a) {
  return _mm512_set1_epi32(a[0]);
}
inline __m512i _mm512_add_epi16(const __m512i& a, const __m512i& b) {
  return emulated::map<uint16_t>(a, b, [](uint16_t x, uint16_t y) { return x + y; });
}
inline __m512i _mm512_and_si512(const __m512i& a, const __m512i& b) {
  return emulated::map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x & y; });
}
inline __m512i _mm512_or_si512(const __m512i& a, const __m512i& b) {
  return emulated::map<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x | y; });
}
inline __m512i _mm512_slli_epi32(const __m512i& a, unsigned n) {
  return emulated::map<uint32_t>(a, a, [&](uint32_t x, uint32_t) { return x << n; });
}
inline __m512i _mm512_srli_epi32(const __m512i& a, unsigned n) {
  return emulated::map<uint32_t>(a, a, [&](uint32_t x, uint32_t) { return x >> n; });
}
inline __m512i _mm512_cvtepu16_epi32(const __m256i& a) {
  return emulated::each<uint32_t>([&](size_t i) { return uint32_t{a[i]}; });
}
inline __m512i _mm512_unpacklo_epi32(const __m512i& a, const __m512i& b) {
  return emulated::unpack<uint32_t>(a, b, false);
}
inline __m512i _mm512_unpackhi_epi32(const __m512i& a, const __m512i& b) {
  return emulated::unpack<uint32_t>(a, b, true);
}
inline __m512i _mm512_unpacklo_epi64(const __m512i& a, const __m512i& b) {
  return emulated::unpack<uint64_t>(a, b, false);
}
inline __m512i _mm512_unpackhi_epi64(const __m512i& a, const __m512i& b) {
  return emulated::unpack<uint64_t>(a, b, true);
}
inline __m512 _mm512_unpacklo_ps(const __m512& a, const __m512& b) {
  return emulated::unpack<uint32_t>(a, b, false);
}
inline __m512 _mm512_unpackhi_ps(const __m512& a, const __m512& b) {
  return emulated::unpack<uint32_t>(a, b, true);
}
inline __m512d _mm512_unpacklo_pd(const __m512d& a, const __m512d& b) {
  return emulated::unpack<uint64_t>(a, b, false);
}
inline __m512d _mm512_unpackhi_pd(const __m512d& a, const __m512d& b) {
  return emulated::unpack<uint64_t>(a, b, true);
}
inline __m512i _mm512_shuffle_i32x4(const __m512i& a, const __m512i& b, int order) {
  return emulated::shuffle_blocks(a, b, order);
}
inline __m512 _mm512_shuffle_f32x4(const __m512& a, const __m512& b, int order) {
  return emulated::shuffle_blocks(a, b, order);
}
inline __m512i _mm512_permutex2var_epi16(const __m512i& a, const __m512i& index, const __m512i& b) {
  const auto x = emulated::lanes<uint16_t>(a), i = emulated::lanes<uint16_t>(index),
             y = emulated::lanes<uint16_t>(b);
  return emulated::each<uint16_t>([&](size_t j) { return (i[j] & 32 ? y : x)[i[j] & 31]; });
}
inline __m512i _mm512_permutexvar_epi16(const __m512i& index, const __m512i& a) {
  return _mm512_permutex2var_epi16(a, index, a);
}

// ---- arithmetic

inline constexpr int _CMP_EQ_OQ = 0x00, _CMP_NEQ_UQ = 0x04;
inline constexpr int _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8;
inline __m512 _mm512_set1_ps(float x) {
  return emulated::each<float>([&](size_t) { return x; });
}
inline __m512 _mm512_add_ps(const __m512& a, const __m512& b) {
  return emulated::map<float>(a, b, [](float x, float y) { return x + y; });
}
inline __m512 _mm512_sub_ps(const __m512& a, const __m512& b) {
  return emulated::map<float>(a, b, [](float x, float y) { return x - y; });
}
inline __m512 _mm512_mul_ps(const __m512& a, const __m512& b) {
  return emulated::map<float>(a, b, [](float x, float y) { return x * y; });
}
// The second operand where either is NaN.
inline __m512 _mm512_max_ps(const __m512& a, const __m512& b) {
  return emulated::map<float>(a, b, [](float x, float y) { return x > y ? x : y; });
}
inline __m512 _mm512_fmadd_ps(const __m512& a, const __m512& b, const __m512& c) {
  const auto x = emulated::lanes<float>(a), y = emulated::lanes<float>(b), z = emulated::lanes<float>(c);
  return emulated::each<float>([&](size_t i) { return std::fma(x[i], y[i], z[i]); });
}
inline __m512 _mm512_fmsub_ps(const __m512& a, const __m512& b, const __m512& c) {
  const auto x = emulated::lanes<float>(a), y = emulated::lanes<float>(b), z = emulated::lanes<float>(c);
  return emulated::each<float>([&](size_t i) { return std::fma(x[i], y[i], -z[i]); });
}
inline __m512 _mm512_roundscale_ps(const __m512& a, int how) {
  if (how != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) emulated::misuse("a rounding not emulated");
  return emulated::map<float>(a, a, [](float x, float) { return std::nearbyint(x); });
}
// a 2^floor(power).
inline __m512 _mm512_scalef_ps(const __m512& a, const __m512& power) {
  return emulated::map<float>(a, power, [](float x, float y) {
    return std::isnan(x) || std::isnan(y) ? x + y : std::ldexp(x, static_cast<int>(std::floor(y)));
  });
}
inline __mmask16 _mm512_cmp_ps_mask(const __m512& a, const __m512& b, int how) {
  if (how != _CMP_EQ_OQ && how != _CMP_NEQ_UQ) emulated::misuse("a comparison not emulated");
  const auto x = emulated::lanes<float>(a), y = emulated::lanes<float>(b);
  unsigned mask = 0;
  for (size_t i = 0; i < x.size(); ++i)
    if ((x[i] == y[i]) == (how == _CMP_EQ_OQ)) mask |= 1u << i;
  return static_cast<__mmask16>(mask);
}
inline __m512 _mm512_mask_mov_ps(const __m512& other, __mmask16 mask, const __m512& a) {
  return emulated::select<uint32_t>(mask, a, other);
}
inline __m512 _mm512_maskz_mov_ps(__mmask16 mask, const __m512& a) {
  return emulated::select<uint32_t>(mask, a, {});
}
inline __m512 _mm512_mask_max_ps(const __m512& other, __mmask16 mask, const __m512& a, const __m512& b) {
  return emulated::select<uint32_t>(mask, _mm512_max_ps(a, b), other);
}
inline __m512 _mm512_maskz_mul_ps(__mmask16 mask, const __m512& a, const __m512& b) {
  return emulated::select<uint32_t>(mask, _mm512_mul_ps(a, b), {});
}
inline __m256i _mm512_cvtneps_pbh(const __m512& a) {
  const auto x = emulated::lanes<float>(a);
  __m256i y;
  for (size_t i = 0; i < y.size(); ++i) y[i] = emulated::to_bf16(x[i]);
  return y;
}
inline __m512i _mm512_cvtne2ps_pbh(const __m512& high, const __m512& low) {
  const auto x = emulated::lanes<float>(low), y = emulated::lanes<float>(high);
  return emulated::each<uint16_t>([&](size_t i) { return emulated::to_bf16(i < 16 ? x[i] : y[i - 16]); });
}

// Adds the products of the odd values, then those of the even ones.
inline __m512 _mm512_dpbf16_ps(const __m512& sums, const __m512bh& a, const __m512bh& b) {
  const auto x = emulated::lanes<uint16_t>(a), y = emulated::lanes<uint16_t>(b);
  const auto z = emulated::lanes<float>(sums);
  return emulated::each<float>([&](size_t i) {
    float sum = emulated::flushed(z[i]);
    for (const size_t k : {2 * i + 1, 2 * i})
      sum = emulated::flushed(sum + emulated::flushed(emulated::from_bf16(x[k]) * emulated::from_bf16(y[k])));
    return sum;
  });
}

// NOLINTEND(bugprone-reserved-identifier)

}  // namespace capstan::kernels
