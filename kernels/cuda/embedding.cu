// Token and position embedding. Bytes moved for N rows of C columns of e bytes: forward 2 e N C (3 e with
// positions), backward e N C and 8 bytes for each element of the rows of the table that occur. The backward
// pass sorts the rows by token id, so that the rows of one token are added in their order, without atomics.
#include "kernels/embedding.hpp"

#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

template <class T>
struct EmbeddingForward {
  Array<T> table;
  const int32_t* ids;
  Array<T> position_table;
  const int32_t* positions;
  Array<T> out;
  int64_t cols, first_row, rows_here;
};
template <class T>
__global__ void embedding_forward_kernel(EmbeddingForward<T> e) {
  const int64_t row = block_index(), id = e.ids[row] - e.first_row;
  const bool here = id >= 0 && id < e.rows_here;
  const int64_t position = e.position_table ? int64_t{e.positions[row]} : 0;
  for (int64_t i = int64_t{thread_index()} * kGroup<T>; i < e.cols; i += block_threads() * kGroup<T>) {
    Group<kGroup<T>> group = {};
    if (here) group = e.table.load(id * e.cols + i, e.cols - i);
    if (e.position_table) {
      const auto other = e.position_table.load(position * e.cols + i, e.cols - i);
      for (int k = 0; k < kGroup<T>; ++k) group[k] += other[k];
    }
    e.out.store(row * e.cols + i, e.cols - i, group);
  }
}
void forward(Context& c, In table, const int32_t* ids, In position_table, const int32_t* positions, Out out,
             int64_t rows, int64_t cols, int64_t first_row, int64_t rows_here) {
  by_type({table, position_table, out}, [&](auto type) {
    using T = decltype(type);
    const EmbeddingForward<T> e{
        array_of<T>(table), ids,      array_of<T>(position_table), positions, array_of<T>(out), cols,
        first_row,          rows_here};
    launch(c, {rows, threads_for(cols, kGroup<T>)}, embedding_forward_kernel<T>, e);
  });
}

// ---- backward: a bitonic sort of keys (row of the table, row of dout), of which no two are equal

using Key = uint64_t;
// Greater than every key.
constexpr Key kNoKey = ~Key{0};
// Keys that a block sorts in shared memory, by half as many threads.
constexpr int kBlockKeys = 1024;

// A power of two, and at least the keys of one block.
int64_t sorted_keys(int64_t rows) {
  return std::max<int64_t>(kBlockKeys, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows))));
}

struct MakeKeys {
  const int32_t* ids;
  int64_t rows, first_row, rows_here;
  Key* keys;
  __device__ void operator()(int64_t i, int64_t) const {
    keys[i] = kNoKey;
    if (i >= rows) return;
    const int64_t id = ids[i] - first_row;
    if (id >= 0 && id < rows_here) keys[i] = static_cast<Key>(id) << 32 | static_cast<Key>(i);
  }
};

// The first of the two keys that thread `pair` of a step compares, which are `distance` apart.
__device__ int64_t first_of_pair(int64_t pair, int64_t distance) {
  return pair / distance * 2 * distance + pair % distance;
}
// Whether the run of `length` keys that contains key i is ascending.
__device__ bool ascending(int64_t i, int64_t length) {
  return (i & length) == 0;
}

// The steps of the runs up to `longest` keys with a distance within a block; from runs of `shortest` keys on.
__global__ void sort_block_kernel(Key* keys, int64_t shortest, int64_t longest) {
  CAPSTAN_SHARED(Key, own, kBlockKeys);
  const int64_t begin = block_index() * kBlockKeys;
  for (int i = thread_index(); i < kBlockKeys; i += block_threads()) own[i] = keys[begin + i];
  sync_threads();
  for (int64_t length = shortest; length <= longest; length *= 2)
    for (int64_t distance = length / 2 < kBlockKeys / 2 ? length / 2 : kBlockKeys / 2; distance > 0;
         distance /= 2) {
      const int64_t i = first_of_pair(thread_index(), distance);
      const Key a = own[i], b = own[i + distance];
      if ((a > b) == ascending(begin + i, length)) {
        own[i] = b;
        own[i + distance] = a;
      }
      sync_threads();
    }
  for (int i = thread_index(); i < kBlockKeys; i += block_threads()) keys[begin + i] = own[i];
}
struct SortStep {
  Key* keys;
  int64_t length, distance;
  __device__ void operator()(int64_t pair, int64_t) const {
    const int64_t i = first_of_pair(pair, distance);
    const Key a = keys[i], b = keys[i + distance];
    if ((a > b) == ascending(i, length)) {
      keys[i] = b;
      keys[i + distance] = a;
    }
  }
};
void sort_keys(Context& c, Key* keys, int64_t count) {
  const Grid blocks{count / kBlockKeys, kBlockKeys / 2};
  launch(c, blocks, sort_block_kernel, keys, int64_t{2}, int64_t{kBlockKeys});
  for (int64_t length = 2 * kBlockKeys; length <= count; length *= 2) {
    for (int64_t distance = length / 2; distance >= kBlockKeys; distance /= 2)
      map<1>(c, count / 2, SortStep{keys, length, distance});
    launch(c, blocks, sort_block_kernel, keys, length, length);
  }
}

// A block for each row of dout and each slice of columns. The one at the first row of a token adds all rows
// of that token to the table, in their order.
template <class T>
__global__ void embedding_backward_kernel(Array<T> dout, const Key* keys, int64_t rows, Array<float> dtable,
                                          int64_t cols, int64_t slices) {
  const int64_t first = block_index() / slices, slice = block_index() % slices;
  if (keys[first] == kNoKey) return;
  const Key id = keys[first] >> 32;
  if (first > 0 && keys[first - 1] >> 32 == id) return;
  const int64_t i = (slice * block_threads() + thread_index()) * kGroup<float>, count = cols - i;
  if (count <= 0) return;
  const int64_t to = static_cast<int64_t>(id) * cols + i;
  auto sum = dtable.load(to, count);
  for (int64_t k = first; k < rows && keys[k] >> 32 == id; ++k) {
    const int64_t from = static_cast<int64_t>(keys[k] & 0xFFFFFFFF) * cols + i;
    for (int n = 0; n < kGroup<float>; ++n)
      if (n < count) sum[n] += dout.at(from + n);
  }
  dtable.store(to, count, sum);
}

WorkspaceSize backward_workspace(int64_t rows, int64_t, int64_t) {
  return {rows > 0 ? static_cast<size_t>(sorted_keys(rows)) * sizeof(Key) : 0, 0};
}
void backward(Context& c, In dout, const int32_t* ids, float* dtable, int64_t rows, int64_t cols,
              int64_t first_row, int64_t rows_here) {
  if (rows <= 0 || cols <= 0) return;
  auto* keys = workspace_of<Key>(c, backward_workspace(rows, cols, rows_here));
  if (!keys) return;
  const int64_t count = sorted_keys(rows);
  map<1>(c, count, MakeKeys{ids, rows, first_row, rows_here, keys});
  sort_keys(c, keys, count);
  by_type({dout}, [&](auto type) {
    using T = decltype(type);
    const int threads = threads_for(cols, kGroup<float>);
    const int64_t slices = ceil_div(cols, int64_t{threads} * kGroup<float>);
    launch(c, {rows * slices, threads}, embedding_backward_kernel<T>, array_of<T>(dout),
           static_cast<const Key*>(keys), rows, Array<float>{dtable}, cols, slices);
  });
}

}  // namespace

const Embedding& embedding_family() {
  static const Embedding family{
      .forward = forward, .backward = backward, .backward_workspace = backward_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
