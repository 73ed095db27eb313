// Moments of an optimizer in fp8: E4M3 codes, and one fp32 scale for each block of kMomentBlock elements, at
// which the largest magnitude of the block is the largest code (448). Of the second moment the square root is
// stored, whose range is half that of the moment in powers of two.
//
// A scale has 20 significant bits and a code 4, so that their product is exact in fp32. Encoding decoded
// values gives the same codes and scales again: a checkpoint stores the values, in any layout.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "base/host_device.hpp"
#include "tensor/float8.hpp"

namespace capstan::kernels {

// The scale of a block; 0 where its values are too small for one, NaN where one is not finite. It is not
// above the quotient, so that the largest element has the largest code also after stochastic rounding.
CAPSTAN_HOST_DEVICE inline float fp8_scale(float largest) {
  if (!(largest <= FLT_MAX)) return NAN;
  const uint32_t bits = std::bit_cast<uint32_t>(largest / kE4m3.largest()) & ~15u;
  float scale = std::bit_cast<float>(bits);
  if (scale * kE4m3.largest() > largest) scale = std::bit_cast<float>(bits - 16);
  return scale < FLT_MIN ? 0 : scale;
}

}  // namespace capstan::kernels
