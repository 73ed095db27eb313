// The instruction sets that the SIMD kernels are compiled for: AVX-512, AVX2 and, for anything older, the
// SSE4.2 that these files are built with (kernels/CMakeLists.txt). To be included before
// hwy/foreach_target.h.
#pragma once

#include "kernels/cpu/level.hpp"

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif

namespace capstan::kernels {

// The best of the functions that CAPSTAN_BEST lists: null where a target was not compiled.
template <class F>
F* best_of(F* avx512, F* avx2, F* fallback) {
  if (avx512 && runs(CpuLevel::avx512)) return avx512;
  if (avx2 && runs(CpuLevel::avx2)) return avx2;
  return fallback;
}

}  // namespace capstan::kernels

// CAPSTAN_BEST(f): `f` compiled for the instruction set of cpu_level() (after hwy/highway.h).
#define CAPSTAN_BEST(f) \
  best_of<decltype(HWY_STATIC_DISPATCH(f))>(HWY_CHOOSE_AVX3(f), HWY_CHOOSE_AVX2(f), HWY_CHOOSE_FALLBACK(f))

// CAPSTAN_FAMILY(Norm, norm) at the end of a file: cpu_norm(), which gives norm_family() of CAPSTAN_BEST.
#define CAPSTAN_FAMILY(Type, name)                            \
  namespace capstan::kernels {                                \
  const Type& cpu_##name() {                                  \
    static const Type family = CAPSTAN_BEST(name##_family)(); \
    return family;                                            \
  }                                                           \
  }
