// GEMMs whose sizes are in device memory (groups), and GEMMs of codes that tensor cores cannot read in place.
// A block computes a tile of 128 x 128 of C in steps of 32 of k, by the matrix operations of its eight warps;
// tiles of A and B pass through shared memory, in three stages of asynchronous copies where 16-bit values are
// aligned. In such a tile, elements of k beyond the matrix are zeros, and rows beyond it zeros or copies of
// others. Values of fp32 are the sums of three bf16 terms (bf16x3), which hold all their bits: six products
// of terms replace one, and the three smallest, below the last bit of fp32, are left out. Codes of FP8 that
// have no scale but that of the tensor, in aligned rows, are copied as they are, 64 of k in a step; each warp
// converts those that it multiplies to fp16, which has all their values. Another code times the scale of its
// block, which has at most four significant bits, is a bf16 value. The scale of the tensor multiplies the
// sums. Bytes moved: A once for each 128 columns of C, B once for each 128 rows of a group, mostly from the
// L2 cache; C once, twice with beta. Sums over k run in one sequence.
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
// Rows of tiles whose blocks run one after the other: about as many as columns of tiles that run then.
constexpr int kBand = 16;
// A tile of A or B in shared memory consists of chunks of eight 16-bit values. Each of these is one element
// of k, or two codes of 8 bits: Source::kCodes.
constexpr int kChunkValues = 8, kTileChunks = kGemmTile * kDepth / kChunkValues;

// ---- operands, as rows (m or n) by k

// Origin of the matrix of a group or batch: offset in elements, first row and first k.
struct TileOrigin {
  int64_t elements = 0, row = 0, k = 0;
};

// Index of a chunk in a tile of shared memory: eight elements of k of one row, or with kByK eight rows of one
// k. Chunks are swizzled, so that the rows of a matrix operation lie in different banks.
template <bool kByK>
__device__ int tile_slot(int row, int k) {
  return kByK ? k * (kGemmTile / kChunkValues) + ((row / kChunkValues) ^ (k % 8))
              : row * (kDepth / kChunkValues) + ((k / kChunkValues) ^ (row / 2 % 4));
}

struct alignas(16) HalfChunk {
  uint16_t bits[kChunkValues];
};

// A matrix whose elements are addressed by rows. kRowsContiguous: rows are contiguous, not elements of k.
template <class T, bool kRowsContiguous>
struct MatrixSource {
  static constexpr bool kByK = kRowsContiguous;
  // The address as an integer. From a pointer, nvcc makes two that advance side by side: one for asynchronous
  // copies, and one of another address space for loads.
  using Position = uintptr_t;
  const T* data;
  int64_t ld;

  __device__ Position at(const TileOrigin& origin, int64_t row, int64_t k) const {
    row += origin.row;
    return moved(reinterpret_cast<Position>(data + origin.elements + (kByK ? row : row * ld)), k + origin.k);
  }
  // The same row, `distance` elements of k further on.
  __device__ Position moved(Position position, int64_t distance) const {
    return position + static_cast<Position>(kByK ? distance * ld : distance) * sizeof(T);
  }
};
// fp32, bf16 or fp16.
template <class T, bool kRowsContiguous>
struct FloatSource : MatrixSource<T, kRowsContiguous> {
  using MatrixSource<T, kRowsContiguous>::at, MatrixSource<T, kRowsContiguous>::ld;
  static constexpr bool kByK = kRowsContiguous;
  static constexpr int kTerms = Terms<T>::kCount, kCodes = 1;
  // On a multiprocessor.
  [[maybe_unused]] static constexpr int kBlocks = kTerms == 1 ? 2 : 1;
  // Tiles have the bits of the matrix.
  static constexpr bool kCanCopy = kTerms == 1;
  using Term = typename Terms<T>::Type;

  // Whether all chunks of these rows are aligned, and complete where the elements of k of their tile exist.
  __device__ bool can_copy(const TileOrigin& origin, int64_t row, int64_t rows) const {
    return at(origin, row, 0) % sizeof(Bytes16) == 0 && ld % kChunkValues == 0 &&
           (!kByK || rows % kChunkValues == 0);
  }
  static __device__ float scale_of_tensor() { return 1; }
};
// Codes of FP8 with a scale of the tensor, [rows, k]; rows begin at multiples of 16 bytes.
template <SmallFloat F>
struct Fp8Source : MatrixSource<uint8_t, false> {
  static constexpr SmallFloat kFormat = F;
  static constexpr int kTerms = 1, kCodes = 2;
  [[maybe_unused]] static constexpr int kBlocks = 2;
  static constexpr bool kCanCopy = true;
  using Term = f16;
  const float* scale;

  static __device__ bool can_copy(const TileOrigin&, int64_t, int64_t) { return true; }
  __device__ float scale_of_tensor() const { return *scale; }
};
// All other codes with scales, [rows, k]; k contiguous.
struct CodeSource {
  static constexpr int kTerms = 1, kCodes = 1;
  // Decoding takes registers.
  [[maybe_unused]] static constexpr int kBlocks = 1;
  static constexpr bool kByK = false, kCanCopy = false;
  using Term = bf16;
  struct Position {
    int64_t row, k;
  };
  const uint8_t* codes;
  DType type;
  const void* scale;
  const float* tensor_scale;
  BlockScales scales;

  __device__ Position at(const TileOrigin& origin, int64_t row, int64_t k) const {
    return {origin.row + row, origin.k + k};
  }
  __device__ Position moved(const Position& position, int64_t distance) const {
    return {position.row, position.k + distance};
  }
  // With a layout that the compiler knows, divisions by the size of blocks are shifts.
  template <ScaleLayout kLayout>
  __device__ int64_t scale_index(int64_t row, int64_t k) const {
    return BlockScales{kLayout, ScaleOrder::tensor_core, scales.rows, scales.cols}.index(
        row, k / block_of(kLayout));
  }
  // Scale of the block of element k in row `row`, without that of the tensor.
  __device__ float scale_at(int64_t row, int64_t k) const {
    const auto* const floats = static_cast<const float*>(scale);
    const auto* const bytes = static_cast<const uint8_t*>(scale);
    switch (scales.layout) {
      case ScaleLayout::block_1x128:
        return floats[scale_index<ScaleLayout::block_1x128>(row, k)];
      case ScaleLayout::block_128x128:
        return floats[scale_index<ScaleLayout::block_128x128>(row / 128, k)];
      case ScaleLayout::block_1x32:
        return decode_e8m0(bytes[scale_index<ScaleLayout::block_1x32>(row, k)]);
      case ScaleLayout::block_1x16:
        return decode<kE4m3>(bytes[scale_index<ScaleLayout::block_1x16>(row, k)]);
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
  // The values of the first `count` codes of a chunk; those after them are 0.
  __device__ void load(int64_t row, int64_t k, int count, float (&values)[kChunkValues]) const {
    if (type == DType::f4e2m1x2) {
      const uint8_t* const from = codes + row * ceil_div(scales.cols, 2) + k / 2;
      CAPSTAN_UNROLL
      for (int i = 0; i < kChunkValues; ++i)
        values[i] = i < count ? decode<kE2m1>(from[i / 2] >> (i % 2 * 4) & 0xFu) : 0.0f;
      return;
    }
    const uint8_t* const from = codes + row * scales.cols + k;
    uint32_t words[kChunkValues / 4] = {};
    CAPSTAN_UNROLL
    for (int i = 0; i < kChunkValues; ++i)
      if (i < count) words[i / 4] |= uint32_t{from[i]} << (i % 4 * 8);
    CAPSTAN_UNROLL
    for (int i = 0; i < kChunkValues; i += 4) {
      uint32_t pairs[2];
      if (type == DType::f8e4m3)
        decode_codes<kE4m3>(words[i / 4], pairs[0], pairs[1]);
      else
        decode_codes<kE5m2>(words[i / 4], pairs[0], pairs[1]);
      CAPSTAN_UNROLL
      for (int n = 0; n < 2; ++n) {
        const FloatPair pair = unpack_pair<f16>(pairs[n]);
        values[i + 2 * n] = pair.low, values[i + 2 * n + 1] = pair.high;
      }
    }
  }
};

// Writes one chunk with the elements [first, count) from a position on, and zeros. Other elements than the
// first one come first with Fp8Source alone.
template <class T, bool kByK>
__device__ void fill_chunk(const FloatSource<T, kByK>&, uintptr_t position, int, int count,
                           const Shared<Bytes16>& memory, int slot) {
  const T* const from = reinterpret_cast<const T*>(position);
  if constexpr (std::is_same_v<T, float>) {
    float values[kChunkValues];
    CAPSTAN_UNROLL
    for (int i = 0; i < kChunkValues; i += kGroup<float>) {
      const auto group = Array<float>{const_cast<float*>(from)}.load(i, count - i);
      CAPSTAN_UNROLL
      for (int k = 0; k < kGroup<float>; ++k) values[i + k] = group[k];
    }
    store_terms<float>(values, memory, slot, kTileChunks);
  } else if (count > 0 && position % sizeof(Bytes16) == 0) {
    copy_part_async<16>(memory, slot, reinterpret_cast<const Bytes16*>(from),
                        count * static_cast<int>(sizeof(T)));
  } else {
    HalfChunk chunk{};
    for (int i = 0; i < kChunkValues && i < count; ++i) chunk.bits[i] = from[i].bits;
    memory[slot] = std::bit_cast<Bytes16>(chunk);
  }
}
template <SmallFloat F>
__device__ void fill_chunk(const Fp8Source<F>&, uintptr_t position, int first, int count,
                           const Shared<Bytes16>& memory, int slot) {
  struct alignas(16) Words {
    uint32_t words[4];
  };
  const auto low_bytes = [](int n) { return n <= 0 ? 0u : n >= 4 ? ~0u : (1u << 8 * n) - 1; };
  Words chunk{};
  if (count > 0) {
    chunk = std::bit_cast<Words>(load_16(reinterpret_cast<const void*>(position)));
    CAPSTAN_UNROLL
    for (int i = 0; i < 4; ++i) chunk.words[i] &= low_bytes(count - 4 * i) & ~low_bytes(first - 4 * i);
  }
  memory[slot] = std::bit_cast<Bytes16>(chunk);
}
__device__ inline void fill_chunk(const CodeSource& source, const CodeSource::Position& from, int, int count,
                                  const Shared<Bytes16>& memory, int slot) {
  float values[kChunkValues] = {};
  if (count > 0) {
    // All elements of a chunk lie in one quantization block.
    const float scale = source.scale_at(from.row, from.k);
    source.load(from.row, from.k, count, values);
    CAPSTAN_UNROLL
    for (float& value : values) value *= scale;
  }
  store_terms<bf16>(values, memory, slot, kTileChunks);
}

// Elements of k of a step.
template <class Source>
inline constexpr int kStepDepth = kDepth* Source::kCodes;

// Loads the tiles of one operand, those of one step after the other. A thread has the same chunks of each
// tile, whose addresses are computed once.
template <class Source>
class TileLoader {
 public:
  // Tiles of rows [row, row + 128) of a matrix of `rows` rows.
  __device__ TileLoader(const Source& source, const TileOrigin& origin, int64_t row, int64_t rows)
      : source_(source),
        slot_(tile_slot<kByK>(row_of(0), k_of(0))),
        rows_(narrow<int>(std::min<int64_t>(rows - row, kGemmTile))) {
    CAPSTAN_UNROLL
    for (int i = 0; i < kChunks; ++i)
      positions_[i] = source.at(origin, row + (row_of(i) < rows_ ? row_of(i) : 0), kCodes * k_of(i));
  }
  // Starts to copy the next tile to memory[first], where can_copy() holds. Rows beyond those of the matrix,
  // which reach no element of C, are copies of others.
  __device__ __forceinline__ void copy(const Shared<Bytes16>& memory, int first) {
    CAPSTAN_UNROLL
    for (int i = 0; i < kChunks; ++i)
      copy_async<16>(memory, first + slot_ + i * kGemmThreads,
                     reinterpret_cast<const Bytes16*>(positions_[i]));
    advance();
  }
  // Starts to load the next tile, of `depth` elements of k, to memory[first]. After them, in place of the
  // first `skipped` ones, and beyond the rows of the matrix, there are zeros.
  __device__ __forceinline__ void fill(const Shared<Bytes16>& memory, int first, int skipped, int depth) {
    constexpr int kMost = kCodes * kChunkValues;
    const auto fill_one = [&](int i, const typename Source::Position& from) {
      const int rows_left = rows_ - row_of(i), depth_left = depth - kCodes * k_of(i);
      const int count = rows_left <= 0 || depth_left <= 0 ? 0 : kByK ? rows_left : depth_left;
      fill_chunk(source_, from, skipped - kCodes * k_of(i), count < kMost ? count : kMost, memory,
                 first + slot_ + i * kGemmThreads);
    };
    if constexpr (std::is_same_v<Source, CodeSource>) {
      // Not unrolled, since decoding is long; positions_[i] would not be in a register.
      for (int i = 0; i < kChunks; ++i)
        fill_one(i, {positions_[0].row + i * (kGemmThreads / kRun), positions_[0].k});
    } else {
      CAPSTAN_UNROLL
      for (int i = 0; i < kChunks; ++i) fill_one(i, positions_[i]);
    }
    advance();
  }

 private:
  static constexpr bool kByK = Source::kByK;
  static constexpr int kCodes = Source::kCodes, kChunks = kTileChunks / kGemmThreads;
  // Chunks that follow each other in a tile: those of a row, or with kByK those of one k.
  static constexpr int kRun = (kByK ? kGemmTile : kDepth) / kChunkValues;
  // All chunks of a thread have one swizzle.
  static_assert(kGemmThreads / kRun % 8 == 0);

  // First row and first 16-bit value of k of chunk i in the tile.
  static __device__ int row_of(int i) {
    return kByK ? thread_index() % kRun * kChunkValues : (thread_index() + i * kGemmThreads) / kRun;
  }
  static __device__ int k_of(int i) {
    return kByK ? (thread_index() + i * kGemmThreads) / kRun : thread_index() % kRun * kChunkValues;
  }
  __device__ __forceinline__ void advance() {
    CAPSTAN_UNROLL
    for (int i = 0; i < kChunks; ++i) positions_[i] = source_.moved(positions_[i], kStepDepth<Source>);
  }

  const Source& source_;
  int slot_;
  // Of the matrix, in these tiles.
  int rows_;
  typename Source::Position positions_[kChunks];
};

// ---- fragments

// The chunks that a lane gives to load_matrices() for kCount fragments of 16 x 16, from row `row` of a tile
// on. Of the 8 x 8 matrices of a fragment of A the halves of rows come first, of B the halves of k.
template <class Source, bool kIsA, int kCount>
class FragmentLoader {
 public:
  __device__ explicit FragmentLoader(int row) {
    const int matrix = lane_index() / 8, line = lane_index() % 8;
    const int row_half = kIsA ? matrix % 2 : matrix / 2, k_half = kIsA ? matrix / 2 : matrix % 2;
    row += 8 * row_half;
    CAPSTAN_UNROLL
    for (int i = 0; i < kSlots; ++i)
      slots_[i] = kByK ? tile_slot<true>(row + 16 * i, 8 * k_half + line)
                       : tile_slot<false>(row + line, 16 * i + 8 * k_half);
  }
  // Loads the terms of the fragments from element k of the tile at memory[first] on.
  __device__ __forceinline__ void load(const Shared<Bytes16>& memory, int first, int k,
                                       uint32_t (&to)[Source::kTerms * kCount][4]) const {
    int rows[Source::kTerms * kCount];
    CAPSTAN_UNROLL
    for (int i = 0; i < Source::kTerms * kCount; ++i) {
      const int fragment = i % kCount;
      rows[i] = first +
                (kByK ? slots_[fragment] + tile_slot<true>(0, k)
                      : slots_[k / 16] + tile_slot<false>(16 * fragment, 0)) +
                i / kCount * kTileChunks;
    }
    load_matrices<kByK>(to, memory, rows);
  }

 private:
  static constexpr bool kByK = Source::kByK;
  // Fragments whose rows (kByK) or k have different swizzles; those of the others are at a constant distance.
  static constexpr int kSlots = kByK ? kCount : kDepth / 16;
  int slots_[kSlots];
};

// ---- groups

enum class TileGroups : uint8_t { batch, m, k };

template <class SourceA, class SourceB>
struct TileGemm {
  GemmShape s;
  TileGroups groups;
  const int64_t* sizes;
  int64_t count;
  SourceA a;
  SourceB b;
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
  // Elements of k that come first, and are of the group before this one, so that chunks are aligned.
  int skipped = 0;
  bool exists = false;
};
__device__ inline int64_t tiles_of(int64_t n) {
  return ceil_div(n, kGemmTile);
}
// Finds the tile of rows `down` of all groups of m. Each lane of the warp adds the sizes of some consecutive
// groups; those of the lane that has the tile are divided among all lanes, until a lane has one group.
// Returns the index of the tile in its group; if there is no such tile, task.exists remains false.
__device__ inline int64_t find_group(const int64_t* sizes, int64_t count, int64_t down, TileTask& task) {
  const int lane = lane_index();
  int64_t each = count, end = count;
  while (!task.exists) {
    each = ceil_div(each, kWarp);
    int64_t tiles = 0, rows = 0;
    for (int64_t i = task.group + lane * each; i < std::min(task.group + (lane + 1) * each, end); ++i) {
      tiles += tiles_of(sizes[i]);
      rows += sizes[i];
    }
    // Those of this lane and of all before it.
    int64_t tiles_so_far = tiles, rows_so_far = rows;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t more_tiles = shuffle_up(tiles_so_far, distance),
                    more_rows = shuffle_up(rows_so_far, distance);
      if (lane >= distance) tiles_so_far += more_tiles, rows_so_far += more_rows;
    }
    const uint32_t beyond = ballot(tiles_so_far > down);
    if (beyond == 0) break;
    const int owner = std::countr_zero(beyond);
    down -= shuffle(tiles_so_far - tiles, owner);
    task.first += shuffle(rows_so_far - rows, owner);
    task.group += owner * each;
    task.m = shuffle(rows, owner);
    task.exists = each == 1;
    end = std::min(task.group + each, end);
  }
  return down;
}
template <class SourceA, class SourceB>
__device__ TileTask task_of(const TileGemm<SourceA, SourceB>& g) {
  const int64_t across = tiles_of(g.s.n);
  int64_t column = block_index() % across, row = block_index() / across;
  TileTask task;
  task.k = g.s.k;
  if (g.groups == TileGroups::m) {
    // Each group has its own tiles of rows; the grid has blocks for all that there can be.
    row = find_group(g.sizes, g.count, row, task);
    if (!task.exists) return task;
  } else {
    task.exists = true;
    task.group = row / tiles_of(g.s.m);
    row %= tiles_of(g.s.m);
    task.m = g.s.m;
  }
  if (g.groups == TileGroups::k) {
    int64_t before = 0;
    for (int64_t i = lane_index(); i < task.group; i += kWarp) before += g.sizes[i];
    task.first = warp_sum(before);
    task.k = g.sizes[task.group];
    if (SourceA::kCodes > 1 && task.k > 0) {
      task.skipped = narrow<int>(task.first % (SourceA::kCodes * kChunkValues));
      task.first -= task.skipped, task.k += task.skipped;
    }
  }
  // Blocks that run at a time have the tiles of a band of rows, column by column, so that they read few rows
  // of A and of B besides those in the L2 cache.
  const int64_t first = row / kBand * kBand, height = std::min(tiles_of(task.m) - first, int64_t{kBand}),
                in_band = (row - first) * across + column;
  task.row = (first + in_band % height) * kGemmTile;
  task.column = in_band / height * kGemmTile;
  return task;
}
// Origin of A (or B) of the task's group; `stride`: elements between the matrices.
template <class Source>
__device__ TileOrigin origin_of(const Source& source, TileGroups groups, const TileTask& task, bool is_a,
                                int64_t stride) {
  TileOrigin origin;
  if (groups == TileGroups::k)
    origin.k = task.first;
  else if (groups == TileGroups::m && is_a)
    origin.row = task.first;
  else
    origin.elements = task.group * stride;
  if constexpr (std::is_same_v<Source, CodeSource>) {
    origin.row += origin.elements / source.scales.cols;
    origin.elements = 0;
  }
  return origin;
}

// ---- storing

using Accumulators = float[kAFragments][2 * kBFragments][4];

// Where a warp stores its sums.
struct WarpTarget {
  // Rows and columns that C has there.
  int rows, columns;
  // This lane's first elements of C and of the bias.
  int64_t element, bias;
};
template <class SourceA, class SourceB>
__device__ WarpTarget target_of(const TileGemm<SourceA, SourceB>& g, const TileTask& task, int warp_row,
                                int warp_column) {
  const int64_t row = task.row + warp_row, column = task.column + warp_column;
  const int lane_row = lane_index() / 4, lane_column = lane_index() % 4 * 2;
  const int64_t matrix = g.groups == TileGroups::m ? task.first * g.s.ldc : task.group * g.s.stride_c;
  return {narrow<int>(std::min<int64_t>(task.m - row, kWarpRows)),
          narrow<int>(std::min<int64_t>(g.s.n - column, kWarpCols)),
          matrix + (row + lane_row) * g.s.ldc + column + lane_column,
          task.group * g.s.n + column + lane_column};
}

// Stores the sums of a warp in a matrix of type T; `to`: this lane's first element. kComplete: the matrix has
// all rows and columns of the warp, and two neighboring elements are aligned to their size.
template <class T, bool kComplete, class SourceA, class SourceB>
__device__ __forceinline__ void store_sums_as(const TileGemm<SourceA, SourceB>& g, T* to,
                                              const WarpTarget& target, Accumulators& sums) {
  constexpr int kPair = 2 * sizeof(T);
  // From this lane's first element on.
  const int rows_left = target.rows - lane_index() / 4, columns_left = target.columns - lane_index() % 4 * 2;
  // body(n, elements of C, two sums) for two neighboring columns, of which the second may be missing.
  const auto for_pairs = [&](const auto& body) {
    CAPSTAN_UNROLL
    for (int m = 0; m < 2 * kAFragments; ++m) {
      T* const line = to + 8 * m * g.s.ldc;
      CAPSTAN_UNROLL
      for (int n = 0; n < 2 * kBFragments; ++n)
        if (kComplete || (8 * m < rows_left && 8 * n < columns_left))
          body(n, line + 8 * n, sums[m / 2][n][m % 2 * 2], sums[m / 2][n][m % 2 * 2 + 1]);
    }
  };
  const auto has_second = [&](int n) { return kComplete || 8 * n + 1 < columns_left; };
  const float alpha = g.alpha * (g.a.scale_of_tensor() * g.b.scale_of_tensor());
  for_pairs([&](int, const T*, float& low, float& high) { low *= alpha, high *= alpha; });
  // All elements are read before the first is written, so that the reads need not wait for each other.
  if (g.beta != 0)
    for_pairs([&](int n, const T* at, float& low, float& high) {
      if constexpr (kComplete) at = static_cast<const T*>(__builtin_assume_aligned(at, kPair));
      low += g.beta * to_float(at[0]);
      if (has_second(n)) high += g.beta * to_float(at[1]);
    });
  if (g.bias) {
    Group<2> bias[2 * kBFragments];
    CAPSTAN_UNROLL
    for (int n = 0; n < 2 * kBFragments; ++n)
      bias[n] = g.bias.template group<2>(target.bias + 8 * n, columns_left - 8 * n);
    for_pairs([&](int n, const T*, float& low, float& high) { low += bias[n][0], high += bias[n][1]; });
  }
  for_pairs([&](int n, T* at, float low, float high) {
    if constexpr (kComplete) {
      uint32_t words[2] = {std::bit_cast<uint32_t>(low), std::bit_cast<uint32_t>(high)};
      if constexpr (!std::is_same_v<T, float>) words[0] = pack_pair<T>(low, high);
      store_words<kPair>(at, words);
    } else {
      at[0] = from_float<T>(low);
      if (has_second(n)) at[1] = from_float<T>(high);
    }
  });
}
template <class SourceA, class SourceB>
__device__ void store_sums(const TileGemm<SourceA, SourceB>& g, const WarpTarget& target,
                           Accumulators& sums) {
  const auto store_as = [&](auto type) {
    using T = decltype(type);
    T* const to = static_cast<T*>(g.c.p) + target.element;
    const bool complete = target.rows == kWarpRows && target.columns == kWarpCols && g.s.ldc % 2 == 0 &&
                          reinterpret_cast<uintptr_t>(to) % (2 * sizeof(T)) == 0;
    if (complete)
      store_sums_as<T, true>(g, to, target, sums);
    else
      store_sums_as<T, false>(g, to, target, sums);
  };
  if (g.c.type == DType::f32)
    store_as(float{});
  else if (g.c.type == DType::bf16)
    store_as(bf16{});
  else
    store_as(f16{});
}

// ---- the kernel

template <class Source>
inline constexpr int kTileStages = Source::kTerms == 1 ? 3 : 2;
// Chunks of a stage: A's terms, then B's.
template <class Source>
inline constexpr int kStageChunks = 2 * Source::kTerms* kTileChunks;

// Converts fragments of codes, of 16 rows and 32 elements of k, to fp16: to those of the first or the second
// 16 elements. Their order in a fragment is not that of k, but the same in A and in B.
template <class Source, bool kIsA, int kCount>
__device__ __forceinline__ void decode_fragments(const uint32_t (&codes)[kCount][4], int half,
                                                 uint32_t (&to)[kCount][4]) {
  CAPSTAN_UNROLL
  for (int i = 0; i < kCount; ++i) CAPSTAN_UNROLL
  for (int rows = 0; rows < 2; ++rows)
    decode_codes<Source::kFormat>(codes[i][kIsA ? rows + 2 * half : 2 * rows + half],
                                  to[i][kIsA ? rows : 2 * rows], to[i][kIsA ? rows + 2 : 2 * rows + 1]);
}

// Adds the products of the tiles in a stage to a warp's sums.
//
// With several terms, the products of a step are added to each other, and their sum to `sums` by an addition
// in fp32, which rounds to nearest. Tensor cores cut off the bits that an accumulator cannot hold (M. Fasi,
// N. Higham, M. Mikaitis, S. Pranesh: Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science
// 7:e330, 2021): errors of one direction, which would grow with the number of matrix operations on a sum. The
// simulation's operations round to nearest, so that no test there shows the difference.
template <class SourceA, class SourceB>
__device__ __forceinline__ void multiply_step(const Shared<Bytes16>& memory, int stage,
                                              const FragmentLoader<SourceA, true, kAFragments>& a_fragments,
                                              const FragmentLoader<SourceB, false, kBFragments>& b_fragments,
                                              Accumulators& sums) {
  constexpr int kTerms = SourceA::kTerms;
  using Term = typename SourceA::Term;
  Accumulators part = {};
  CAPSTAN_UNROLL
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t a[kTerms * kAFragments][4], b[kTerms * kBFragments][4];
    a_fragments.load(memory, stage, k, a);
    b_fragments.load(memory, stage + kTerms * kTileChunks, k, b);
    if constexpr (SourceA::kCodes == 1) {
      multiply_add<Term, kTerms>(kTerms == 1 ? sums : part, 0, a, b);
    } else {
      CAPSTAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t a_values[kAFragments][4], b_values[kBFragments][4];
        decode_fragments<SourceA, true>(a, half, a_values);
        decode_fragments<SourceB, false>(b, half, b_values);
        multiply_add<Term, 1>(sums, 0, a_values, b_values);
      }
    }
  }
  if constexpr (kTerms > 1) {
    CAPSTAN_UNROLL
    for (int m = 0; m < kAFragments; ++m) CAPSTAN_UNROLL
    for (int n = 0; n < 2 * kBFragments; ++n) CAPSTAN_UNROLL
    for (int i = 0; i < 4; ++i) sums[m][n][i] += part[m][n][i];
  }
}

template <class SourceA, class SourceB>
__global__ void CAPSTAN_LAUNCH_BOUNDS(kGemmThreads, SourceA::kBlocks)
    tile_kernel(CAPSTAN_KERNEL_PARAMETER const TileGemm<SourceA, SourceB> g) {
  constexpr int kStages = kTileStages<SourceA>, kTerms = SourceA::kTerms, kChunks = kStageChunks<SourceA>;
  CAPSTAN_DYNAMIC_SHARED(Bytes16, memory);
  // In shared memory, so that it takes no registers until the end.
  CAPSTAN_SHARED(TileTask, tasks, 1);
  if (warp_index() == 0) {
    const TileTask task = task_of(g);
    if (lane_index() == 0) tasks[0] = task;
  }
  sync_threads();
  const TileTask task = tasks[0];
  // The grid may have more blocks than the groups have tiles.
  if (!task.exists) return;
  const int warp_row = warp_index() / kWarpsAcross * kWarpRows,
            warp_column = warp_index() % kWarpsAcross * kWarpCols;
  // This warp has no elements of C.
  const bool idle = task.row + warp_row >= task.m || task.column + warp_column >= g.s.n;
  constexpr int kStep = kStepDepth<SourceA>;
  const auto steps = narrow<int>(ceil_div(task.k, kStep));
  const int last_depth = static_cast<int>(task.k - int64_t{steps - 1} * kStep);
  const TileOrigin a_origin = origin_of(g.a, g.groups, task, true, g.s.stride_a),
                   b_origin = origin_of(g.b, g.groups, task, false, g.s.stride_b);
  TileLoader<SourceA> a_tiles(g.a, a_origin, task.row, task.m);
  TileLoader<SourceB> b_tiles(g.b, b_origin, task.column, g.s.n);
  const auto next = [](int stage) { return stage == (kStages - 1) * kChunks ? 0 : stage + kChunks; };
  // The first steps, whose tiles are copied; those of the others are filled.
  int copied_steps = 0, to = 0;
  if constexpr (SourceA::kCanCopy)
    if (g.a.can_copy(a_origin, task.row, task.m) && g.b.can_copy(b_origin, task.column, g.s.n))
      copied_steps = narrow<int>(task.k / kStep);
  const auto copy = [&] {
    if constexpr (SourceA::kCanCopy) {
      a_tiles.copy(memory, to);
      b_tiles.copy(memory, to + kTerms * kTileChunks);
    }
    to = next(to);
  };
  const auto fill = [&](int step, int skipped = 0) {
    if (step >= steps) return;
    const int depth = step == steps - 1 ? last_depth : kStep;
    a_tiles.fill(memory, to, skipped, depth);
    b_tiles.fill(memory, to + kTerms * kTileChunks, skipped, depth);
    to = next(to);
  };
  for (int step = 0; step < kStages - 1; ++step) {
    const int skipped = SourceA::kCodes > 1 && step == 0 ? task.skipped : 0;
    if (step < copied_steps && skipped == 0)
      copy();
    else
      fill(step, skipped);
    commit_copies();
  }

  const FragmentLoader<SourceA, true, kAFragments> a_fragments(warp_row);
  const FragmentLoader<SourceB, false, kBFragments> b_fragments(warp_column);
  Accumulators sums = {};
  int step = 0, stage = 0;
  // Multiplies the tiles of all steps before `end`; load(): starts to load those of a later step.
  const auto multiply = [&](int end, const auto& load) {
    for (; step < end; ++step, stage = next(stage)) {
      wait_for_copies<kStages - 2>();
      // After the barrier the stage of this step is loaded, and no warp reads the stage that load() writes.
      sync_threads();
      load(step + kStages - 1);
      commit_copies();
      if (idle) continue;
      multiply_step(memory, stage, a_fragments, b_fragments, sums);
    }
  };
  if constexpr (SourceA::kCanCopy) multiply(copied_steps - (kStages - 1), [&](int) { copy(); });
  multiply(steps, fill);
  wait_for_copies<0>();
  if (!idle) store_sums(g, target_of(g, tasks[0], warp_row, warp_column), sums);
}

// ---- launches

template <class SourceA, class SourceB>
void launch_tiles(Context& c, const TileGemm<SourceA, SourceB>& g) {
  const int64_t across = ceil_div(g.s.n, int64_t{kGemmTile});
  const int64_t down = g.groups == TileGroups::m ? ceil_div(g.s.m, int64_t{kGemmTile}) + g.count
                                                 : g.count * ceil_div(g.s.m, int64_t{kGemmTile});
  const Grid grid{across * down, kGemmThreads,
                  size_t{kTileStages<SourceA>} * kStageChunks<SourceA> * sizeof(Bytes16)};
  launch(c, grid, tile_kernel<SourceA, SourceB>, g);
}

// All rows of a matrix with scales: those of the groups or of the batch lie one after the other.
CodeSource code_source(const Operand& x, int64_t rows, int64_t k) {
  return {static_cast<const uint8_t*>(x.data),
          x.dtype,
          x.scale,
          x.tensor_scale,
          {x.layout, ScaleOrder::tensor_core, rows, k}};
}

// Whether Fp8Source reads this matrix of k columns.
bool has_aligned_codes(const Operand& x, int64_t k) {
  constexpr int64_t kAlignment = sizeof(Bytes16);
  return x.layout == ScaleLayout::tensor && k % kAlignment == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % kAlignment == 0;
}
template <SmallFloat F>
Fp8Source<F> fp8_source(const Operand& x, int64_t k) {
  return {{static_cast<const uint8_t*>(x.data), k}, static_cast<const float*>(x.scale)};
}

void launch_problem(Context& c, const GemmShape& s, TileGroups groups, const int64_t* sizes, int64_t count,
                    const Operand& a, const Operand& b, Out out, float alpha, float beta, In bias) {
  const auto run = [&]<class SourceA, class SourceB>(const SourceA& source_a, const SourceB& source_b) {
    launch_tiles(c, TileGemm<SourceA, SourceB>{s, groups, sizes, count, source_a, source_b,
                                               array_of<Any>(out), alpha, beta, array_of<Any>(bias)});
  };
  if (has_aligned_codes(a, s.k) && has_aligned_codes(b, s.k)) {
    // One of the two is e4m3.
    if (a.dtype == DType::f8e5m2) return run(fp8_source<kE5m2>(a, s.k), fp8_source<kE4m3>(b, s.k));
    if (b.dtype == DType::f8e5m2) return run(fp8_source<kE4m3>(a, s.k), fp8_source<kE5m2>(b, s.k));
    return run(fp8_source<kE4m3>(a, s.k), fp8_source<kE4m3>(b, s.k));
  }
  if (a.layout != ScaleLayout::none) {
    const bool many_a = groups == TileGroups::batch && s.stride_a != 0,
               many_b = groups != TileGroups::k && s.stride_b != 0;
    return run(code_source(a, many_a ? count * s.m : s.m, s.k),
               code_source(b, many_b ? count * s.n : s.n, s.k));
  }
  by_type({In{a.data, a.dtype}}, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, Any>) {
      const auto with_a = [&](const auto& source_a) {
        if (s.trans_b)
          run(source_a, FloatSource<T, false>{{static_cast<const T*>(b.data), s.ldb}});
        else
          run(source_a, FloatSource<T, true>{{static_cast<const T*>(b.data), s.ldb}});
      };
      if (s.trans_a)
        with_a(FloatSource<T, true>{{static_cast<const T*>(a.data), s.lda}});
      else
        with_a(FloatSource<T, false>{{static_cast<const T*>(a.data), s.lda}});
    }
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
