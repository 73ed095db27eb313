// Passes over matrices beside a GEMM: the bias and the type of C where cuBLASLt does not give them, and
// column sums. Bytes moved for a matrix of e bytes an element: e m n to read and to write, 4 m n for fp32
// values that replace C; e m n to read for column sums. They add in a fixed order: a warp every eighth row of
// its block, the block its warps, and a second kernel the blocks, eight runs of them side by side. The blocks
// depend on the shape alone.
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/gemm.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

constexpr int kPassThreads = 256, kPassWarps = kPassThreads / kWarp;
// Smallest number of rows of a block, and largest number of blocks of rows, which limits the partial sums.
constexpr int64_t kPassRows = 64, kPassRowBlocks = 256;

// Division of a matrix among blocks of threads: a block has some rows, and one group of columns for each
// lane.
struct PassBlocks {
  int64_t rows, cols, rows_each, down;
  PassBlocks(int64_t all_rows, int64_t all_cols)
      : rows(all_rows),
        cols(all_cols),
        rows_each(std::max(kPassRows, round_up(ceil_div(rows, kPassRowBlocks), kPassWarps))),
        down(ceil_div(rows, rows_each)) {}
  int64_t across(int64_t group) const { return ceil_div(cols, group * kWarp); }
};

template <class T>
struct ResultPass {
  int64_t batch = 1, m = 0, n = 0, ldc = 0, stride_c = 0;
  int64_t rows_each = 0, across = 0;
  Array<T> c{};
  GemmResult result{};
  Array<Any> bias{};
};

template <class T>
__global__ void finish_result_kernel(ResultPass<T> p) {
  constexpr int kSize = kGroup<T>;
  const int64_t begin = block_index() / p.across * p.rows_each, rows = p.batch * p.m,
                end = rows < begin + p.rows_each ? rows : begin + p.rows_each;
  const int64_t column = (block_index() % p.across * kWarp + lane_index()) * kSize, count = p.n - column;
  if (count <= 0) return;
  for (int64_t row = begin + warp_index(); row < end; row += kPassWarps) {
    const int64_t matrix = p.batch == 1 ? 0 : row / p.m;
    const int64_t at = matrix * p.stride_c + (row - matrix * p.m) * p.ldc + column;
    Group<kSize> group = {};
    if (!p.result.replaces || p.result.beta != 0) group = p.c.load(at, count);
    if (p.result.replaces)
      for (int k = 0; k < kSize && k < count; ++k)
        group[k] = (p.result.values ? p.result.values[row * p.n + column + k] : 0.0f) +
                   (p.result.beta != 0 ? p.result.beta * group[k] : 0.0f);
    if (p.bias) {
      const auto bias = p.bias.template group<kSize>(column, count);
      for (int k = 0; k < kSize; ++k) group[k] += bias[k];
    }
    p.c.store(at, count, group);
  }
}

// partials [blocks of rows, cols]
template <class T>
__global__ void column_partials_kernel(Array<T> x, int64_t rows, int64_t cols, int64_t row_stride,
                                       int64_t rows_each, int64_t across, float* partials) {
  constexpr int kSize = kGroup<T>, kColumns = kWarp * kSize;
  const int64_t block = block_index() / across, first = block_index() % across * kColumns,
                column = first + lane_index() * kSize, begin = block * rows_each,
                end = rows < begin + rows_each ? rows : begin + rows_each;
  Group<kSize> sums = {};
  if (column < cols)
    for (int64_t row = begin + warp_index(); row < end; row += kPassWarps) {
      const auto group = x.load(row * row_stride + column, cols - column);
      for (int k = 0; k < kSize && column + k < cols; ++k) sums[k] += group[k];
    }
  CAPSTAN_SHARED(float, of_warps, kPassWarps* kColumns);
  for (int k = 0; k < kSize; ++k) of_warps[warp_index() * kColumns + lane_index() * kSize + k] = sums[k];
  sync_threads();
  for (int i = thread_index(); i < kColumns && first + i < cols; i += block_threads()) {
    float sum = 0;
    for (int warp = 0; warp < kPassWarps; ++warp) sum += of_warps[warp * kColumns + i];
    partials[block * cols + first + i] = sum;
  }
}

// out[j] (+)= the sum of column j of partials [blocks, n]
__global__ void add_column_partials_kernel(const float* partials, int64_t blocks, int64_t n, float* out,
                                           bool accumulate) {
  const int64_t j = block_index() * kWarp + lane_index();
  const float sum = column_sum(j < n ? partials + j : nullptr, blocks, n);
  if (warp_index() == 0 && j < n) out[j] = accumulate ? out[j] + sum : sum;
}

}  // namespace

void finish_result(Context& c, const GemmShape& s, Out out, const GemmResult& result, In bias) {
  const PassBlocks blocks(s.batch * s.m, s.n);
  by_type({out}, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, Any>) {
      const int64_t across = blocks.across(kGroup<T>);
      launch(c, {blocks.down * across, kPassThreads}, finish_result_kernel<T>,
             ResultPass<T>{.batch = s.batch,
                           .m = s.m,
                           .n = s.n,
                           .ldc = s.ldc,
                           .stride_c = s.stride_c,
                           .rows_each = blocks.rows_each,
                           .across = across,
                           .c = array_of<T>(out),
                           .result = result,
                           .bias = array_of<Any>(bias)});
    }
  });
}

WorkspaceSize column_sum_workspace(int64_t rows, int64_t cols) {
  if (cols <= 0) return {};
  return {static_cast<size_t>(PassBlocks(std::max<int64_t>(rows, 1), cols).down * cols) * sizeof(float), 0};
}
void column_sum(Context& c, In x, float* out, int64_t rows, int64_t cols, int64_t row_stride,
                bool accumulate) {
  if (cols <= 0) return;
  auto* const partials = workspace_of<float>(c, column_sum_workspace(rows, cols));
  if (!partials) return;
  const PassBlocks blocks(rows, cols);
  by_type({x}, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, Any>) {
      const int64_t across = blocks.across(kGroup<T>);
      launch(c, {blocks.down * across, kPassThreads}, column_partials_kernel<T>, array_of<T>(x), rows, cols,
             row_stride, blocks.rows_each, across, partials);
    }
  });
  launch(c, {ceil_div(cols, int64_t{kWarp}), kColumnSumThreads}, add_column_partials_kernel, partials,
         blocks.down, cols, out, accumulate);
}

}  // namespace capstan::kernels::CAPSTAN_GPU
