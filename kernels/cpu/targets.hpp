// The instruction sets that the SIMD kernels are compiled for: AVX-512, AVX2 and, for anything older, the SSE4.2 that these
// files are built with (kernels/CMakeLists.txt). To be included before hwy/foreach_target.h.
#pragma once

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif
