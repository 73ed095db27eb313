// fp32 of a matrix with scales (ScaleLayout), for the GEMM of a processor without low-precision units.
#pragma once

#include <algorithm>
#include <array>

#include "base/checked.hpp"
#include "kernels/operand.hpp"
#include "tensor/float8.hpp"

namespace capstan::kernels {

// fp32 of all codes of a type. fp4: of the two codes of a byte, the first in the lower half.
template <SmallFloat F>
const std::array<float, 256>& values_of_codes() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values;
    for (uint32_t code = 0; code < 256; ++code) values[code] = decode<F>(code & (2 * F.sign() - 1));
    return values;
  }();
  return table;
}

// Rows of k elements, from `row` and element `first` of k on.
struct ScaledMatrix {
  Operand x;
  int64_t row, first;
  int64_t row_bytes;
  int64_t scales_per_row;
  ScaledMatrix(const Operand& operand, int64_t k, int64_t row_begin = 0, int64_t first_of_k = 0)
      : x(operand),
        row(row_begin),
        first(first_of_k),
        row_bytes(operand.dtype == DType::f4e2m1x2 ? ceil_div(k, int64_t{2}) : k),
        scales_per_row(block_of(operand.layout) > 0 ? ceil_div(k, block_of(operand.layout)) : 0) {}

  // The factor of the elements of row r, block `block` of k.
  float scale_of(int64_t r, int64_t block) const {
    switch (x.layout) {
      case ScaleLayout::tensor:
        return *static_cast<const float*>(x.scale);
      case ScaleLayout::block_1x128:
        return static_cast<const float*>(x.scale)[r * scales_per_row + block];
      case ScaleLayout::block_128x128:
        return static_cast<const float*>(x.scale)[r / 128 * scales_per_row + block];
      case ScaleLayout::block_1x32:
        return decode_e8m0(static_cast<const uint8_t*>(x.scale)[r * scales_per_row + block]);
      case ScaleLayout::block_1x16:
        return *x.tensor_scale *
               decode<kE4m3>(static_cast<const uint8_t*>(x.scale)[r * scales_per_row + block]);
      case ScaleLayout::none:
        break;
    }
    return 1;
  }
};

// to[i] = element k0 + i of row r.
inline void dequantize(const ScaledMatrix& m, int64_t r, int64_t k0, int64_t k, float* to) {
  const auto* codes = static_cast<const uint8_t*>(m.x.data) + (m.row + r) * m.row_bytes;
  const float* values = m.x.dtype == DType::f8e4m3   ? values_of_codes<kE4m3>().data()
                        : m.x.dtype == DType::f8e5m2 ? values_of_codes<kE5m2>().data()
                                                     : values_of_codes<kE2m1>().data();
  const bool pairs = m.x.dtype == DType::f4e2m1x2;
  const int64_t block = block_of(m.x.layout) > 0 ? block_of(m.x.layout) : m.first + k0 + k;
  for (int64_t p = m.first + k0, last = p + k; p < last;) {
    const int64_t end = std::min(last, (p / block + 1) * block);
    const float scale = m.scale_of(m.row + r, p / block);
    for (; p < end; ++p) {
      const uint32_t code = pairs ? codes[p / 2] >> (p % 2 * 4) & 0xFu : codes[p];
      *to++ = values[code] * scale;
    }
  }
}

}  // namespace capstan::kernels
