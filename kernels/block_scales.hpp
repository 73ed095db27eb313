// Where the scales of a matrix's blocks lie in memory. The kernels of one device agree on an order
// (Table::scale_order): `quantize` writes the scales there, and GEMMs read them.
#pragma once

#include "base/division.hpp"
#include "base/host_device.hpp"
#include "kernels/operand.hpp"

namespace capstan::kernels {

enum class ScaleOrder : uint8_t {
  // [rows, blocks of k], or for block_128x128 [blocks of rows, blocks of k]; row-major, without gaps.
  row_major,
  // As cuBLASLt reads them. Rounding up leaves gaps, into which `quantize` writes 0; the array
  // begins at a multiple of 16 bytes.
  //   block_1x128              [blocks of k, rows rounded up to 4]
  //   block_128x128            [blocks of rows, blocks of k rounded up to 4]
  //   block_1x32, block_1x16   tiles of 128 rows x 4 blocks of k, one byte a scale: [rows / 128, blocks / 4,
  //                            512], both rounded up. In a tile the scale of row r and block b is byte
  //                            r % 32 * 16 + r / 32 * 4 + b
  tensor_core,
};

// The type of the scales of blocks.
constexpr DType block_scale_type(ScaleLayout layout) {
  return layout == ScaleLayout::block_1x32   ? DType::f8e8m0
         : layout == ScaleLayout::block_1x16 ? DType::f8e4m3
                                             : DType::f32;
}

// The scales of a matrix [rows, cols] that has a layout with blocks.
struct BlockScales {
  ScaleLayout layout = ScaleLayout::block_1x128;
  ScaleOrder order = ScaleOrder::row_major;
  int64_t rows = 0, cols = 0;

  // Blocks of k in a row.
  CAPSTAN_HOST_DEVICE constexpr int64_t blocks() const { return ceil_div(cols, block_of(layout)); }
  // Rows of scales.
  CAPSTAN_HOST_DEVICE constexpr int64_t scale_rows() const {
    return layout == ScaleLayout::block_128x128 ? ceil_div(rows, 128) : rows;
  }
  // Elements of the array of scales, with its gaps.
  CAPSTAN_HOST_DEVICE constexpr int64_t elements() const {
    if (order == ScaleOrder::row_major) return scale_rows() * blocks();
    if (layout == ScaleLayout::block_1x128) return blocks() * round_up(rows, 4);
    if (layout == ScaleLayout::block_128x128) return scale_rows() * round_up(blocks(), 4);
    return ceil_div(rows, 128) * ceil_div(blocks(), 4) * kTile;
  }
  // The element that is the scale of block `block` of row `row`, both of scales: for block_128x128 `row` is
  // that of the matrix divided by 128.
  CAPSTAN_HOST_DEVICE constexpr int64_t index(int64_t row, int64_t block) const {
    if (order == ScaleOrder::row_major) return row * blocks() + block;
    if (layout == ScaleLayout::block_1x128) return block * round_up(rows, 4) + row;
    if (layout == ScaleLayout::block_128x128) return row * round_up(blocks(), 4) + block;
    const int64_t tile = row / 128 * ceil_div(blocks(), 4) + block / 4;
    return tile * kTile + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
  }

 private:
  static constexpr int64_t kTile = 512;
};

}  // namespace capstan::kernels
