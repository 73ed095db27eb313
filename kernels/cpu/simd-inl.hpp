// SIMD building blocks, compiled once for every instruction set (a Highway "-inl" header): vectors of floats,
// loads and stores of fp32, bf16 and fp16 rows with any length, exp, the normal distribution function,
// Philox.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "base/philox.hpp"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/common/exp2.hpp"
#include "kernels/cpu/parallel.hpp"
#include "tensor/dtype.hpp"
#include "tensor/kernel_context.hpp"

#if defined(CAPSTAN_KERNELS_CPU_SIMD_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef CAPSTAN_KERNELS_CPU_SIMD_INL
#undef CAPSTAN_KERNELS_CPU_SIMD_INL
#else
#define CAPSTAN_KERNELS_CPU_SIMD_INL
#endif

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using DD = hn::ScalableTag<double>;
using VF = hn::Vec<DF>;
inline constexpr size_t kLanes = hn::MaxLanes(DF());
inline constexpr int64_t kStep = static_cast<int64_t>(kLanes);

// ---- loads and stores: `float`, `bf16` and `f16` arrays, as floats. Part: the first n < kLanes lanes,
// others 0.

HWY_INLINE VF load(const float* p) {
  return hn::LoadU(DF(), p);
}
HWY_INLINE VF load(const bf16* p) {
  const hn::Rebind<uint16_t, DF> d16;
  const auto wide = hn::PromoteTo(DU(), hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(DF(), hn::ShiftLeft<16>(wide));
}
// The values at p, in the lanes of D.
template <class D>
HWY_INLINE hn::Vec<D> load_half(D d, const f16* p) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  return hn::PromoteTo(
      d, hn::LoadU(hn::Rebind<hwy::float16_t, D>(), reinterpret_cast<const hwy::float16_t*>(p)));
#else
  // The conversion of f16 (tensor/dtype.hpp) in vectors.
  const hn::RebindToUnsigned<D> du;
  const auto h =
      hn::PromoteTo(du, hn::LoadU(hn::Rebind<uint16_t, D>(), reinterpret_cast<const uint16_t*>(p)));
  const auto size = hn::ShiftLeft<13>(hn::And(h, hn::Set(du, 0x7FFF)));
  const auto value = hn::Mul(hn::BitCast(d, size), hn::Set(d, 0x1p112f)), limit = hn::Set(d, 65536.0f);
  const auto infinite = hn::IfThenElseZero(hn::Ge(value, limit), hn::BitCast(d, hn::Set(du, 0x7F800000))),
             quiet = hn::IfThenElseZero(hn::Gt(value, limit), hn::BitCast(d, hn::Set(du, 0x400000))),
             sign = hn::BitCast(d, hn::ShiftLeft<16>(hn::And(h, hn::Set(du, 0x8000))));
  return hn::Or(hn::Or(value, sign), hn::Or(infinite, quiet));
#endif
}
HWY_INLINE VF load(const f16* p) {
  return load_half(DF(), p);
}
HWY_INLINE void store(VF v, float* p) {
  hn::StoreU(v, DF(), p);
}
// Nearest even; NaNs stay NaNs.
HWY_INLINE void store(VF v, bf16* p) {
  const DU du;
  const hn::Rebind<uint16_t, DF> d16;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1));
  const auto rounded = hn::Add(hn::Add(u, hn::Set(du, 0x7FFF)), odd);
  const auto nan = hn::Or(u, hn::Set(du, 0x400000));
  const auto bits = hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), nan, rounded));
  hn::StoreU(hn::TruncateTo(d16, bits), d16, reinterpret_cast<uint16_t*>(p));
}
// Rounds to nearest even; values beyond the range become infinite, NaNs stay NaNs.
HWY_INLINE void store(VF v, f16* p) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  const hn::Rebind<hwy::float16_t, DF> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
#else
  // The conversion of f16 (tensor/dtype.hpp) in vectors.
  const DU du;
  const hn::Rebind<uint16_t, DF> d16;
  const auto u = hn::BitCast(du, v), size = hn::And(u, hn::Set(du, 0x7FFFFFFF)),
             upper = hn::ShiftRight<13>(size);
  const VF magnitude = hn::Abs(v);
  const auto normal = hn::ShiftRight<13>(
      hn::Add(hn::Add(size, hn::Set(du, 0xFFFu - 0x38000000u)), hn::And(upper, hn::Set(du, 1))));
  const auto subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(magnitude, hn::Set(DF(), 0.5f))), hn::Set(du, 0x3F000000));
  const auto nan = hn::Or(hn::And(upper, hn::Set(du, 0x3FF)), hn::Set(du, 0x7E00));
  const auto is = [&](auto mask) HWY_ATTR { return hn::RebindMask(du, mask); };
  auto bits = hn::IfThenElse(is(hn::Lt(magnitude, hn::Set(DF(), 0x1p-14f))), subnormal, normal);
  bits = hn::IfThenElse(is(hn::Ge(magnitude, hn::Set(DF(), 65536.0f))), hn::Set(du, 0x7C00), bits);
  bits = hn::IfThenElse(is(hn::IsNaN(v)), nan, bits);
  bits = hn::Or(bits, hn::And(hn::ShiftRight<16>(u), hn::Set(du, 0x8000)));
  hn::StoreU(hn::TruncateTo(d16, bits), d16, reinterpret_cast<uint16_t*>(p));
#endif
}
template <class T>
HWY_INLINE VF load_part(const T* p, int64_t n) {
  HWY_ALIGN T buffer[kLanes] = {};
  // The bytes may be of another type elsewhere.
  std::memcpy(buffer, p, static_cast<size_t>(n) * sizeof(T));
  return load(buffer);
}
template <class T>
HWY_INLINE void store_part(VF v, T* p, int64_t n) {
  HWY_ALIGN T buffer[kLanes];
  store(v, buffer);
  std::memcpy(p, buffer, static_cast<size_t>(n) * sizeof(T));
}
// The first n <= kLanes lanes.
template <class T>
HWY_INLINE VF load_lanes(const T* p, int64_t n) {
  return n == kStep ? load(p) : load_part(p, n);
}
template <class T>
HWY_INLINE void store_lanes(VF v, T* p, int64_t n) {
  n == kStep ? store(v, p) : store_part(v, p, n);
}

// Prefetches the elements after p[0] in a row that is read from front to back, because the hardware
// prefetcher is too slow for loops with some arithmetic and stops at page boundaries. Harmless beyond the
// array.
template <class T>
HWY_INLINE void fetch_after(const T* p) {
  constexpr int64_t kPrefetchBytes = 1024;
  hwy::Prefetch(p + kPrefetchBytes / static_cast<int64_t>(sizeof(T)));
}

// An array whose element type is known at compile time (float, bf16, f16) or only at run time (Any).
struct Any {};
template <class T>
struct Array {
  T* p;
  HWY_INLINE VF at(int64_t i) const {
    fetch_after(p + i);
    return at_without_prefetch(i);
  }
  // Without prefetching.
  HWY_INLINE VF at_without_prefetch(int64_t i) const { return load(p + i); }
  HWY_INLINE void fetch(int64_t i) const { hwy::Prefetch(p + i); }
  HWY_INLINE VF part(int64_t i, int64_t n) const { return load_part(p + i, n); }
  // Without prefetching.
  HWY_INLINE VF lanes(int64_t i, int64_t n) const { return load_lanes(p + i, n); }
  HWY_INLINE void put(int64_t i, VF v) const { store(v, p + i); }
  HWY_INLINE void put_part(int64_t i, VF v, int64_t n) const { store_part(v, p + i, n); }
};
template <>
struct Array<Any> {
  void* p;
  DType type;
  // No prefetching, because mixed types are rare.
  HWY_INLINE VF at_without_prefetch(int64_t i) const { return at(i); }
  HWY_INLINE void fetch(int64_t) const {}
  HWY_INLINE VF at(int64_t i) const {
    return type == DType::f32    ? load(of<float>(i))
           : type == DType::bf16 ? load(of<bf16>(i))
                                 : load(of<f16>(i));
  }
  HWY_INLINE VF part(int64_t i, int64_t n) const {
    return type == DType::f32    ? load_part(of<float>(i), n)
           : type == DType::bf16 ? load_part(of<bf16>(i), n)
                                 : load_part(of<f16>(i), n);
  }
  HWY_INLINE VF lanes(int64_t i, int64_t n) const { return n == kStep ? at(i) : part(i, n); }
  HWY_INLINE void put(int64_t i, VF v) const {
    type == DType::f32    ? store(v, of<float>(i))
    : type == DType::bf16 ? store(v, of<bf16>(i))
                          : store(v, of<f16>(i));
  }
  HWY_INLINE void put_part(int64_t i, VF v, int64_t n) const {
    type == DType::f32    ? store_part(v, of<float>(i), n)
    : type == DType::bf16 ? store_part(v, of<bf16>(i), n)
                          : store_part(v, of<f16>(i), n);
  }

 private:
  template <class T>
  HWY_INLINE T* of(int64_t i) const {
    return static_cast<T*>(p) + i;
  }
};
template <class T>
HWY_INLINE Array<T> array_of(In x) {
  return {const_cast<T*>(static_cast<const T*>(x.data))};
}
template <>
HWY_INLINE Array<Any> array_of<Any>(In x) {
  return {const_cast<void*>(x.data), x.dtype};
}

// Runs body(T{}) with T = float, bf16 or f16 when all of the given arrays are of that type (absent ones fit
// any), else Any.
template <class Body>
HWY_INLINE void by_type(std::initializer_list<In> arrays, Body&& body) {
  bool all_f32 = true, all_bf16 = true, all_f16 = true;
  for (const In& x : arrays) {
    if (!x) continue;
    all_f32 &= x.dtype == DType::f32;
    all_bf16 &= x.dtype == DType::bf16;
    all_f16 &= x.dtype == DType::f16;
  }
  if (all_f32)
    body(float{});
  else if (all_bf16)
    body(bf16{});
  else if (all_f16)
    body(f16{});
  else
    body(Any{});
}

// body(p) with the typed address of element i.
template <class Body>
HWY_INLINE void at_element(In x, int64_t i, Body&& body) {
  if (x.dtype == DType::f32)
    body(x.as<float>() + i);
  else if (x.dtype == DType::bf16)
    body(x.as<bf16>() + i);
  else
    body(x.as<f16>() + i);
}

// body(i, n) over [0, count): n = kStep for full vectors, fewer for the last one.
template <class Full, class Tail>
HWY_INLINE void for_vectors(int64_t count, Full&& full, Tail&& tail) {
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) full(i);
  if (i < count) tail(i, count - i);
}

// fp32 copy of n elements from `first` on, such as gamma or a bias.
HWY_INLINE void widen(In x, int64_t first, float* to, int64_t n) {
  at_element(x, first, [&](const auto* p) HWY_ATTR {
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) store(load(p + i), to + i);
    for (; i < n; ++i) to[i] = static_cast<float>(p[i]);
  });
}
HWY_INLINE void widen(In x, float* to, int64_t n) {
  widen(x, 0, to, n);
}

HWY_INLINE float sum_lanes(VF v) {
  return hn::GetLane(hn::SumOfLanes(DF(), v));
}
HWY_INLINE float max_lanes(VF v) {
  return hn::GetLane(hn::MaxOfLanes(DF(), v));
}
HWY_INLINE VF splat(float value) {
  return hn::Set(DF(), value);
}

// ---- elementary functions

// e^(x - k ln 2) for k = x / ln 2 rounded: ln 2 in two parts, polynomial of Cephes' expf.
HWY_INLINE VF exp_remainder(VF x, VF k) {
  VF r = hn::NegMulAdd(k, splat(0.693359375f), x);
  r = hn::NegMulAdd(k, splat(-2.12194440e-4f), r);
  VF p = splat(1.9875691500e-4f);
  p = hn::MulAdd(p, r, splat(1.3981999507e-3f));
  p = hn::MulAdd(p, r, splat(8.3334519073e-3f));
  p = hn::MulAdd(p, r, splat(4.1665795894e-2f));
  p = hn::MulAdd(p, r, splat(1.6666665459e-1f));
  p = hn::MulAdd(p, r, splat(5.0000001201e-1f));
  return hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), splat(1.0f));
}

// e^x for x <= 0, as softmax asks for it: the same polynomial, 0 below -87.7, NaN stays NaN. The integer part
// of x / ln 2 is rounded by adding 1.5 * 2^23, whose lowest bits then hold it, biased as the exponent of a
// float wants it.
HWY_INLINE VF exp_not_positive(VF x) {
  const DF d;
  constexpr float kShift = 12582912.0f + 127.0f;
  // Gives the exponent 0, that is 0.
  const VF clamped = hn::Max(splat(-88.0f), x);
  const VF shifted = hn::MulAdd(clamped, splat(1.44269504088896341f), splat(kShift));
  const VF k = hn::Sub(shifted, splat(kShift));
  const VF y = exp_remainder(clamped, k);
  return hn::Mul(y, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(DI(), shifted))));
}

// e^x with an error of at most 2 ulp (tests/kernels/functions.cpp); 0 below -87.7, about 2.4e38 above 88.37;
// NaN stays NaN.
HWY_INLINE VF exp(VF x) {
  return exp_not_positive(hn::Min(splat(88.3762626647949f), x));
}

// tanh(x) to 2 ulp: Cephes' odd polynomial near 0, else by e^(2|x|). NaN stays NaN.
HWY_INLINE VF tanh(VF x) {
  const VF a = hn::Abs(x), s = hn::Mul(x, x);
  VF p = splat(-5.70498872745e-3f);
  p = hn::MulAdd(p, s, splat(2.06390887954e-2f));
  p = hn::MulAdd(p, s, splat(-5.37397155531e-2f));
  p = hn::MulAdd(p, s, splat(1.33314422036e-1f));
  p = hn::MulAdd(p, s, splat(-3.33332819422e-1f));
  const VF near = hn::MulAdd(hn::Mul(p, s), x, x);
  const VF far = hn::Sub(splat(1.0f), hn::Div(splat(2.0f), hn::Add(exp(hn::Add(a, a)), splat(1.0f))));
  return hn::IfThenElse(hn::Lt(a, splat(0.625f)), near, hn::CopySign(far, x));
}

// cap tanh(x / cap).
HWY_INLINE VF softcap(VF x, VF cap, VF inverse_cap) {
  return hn::Mul(cap, tanh(hn::Mul(x, inverse_cap)));
}

// 1 / x for finite x. AVX-512 estimates 14 bits, which one step of Newton's doubles: less than half a
// division.
HWY_INLINE VF reciprocal(VF x) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  const VF r = hn::ApproximateReciprocal(x);
  return hn::MulAdd(r, hn::NegMulAdd(x, r, splat(1.0f)), r);
#else
  return hn::Div(splat(1.0f), x);
#endif
}

// 1 / (1 + 2^x), that is sigmoid(-x ln 2); NaN stays NaN. The exponent as in exp_not_positive, the rest by
// common/exp2.hpp.
HWY_INLINE VF falling_sigmoid2(VF x) {
  constexpr float kShift = 12582912.0f + 127.0f;
  const VF clamped = hn::Max(splat(-126.0f), hn::Min(splat(126.0f), x));
  const VF shifted = hn::Add(clamped, splat(kShift)), f = hn::Sub(clamped, hn::Sub(shifted, splat(kShift)));
  VF p = splat(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = hn::MulAdd(p, f, splat(kExp2[i]));
  const VF power = hn::BitCast(DF(), hn::ShiftLeft<23>(hn::BitCast(DI(), shifted)));
  return reciprocal(hn::MulAdd(p, power, splat(1.0f)));
}
HWY_INLINE VF sigmoid(VF x) {
  return falling_sigmoid2(hn::Mul(x, splat(-1.44269504088896341f)));
}

// The standard normal distribution: density(x) and cumulative(x) = (1 + erf(x / sqrt 2)) / 2, to 1e-6
// relative also in the lower tail. erfc(z) = e^(-z²) t Q(t), t = 1 / (1 + 0.3 z); Q is a least-maximum fit on
// z in [0, 10] (2e-8).
HWY_INLINE void normal_distribution(VF x, VF& cumulative, VF& density) {
  const VF a = hn::Abs(x);
  const VF e = exp(hn::Mul(hn::Mul(a, a), splat(-0.5f)));
  const VF t = hn::Div(splat(1.0f), hn::MulAdd(a, splat(0.3f * 0.70710678118654752f), splat(1.0f)));
  VF q = splat(-0.12952286005020142f);
  q = hn::MulAdd(q, t, splat(0.4855629801750183f));
  q = hn::MulAdd(q, t, splat(-0.5122776627540588f));
  q = hn::MulAdd(q, t, splat(0.5477195978164673f));
  q = hn::MulAdd(q, t, splat(-0.09465049207210541f));
  q = hn::MulAdd(q, t, splat(0.21492598950862885f));
  q = hn::MulAdd(q, t, splat(0.148339182138443f));
  q = hn::MulAdd(q, t, splat(0.17071522772312164f));
  q = hn::MulAdd(q, t, splat(0.1691880077123642f));
  const VF tail = hn::Mul(hn::Mul(e, hn::Mul(t, q)), splat(0.5f));
  cumulative = hn::IfThenElse(hn::Lt(x, hn::Zero(DF())), tail, hn::Sub(splat(1.0f), tail));
  density = hn::Mul(e, splat(0.3989422804014327f));
}

// ---- Philox4x32-10, one block to a lane: counters (lo, hi) with lo the same for all and hi = hi_base + lane
// (low 32 bits of hi_base must not overflow within the vector: bases are multiples of the lane count).
struct PhiloxWords {
  hn::Vec<DU> w0, w1, w2, w3;
};
HWY_INLINE void multiply_wide(hn::Vec<DU> a, hn::Vec<DU> b, hn::Vec<DU>& hi, hn::Vec<DU>& lo) {
  const DU d;
  const hn::RepartitionToWide<DU> d64;
  const auto even = hn::MulEven(a, b);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(d64, a))), b);
  lo = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
  hi = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
}
HWY_INLINE PhiloxWords philox(PhiloxKey key, uint64_t lo, uint64_t hi_base) {
  const DU d;
  auto c0 = hn::Set(d, static_cast<uint32_t>(lo)), c1 = hn::Set(d, static_cast<uint32_t>(lo >> 32));
  auto c2 = hn::Add(hn::Set(d, static_cast<uint32_t>(hi_base)), hn::Iota(d, 0));
  auto c3 = hn::Set(d, static_cast<uint32_t>(hi_base >> 32));
  const auto m0 = hn::Set(d, 0xD2511F53u), m1 = hn::Set(d, 0xCD9E8D57u);
  uint32_t k0 = key.k0, k1 = key.k1;
  for (int round = 0; round < 10; ++round) {
    hn::Vec<DU> hi0, lo0, hi1, lo1;
    multiply_wide(c0, m0, hi0, lo0);
    multiply_wide(c2, m1, hi1, lo1);
    c0 = hn::Xor(hn::Xor(hi1, c1), hn::Set(d, k0));
    c2 = hn::Xor(hn::Xor(hi0, c3), hn::Set(d, k1));
    c1 = lo1;
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// The words of 4 * kLanes consecutive elements: word i % 4 of block (lo, hi_base + i / 4), see
// common/dropout.hpp.
HWY_INLINE void philox_words(PhiloxKey key, uint64_t lo, uint64_t hi_base, uint32_t* words) {
  const PhiloxWords w = philox(key, lo, hi_base);
  hn::StoreInterleaved4(w.w0, w.w1, w.w2, w.w3, DU(), words);
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#endif
