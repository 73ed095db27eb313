// The orthogonal transform that distributes outliers before values of 4 bits: a diagonal of signs times a
// Hadamard matrix of 16, over 4. The signs are those of Transformer Engine's NVFP4 recipe.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"

namespace capstan::kernels {

inline constexpr int kHadamard = 16;

// x[16] becomes x D H / 4, with H[i][j] = (-1)^(bits that i and j have in common).
CAPSTAN_HOST_DEVICE inline void hadamard_transform(float* x) {
  constexpr float kSigns[kHadamard] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  for (int i = 0; i < kHadamard; ++i) x[i] *= kSigns[i] * 0.25f;
  // Counted loops, which compilers unroll.
  for (int bit = 0; bit < 4; ++bit)
    for (int i = 0; i < kHadamard; ++i)
      if (const int half = 1 << bit; (i & half) == 0) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
}

}  // namespace capstan::kernels
