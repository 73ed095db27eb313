// The matrix operations of a warp: the elements that its lanes hold, gathered, multiplied and given back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace capstan::kernels::simulated {

// 16 bytes, which must begin at a multiple of 16.
struct alignas(16) Bytes16 {
  std::byte bytes[16];
};

// The two values that a lane has of an 8 x 8 matrix with these rows.
template <bool kTransposed>
uint32_t pair_of_matrix(const Bytes16 (&rows)[8], int lane) {
  const int row = lane / 4, column = lane % 4 * 2;
  uint32_t pair;
  if constexpr (kTransposed) {
    uint16_t low, high;
    std::memcpy(&low, rows[column].bytes + row * 2, 2);
    std::memcpy(&high, rows[column + 1].bytes + row * 2, 2);
    pair = uint32_t{high} << 16 | low;
  } else {
    std::memcpy(&pair, rows[row].bytes + column * 2, 4);
  }
  return pair;
}

// The operands of one lane of multiply_add().
struct MatrixOperands {
  // accumulators[m * stride + 4 n + i]
  float* accumulators;
  int stride;
  // [terms][m][4], [terms][n][4]
  const uint32_t *a, *b;
};
// accumulators += a b, as kernels/cuda/intrinsics.hpp describes multiply_add(). Each accumulator adds its
// products in the order of the columns of `a`, in fp32.
template <class T>
void multiply_matrices(const MatrixOperands* const* lanes, int terms, int m, int n);

}  // namespace capstan::kernels::simulated
