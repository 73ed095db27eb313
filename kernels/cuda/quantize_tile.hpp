// Codes and scales of a matrix, in tiles of 128 x 128 elements that hold full blocks of every layout. A block
// of threads reads a tile once, into shared memory, and encodes its rows and then its columns from there. The
// kernel that computes a matrix can write codes of its rows itself: encode_row().
#pragma once

#include "kernels/block_scales.hpp"
#include "kernels/common/hadamard.hpp"
#include "kernels/common/quantize.hpp"
#include "kernels/cuda/device.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

inline constexpr int kQuantizeTileSize = 128;
inline constexpr int kQuantizeThreads = 256;
// Consecutive elements of a column that a thread encodes: the smallest block, and that of the transform.
inline constexpr int kRun = 16;
static_assert(kRun == kHadamard);

// Order of block scales that the GEMMs of this device read.
inline constexpr ScaleOrder kScaleOrder = ScaleOrder::tensor_core;

// Codes and scales of the rows of a matrix, or of the rows of its transpose, with `cols` elements each. The
// layout of the scales, and with it the bits of codes (4 for block_1x16), is known at compile time.
struct EncodedRows {
  QuantizeFormat format;
  int64_t rows = 0, cols = 0;
  // Scale of the tensor, for `tensor` and block_1x16.
  const float* tensor_scale = nullptr;
  Quantized to;
  RoundingPosition random;
};

// Writes the scale of block `block` of row `row` of scales. stored: as of a BlockScale.
template <ScaleLayout kLayout>
__device__ void store_scale(const EncodedRows& e, int64_t row, int64_t block, uint32_t stored) {
  const int64_t at = BlockScales{kLayout, kScaleOrder, e.rows, e.cols}.index(row, block);
  if constexpr (block_scale_type(kLayout) == DType::f32)
    static_cast<float*>(e.to.scale)[at] = std::bit_cast<float>(stored);
  else
    static_cast<uint8_t*>(e.to.scale)[at] = static_cast<uint8_t>(stored);
}

// Random words of consecutive elements, for stochastic rounding.
struct CodeWords {
  RoundingPosition random;
  RandomBlock last = {};

  __device__ uint32_t of(uint64_t element) {
    return last.word_of(element, [&](uint64_t block) { return philox4x32(random.key, block, random.call); });
  }
};

// Stores the first of kBytes bytes, at most `count`, at once where the address allows it.
template <int kBytes>
__device__ void store_codes(uint8_t* to, const uint32_t* words, int64_t count) {
  if (count >= kBytes && reinterpret_cast<uintptr_t>(to) % kBytes == 0) {
    store_words<kBytes>(to, words);
    return;
  }
  for (int k = 0; k < kBytes; ++k)
    if (k < count) to[k] = static_cast<uint8_t>(words[k / 4] >> (k % 4 * 8));
}

// Stores values * factor as 8-bit codes, from element (row, col) on.
template <SmallFloat F, int kCount>
__device__ void encode_bytes(const EncodedRows& e, int64_t row, int64_t col, const float* values,
                             float factor) {
  uint32_t words[kCount / 4];
  for (int k = 0; k < kCount; k += 4) {
    float scaled[4];
    for (int i = 0; i < 4; ++i) scaled[i] = values[k + i] * factor;
    words[k / 4] = encode_four<F>(scaled);
  }
  store_codes<kCount>(static_cast<uint8_t*>(e.to.codes) + row * e.cols + col, words, e.cols - col);
}
// Stores values * factor as 4-bit codes. In rows with an odd number of elements the last byte holds one code.
template <int kCount>
__device__ void encode_nibbles(const EncodedRows& e, int64_t row, int64_t col, const float* values,
                               float factor) {
  const int64_t count = e.cols - col;
  uint32_t words[kCount < 8 ? 1 : kCount / 8] = {};
  CodeWords random{e.random};
  const auto element = static_cast<uint64_t>(row * e.cols + col);
  CAPSTAN_UNROLL
  for (int k = 0; k < kCount; k += 2) {
    const float first = values[k] * factor, second = k + 1 < count ? values[k + 1] * factor : 0.0f;
    uint32_t codes;
    if (e.format.stochastic) {
      codes = encode_stochastic<kE2m1>(first, random.of(element + static_cast<uint64_t>(k)));
      if (k + 1 < count)
        codes |= encode_stochastic<kE2m1>(second, random.of(element + static_cast<uint64_t>(k + 1))) << 4;
    } else {
      codes = encode_pair(first, second);
    }
    words[k / 8] |= codes << (k % 8 * 4);
  }
  const int64_t row_bytes = ceil_div(e.cols, int64_t{2});
  store_codes<kCount / 2>(static_cast<uint8_t*>(e.to.codes) + row * row_bytes + col / 2, words,
                          ceil_div(count, int64_t{2}));
}

template <int kCount>
__device__ uint32_t largest_of_values(const float* values) {
  uint32_t largest = 0;
  for (int k = 0; k < kCount; ++k) largest = Max<uint32_t>()(magnitude_bits(values[k]), largest);
  return largest;
}

// Encodes kCount elements from (row, col) on, which may lie outside and are 0 there. All lanes of a warp call
// it, neighbors with neighboring elements of a row, so that those of a block with one scale stand together.
// several_rows: the block consists of several rows, and its maximum is `amax`.
template <ScaleLayout kLayout, int kCount>
__device__ void encode_row(const EncodedRows& e, int64_t row, int64_t col, const float* values,
                           bool several_rows = false, uint32_t amax = 0, Location at = {}) {
  constexpr bool kBlocks = kLayout != ScaleLayout::tensor;
  // The block is unused if the tensor has one scale.
  constexpr int kBlock = kBlocks ? static_cast<int>(block_of(kLayout)) : kCount;
  if (kBlocks && !several_rows)
    amax = warp_reduce(largest_of_values<kCount>(values), Max<uint32_t>(), kBlock / kCount, at);
  if (row >= e.rows || col >= e.cols) return;
  QuantizeFormat format = e.format;
  format.layout = kLayout;
  const BlockScale scale = block_scale(format, std::bit_cast<float>(amax), e.tensor_scale);
  if constexpr (kLayout == ScaleLayout::block_128x128) {
    if (row % 128 == 0 && col % kBlock == 0) store_scale<kLayout>(e, row / 128, col / kBlock, scale.stored);
  } else if constexpr (kBlocks) {
    if (col % kBlock == 0) store_scale<kLayout>(e, row, col / kBlock, scale.stored);
  }
  if constexpr (kLayout == ScaleLayout::block_1x16)
    encode_nibbles<kCount>(e, row, col, values, scale.factor);
  else if (format.codes == DType::f8e4m3)
    encode_bytes<kE4m3, kCount>(e, row, col, values, scale.factor);
  else
    encode_bytes<kE5m2, kCount>(e, row, col, values, scale.factor);
}

// *amax = the maximum of it and `largest` of all threads of the block.
__device__ inline void record_maximum(uint32_t largest, float* amax, Location at = {}) {
  largest = block_reduce(largest, uint32_t{0}, Max<uint32_t>(), at);
  if (thread_index() == 0) atomic_max(reinterpret_cast<uint32_t*>(amax), largest);
}

// Results that a launch computes from a matrix [rows, cols]. No codes, or null: not computed.
struct QuantizeTask {
  EncodedRows rows, columns;
  // Maxima of the elements, and of the transformed columns.
  float *amax = nullptr, *transformed_amax = nullptr;

  // True if more than the maximum of the elements is computed.
  __host__ __device__ bool reads_tile() const {
    return rows.to.codes || columns.to.codes || transformed_amax;
  }
};

// A matrix in memory, the source of a launch. load() returns the elements of row `row` from `col` on, those
// from `count` on as 0. Full tiles are copied to shared memory where vectors are aligned.
template <class T>
struct MatrixSource {
  using Stored = T;
  static constexpr bool kCopies = true;
  Array<T> x;
  int64_t stride;
  __device__ Group<kGroup<T>> load(int64_t row, int64_t col, int64_t count) const {
    return x.load(row * stride + col, count);
  }
  __device__ const T* address(int64_t row, int64_t col) const { return x.p + row * stride + col; }
  __device__ bool has_vectors() const {
    return stride % kGroup<T> == 0 && reinterpret_cast<uintptr_t>(x.p) % 16 == 0;
  }
};

// A tile in shared memory: [128, 128], with an XOR swizzle against bank conflicts: groups of kSize columns,
// those of a vector, are permuted by row / 16, so that accesses along rows and along columns have none.
template <class T>
struct QuantizeTile {
  static constexpr int kSize = kGroup<T>;
  Shared<T> values;
  int64_t first_row, first_col;

  static __device__ int at(int row, int col) {
    return row * kQuantizeTileSize + (col ^ (row / kRun * kSize));
  }
  __device__ void store(int row, int col, const Group<kSize>& group, Location location = {}) const {
    store_16(values, at(row, col), Array<T>::pack(group), location);
  }
  __device__ Group<kSize> load(int row, int col, Location location = {}) const {
    return Array<T>::unpack(load_16(values, at(row, col), location));
  }
  // Element (row + k, col), k < kRun, of the run that begins in row `row`, a multiple of kRun.
  __device__ float of_run(int row, int col, int k) const {
    const T value = values[at(row, col) + k * kQuantizeTileSize];
    return to_float(value);
  }
};

// Maxima of the blocks of 16 x 16, or of the tile in all of them.
__device__ inline uint32_t block_at(int row, int col) {
  return static_cast<uint32_t>(row / kRun * (kQuantizeTileSize / kRun) + col / kRun);
}
template <ScaleLayout kLayout, class T>
__device__ void find_block_maxima(const QuantizeTile<T>& tile, uint32_t largest,
                                  const Shared<uint32_t>& maxima) {
  static_assert(kQuantizeThreads == 4 * (kQuantizeTileSize / kRun) * (kQuantizeTileSize / kRun));
  const int block = thread_index() / 4, quarter = thread_index() % 4;
  if constexpr (kLayout == ScaleLayout::block_128x128) {
    largest = block_reduce(largest, uint32_t{0}, Max<uint32_t>());
  } else {
    sync_threads();
    const int row = block / (kQuantizeTileSize / kRun) * kRun,
              col = block % (kQuantizeTileSize / kRun) * kRun;
    largest = 0;
    // Lanes begin in different columns, which lie in different banks.
    for (int i = 0; i < kRun * kRun / 4; ++i) {
      const float value =
          tile.of_run(row, col + (i + thread_index()) % kRun, quarter * (kRun / 4) + i / kRun);
      largest = Max<uint32_t>()(magnitude_bits(value), largest);
    }
    largest = warp_reduce(largest, Max<uint32_t>(), 4);
  }
  if (quarter == 0) maxima[block] = largest;
  sync_threads();
}

// body(row, column) for the groups of a tile that a thread reads, and encodes along rows.
template <class T, class Body>
__device__ void for_groups(const Body& body) {
  constexpr int kSize = kGroup<T>, kLanes = kQuantizeTileSize / kSize, kRows = kQuantizeThreads / kLanes;
  const int col = thread_index() % kLanes * kSize;
  for (int row = thread_index() / kLanes; row < kQuantizeTileSize; row += kRows) body(row, col);
}

// Reads the tile, all elements of which are 0 outside of the matrix. Returns the maximum of this thread's, or
// of none of them if `counts` is not set.
template <class Source, class T>
__device__ uint32_t read_tile(const Source& source, const QuantizeTask& task, const QuantizeTile<T>& tile,
                              bool counts) {
  constexpr int kSize = kGroup<T>;
  const int64_t rows = task.rows.rows, cols = task.rows.cols;
  uint32_t largest = 0;
  const auto count = [&](const Group<kSize>& group) {
    largest = Max<uint32_t>()(largest_of_values<kSize>(group.v), largest);
  };
  if constexpr (Source::kCopies)
    if (source.has_vectors() && tile.first_row + kQuantizeTileSize <= rows &&
        tile.first_col + kQuantizeTileSize <= cols) {
      for_groups<T>([&](int row, int col) {
        copy_async<16>(tile.values, QuantizeTile<T>::at(row, col),
                       source.address(tile.first_row + row, tile.first_col + col));
      });
      commit_copies();
      wait_for_copies<0>();
      if (counts) for_groups<T>([&](int row, int col) { count(tile.load(row, col)); });
      return largest;
    }
  for_groups<T>([&](int row, int col) {
    Group<kSize> group = {};
    const int64_t r = tile.first_row + row, c = tile.first_col + col;
    if (r < rows && c < cols) group = source.load(r, c, cols - c);
    if (counts) count(group);
    if (task.reads_tile()) tile.store(row, col, group);
  });
  return largest;
}

// The groups that read_tile() has stored by the same thread. Returns the maximum of this thread's.
template <ScaleLayout kLayout, class T>
__device__ uint32_t encode_rows_of_tile(const QuantizeTile<T>& tile, const EncodedRows& rows,
                                        const Shared<uint32_t>& maxima, bool several_rows) {
  uint32_t largest = 0;
  for_groups<T>([&](int row, int col) {
    const auto group = tile.load(row, col);
    largest = Max<uint32_t>()(largest_of_values<kGroup<T>>(group.v), largest);
    const uint32_t amax = several_rows ? static_cast<uint32_t>(maxima[block_at(row, col)]) : 0;
    encode_row<kLayout, kGroup<T>>(rows, tile.first_row + row, tile.first_col + col, group.v, several_rows,
                                   amax);
  });
  return largest;
}

// A thread takes a run of a column, and its neighbors the others of the column. Returns the maximum of the
// thread's values, which are transformed first if the format says so, or of none if `counts` is not set.
template <ScaleLayout kLayout, class T>
__device__ uint32_t encode_columns_of_tile(const QuantizeTile<T>& tile, const EncodedRows& columns,
                                           const Shared<uint32_t>& maxima, bool several_rows, bool counts) {
  constexpr int kRuns = kQuantizeTileSize / kRun;
  const int row = thread_index() % kRuns * kRun;
  const int64_t first = tile.first_row + row;
  uint32_t largest = 0;
  for (int col = thread_index() / kRuns; col < kQuantizeTileSize; col += kQuantizeThreads / kRuns) {
    float values[kRun];
    for (int k = 0; k < kRun; ++k) values[k] = tile.of_run(row, col, k);
    // A shorter run at the end stays as it is.
    if (columns.format.hadamard && first + kRun <= columns.cols) hadamard_transform(values);
    if (counts) largest = Max<uint32_t>()(largest_of_values<kRun>(values), largest);
    if (!columns.to.codes) continue;
    const uint32_t amax = several_rows ? static_cast<uint32_t>(maxima[block_at(row, col)]) : 0;
    encode_row<kLayout, kRun>(columns, tile.first_col + col, first, values, several_rows, amax);
  }
  return largest;
}

template <ScaleLayout kLayout, class Source>
__global__ void CAPSTAN_LAUNCH_BOUNDS(kQuantizeThreads, kLayout == ScaleLayout::block_1x16 ? 2 : 3)
    quantize_kernel(Source source, QuantizeTask task) {
  using T = typename Source::Stored;
  CAPSTAN_DYNAMIC_SHARED(T, values);
  CAPSTAN_SHARED(uint32_t, maxima, (kQuantizeTileSize / kRun) * (kQuantizeTileSize / kRun));
  const int64_t across = ceil_div(task.rows.cols, int64_t{kQuantizeTileSize});
  const QuantizeTile<T> tile{values, block_index() / across * kQuantizeTileSize,
                             block_index() % across * kQuantizeTileSize};
  // The rows' pass counts as well; blocks of several rows need their maxima before.
  const bool several_rows = kLayout == ScaleLayout::block_128x128 ||
                            (kLayout == ScaleLayout::block_1x16 && task.rows.format.square);
  const bool by_rows = task.rows.to.codes && kLayout != ScaleLayout::block_128x128;
  uint32_t largest = read_tile(source, task, tile, !by_rows);
  if (several_rows) find_block_maxima<kLayout>(tile, largest, maxima);
  if (task.rows.to.codes) {
    const uint32_t of_rows = encode_rows_of_tile<kLayout>(tile, task.rows, maxima, several_rows);
    if (by_rows) largest = of_rows;
  }
  if (task.amax) record_maximum(largest, task.amax);
  if (!task.columns.to.codes && !task.transformed_amax) return;
  sync_threads();
  const uint32_t transformed = encode_columns_of_tile<kLayout>(tile, task.columns, maxima, several_rows,
                                                               task.transformed_amax != nullptr);
  if (task.transformed_amax) record_maximum(transformed, task.transformed_amax);
}

// Writes 0 between the scales of blocks, where the sizes of the matrix leave gaps (quantize.cu).
void fill_scale_gaps(Context& c, const EncodedRows& e);

// body(layout), with the layout as a type: that of the codes of a task, or `tensor` where it has none.
template <ScaleLayout kLayout>
struct Layout {
  static constexpr ScaleLayout value = kLayout;
};
template <class Body>
void by_layout(const QuantizeTask& task, const Body& body) {
  const bool has_codes = task.rows.to.codes || task.columns.to.codes;
  switch (has_codes ? task.rows.format.layout : ScaleLayout::tensor) {
    case ScaleLayout::block_1x128:
      return body(Layout<ScaleLayout::block_1x128>());
    case ScaleLayout::block_128x128:
      return body(Layout<ScaleLayout::block_128x128>());
    case ScaleLayout::block_1x32:
      return body(Layout<ScaleLayout::block_1x32>());
    case ScaleLayout::block_1x16:
      return body(Layout<ScaleLayout::block_1x16>());
    case ScaleLayout::tensor:
    case ScaleLayout::none:
      break;
  }
  return body(Layout<ScaleLayout::tensor>());
}
// As above for a quantized output, which supports fewer layouts.
template <class Body>
void by_layout_of_output(const QuantizeTask& task, const Body& body) {
  by_layout(task, [&]<ScaleLayout kLayout>(Layout<kLayout> layout) {
    if constexpr (kLayout != ScaleLayout::block_128x128 && kLayout != ScaleLayout::block_1x16) body(layout);
  });
}

// Computes the task of a matrix that `source` reads or computes.
template <ScaleLayout kLayout, class Source>
void quantize_source(Context& c, const Source& source, const QuantizeTask& task) {
  using T = typename Source::Stored;
  const int64_t tiles = ceil_div(task.rows.rows, int64_t{kQuantizeTileSize}) *
                        ceil_div(task.rows.cols, int64_t{kQuantizeTileSize});
  const size_t shared =
      Source::kCopies || task.reads_tile() ? sizeof(T) * kQuantizeTileSize * kQuantizeTileSize : 0;
  launch(c, {tiles, kQuantizeThreads, shared}, quantize_kernel<kLayout, Source>, source, task);
  fill_scale_gaps(c, task.rows);
  fill_scale_gaps(c, task.columns);
}

// Quantizes an array in memory, with rows `stride` elements apart (quantize.cu).
void quantize_array(Context& c, In x, int64_t stride, const QuantizeTask& task);

// The task for the quantized output of a matrix [rows, cols].
inline QuantizeTask task_of(const QuantizedOutput& output, int64_t rows, int64_t cols) {
  return {.rows = {output.format, rows, cols, output.tensor_scale, output.rows, {}},
          .columns = {output.format, cols, rows, output.tensor_scale, output.columns, {}},
          .amax = output.amax,
          .transformed_amax = nullptr};
}
// Reports an error if a quantized output does not support this layout of codes. Returns whether it did.
inline bool refuse_quantized_output(Context& c, const QuantizedOutput& output,
                                    const char* file = __builtin_FILE(),
                                    const char* function = __builtin_FUNCTION()) {
  const QuantizeFormat& f = output.format;
  const bool has = f.layout == ScaleLayout::tensor || f.layout == ScaleLayout::block_1x128 ||
                   f.layout == ScaleLayout::block_1x32;
  if (!(output.rows.codes || output.columns.codes) || (has && !f.square && !f.hadamard && !f.stochastic))
    return false;
  refuse(c, "a quantized output has codes with a scale of the tensor or of blocks 1x128 and 1x32 only", file,
         function);
  return true;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
