#include "kernels/simulated/matrices.hpp"

#include <algorithm>

#include "tensor/dtype.hpp"

namespace capstan::kernels::simulated {

namespace {
constexpr int kLanes = 32, kDepth = 16;
// Largest number of columns of B in one call.
constexpr int kMaxColumns = 256;

template <class T>
float lower_value(uint32_t pair) {
  T value;
  value.bits = static_cast<uint16_t>(pair);
  return static_cast<float>(value);
}

// Gathers a 16 x 16 fragment of A, row by row.
template <class T>
void gather_a(const MatrixOperands* const* lanes, int at, float* to) {
  for (int lane = 0; lane < kLanes; ++lane)
    for (int quarter = 0; quarter < 4; ++quarter) {
      const uint32_t pair = lanes[lane]->a[at + quarter];
      float* const first = to + (lane / 4 + quarter % 2 * 8) * kDepth + quarter / 2 * 8 + lane % 4 * 2;
      first[0] = lower_value<T>(pair);
      first[1] = lower_value<T>(pair >> 16);
    }
}
// Gathers 16 x 16 n values of B, row by row. Returns whether all of them are finite.
template <class T>
bool gather_b(const MatrixOperands* const* lanes, int at, int n, float* to) {
  const int columns = n * 16;
  float zero = 0;
  for (int block = 0; block < n; ++block)
    for (int lane = 0; lane < kLanes; ++lane)
      for (int half = 0; half < 4; ++half) {
        const uint32_t pair = lanes[lane]->b[at + block * 4 + half];
        const float low = lower_value<T>(pair), high = lower_value<T>(pair >> 16);
        float* const first =
            to + (half % 2 * 8 + lane % 4 * 2) * columns + block * 16 + half / 2 * 8 + lane / 4;
        first[0] = low;
        first[columns] = high;
        zero += low * 0 + high * 0;
      }
  return zero == 0;
}
// One row of sums, of n * 16 columns: in the lanes of a row of four, or back there.
template <class Move>
void for_row(const MatrixOperands* const* lanes, int m, int row, int columns, const Move& move) {
  for (int column = 0; column < columns; column += 2) {
    const MatrixOperands& lane = *lanes[row % 8 * 4 + column % 8 / 2];
    move(lane.accumulators + m * lane.stride + column / 8 * 4 + row / 8 * 2, column);
  }
}
}  // namespace

template <class T>
void multiply_matrices(const MatrixOperands* const* lanes, int terms, int m, int n) {
  const int columns = n * 16;
  float left[16 * kDepth], right[kDepth * kMaxColumns], sums[kMaxColumns];
  for (int order = terms - 1; order >= 0; --order)
    for (int i = 0; i <= order; ++i) {
      // A product by zero changes no sum unless the other factor is not finite.
      const bool finite = gather_b<T>(lanes, (order - i) * n * 4, n, right);
      for (int block = 0; block < m; ++block) {
        gather_a<T>(lanes, (i * m + block) * 4, left);
        for (int row = 0; row < 16; ++row) {
          const float* const factors = left + row * kDepth;
          if (finite && std::all_of(factors, factors + kDepth, [](float x) { return x == 0; })) continue;
          for_row(lanes, block, row, columns, [&](const float* from, int column) {
            sums[column] = from[0];
            sums[column + 1] = from[1];
          });
          for (int k = 0; k < kDepth; ++k) {
            const float factor = factors[k];
            const float* const values = right + k * columns;
            if (finite && factor == 0) continue;
            for (int column = 0; column < columns; ++column) sums[column] += factor * values[column];
          }
          for_row(lanes, block, row, columns, [&](float* to, int column) {
            to[0] = sums[column];
            to[1] = sums[column + 1];
          });
        }
      }
    }
}
template void multiply_matrices<bf16>(const MatrixOperands* const*, int, int, int);
template void multiply_matrices<f16>(const MatrixOperands* const*, int, int, int);

}  // namespace capstan::kernels::simulated
