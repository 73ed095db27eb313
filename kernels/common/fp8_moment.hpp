// Moments of an optimizer in fp8: E4M3 codes, and one fp32 scale for each block of kMomentBlock elements, at
// which the largest magnitude of the block is the largest code (448). Of the second moment the square root is
// stored, whose range is half that of the moment in powers of two.
//
// A scale has 20 significant bits and a code 4, so that their product is exact in fp32. Encoding decoded
// values gives the same codes and scales again: a checkpoint stores the values, in any layout.
#pragma once

#include <bit>
#include <cstdint>

#include "tensor/float8.hpp"

namespace capstan::kernels {

// The scale of a block; 0 where its values are too small for one, NaN where one is not finite.
inline float fp8_scale(float largest) {
  if (!(largest <= 3.4028234e38f)) return std::bit_cast<float>(0x7FC00000u);
  const float scale = largest / kE4m3.largest();
  if (scale < 1.1754944e-38f) return 0;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(scale) + 8u) & ~15u);
}

}  // namespace capstan::kernels
