// Quantization to types of 8 and 4 bits for GEMMs, and the scales of the scaling recipes of Transformer
// Engine.
#pragma once

#include "base/philox.hpp"
#include "kernels/operand.hpp"
#include "kernels/step_control.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

struct QuantizeShape {
  int64_t rows = 0, cols = 0, stride = 0;  // elements
};

struct QuantizeFormat {
  DType codes = DType::f8e4m3;
  ScaleLayout layout = ScaleLayout::tensor;
  // block_1x16: blocks of 16 x 16 have one scale, which is written for each of their rows, so that a matrix
  // and its transpose have the same values (weights).
  bool square = false;
  // Columns only: blocks of 16 are multiplied with the Hadamard matrix of kernels/common/hadamard.hpp first.
  // It is orthogonal: the product of two matrices along that dimension does not change.
  bool hadamard = false;
  // fp4: rounded up or down with the probability that makes the expected value right, else to nearest.
  bool stochastic = false;
};

// Random numbers of stochastic rounding: element i of the codes takes word i % 4 of the Philox block with
// counter (i / 4, call); element i of the transposed codes that with counter (i / 4, call + 2^63).
struct RoundingPosition {
  PhiloxKey key{};
  uint64_t call = 0;
};

// Codes and scales of a matrix. codes null: not computed.
struct Quantized {
  void* codes = nullptr;
  // Block scales: all elements of BlockScales (block_scales.hpp), in the device's order, its gaps 0.
  void* scale = nullptr;
};

// The quantized output of a kernel that computes a matrix y [rows, cols], contiguous, which a linear layer
// reads: the result of Quantize::quantize for y as stored, in the launch that writes y. A kernel can write
// codes where their scales are known without the rest of y:
//   tensor, delayed scaling                    codes, the scale being that of earlier steps, and amax
//   block_1x128, block_1x32                    codes; a block of `columns` takes 128 or 32 rows
//   tensor, current scaling; block_1x16        amax alone, which the scale of the tensor needs first
// block_128x128, `square`, `hadamard` and `stochastic` are for other matrices. Rows and columns are optional.
struct QuantizedOutput {
  QuantizeFormat format;
  // {scale, inverse} of the tensor, of rows and columns alike, or null, as in Quantize::quantize.
  const float* tensor_scale = nullptr;
  Quantized rows, columns;
  // fp32 [1], as in Quantize::absolute_maximum; null: none.
  float* amax = nullptr;

  explicit operator bool() const { return rows.codes || columns.codes || amax; }
};

struct Quantize {
  // amax[0] = max(amax[0], |x|), or with `hadamard` of the transformed columns; NaN is the largest. amax must
  // not be negative.
  void (*absolute_maximum)(Context&, In x, QuantizeShape, bool hadamard, float* amax);

  // The scales of `count` tensors from their maxima: scale [count, 2], scale[i] = {format_max / amax[i], its
  // inverse}; 1 where amax[i] is 0 or not finite. Sets amax to 0. format_max: largest value of the type.
  void (*current_scale)(Context&, float* amax, float* scale, int64_t count, float format_max);

  // Delayed scaling of `layers` linear layers with three tensors each: input, weight, gradient of the output.
  // history [layers, 3, history_length] is shifted by one, and amax [layers, 3] becomes its first element, 0
  // where it is not finite; scale [layers, 3, 2] is as in current_scale, from the first element of the
  // history or from its maximum, divided by 2^margin. It keeps its value where that maximum is 0. Sets amax
  // to 0. control: one StepControl, whose `skip` leaves history and scale as they are; null: it does not
  // skip.
  struct DelayedScaling {
    int64_t history_length = 1;
    // The scale comes from the maximum of the history; false: from its first, most recent element.
    bool maximum = false;
    int64_t margin = 0;
    // Largest values of the types: 448 for e4m3, 57344 for e5m2.
    float format_max = 448, gradient_format_max = 448;
  };
  void (*delayed_scale)(Context&, In control, float* amax, float* history, float* scale, int64_t layers,
                        DelayedScaling);

  // Codes of x along its rows (`rows`: [rows, cols]) and of its transpose along the rows of x (`columns`:
  // [cols, rows]), each with its own scales; in one pass, x is read once. Tensor scales: {scale, inverse} of
  // current_scale or delayed_scale, with `tensor` and block_1x16, else null; the GEMM takes the inverse.
  // `amax` as in absolute_maximum; null: none. The stored scale of a block with maximum a, where m is the
  // largest value of the type:
  //   block_1x128, block_128x128   the inverse, in fp32, of the largest power of two up to m / a
  //   block_1x32                   a / m, rounded up to a power of two (e8m0)
  //   block_1x16                   a / 6 * tensor scale in e4m3; the codes are x * tensor scale / that
  // A block of zeros has scale 1 (block_1x16: 0).
  void (*quantize)(Context&, QuantizeFormat, QuantizeShape, In x, const float* row_tensor_scale,
                   Quantized rows, const float* column_tensor_scale, Quantized columns, float* amax,
                   RoundingPosition);

  // y [cols, rows] = the transpose of x [rows, cols], of codes of 8 bits. Reads and writes rows x cols bytes.
  void (*transpose_codes)(Context&, In x, Out y, int64_t rows, int64_t cols);
};

}  // namespace capstan::kernels
