// The orthogonal transform that distributes outliers before values of 4 bits: a diagonal of signs times a
// Hadamard matrix of 16, over 4. The signs are those of Transformer Engine's NVFP4 recipe.
#pragma once

#include <cstdint>

namespace capstan::kernels {

inline constexpr int kHadamard = 16;
inline constexpr float kHadamardSigns[kHadamard] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};

// x[16] becomes x D H / 4, with H[i][j] = (-1)^(bits that i and j have in common).
inline void hadamard_transform(float* x) {
  for (int i = 0; i < kHadamard; ++i) x[i] *= kHadamardSigns[i] * 0.25f;
  for (int half = 1; half < kHadamard; half *= 2)
    for (int i = 0; i < kHadamard; ++i)
      if ((i & half) == 0) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
}

}  // namespace capstan::kernels
