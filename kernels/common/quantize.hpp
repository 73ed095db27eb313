// Scales of quantization, for all devices: the same bits on each.
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cstdint>

#include "base/host_device.hpp"
#include "kernels/quantize.hpp"
#include "tensor/float8.hpp"

namespace capstan::kernels {

// The bits of |x|, whose order is that of the magnitudes, with NaN as the largest.
CAPSTAN_HOST_DEVICE inline uint32_t magnitude_bits(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu;
}
// Whether a scale can be computed from a maximum.
CAPSTAN_HOST_DEVICE inline bool usable(float amax) {
  return amax > 0 && amax <= FLT_MAX;
}
// 2^n, n within the normal numbers.
CAPSTAN_HOST_DEVICE inline float power_of_two(int n) {
  return std::bit_cast<float>(static_cast<uint32_t>(n + 127) << 23);
}

// {scale, inverse} of a tensor.
CAPSTAN_HOST_DEVICE inline void set_tensor_scale(float scale, float* to) {
  to[0] = std::min(scale, FLT_MAX);
  to[1] = 1 / to[0];
}

// The scale of a block.
struct BlockScale {
  // Factor of the block's values before they are encoded.
  float factor = 1;
  // The stored scale: the bits of an fp32 value, or an 8-bit code.
  uint32_t stored = 0;
};
// Computes a block's scale from its maximum (Quantize::quantize). With `tensor` the scale is that of the
// tensor and is not stored.
CAPSTAN_HOST_DEVICE inline BlockScale block_scale(const QuantizeFormat& format, float amax,
                                                  const float* tensor_scale) {
  const float largest = largest_of(format.codes);
  switch (format.layout) {
    case ScaleLayout::block_1x128:
    case ScaleLayout::block_128x128: {
      int exponent = 0;
      if (usable(amax)) {
        // A finite quotient, whose exponent can be read from its bits.
        const float most = std::min(largest / amax, FLT_MAX);
        exponent = std::clamp(static_cast<int>(std::bit_cast<uint32_t>(most) >> 23) - 127, -126, 126);
      }
      return {power_of_two(exponent), std::bit_cast<uint32_t>(power_of_two(-exponent))};
    }
    case ScaleLayout::block_1x32: {
      const uint32_t code = amax > 0 ? encode_e8m0_up(amax / largest) : 127;
      return {1 / decode_e8m0(code), code};
    }
    case ScaleLayout::block_1x16: {
      const uint32_t code = encode<kE4m3>(amax * (1 / largest) * tensor_scale[0]);
      const float scale = decode<kE4m3>(code);
      return {scale == 0 ? 0 : std::min(tensor_scale[0] / scale, FLT_MAX), code};
    }
    case ScaleLayout::tensor:
    case ScaleLayout::none:
      break;
  }
  return {tensor_scale[0], 0};
}

}  // namespace capstan::kernels
