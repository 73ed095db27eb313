// Quantized outputs of CPU kernels.
#pragma once

#include "kernels/quantize.hpp"

namespace capstan::kernels {

// A multiple of the blocks of every layout.
constexpr int64_t kQuantizedRows = 128;

// Writes a QuantizedOutput for rows [begin, end) of y [rows, cols], which are complete. `begin` is a multiple
// of kQuantizedRows, and so is `end` unless it is `rows`.
void quantize_rows(const QuantizedOutput& output, In y, int64_t rows, int64_t cols, int64_t begin,
                   int64_t end);

}  // namespace capstan::kernels
