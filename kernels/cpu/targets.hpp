// The instruction sets that the SIMD kernels are compiled for: AVX-512, AVX2 and, for anything older, the SSE4.2 that these
// files are built with (kernels/CMakeLists.txt). To be included before hwy/foreach_target.h.
#pragma once

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif

namespace capstan::kernels {

// What Highway asks of a processor before it runs code of its AVX2 and AVX3 targets. The question is asked here, with the
// compiler's own builtin (which looks at the operating system's part too), because the library libhwy calibrates a timer
// when it is loaded: 5 ms before main, for each of `capstan help`, `check` or a completion at the prompt.
#if defined(__x86_64__)
inline bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");  // all of these have f16c, which some compilers cannot ask for
}
inline bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd");
}
#else
inline bool runs_avx2() {
  return false;
}
inline bool runs_avx512() {
  return false;
}
#endif

// The best of the functions that CAPSTAN_BEST lists: null where a target was not compiled.
template <class F>
F* best_of(F* avx512, F* avx2, F* fallback) {
  if (avx512 && runs_avx512()) return avx512;
  if (avx2 && runs_avx2()) return avx2;
  return fallback;
}

}  // namespace capstan::kernels

// CAPSTAN_BEST(f): `f` compiled for the best instruction set that this machine runs (after hwy/highway.h).
#define CAPSTAN_BEST(f) \
  best_of<decltype(HWY_STATIC_DISPATCH(f))>(HWY_CHOOSE_AVX3(f), HWY_CHOOSE_AVX2(f), HWY_CHOOSE_FALLBACK(f))
