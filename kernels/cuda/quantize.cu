// Quantization for GEMMs in 8 and 4 bits (quantize_tile.hpp). Bytes moved for n elements of e bytes, codes of
// q bytes and one scale of s bytes per block of b elements: reads e n, and writes (q + s / b) n each for the
// rows and the columns. The maximum alone reads e n.
#include "kernels/quantize.hpp"

#include "kernels/cuda/families.hpp"
#include "kernels/cuda/quantize_tile.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// Writes 0 to the scale at an index of the padded rows and blocks, unless it is a scale of the matrix.
template <ScaleLayout kLayout>
struct FillGap {
  EncodedRows e;
  // Rows and blocks of the matrix, and blocks of a padded row.
  int64_t rows, blocks, all_blocks;
  __device__ void operator()(int64_t i, int64_t) const {
    const int64_t row = i / all_blocks, block = i % all_blocks;
    if (row >= rows || block >= blocks) store_scale<kLayout>(e, row, block, 0);
  }
};

void absolute_maximum(Context& c, In x, QuantizeShape s, bool hadamard, float* amax) {
  QuantizeTask task;
  task.rows.rows = task.columns.cols = s.rows;
  task.rows.cols = task.columns.rows = s.cols;
  task.columns.format.hadamard = hadamard;
  (hadamard ? task.transformed_amax : task.amax) = amax;
  quantize_array(c, x, s.stride, task);
}

struct CurrentScale {
  float *amax, *scale;
  float format_max;
  __device__ void operator()(int64_t i, int64_t) const {
    set_tensor_scale(usable(amax[i]) ? format_max / amax[i] : 1.0f, scale + 2 * i);
    amax[i] = 0;
  }
};
void current_scale(Context& c, float* amax, float* scale, int64_t count, float format_max) {
  map<1>(c, count, CurrentScale{amax, scale, format_max});
}

// A block for each tensor. The history moves from its end on, as many elements at a time as there are
// threads: none is overwritten before it is read.
constexpr int kHistoryThreads = 128;
__global__ void delayed_scale_kernel(const StepControl* control, float* amax, float* history, float* scale,
                                     Quantize::DelayedScaling d) {
  const int64_t i = block_index();
  const bool first = thread_index() == 0;
  if (control && control->skip) {
    if (first) amax[i] = 0;
    return;
  }
  float* own = history + i * d.history_length;
  const float found = amax[i];
  const float newest = found <= FLT_MAX ? found : 0.0f;
  uint32_t largest = magnitude_bits(newest);
  const int64_t chunks = ceil_div(d.history_length, int64_t{kHistoryThreads});
  for (int64_t begin = (chunks - 1) * kHistoryThreads; begin >= 0; begin -= kHistoryThreads) {
    const int64_t at = begin + thread_index();
    const bool moves = at < d.history_length;
    const float value = !moves ? 0.0f : at == 0 ? newest : own[at - 1];
    sync_threads();
    if (moves) own[at] = value;
    largest = Max<uint32_t>()(magnitude_bits(value), largest);
  }
  largest = block_reduce(largest, uint32_t{0}, Max<uint32_t>());
  if (!first) return;
  const float most = d.maximum ? std::bit_cast<float>(largest) : newest;
  const float format_max = i % 3 == 2 ? d.gradient_format_max : d.format_max;
  if (usable(most))
    set_tensor_scale(format_max / most / std::ldexp(1.0f, static_cast<int>(d.margin)), scale + 2 * i);
  amax[i] = 0;
}
void delayed_scale(Context& c, In control, float* amax, float* history, float* scale, int64_t layers,
                   Quantize::DelayedScaling d) {
  launch(c, {3 * layers, kHistoryThreads}, delayed_scale_kernel, control.as<StepControl>(), amax, history,
         scale, d);
}

void quantize(Context& c, QuantizeFormat format, QuantizeShape s, In x, const float* row_tensor_scale,
              Quantized rows, const float* column_tensor_scale, Quantized columns, float* amax,
              RoundingPosition random) {
  if ((rows.codes || columns.codes) &&
      (format.codes == DType::f4e2m1x2) != (format.layout == ScaleLayout::block_1x16))
    return refuse(c, "codes of 4 bits have scales of blocks of 16, and codes of 8 bits have others");
  const RoundingPosition of_columns{random.key, random.call | uint64_t{1} << 63};
  const QuantizeTask task{.rows = {format, s.rows, s.cols, row_tensor_scale, rows, random},
                          .columns = {format, s.cols, s.rows, column_tensor_scale, columns, of_columns},
                          .amax = amax,
                          .transformed_amax = nullptr};
  quantize_array(c, x, s.stride, task);
}

// A tile goes through shared memory, so that reads and writes are vectors of consecutive bytes. The pitch, in
// words of four codes, puts the codes of a column into different banks.
constexpr int kCodeTile = 128, kCodePitch = kCodeTile / 4 + 1, kCodeVector = 16, kTransposeThreads = 256;
__global__ void transpose_codes_kernel(const uint8_t* x, uint8_t* y, int64_t rows, int64_t cols) {
  CAPSTAN_SHARED(uint32_t, tile, kCodeTile * kCodePitch);
  constexpr int kVectors = kCodeTile / kCodeVector, kAll = kCodeTile * kVectors;
  struct alignas(16) Codes {
    uint32_t words[kCodeVector / 4];
  };
  const int64_t across = ceil_div(cols, int64_t{kCodeTile});
  const int64_t row = block_index() / across * kCodeTile, col = block_index() % across * kCodeTile;
  for (int i = thread_index(); i < kAll; i += kTransposeThreads) {
    const int r = i / kVectors, c = i % kVectors * kCodeVector;
    const uint8_t* from = x + (row + r) * cols + col + c;
    const int64_t count = row + r < rows ? cols - col - c : 0;
    Codes codes = {};
    if (count >= kCodeVector && reinterpret_cast<uintptr_t>(from) % kCodeVector == 0)
      codes = std::bit_cast<Codes>(load_16(from));
    else
      for (int k = 0; k < kCodeVector; ++k)
        if (k < count) codes.words[k / 4] |= uint32_t{from[k]} << k % 4 * 8;
    for (int k = 0; k < kCodeVector / 4; ++k) tile[r * kCodePitch + c / 4 + k] = codes.words[k];
  }
  sync_threads();
  // A warp has two vectors of 16 columns each: sectors of 32 bytes.
  for (int i = thread_index(); i < kAll; i += kTransposeThreads) {
    const int c = i / 2 % kCodeTile, r = (i / (2 * kCodeTile) * 2 + i % 2) * kCodeVector;
    if (col + c >= cols || row + r >= rows) continue;
    uint32_t words[kCodeVector / 4] = {};
    for (int k = 0; k < kCodeVector; ++k) {
      const uint32_t four = tile[(r + k) * kCodePitch + c / 4];
      words[k / 4] |= (four >> c % 4 * 8 & 0xFF) << k % 4 * 8;
    }
    store_codes<kCodeVector>(y + (col + c) * rows + row + r, words, rows - row - r);
  }
}
void transpose_codes(Context& c, In x, Out y, int64_t rows, int64_t cols) {
  const int64_t tiles = ceil_div(rows, int64_t{kCodeTile}) * ceil_div(cols, int64_t{kCodeTile});
  launch(c, {tiles, kTransposeThreads}, transpose_codes_kernel, x.as<uint8_t>(), y.as<uint8_t>(), rows, cols);
}

}  // namespace

void fill_scale_gaps(Context& c, const EncodedRows& e) {
  QuantizeTask task;
  task.rows = e;
  by_layout(task, [&]<ScaleLayout kLayout>(Layout<kLayout>) {
    if constexpr (kLayout != ScaleLayout::tensor) {
      const BlockScales scales{kLayout, kScaleOrder, e.rows, e.cols};
      const int64_t all = scales.elements(), rows = scales.scale_rows(), blocks = scales.blocks();
      if (all == rows * blocks) return;
      const int64_t all_blocks = kLayout == ScaleLayout::block_1x128 ? blocks : round_up(blocks, 4);
      map<1>(c, all, FillGap<kLayout>{e, rows, blocks, all_blocks});
    }
  });
}

void quantize_array(Context& c, In x, int64_t stride, const QuantizeTask& task) {
  by_layout(task, [&]<ScaleLayout kLayout>(Layout<kLayout>) {
    const auto run = [&]<class T>(T) {
      quantize_source<kLayout>(c, MatrixSource<T>{array_of<T>(x), stride}, task);
    };
    if (x.dtype == DType::f32)
      run(float{});
    else if (x.dtype == DType::bf16)
      run(bf16{});
    else
      run(f16{});
  });
}

const Quantize& quantize_family() {
  static const Quantize family{.absolute_maximum = absolute_maximum,
                               .current_scale = current_scale,
                               .delayed_scale = delayed_scale,
                               .quantize = quantize,
                               .transpose_codes = transpose_codes};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
