// Token and position embedding. Bytes moved for N rows of C columns of e bytes: forward 2 e N C (3 e with
// positions), backward e N C and 8 bytes for each element of the rows of the table that occur. The backward
// pass sorts the rows by token id, so that the rows of one token are added in their order, without atomics.
#include "kernels/embedding.hpp"

#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/sort.hpp"

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

// ---- backward: sorts keys (row of the table, row of dout), of which no two are equal

struct MakeKeys {
  const int32_t* ids;
  int64_t rows, first_row, rows_here;
  SortKey* keys;
  __device__ void operator()(int64_t i, int64_t) const {
    keys[i] = kPaddingKey;
    if (i >= rows) return;
    const int64_t id = ids[i] - first_row;
    if (id >= 0 && id < rows_here) keys[i] = static_cast<SortKey>(id) << 32 | static_cast<SortKey>(i);
  }
};

// A block for each row of dout and each slice of columns. The one at the first row of a token adds all rows
// of that token to the table, in their order.
template <class T>
__global__ void embedding_backward_kernel(Array<T> dout, const SortKey* keys, int64_t rows,
                                          Array<float> dtable, int64_t cols, int64_t slices) {
  const int64_t first = block_index() / slices, slice = block_index() % slices;
  if (keys[first] == kPaddingKey) return;
  const SortKey id = keys[first] >> 32;
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
  return {rows > 0 ? static_cast<size_t>(sorted_keys(rows)) * sizeof(SortKey) : 0, 0};
}
void backward(Context& c, In dout, const int32_t* ids, float* dtable, int64_t rows, int64_t cols,
              int64_t first_row, int64_t rows_here) {
  if (rows <= 0 || cols <= 0) return;
  auto* keys = workspace_of<SortKey>(c, backward_workspace(rows, cols, rows_here));
  if (!keys) return;
  const int64_t count = sorted_keys(rows);
  map<1>(c, count, MakeKeys{ids, rows, first_row, rows_here, keys});
  sort_keys(c, keys, 1, count);
  by_type({dout}, [&](auto type) {
    using T = decltype(type);
    const int threads = threads_for(cols, kGroup<float>);
    const int64_t slices = ceil_div(cols, int64_t{threads} * kGroup<float>);
    launch(c, {rows * slices, threads}, embedding_backward_kernel<T>, array_of<T>(dout),
           static_cast<const SortKey*>(keys), rows, Array<float>{dtable}, cols, slices);
  });
}

}  // namespace

const Embedding& embedding_family() {
  static const Embedding family{
      .forward = forward, .backward = backward, .backward_workspace = backward_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
