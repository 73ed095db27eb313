// A bitonic sort of keys of 64 bits, in rows that are sorted by themselves. The order is that of the keys
// alone if no two of a row are equal.
#pragma once

#include "kernels/cuda/device.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

using SortKey = uint64_t;
// Pads a row; it is greater than every key.
inline constexpr SortKey kPaddingKey = ~SortKey{0};
// Largest number of keys that a block sorts in shared memory, and number of threads of the block.
inline constexpr int kBlockKeys = 4096;
inline constexpr int kSortThreads = 512;

// Padded number of keys of a row with `count` keys: a power of two, at least two for each lane.
inline int64_t sorted_keys(int64_t count) {
  return std::max<int64_t>(2 * kWarp, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count))));
}

// Index of the first key of pair `pair`, whose keys are `distance` apart. distance: a power of two.
__device__ inline int64_t first_of_pair(int64_t pair, int64_t distance) {
  return 2 * pair - (pair & (distance - 1));
}
// Compares and swaps keys i and i + distance: ascending in runs of `length` keys with an even index in their
// row, descending in the others. first: index of key i in its row.
template <class Keys>
__device__ void order_pair(const Keys& keys, int64_t i, int64_t distance, int64_t first, int64_t length) {
  const SortKey a = keys[i], b = keys[i + distance];
  if ((a > b) == ((first & length) == 0)) {
    keys[i] = b;
    keys[i + distance] = a;
  }
}

// The steps of runs of `shortest` to `longest` keys whose pairs lie within `count` keys, which the block has
// in shared memory. first: index of its first key in the row.
__device__ inline void sort_shared(const Shared<SortKey>& own, int count, int64_t first, int64_t shortest,
                                   int64_t longest) {
  for (int64_t length = shortest; length <= longest; length *= 2)
    for (int64_t distance = length / 2 < count / 2 ? length / 2 : count / 2; distance > 0; distance /= 2) {
      for (int64_t pair = thread_index(); pair < count / 2; pair += block_threads()) {
        const int64_t i = first_of_pair(pair, distance);
        order_pair(own, i, distance, first + i, length);
      }
      sync_threads();
    }
}
template <int kMost>
__global__ void sort_block_kernel(SortKey* keys, int count, int64_t row_keys, int64_t shortest,
                                  int64_t longest) {
  CAPSTAN_SHARED(SortKey, own, kMost);
  const int64_t begin = block_index() * count;
  for (int i = thread_index(); i < count; i += block_threads()) own[i] = keys[begin + i];
  sync_threads();
  sort_shared(own, count, begin & (row_keys - 1), shortest, longest);
  for (int i = thread_index(); i < count; i += block_threads()) keys[begin + i] = own[i];
}
struct SortStep {
  SortKey* keys;
  int64_t row_keys, length, distance;
  __device__ void operator()(int64_t pair, int64_t) const {
    const int64_t i = first_of_pair(pair, distance);
    order_pair(keys, i, distance, i & (row_keys - 1), length);
  }
};

inline int sort_threads(int64_t count) {
  return static_cast<int>(std::min<int64_t>(kSortThreads, count / 2));
}
// Sorts each row of keys [rows, row_keys] in ascending order; row_keys as from sorted_keys().
inline void sort_keys(Context& c, SortKey* keys, int64_t rows, int64_t row_keys) {
  const int count = static_cast<int>(std::min<int64_t>(kBlockKeys, row_keys));
  const Grid blocks{rows * row_keys / count, sort_threads(count)};
  launch(c, blocks, sort_block_kernel<kBlockKeys>, keys, count, row_keys, int64_t{2}, int64_t{count});
  for (int64_t length = 2 * count; length <= row_keys; length *= 2) {
    for (int64_t distance = length / 2; distance >= count; distance /= 2)
      map<1>(c, rows * row_keys / 2, SortStep{keys, row_keys, length, distance});
    launch(c, blocks, sort_block_kernel<kBlockKeys>, keys, count, row_keys, length, length);
  }
}

}  // namespace capstan::kernels::CAPSTAN_GPU
