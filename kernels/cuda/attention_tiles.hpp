// Matrices for attention: tiles of head rows in shared memory, from which a warp loads A and B fragments, and
// the products of such tiles. In registers a warp holds accumulators[m][n][4], blocks of 16 x 8, as
// intrinsics.hpp describes them; rows are queries or keys.
#pragma once

#include "kernels/cuda/bf16x3.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/heads.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// kRowCount x kColumnCount values in shared memory, a plane for each term, in chunks of 16 bytes. The chunks
// of a row are swizzled, so that 8 consecutive rows have the same chunk in different banks.
template <class T, int kRowCount, int kColumnCount>
struct OperandTile {
  using Element = T;
  static constexpr int kRows = kRowCount, kColumns = kColumnCount, kTerms = Terms<T>::kCount;
  static constexpr int kChunks = kColumns / 8, kPlane = kRows * kChunks;
  // Size of the tile, in chunks.
  static constexpr int kSize = kTerms * kPlane;
  // Chunks are swizzled within runs of this many: a divisor of the chunks of a row.
  static constexpr int kSwizzled = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
  static_assert(kRows % 16 == 0 && kColumns % 32 == 0);

  // Index of a chunk of row first + row; `first` must be a multiple of 8.
  static __device__ __forceinline__ int at(int first, int row, int chunk) {
    const uint32_t swizzle = static_cast<uint32_t>(row) / (8 / kSwizzled) % kSwizzled;
    return (first + row) * kChunks + (chunk ^ static_cast<int>(swizzle));
  }
  // The step from at(first, row, chunk) to at(first + rows, row, chunk + chunks), in the plane of a term.
  // rows: a multiple of 8. chunk: 0 or 1; `chunks` is even, so that their sum has the bits of both.
  static __device__ __forceinline__ SwizzledStep step(int term, int rows, int chunks) {
    const int flip = chunks % kSwizzled;
    return {flip, term * kPlane + rows * kChunks + chunks - flip};
  }
};

// ---- loading

// Rows of one head: row r is row first + r of `count`, and exists if that is in [0, count). `heads` rows
// belong to a token, of as many heads.
template <class T>
struct HeadRows {
  const T* base;
  int64_t stride;
  int first, count;
  // Elements of a row.
  int width;
  // Rows begin at multiples of 16 bytes.
  bool aligned;
  // Token of row 0; `base` is the head's first element of token 0, so that an address takes one product.
  int64_t token = 0;
  int64_t head_stride = 0;
  int heads = 1;
  __device__ bool has(int row) const {
    return static_cast<uint32_t>(first + row) < static_cast<uint32_t>(count);
  }
  __device__ const T* at(int row) const {
    const int i = first + row;
    if (heads == 1) return base + (token + i) * stride;
    return base + (token + i / heads) * stride + i % heads * head_stride;
  }
};

// Loads the first `count` of 8 values; the others become 0.
template <class T>
__device__ __forceinline__ void load_chunk(const T* from, int count, bool aligned, float (&values)[8]) {
  const Array<T> array{const_cast<T*>(from)};
  constexpr int kSize = kGroup<T>;
  CAPSTAN_UNROLL
  for (int i = 0; i < 8; i += kSize) {
    if (aligned && count >= i + kSize) {
      const auto group = array.load(i, kSize);
      CAPSTAN_UNROLL
      for (int k = 0; k < kSize; ++k) values[i + k] = group[k];
    } else {
      CAPSTAN_UNROLL
      for (int k = 0; k < kSize; ++k) values[i + k] = i + k < count ? array.at(i + k) : 0.0f;
    }
  }
}

// Starts asynchronous copies of rows of complete chunks. A thread copies one chunk of each run of kSwizzled
// chunks, of every kStep-th row.
template <class Tile, int kThreads, bool kOnce>
__device__ __forceinline__ void copy_tile(const Shared<Bytes16>& memory, int tile,
                                          const HeadRows<typename Tile::Element>& rows) {
  using T = typename Tile::Element;
  constexpr int kRun = Tile::kSwizzled, kStep = kThreads / kRun;
  static_assert(Tile::kTerms == 1 && Tile::kRows % kStep == 0);
  const auto thread = static_cast<uint32_t>(thread_index());
  const auto first_row = static_cast<int>(thread / kRun), chunk = static_cast<int>(thread % kRun);
  const auto copy_row = [&](int row_of_pass, const T* from) {
    const bool has_row = rows.has(row_of_pass + first_row);
    // Rows at a distance of 8 rows are swizzled alike: a constant leads from one to the next.
    const int to =
        tile + Tile::at(0, row_of_pass % 8 + first_row, chunk) + row_of_pass / 8 * 8 * Tile::kChunks;
    CAPSTAN_UNROLL
    for (int run = 0; run < Tile::kChunks; run += kRun)
      copy_async_if(has_row && (run + chunk) * 8 < rows.width, memory, to + run,
                    reinterpret_cast<const Bytes16*>(from + run * 8));
  };
  // Outside of the loop of a kernel short code is better; rows of several heads have no common distance.
  if (kOnce || rows.heads > 1) {
    CAPSTAN_UNROLL_TWICE
    for (int row = 0; row < Tile::kRows; row += kStep) copy_row(row, rows.at(row + first_row) + chunk * 8);
    return;
  }
  const T* from = rows.at(first_row) + chunk * 8;
  CAPSTAN_UNROLL
  for (int row = 0; row < Tile::kRows; row += kStep) {
    copy_row(row, from);
    from += kStep * rows.stride;
  }
}
// Starts to load the rows of a tile at `tile`; missing rows and columns become zeros. Other threads see them
// after wait_for_copies() and a barrier. kOnce: not in the loop of a kernel.
template <class Tile, int kThreads, bool kOnce = false>
__device__ __forceinline__ void load_tile(const Shared<Bytes16>& memory, int tile,
                                          const HeadRows<typename Tile::Element>& rows) {
  using T = typename Tile::Element;
  const auto count_of = [&](int row, int chunk) {
    const int left = rows.width - chunk * 8;
    return !rows.has(row) || left < 0 ? 0 : left < 8 ? left : 8;
  };
  if constexpr (Tile::kTerms == 1) {
    // The usual case; other widths and alignments are loaded by element.
    if (rows.aligned && rows.width % 8 == 0) {
      copy_tile<Tile, kThreads, kOnce>(memory, tile, rows);
      return;
    }
  }
  for (int i = thread_index(); i < Tile::kPlane; i += kThreads) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks, count = count_of(row, chunk);
    float values[8];
    load_chunk(count > 0 ? rows.at(row) + chunk * 8 : rows.base, count, rows.aligned, values);
    store_terms<T>(values, memory, tile + Tile::at(0, row, chunk), Tile::kPlane);
  }
}

// ---- GEMMs of tiles, by a warp

// body(m, n, i) for the accumulators of a lane:
// row 16 m + 8 (i / 2) + lane / 4, column 8 n + 2 (lane % 4) + i % 2.
template <int kM, int kN, class Body>
__device__ __forceinline__ void for_accumulators(const Body& body) {
  CAPSTAN_UNROLL
  for (int m = 0; m < kM; ++m) {
    CAPSTAN_UNROLL
    for (int n = 0; n < kN; ++n) {
      CAPSTAN_UNROLL
      for (int i = 0; i < 4; ++i) body(m, n, i);
    }
  }
}
// Row and column of this lane's first accumulator.
__device__ __forceinline__ int lane_row() {
  return lane_index() / 4;
}
__device__ __forceinline__ int lane_column() {
  return lane_index() % 4 * 2;
}

// accumulators += X Y^T for rows [x_row, x_row + 16 kM) of tile x and the first 16 kN rows of tile y.
template <class X, class Y, int kM, int kN>
__device__ __forceinline__ void multiply_rows(const Shared<Bytes16>& memory, int x, int x_row, int y,
                                              float (&accumulators)[kM][kN][4]) {
  static_assert(X::kColumns == Y::kColumns && kN % 2 == 0 && kN * 8 <= Y::kRows);
  constexpr int kTerms = X::kTerms, kBlocks = kN / 2;
  const int lane = lane_index(), a_row = x + X::at(x_row, lane % 16, lane / 16),
            b_row = y + Y::at(0, lane % 8 + lane / 16 * 8, lane / 8 % 2);
  CAPSTAN_UNROLL
  for (int k = 0; k < X::kColumns / 16; ++k) {
    uint32_t a[kTerms * kM][4], b[kTerms * kBlocks][4];
    SwizzledStep a_steps[kTerms * kM], b_steps[kTerms * kBlocks];
    CAPSTAN_UNROLL
    for (int term = 0; term < kTerms; ++term) {
      CAPSTAN_UNROLL
      for (int m = 0; m < kM; ++m) a_steps[term * kM + m] = X::step(term, 16 * m, 2 * k);
      CAPSTAN_UNROLL
      for (int n = 0; n < kBlocks; ++n) b_steps[term * kBlocks + n] = Y::step(term, 16 * n, 2 * k);
    }
    load_matrices<false>(a, memory, a_row, a_steps);
    load_matrices<false>(b, memory, b_row, b_steps);
    multiply_add<typename Terms<typename X::Element>::Type, kTerms>(accumulators, 0, a, b);
  }
}

// Converts accumulators to A fragments: 16 x (8 kN) values for each m.
template <class T, int kM, int kN>
struct AFragments {
  static constexpr int kTerms = Terms<T>::kCount, kDepth = kN / 2;
  // [terms][m], for each 16 columns
  uint32_t v[kDepth][kTerms * kM][4];

  __device__ __forceinline__ explicit AFragments(const float (&accumulators)[kM][kN][4]) {
    CAPSTAN_UNROLL
    for (int k = 0; k < kDepth; ++k) {
      CAPSTAN_UNROLL
      for (int m = 0; m < kM; ++m) {
        CAPSTAN_UNROLL
        for (int quarter = 0; quarter < 4; ++quarter) {
          const float(&block)[4] = accumulators[m][2 * k + quarter / 2];
          uint32_t terms[kTerms];
          pack_terms<T>(block[quarter % 2 * 2], block[quarter % 2 * 2 + 1], terms);
          CAPSTAN_UNROLL
          for (int term = 0; term < kTerms; ++term) v[k][term * kM + m][quarter] = terms[term];
        }
      }
    }
  }
};

// Blocks of 16 columns whose B fragments are in registers at a time; two of a head size for which more do not
// fit beside the accumulators of all columns.
template <int kBlocks, int kTerms, int kM>
inline constexpr int kColumnBlocks = kTerms > 1 || kM* kBlocks >= 16 ? 2
                                     : kBlocks % 4 == 0              ? 4
                                     : kBlocks % 3 == 0              ? 3
                                                                     : 2;

// accumulators += A Y for the first rows of tile y. With several terms, the products of one call are added at
// its end: tensor cores round toward zero, and the error would grow with the length of the sequence.
template <class Y, class T, int kM, int kN, int kAccumulators>
__device__ __forceinline__ void multiply_columns(const Shared<Bytes16>& memory, int y,
                                                 const AFragments<T, kM, kN>& a,
                                                 float (&accumulators)[kM][kAccumulators][4]) {
  static_assert(kAccumulators * 8 == Y::kColumns && kN * 8 <= Y::kRows);
  constexpr int kTerms = Y::kTerms, kBlocks = kColumnBlocks<kAccumulators / 2, kTerms, kM>;
  using Term = typename Terms<T>::Type;
  const int lane = lane_index(), b_row = y + Y::at(0, lane % 16, lane / 16);
  CAPSTAN_UNROLL
  for (int first = 0; first < kAccumulators / 2; first += kBlocks) {
    float part[kM][2 * kBlocks][4] = {};
    CAPSTAN_UNROLL
    for (int k = 0; k < kN / 2; ++k) {
      uint32_t b[kTerms * kBlocks][4];
      SwizzledStep steps[kTerms * kBlocks];
      CAPSTAN_UNROLL
      for (int term = 0; term < kTerms; ++term) {
        CAPSTAN_UNROLL
        for (int n = 0; n < kBlocks; ++n) steps[term * kBlocks + n] = Y::step(term, 16 * k, 2 * (first + n));
      }
      load_matrices<true>(b, memory, b_row, steps);
      if constexpr (kTerms == 1)
        multiply_add<Term, kTerms>(accumulators, 2 * first, a.v[k], b);
      else
        multiply_add<Term, kTerms>(part, 0, a.v[k], b);
    }
    if constexpr (kTerms > 1)
      for_accumulators<kM, 2 * kBlocks>(
          [&](int m, int n, int i) { accumulators[m][2 * first + n][i] += part[m][n][i]; });
  }
}

// ---- storing
//
// A row of 8 kColumns elements goes to a head of `width` elements. value(n, i) is the lane's value of column
// 8 n + lane_column() + i. These stores are a large part of a kernel's code. To keep it small, types and
// alignment are checked once per row, addresses have constant offsets, and only the stores depend on the
// width.

// body(n, 8 n < left, 8 n + 1 < left) for the pairs of columns of a lane.
template <int kColumns, class Body>
__device__ __forceinline__ void for_pairs_of_columns(int width, const Body& body) {
  const int left = width - lane_column();
  CAPSTAN_UNROLL
  for (int n = 0; n < kColumns; ++n) body(n, 8 * n < left, 8 * n + 1 < left);
}
// Writes a row of fp32, bf16 or fp16.
template <int kColumns, class Value>
__device__ __forceinline__ void put_row(const Out& out, int64_t at, int width, const Value& value) {
  at += lane_column();
  if (out.dtype == DType::f32) {
    float* const to = static_cast<float*>(out.data) + at;
    for_pairs_of_columns<kColumns>(width, [&](int n, bool has_low, bool has_high) {
      const float low = value(n, 0), high = value(n, 1);
      if (has_low) to[8 * n] = low;
      if (has_high) to[8 * n + 1] = high;
    });
    return;
  }
  uint16_t* const to = static_cast<uint16_t*>(out.data) + at;
  const bool is_bf16 = out.dtype == DType::bf16,
             pairs = width % 2 == 0 && reinterpret_cast<uintptr_t>(to) % 4 == 0;
  for_pairs_of_columns<kColumns>(width, [&](int n, bool has_low, bool has_high) {
    const float low = value(n, 0), high = value(n, 1);
    const uint32_t pair = is_bf16 ? pack_pair<bf16>(low, high) : pack_pair<f16>(low, high);
    if (pairs && has_low) store_4(to + 8 * n, pair);
    if (!pairs && has_low) to[8 * n] = static_cast<uint16_t>(pair);
    if (!pairs && has_high) to[8 * n + 1] = static_cast<uint16_t>(pair >> 16);
  });
}
// to[column] = value + before * to[column].
template <int kColumns, class Value>
__device__ __forceinline__ void add_to_row(float* to, int width, float before, const Value& value) {
  to += lane_column();
  for_pairs_of_columns<kColumns>(width, [&](int n, bool has_low, bool has_high) {
    if (has_low) to[8 * n] = value(n, 0) + before * to[8 * n];
    if (has_high) to[8 * n + 1] = value(n, 1) + before * to[8 * n + 1];
  });
}

}  // namespace capstan::kernels::CAPSTAN_GPU
