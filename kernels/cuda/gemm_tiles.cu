// GEMMs whose sizes are in device memory (groups), and GEMMs of codes that tensor cores cannot read in place.
// A block computes a tile of 128 x 128 of C in steps of 32 of k, by the matrix operations of its eight warps;
// tiles of A and B pass through shared memory, in three stages of asynchronous copies where 16-bit values are
// aligned. Values of fp32 are the sums of three bf16 terms (bf16x3), which hold all their bits: six products
// of terms replace one, and the three smallest, below the last bit of fp32, are left out. A code times the
// scale of its block, which has at most four significant bits, is a bf16 value; the scale of the tensor
// multiplies the sums. Bytes moved: A once for each 128 columns of C, B once for each 128 rows of a group,
// mostly from the L2 cache; C once, twice with beta. Sums over k run in one sequence.
#include <array>

#include "kernels/block_scales.hpp"
#include "kernels/cuda/bf16x3.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/gemm.hpp"
#include "tensor/float8.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

constexpr int kGemmTile = 128, kDepth = 32, kGemmThreads = 256;
// A warp computes 64 rows and 32 columns of the tile, in fragments of 16 x 16.
constexpr int kWarpRows = 64, kWarpCols = 32, kAFragments = kWarpRows / 16, kBFragments = kWarpCols / 16;
constexpr int kWarpsAcross = kGemmTile / kWarpCols;
// A tile of A or B in shared memory consists of chunks of eight 16-bit values.
constexpr int kChunkValues = 8, kTileChunks = kGemmTile * kDepth / kChunkValues;

// ---- operands, as rows (m or n) by k

// Origin of the matrix of a group or batch: offset in elements, first row and first k.
struct TileOrigin {
  int64_t elements = 0, row = 0, k = 0;
};

// Index of a chunk in a tile of shared memory: eight elements of k of one row, or with `by_k` eight rows of
// one k. Chunks are swizzled, so that the rows of a matrix operation lie in different banks.
__device__ inline int tile_slot(bool by_k, int row, int k) {
  return by_k ? k * (kGemmTile / kChunkValues) + ((row / kChunkValues) ^ (k % 8))
              : row * (kDepth / kChunkValues) + ((k / kChunkValues) ^ (row / 2 % 4));
}

struct alignas(16) HalfChunk {
  uint16_t bits[kChunkValues];
};

// fp32, bf16 or fp16.
template <class T>
struct FloatSource {
  static constexpr int kTerms = Terms<T>::kCount;
  // On a multiprocessor.
  [[maybe_unused]] static constexpr int kBlocks = kTerms == 1 ? 2 : 1;
  using Term = typename Terms<T>::Type;
  const T* data;
  int64_t ld;
  // Rows are contiguous, not elements of k.
  bool by_k;

  __device__ const T* at(const TileOrigin& origin, int64_t row, int64_t k) const {
    row += origin.row;
    k += origin.k;
    return data + origin.elements + (by_k ? k * ld + row : row * ld + k);
  }
};
// Codes with scales, [rows, k]; k contiguous.
struct CodeSource {
  static constexpr int kTerms = 1;
  // Decoding takes registers.
  [[maybe_unused]] static constexpr int kBlocks = 1;
  using Term = bf16;
  static constexpr bool by_k = false;
  const uint8_t* codes;
  DType type;
  const void* scale;
  const float* tensor_scale;
  BlockScales scales;

  // Scale of the block of element k in row `row`, without that of the tensor.
  __device__ float scale_at(int64_t row, int64_t k) const {
    const auto* const floats = static_cast<const float*>(scale);
    const auto* const bytes = static_cast<const uint8_t*>(scale);
    switch (scales.layout) {
      case ScaleLayout::block_1x128:
        return floats[scales.index(row, k / 128)];
      case ScaleLayout::block_128x128:
        return floats[scales.index(row / 128, k / 128)];
      case ScaleLayout::block_1x32:
        return decode_e8m0(bytes[scales.index(row, k / 32)]);
      case ScaleLayout::block_1x16:
        return decode<kE4m3>(bytes[scales.index(row, k / 16)]);
      case ScaleLayout::none:
      case ScaleLayout::tensor:
        break;
    }
    return 1;
  }
  __device__ float scale_of_tensor() const {
    if (scales.layout == ScaleLayout::tensor) return *static_cast<const float*>(scale);
    return scales.layout == ScaleLayout::block_1x16 ? *tensor_scale : 1.0f;
  }
  __device__ float code_at(int64_t row, int64_t k) const {
    if (type == DType::f4e2m1x2)
      return decode<kE2m1>(codes[row * ceil_div(scales.cols, 2) + k / 2] >> (k % 2 * 4) & 0xFu);
    const uint8_t code = codes[row * scales.cols + k];
    return type == DType::f8e4m3 ? decode<kE4m3>(code) : decode<kE5m2>(code);
  }
};

// Writes one chunk with the first `count` values from row `row` and element `k` of the matrix of a group, and
// zeros.
template <class T>
__device__ void fill_chunk(const FloatSource<T>& source, const TileOrigin& origin, int64_t row, int64_t k,
                           int count, const Shared<Bytes16>& memory, int slot) {
  const T* const from = source.at(origin, row, k);
  if constexpr (std::is_same_v<T, float>) {
    float values[kChunkValues];
    for (int i = 0; i < kChunkValues; ++i) values[i] = i < count ? from[i] : 0.0f;
    store_terms<float>(values, memory, slot, kTileChunks);
  } else if (count > 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    copy_part_async<16>(memory, slot, reinterpret_cast<const Bytes16*>(from),
                        count * static_cast<int>(sizeof(T)));
  } else {
    HalfChunk chunk;
    for (int i = 0; i < kChunkValues; ++i) chunk.bits[i] = i < count ? from[i].bits : uint16_t{0};
    memory[slot] = std::bit_cast<Bytes16>(chunk);
  }
}
__device__ inline void fill_chunk(const CodeSource& source, const TileOrigin& origin, int64_t row, int64_t k,
                                  int count, const Shared<Bytes16>& memory, int slot) {
  row += origin.row;
  k += origin.k;
  float values[kChunkValues] = {};
  if (count > 0) {
    // All elements of a chunk lie in one quantization block.
    const float scale = source.scale_at(row, k);
    for (int i = 0; i < kChunkValues && i < count; ++i) values[i] = source.code_at(row, k + i) * scale;
  }
  store_terms<bf16>(values, memory, slot, kTileChunks);
}

// Rows [row, row + 128) and elements [k, k + 32) of a matrix of `rows` rows and `depth` elements of k; beyond
// them zeros. `first`: of the tile in shared memory.
template <class Source>
__device__ void fill_tile(const Source& source, const TileOrigin& origin, int64_t row, int64_t rows,
                          int64_t k, int64_t depth, const Shared<Bytes16>& memory, int first) {
  const auto left = [](int64_t end, int64_t begin) {
    return narrow<int>(end - begin < kChunkValues ? end - begin : kChunkValues);
  };
  for (int i = thread_index(); i < kTileChunks; i += kGemmThreads) {
    if (source.by_k) {
      const int at_k = i / (kGemmTile / kChunkValues), at_row = i % (kGemmTile / kChunkValues) * kChunkValues;
      const int count = k + at_k < depth ? left(rows, row + at_row) : 0;
      fill_chunk(source, origin, row + at_row, k + at_k, count, memory,
                 first + tile_slot(true, at_row, at_k));
    } else {
      const int at_row = i / (kDepth / kChunkValues), at_k = i % (kDepth / kChunkValues) * kChunkValues;
      const int count = row + at_row < rows ? left(depth, k + at_k) : 0;
      fill_chunk(source, origin, row + at_row, k + at_k, count, memory,
                 first + tile_slot(false, at_row, at_k));
    }
  }
}

// ---- fragments

// Loads the terms of kCount fragments of 16 x 16, from row `row` of the tile and element k on. Of the 8 x 8
// matrices of a fragment of A the halves of rows come first, of B the halves of k.
template <bool kIsA, int kTerms, int kCount>
__device__ void load_fragments(bool by_k, int row, int k, const Shared<Bytes16>& memory, int first,
                               uint32_t (&to)[kTerms * kCount][4]) {
  const int matrix = lane_index() / 8, line = lane_index() % 8;
  const int row_half = kIsA ? matrix % 2 : matrix / 2, k_half = kIsA ? matrix / 2 : matrix % 2;
  int rows[kTerms * kCount];
  CAPSTAN_UNROLL
  for (int i = 0; i < kTerms * kCount; ++i) {
    const int at_row = row + 16 * (i % kCount) + 8 * row_half, at_k = k + 8 * k_half;
    rows[i] = first + i / kCount * kTileChunks +
              (by_k ? tile_slot(true, at_row, at_k + line) : tile_slot(false, at_row + line, at_k));
  }
  if (by_k)
    load_matrices<true>(to, memory, rows);
  else
    load_matrices<false>(to, memory, rows);
}

// ---- groups

enum class TileGroups : uint8_t { batch, m, k };

template <class Source>
struct TileGemm {
  GemmShape s;
  TileGroups groups;
  const int64_t* sizes;
  int64_t count;
  Source a, b;
  Array<Any> c;
  float alpha, beta;
  // [count, n]; null: none.
  Array<Any> bias;
};

// The tile of a block: its group, the sizes of that GEMM, and the corner of the tile.
struct TileTask {
  int64_t group = 0, m = 0, k = 0;
  int64_t row = 0, column = 0;
  // Number of rows of all groups before this one (groups of m), or of their elements of k.
  int64_t first = 0;
  bool exists = false;
};
template <class Source>
__device__ TileTask task_of(const TileGemm<Source>& g) {
  const auto tiles = [](int64_t n) { return ceil_div(n, kGemmTile); };
  const int64_t across = tiles(g.s.n);
  int64_t down = block_index() / across;
  TileTask task;
  task.column = block_index() % across * kGemmTile;
  task.m = g.s.m;
  task.k = g.s.k;
  if (g.groups == TileGroups::m) {
    // Each group has its own tiles of rows; the grid has blocks for all that there can be.
    for (; task.group < g.count && down >= tiles(g.sizes[task.group]); ++task.group) {
      down -= tiles(g.sizes[task.group]);
      task.first += g.sizes[task.group];
    }
    task.exists = task.group < g.count;
    if (task.exists) task.m = g.sizes[task.group];
  } else {
    task.group = down / tiles(g.s.m);
    down %= tiles(g.s.m);
    task.exists = true;
    if (g.groups == TileGroups::k) {
      for (int64_t i = 0; i < task.group; ++i) task.first += g.sizes[i];
      task.k = g.sizes[task.group];
    }
  }
  task.row = down * kGemmTile;
  return task;
}
// Origin of A (or B) of the task's group.
template <class Source>
__device__ TileOrigin origin_of(const TileGemm<Source>& g, const TileTask& task, bool is_a) {
  TileOrigin origin;
  if (g.groups == TileGroups::k)
    origin.k = task.first;
  else if (g.groups == TileGroups::m && is_a)
    origin.row = task.first;
  else
    origin.elements = task.group * (is_a ? g.s.stride_a : g.s.stride_b);
  if constexpr (std::is_same_v<Source, CodeSource>) {
    origin.row += origin.elements / (is_a ? g.a : g.b).scales.cols;
    origin.elements = 0;
  }
  return origin;
}

template <class Source>
__device__ void store_tile(const TileGemm<Source>& g, const TileTask& task, int warp_row, int warp_column,
                           const float (&accumulators)[kAFragments][2 * kBFragments][4]) {
  const int64_t matrix = g.groups == TileGroups::m ? task.first * g.s.ldc : task.group * g.s.stride_c;
  float alpha = g.alpha;
  if constexpr (std::is_same_v<Source, CodeSource>) alpha *= g.a.scale_of_tensor() * g.b.scale_of_tensor();
  CAPSTAN_UNROLL
  for (int m = 0; m < kAFragments; ++m) CAPSTAN_UNROLL
  for (int n = 0; n < 2 * kBFragments; ++n) CAPSTAN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int64_t row = task.row + warp_row + 16 * m + lane_index() / 4 + i / 2 * 8;
    const int64_t column = task.column + warp_column + 8 * n + lane_index() % 4 * 2 + i % 2;
    if (row >= task.m || column >= g.s.n) continue;
    const int64_t at = matrix + row * g.s.ldc + column;
    float value = alpha * accumulators[m][n][i];
    if (g.beta != 0) value += g.beta * g.c.at(at);
    if (g.bias) value += g.bias.at(task.group * g.s.n + column);
    g.c.put(at, value);
  }
}

template <class Source>
inline constexpr int kTileStages = Source::kTerms == 1 ? 3 : 2;
// Chunks of a stage: A's terms, then B's.
template <class Source>
inline constexpr int kStageChunks = 2 * Source::kTerms* kTileChunks;

template <class Source>
__global__ void CAPSTAN_LAUNCH_BOUNDS(kGemmThreads, Source::kBlocks) tile_kernel(TileGemm<Source> g) {
  constexpr int kStages = kTileStages<Source>, kTerms = Source::kTerms;
  CAPSTAN_DYNAMIC_SHARED(Bytes16, memory);
  const TileTask task = task_of(g);
  // The grid may have more blocks than the groups have tiles.
  if (!task.exists) return;
  const TileOrigin a_origin = origin_of(g, task, true), b_origin = origin_of(g, task, false);
  // Not warp_index(), whose unsigned division lets ptxas spill 352 bytes in this kernel (CUDA 13.0).
  const int warp = thread_index() / kWarp, warp_row = warp / kWarpsAcross * kWarpRows,
            warp_column = warp % kWarpsAcross * kWarpCols;
  // This warp has no elements of C.
  const bool idle = task.row + warp_row >= task.m || task.column + warp_column >= g.s.n;
  const int64_t steps = ceil_div(task.k, kDepth);

  const auto fill = [&](int64_t step) {
    if (step < steps) {
      const int first = static_cast<int>(step % kStages) * kStageChunks<Source>;
      fill_tile(g.a, a_origin, task.row, task.m, step * kDepth, task.k, memory, first);
      fill_tile(g.b, b_origin, task.column, g.s.n, step * kDepth, task.k, memory,
                first + kTerms * kTileChunks);
    }
    commit_copies();
  };
  for (int64_t step = 0; step < kStages - 1; ++step) fill(step);

  float accumulators[kAFragments][2 * kBFragments][4] = {};
  for (int64_t step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    // After the barrier the stage of this step is loaded, and no warp reads the stage that fill() writes.
    sync_threads();
    fill(step + kStages - 1);
    if (idle) continue;
    const int first = static_cast<int>(step % kStages) * kStageChunks<Source>;
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[kTerms * kAFragments][4], b[kTerms * kBFragments][4];
      load_fragments<true, kTerms, kAFragments>(g.a.by_k, warp_row, k, memory, first, a);
      load_fragments<false, kTerms, kBFragments>(g.b.by_k, warp_column, k, memory,
                                                 first + kTerms * kTileChunks, b);
      multiply_add<typename Source::Term, kTerms>(accumulators, 0, a, b);
    }
  }
  wait_for_copies<0>();
  if (!idle) store_tile(g, task, warp_row, warp_column, accumulators);
}

// ---- launches

template <class Source>
void launch_tiles(Context& c, const TileGemm<Source>& g) {
  const int64_t across = ceil_div(g.s.n, int64_t{kGemmTile});
  const int64_t down = g.groups == TileGroups::m ? ceil_div(g.s.m, int64_t{kGemmTile}) + g.count
                                                 : g.count * ceil_div(g.s.m, int64_t{kGemmTile});
  const Grid grid{across * down, kGemmThreads,
                  size_t{kTileStages<Source>} * kStageChunks<Source> * sizeof(Bytes16)};
  launch(c, grid, tile_kernel<Source>, g);
}

// All rows of a matrix with scales: those of the groups or of the batch lie one after the other.
CodeSource code_source(const Operand& x, int64_t rows, int64_t k) {
  return {static_cast<const uint8_t*>(x.data),
          x.dtype,
          x.scale,
          x.tensor_scale,
          {x.layout, ScaleOrder::tensor_core, rows, k}};
}

void launch_problem(Context& c, const GemmShape& s, TileGroups groups, const int64_t* sizes, int64_t count,
                    const Operand& a, const Operand& b, Out out, float alpha, float beta, In bias) {
  if (a.layout != ScaleLayout::none) {
    const bool many_a = groups == TileGroups::batch && s.stride_a != 0,
               many_b = groups != TileGroups::k && s.stride_b != 0;
    launch_tiles(
        c, TileGemm<CodeSource>{s, groups, sizes, count, code_source(a, many_a ? count * s.m : s.m, s.k),
                                code_source(b, many_b ? count * s.n : s.n, s.k), array_of<Any>(out), alpha,
                                beta, array_of<Any>(bias)});
    return;
  }
  by_type({In{a.data, a.dtype}}, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, Any>)
      launch_tiles(c,
                   TileGemm<FloatSource<T>>{s, groups, sizes, count,
                                            FloatSource<T>{static_cast<const T*>(a.data), s.lda, s.trans_a},
                                            FloatSource<T>{static_cast<const T*>(b.data), s.ldb, !s.trans_b},
                                            array_of<Any>(out), alpha, beta, array_of<Any>(bias)});
  });
}

}  // namespace

void run_tiles(Context& c, const GemmShape& s, const Operand& a, const Operand& b, Out out, float alpha,
               float beta) {
  launch_problem(c, s, TileGroups::batch, nullptr, s.batch, a, b, out, alpha, beta, {});
}

void run_grouped_tiles(Context& c, GemmShape s, GemmGroups groups, const int64_t* sizes, int64_t count,
                       Operand a, Operand b, Out out, float alpha, float beta, In bias) {
  launch_problem(c, s, groups == GemmGroups::m ? TileGroups::m : TileGroups::k, sizes, count, a, b, out,
                 alpha, beta, bias);
}

}  // namespace capstan::kernels::CAPSTAN_GPU
