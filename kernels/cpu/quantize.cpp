// Quantization in tiles of 128 x 128 elements, which hold full blocks of every layout: a tile is read once as
// fp32, then its rows and its columns are encoded.
#include "kernels/cpu/quantize.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "kernels/common/hadamard.hpp"
#include "kernels/common/quantize.hpp"
#include "kernels/cpu/atomic_max.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"

namespace capstan::kernels {

namespace {

constexpr int64_t kTile = 128;

struct Tile {
  int64_t rows, cols;
  std::array<float, kTile * kTile> values;  // rows kTile apart
};

void read_row(In x, int64_t at, int64_t count, float* to) {
  if (x.dtype == DType::f32)
    std::copy_n(x.as<float>() + at, count, to);
  else if (x.dtype == DType::bf16)
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(x.as<bf16>()[at + i]);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(x.as<f16>()[at + i]);
}

// NaN is the largest.
float largest_in(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(x[i]));
  return std::bit_cast<float>(largest);
}
float largest_in(const float* x, int64_t rows, int64_t cols) {
  float largest = 0;
  for (int64_t r = 0; r < rows && !std::isnan(largest); ++r)
    if (const float row = largest_in(x + r * kTile, cols); !(row <= largest)) largest = row;
  return largest;
}

template <SmallFloat F>
void encode_bytes(const float* x, float scale, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(encode<F>(x[i] * scale));
}
// encode_one(value, i) for i < count, two codes to a byte.
template <class Encode>
void encode_pairs(const float* x, float scale, int64_t count, uint8_t* codes, Encode&& encode_one) {
  for (int64_t i = 0; i < count; i += 2) {
    const uint32_t first = encode_one(x[i] * scale, i),
                   second = i + 1 < count ? encode_one(x[i + 1] * scale, i + 1) : 0;
    codes[i / 2] = static_cast<uint8_t>(first | second << 4);
  }
}
// `element`: of the first value, among all codes.
void encode_run(const QuantizeFormat& format, const float* x, float scale, int64_t count, int64_t element,
                const RoundingPosition& random, uint8_t* codes) {
  if (format.codes == DType::f8e4m3)
    encode_bytes<kE4m3>(x, scale, count, codes);
  else if (format.codes == DType::f8e5m2)
    encode_bytes<kE5m2>(x, scale, count, codes);
  else if (!format.stochastic)
    encode_pairs(x, scale, count, codes, [](float value, int64_t) { return encode<kE2m1>(value); });
  else
    encode_pairs(
        x, scale, count, codes,
        [&, block = ~uint64_t{0}, words = std::array<uint32_t, 4>()](float value, int64_t i) mutable {
          const auto at = static_cast<uint64_t>(element + i);
          if (at / 4 != block) block = at / 4, words = philox4x32(random.key, block, random.call);
          return encode_stochastic<kE2m1>(value, words[at % 4]);
        });
}

// Writes the scale of a block with maximum `amax` to element `at` of the scales, and returns the factor of
// its values before they are encoded.
float scale_block(const QuantizeFormat& format, float amax, const float* tensor_scale, void* scales,
                  int64_t at) {
  const BlockScale scale = block_scale(format, amax, tensor_scale);
  if (format.layout == ScaleLayout::block_1x128 || format.layout == ScaleLayout::block_128x128)
    static_cast<float*>(scales)[at] = std::bit_cast<float>(scale.stored);
  else if (format.layout != ScaleLayout::tensor)
    static_cast<uint8_t*>(scales)[at] = static_cast<uint8_t>(scale.stored);
  return scale.factor;
}

// Where a tile lies in the matrix whose rows are encoded.
struct Position {
  int64_t row, col, cols;
};

// Encodes the rows of a tile.
void encode_tile(const QuantizeFormat& format, const Tile& tile, const Position& at,
                 const float* tensor_scale, const RoundingPosition& random, const Quantized& to) {
  if (!to.codes) return;
  const bool pairs = format.codes == DType::f4e2m1x2;
  const int64_t row_bytes = pairs ? ceil_div(at.cols, int64_t{2}) : at.cols;
  const int64_t block = format.layout == ScaleLayout::tensor ? kTile : block_of(format.layout);
  const int64_t height = format.layout == ScaleLayout::block_128x128 ? kTile : format.square ? block : 1;
  const int64_t scales_per_row = ceil_div(at.cols, block);
  for (int64_t r0 = 0; r0 < tile.rows; r0 += height)
    for (int64_t c0 = 0; c0 < tile.cols; c0 += block) {
      const int64_t rows = std::min(height, tile.rows - r0), cols = std::min(block, tile.cols - c0);
      const float* values = tile.values.data() + r0 * kTile + c0;
      const float amax = format.layout == ScaleLayout::tensor ? 0 : largest_in(values, rows, cols);
      const auto write_scale = [&](int64_t scale_row) {
        return scale_block(format, amax, tensor_scale, to.scale,
                           scale_row * scales_per_row + (at.col + c0) / block);
      };
      // The scale of a square block is stored once for each row of the block.
      float scale = format.layout == ScaleLayout::block_128x128 ? write_scale((at.row + r0) / kTile) : 0;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = at.row + r0 + r;
        if (format.layout != ScaleLayout::block_128x128) scale = write_scale(row);
        uint8_t* codes = static_cast<uint8_t*>(to.codes) + row * row_bytes + (at.col + c0) / (pairs ? 2 : 1);
        encode_run(format, values + r * kTile, scale, cols, row * at.cols + at.col + c0, random, codes);
      }
    }
}

Tile transposed(const Tile& tile) {
  Tile result{tile.cols, tile.rows, {}};
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t c = 0; c < tile.cols; ++c)
      result.values[static_cast<size_t>(c * kTile + r)] = tile.values[static_cast<size_t>(r * kTile + c)];
  return result;
}

// The full blocks of the rows of a tile; a shorter one at the end stays as it is.
void transform_rows(Tile& tile) {
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t c = 0; c + kHadamard <= tile.cols; c += kHadamard)
      hadamard_transform(tile.values.data() + r * kTile + c);
}

Tile read_tile(const QuantizeShape& s, In x, int64_t row, int64_t col) {
  Tile tile;
  tile.rows = std::min(kTile, s.rows - row);
  tile.cols = std::min(kTile, s.cols - col);
  for (int64_t r = 0; r < tile.rows; ++r)
    read_row(x, (row + r) * s.stride + col, tile.cols, tile.values.data() + r * kTile);
  return tile;
}

// body(tile, first row, first column) for all tiles of x.
template <class Body>
void for_tiles(Context& c, const QuantizeShape& s, In x, Body&& body) {
  if (s.rows <= 0 || s.cols <= 0) return;
  const int64_t across = ceil_div(s.cols, kTile);
  c.pool->parallel_for(ceil_div(s.rows, kTile) * across, [&](int64_t index, int) {
    const int64_t row = index / across * kTile, col = index % across * kTile;
    body(read_tile(s, x, row, col), row, col);
  });
}

void absolute_maximum(Context& c, In x, QuantizeShape s, bool hadamard, float* amax) {
  for_tiles(c, s, x, [&](const Tile& tile, int64_t, int64_t) {
    if (!hadamard) return atomic_max(*amax, largest_in(tile.values.data(), tile.rows, tile.cols));
    Tile columns = transposed(tile);
    transform_rows(columns);
    atomic_max(*amax, largest_in(columns.values.data(), columns.rows, columns.cols));
  });
}

void current_scale(Context&, float* amax, float* scale, int64_t count, float format_max) {
  for (int64_t i = 0; i < count; ++i) {
    set_tensor_scale(usable(amax[i]) ? format_max / amax[i] : 1.0f, scale + 2 * i);
    amax[i] = 0;
  }
}

void delayed_scale(Context&, In control, float* amax, float* history, float* scale, int64_t layers,
                   Quantize::DelayedScaling d) {
  if (control && control.as<StepControl>()->skip) {
    std::fill_n(amax, 3 * layers, 0.0f);
    return;
  }
  for (int64_t i = 0; i < 3 * layers; ++i) {
    float* own = history + i * d.history_length;
    std::copy_backward(own, own + d.history_length - 1, own + d.history_length);
    own[0] = std::isfinite(amax[i]) ? amax[i] : 0;
    const float largest_amax = d.maximum ? largest_in(own, d.history_length) : own[0];
    const float format_max = i % 3 == 2 ? d.gradient_format_max : d.format_max;
    if (usable(largest_amax))
      set_tensor_scale(format_max / largest_amax / std::ldexp(1.0f, static_cast<int>(d.margin)),
                       scale + 2 * i);
    amax[i] = 0;
  }
}

// A tile of both results of Quantize::quantize.
void quantize_tile(const QuantizedOutput& to, const float* column_tensor_scale,
                   const RoundingPosition& random, const QuantizeShape& s, const Tile& tile, int64_t row,
                   int64_t col) {
  if (to.amax) atomic_max(*to.amax, largest_in(tile.values.data(), tile.rows, tile.cols));
  encode_tile(to.format, tile, {row, col, s.cols}, to.tensor_scale, random, to.rows);
  if (!to.columns.codes) return;
  Tile columns_tile = transposed(tile);
  if (to.format.hadamard) transform_rows(columns_tile);
  const RoundingPosition of_columns{random.key, random.call | uint64_t{1} << 63};
  encode_tile(to.format, columns_tile, {col, row, s.rows}, column_tensor_scale, of_columns, to.columns);
}

void quantize(Context& c, QuantizeFormat format, QuantizeShape s, In x, const float* row_tensor_scale,
              Quantized rows, const float* column_tensor_scale, Quantized columns, float* amax,
              RoundingPosition random) {
  const QuantizedOutput to{format, row_tensor_scale, rows, columns, amax};
  for_tiles(c, s, x, [&](const Tile& tile, int64_t row, int64_t col) {
    quantize_tile(to, column_tensor_scale, random, s, tile, row, col);
  });
}

void transpose_codes(Context& c, In x, Out y, int64_t rows, int64_t cols) {
  if (rows <= 0 || cols <= 0) return;
  const int64_t across = ceil_div(cols, kTile);
  c.pool->parallel_for(ceil_div(rows, kTile) * across, [&](int64_t index, int) {
    const int64_t row = index / across * kTile, col = index % across * kTile;
    const int64_t row_end = std::min(rows, row + kTile), col_end = std::min(cols, col + kTile);
    for (int64_t k = col; k < col_end; ++k)
      for (int64_t r = row; r < row_end; ++r) y.as<uint8_t>()[k * rows + r] = x.as<uint8_t>()[r * cols + k];
  });
}

}  // namespace

void quantize_rows(const QuantizedOutput& output, In y, int64_t rows, int64_t cols, int64_t begin,
                   int64_t end) {
  static_assert(kQuantizedRows == kTile);
  const QuantizeShape shape{rows, cols, cols};
  for (int64_t row = begin; row < end; row += kTile)
    for (int64_t col = 0; col < cols; col += kTile)
      quantize_tile(output, output.tensor_scale, {}, shape, read_tile(shape, y, row, col), row, col);
}

const Quantize& cpu_quantize() {
  static const Quantize family{.absolute_maximum = absolute_maximum,
                               .current_scale = current_scale,
                               .delayed_scale = delayed_scale,
                               .quantize = quantize,
                               .transpose_codes = transpose_codes};
  return family;
}

}  // namespace capstan::kernels
