// A matrix that a GEMM reads: an array of a run-time element type, with scales where that type has 8 or 4
// bits.
#pragma once

#include <cstddef>

#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

// The scales of a matrix: each element is multiplied with one. A matrix with scales has rows of k elements, k
// contiguous (k: the dimension over which the GEMM sums), and a block is of one row and consecutive k, unless
// it says otherwise; the last block may be shorter. Where the scales of blocks lie: block_scales.hpp.
enum class ScaleLayout : uint8_t {
  none,
  // One fp32.
  tensor,
  block_1x128,    // fp32
  block_128x128,  // fp32
  // fp8 e8m0 (MXFP8).
  block_1x32,
  // fp8 e4m3, times the fp32 of the tensor (NVFP4).
  block_1x16,
};
// Elements of k with one scale; 0: all.
constexpr int64_t block_of(ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::block_1x128:
    case ScaleLayout::block_128x128:
      return 128;
    case ScaleLayout::block_1x32:
      return 32;
    case ScaleLayout::block_1x16:
      return 16;
    case ScaleLayout::none:
    case ScaleLayout::tensor:
      break;
  }
  return 0;
}

struct Operand {
  const void* data = nullptr;
  DType dtype = DType::f32;
  ScaleLayout layout = ScaleLayout::none;
  // fp32 [1] with `tensor`; else of the blocks.
  const void* scale = nullptr;
  // fp32 [1], with block_1x16.
  const float* tensor_scale = nullptr;

  Operand() = default;
  Operand(In x) : data(x.data), dtype(x.dtype) {}  // NOLINT: an implicit conversion on purpose
};

// The array from an element on, without scales. For types whose elements are one or more bytes.
inline In from_element(const Operand& x, int64_t element) {
  return {static_cast<const std::byte*>(x.data) + element * size_of(x.dtype), x.dtype};
}
inline Out from_element(Out x, int64_t element) {
  return {x.as<std::byte>() + element * size_of(x.dtype), x.dtype};
}

}  // namespace capstan::kernels
