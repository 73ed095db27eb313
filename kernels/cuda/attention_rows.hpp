// Functions that the attention kernels share: the keys that a query attends to, the logits, and dropout.
#pragma once

#include "kernels/common/dropout.hpp"
#include "kernels/cuda/attention_calls.hpp"
#include "kernels/cuda/attention_tiles.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr int kNoKey = INT32_MAX;

// Returns the smallest head size of a compiled kernel that holds both sizes; 0: there is none.
template <class T>
int padded_head(int64_t qk_dim, int64_t v_dim) {
  const int64_t most = std::max(qk_dim, v_dim);
  for (const int size : {32, 64, 96, 128, 192, 256})
    if (most <= size && (Terms<T>::kCount == 1 || (size != 96 && size != 192))) return size;
  return 0;
}
// body(std::integral_constant<int, padded head size>).
template <class T, class Body>
void by_head_size(int64_t qk_dim, int64_t v_dim, const Body& body) {
  const int size = padded_head<T>(qk_dim, v_dim);
  if (size == 32) body(std::integral_constant<int, 32>());
  if (size == 64) body(std::integral_constant<int, 64>());
  if (size == 128) body(std::integral_constant<int, 128>());
  if (size == 256) body(std::integral_constant<int, 256>());
  if constexpr (Terms<T>::kCount == 1) {
    if (size == 96) body(std::integral_constant<int, 96>());
    if (size == 192) body(std::integral_constant<int, 192>());
  }
}

// ---- visible keys

// Positions [begin, end) of the keys that a query attends to.
struct KeyInterval {
  int begin, end;
};
__device__ inline int document_start(const Documents& d, int batch, int b, int rows, int row, int position) {
  if (d.start) return d.start[int64_t{b} * rows + row];
  if (!d.cu_seqlens) return 0;
  // Searches for the last document that begins at or before this position.
  const int first = b * (d.cu_seqlens[d.count] / batch), at = first + position;
  int low = 0, high = narrow<int>(d.count);
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (d.cu_seqlens[middle] <= at ? low : high) = middle;
  }
  return d.cu_seqlens[low] - first;
}
__device__ inline int end_of_keys(const AttentionCall& c, int position) {
  return c.causal ? position + 1 : kNoKey;
}
__device__ inline KeyInterval visible_keys(const AttentionCall& c, int b, int row, int position) {
  int begin = document_start(c.documents, c.batch, b, c.queries.rows(), row, position);
  if (c.window > 0 && begin < position - c.window + 1) begin = position - c.window + 1;
  return {begin < 0 ? 0 : begin, end_of_keys(c, position)};
}

// Smallest and largest begin and end of the key intervals of several queries. If a query attends to no key,
// attends_to_all() is false. Aligned, so that it is loaded at once.
struct alignas(16) KeyBounds {
  int min_begin = kNoKey, max_begin = -1, min_end = kNoKey, max_end = -1;
  __device__ void add(const KeyInterval& keys) {
    if (keys.begin < keys.end) {
      min_begin = keys.begin < min_begin ? keys.begin : min_begin;
      max_begin = keys.begin > max_begin ? keys.begin : max_begin;
      min_end = keys.end < min_end ? keys.end : min_end;
      max_end = keys.end > max_end ? keys.end : max_end;
    } else {
      max_begin = kNoKey;
    }
  }
  // True if some query may attend to one of the keys [first, last).
  __device__ bool attends_to_any(int first, int last) const { return first < max_end && last > min_begin; }
  // True if all queries attend to all keys [first, last).
  __device__ bool attends_to_all(int first, int last) const { return first >= max_begin && last <= min_end; }
};
// Bounds over the queries of all lanes.
__device__ __forceinline__ KeyBounds join_lanes(const KeyBounds& bounds, Location at = {}) {
  int v[4] = {-bounds.min_begin, bounds.max_begin, -bounds.min_end, bounds.max_end};
  reduce_lanes(v, Max<int>(), kWarp, at);
  return {-v[0], v[1], -v[2], v[3]};
}

// A tile of keys.
struct KeyTile {
  // Position of the first key of the tile, and positions [begin, end) of the keys of its segment.
  int position, begin, end;
  // Row of the first key of the segment.
  int first_row;
};
// Tiles of kKeys keys that cover the positions [begin, end) in both segments. Their first positions are
// multiples of 4, so that each dropout block of four keys lies in one tile.
template <int kKeys>
struct KeyTiles {
  Segments keys;
  int first0, count0, first1, count1;

  __device__ KeyTiles(const Segments& k, int begin, int end) : keys(k) {
    set(0, begin, end, first0, count0);
    set(1, begin, end, first1, count1);
  }
  __device__ int count() const { return count0 + count1; }
  __device__ KeyTile at(int tile) const {
    const int segment = tile < count0 ? 0 : 1;
    const int i = segment == 0 ? first0 + tile : first1 + tile - count0, begin = keys.begin(segment);
    return {origin(segment) + i * kKeys, begin, begin + keys.count(segment), keys.first_row(segment)};
  }

 private:
  __device__ int origin(int segment) const { return keys.begin(segment) & ~3; }
  __device__ void set(int segment, int begin, int end, int& first, int& count) const {
    const int from = keys.begin(segment), to = from + keys.count(segment);
    begin = begin > from ? begin : from;
    end = end < to ? end : to;
    first = begin < end ? (begin - origin(segment)) / kKeys : 0;
    count = begin < end ? narrow<int>(ceil_div(end - origin(segment), kKeys)) - first : 0;
  }
};
// Returns the number of tiles of kKeys keys that cover a segment.
template <int kKeys>
__host__ __device__ int tiles_of_segment(const Segments& keys, int segment) {
  const int count = keys.count(segment);
  return count > 0 ? narrow<int>(ceil_div(keys.begin(segment) % 4 + count, kKeys)) : 0;
}

// ---- logits

// Computes logits from dot products of queries and keys: factor * q k, or with a logit soft cap
// factor * tanh(inner * q k).
struct Logits {
  float factor, inner;
  bool capped;
  __host__ __device__ explicit Logits(const AttentionCall& c)
      : factor(c.softcap > 0 ? c.softcap : c.scale),
        inner(c.softcap > 0 ? c.scale / c.softcap : 0.0f),
        capped(c.softcap > 0) {}
};
// A small absolute error suffices where results are 16-bit; fp32 results need a small relative error.
template <class T>
__device__ __forceinline__ float tanh_of(float x) {
  if constexpr (std::is_same_v<T, float>)
    return std::tanh(x);
  else
    return 1.0f - 2.0f * reciprocal_fast(1.0f + exp2_fast(2 * kLog2E * x));
}
template <class T, int kM, int kN>
__device__ __forceinline__ void cap_logits(const Logits& logits, float (&scores)[kM][kN][4]) {
  if (!logits.capped) return;
  for_accumulators<kM, kN>(
      [&](int m, int n, int i) { scores[m][n][i] = tanh_of<T>(logits.inner * scores[m][n][i]); });
}

// ---- dropout, for a tile of scores whose first key is a multiple of 4

__device__ __forceinline__ float keep_factor(float probability) {
  return probability > 0 ? 1.0f / (1.0f - probability) : 1.0f;
}
struct Dropout {
  uint32_t threshold;
  PhiloxKey key;
  uint64_t head;
  __device__ Dropout(const AttentionCall& c, int of_head)
      : threshold(dropout_threshold(c.dropout)),
        key(c.dropout_key),
        head(static_cast<uint64_t>(c.head_offset + of_head)) {}
  // Bit i is 1 if dropout keeps the pair of this query and key 4 * block + i.
  __device__ __forceinline__ uint32_t kept(int64_t dropout_row, int block) const {
    const auto words =
        philox4x32(key, static_cast<uint64_t>(dropout_row), head << 40 | static_cast<uint64_t>(block));
    return uint32_t{words[0] >= threshold} | uint32_t{words[1] >= threshold} << 1 |
           uint32_t{words[2] >= threshold} << 2 | uint32_t{words[3] >= threshold} << 3;
  }
};
// Dropout mask of a lane's scores in a 16 x (8 kN) block whose rows are queries and whose columns are keys
// from `first_key` on. rows[i]: dropout row index of the lane's row i of two. Neighboring lanes compute the
// random blocks together.
template <int kN>
struct KeptKeys {
  static_assert(kN <= 8);
  uint32_t bits[2];
  __device__ __forceinline__ void init(const Dropout& dropout, const int64_t (&rows)[2], int first_key,
                                       Location at = {}) {
    const int lane = lane_index();
    uint32_t mine = 0;
    CAPSTAN_UNROLL_TWICE
    for (int n = 0; n < kN; ++n)
      mine |= dropout.kept(lane % 2 == 0 ? rows[0] : rows[1], first_key / 4 + 2 * n + lane % 4 / 2) << 4 * n;
    const uint32_t other = shuffle_xor(mine, 1, kAllLanes, at);
    bits[0] = lane % 2 == 0 ? mine : other;
    bits[1] = lane % 2 == 0 ? other : mine;
  }
  __device__ __forceinline__ bool operator()(int n, int i) const {
    return (bits[i / 2] >> (4 * n + lane_index() % 2 * 2 + i % 2) & 1) != 0;
  }
};
// Dropout mask where rows are keys and columns are queries. row_of(query) is the dropout row index.
template <int kN>
struct KeptQueries {
  static_assert(kN <= 8);
  uint32_t bits[4] = {};
  template <class RowOf>
  __device__ __forceinline__ void init(const Dropout& dropout, const RowOf& row_of, int first_key,
                                       Location at = {}) {
    // Four lanes have the same four pairs of a query and a block of keys; each lane computes one pair.
    const int lane = lane_index(), part = lane / 4 % 4;
    uint32_t mine = 0;
    CAPSTAN_UNROLL_TWICE
    for (int n = 0; n < kN; ++n)
      mine |= dropout.kept(row_of(8 * n + lane % 4 * 2 + part % 2), first_key / 4 + lane / 16 + part / 2 * 2)
              << 4 * n;
    CAPSTAN_UNROLL
    for (int i = 0; i < 4; ++i) bits[i] = shuffle(mine, (lane & ~12) | i * 4, kAllLanes, at);
  }
  __device__ __forceinline__ bool operator()(int n, int i) const {
    return (bits[i] >> (4 * n + lane_index() / 4 % 4) & 1) != 0;
  }
};

}  // namespace capstan::kernels::CAPSTAN_GPU
