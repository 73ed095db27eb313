// The epilogue of a GEMM where cuBLASLt has none that fits, and column sums: one pass over C in blocks of
// rows and columns. Bytes moved for C of e bytes an element: e m n to read and e m n to write (without an
// activation, a bias and new values only to read), e m n for the auxiliary matrix, 4 m n for fp32 values that
// replace C. Sums of columns: a warp adds every eighth row of its block, the block its warps in order, a
// second kernel the blocks in order. The blocks depend on the shape alone.
#include "kernels/cuda/activation_functions.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/gemm.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

constexpr int kEpilogueThreads = 256, kEpilogueWarps = kEpilogueThreads / kWarp;
// Smallest number of rows of a block, and largest number of blocks of rows, which limits the partial sums.
constexpr int64_t kEpilogueRows = 64, kEpilogueRowBlocks = 256;

// Division of C among blocks of threads: a block has some rows, and one group of columns for each lane.
struct EpilogueBlocks {
  int64_t rows, cols, rows_each, down;
  EpilogueBlocks(int64_t all_rows, int64_t all_cols)
      : rows(all_rows),
        cols(all_cols),
        rows_each(std::max(kEpilogueRows, round_up(ceil_div(rows, kEpilogueRowBlocks), kEpilogueWarps))),
        down(ceil_div(rows, rows_each)) {}
  int64_t across(int64_t group) const { return ceil_div(cols, group * kWarp); }
};

template <class T>
struct EpiloguePass {
  int64_t batch = 1, m = 0, n = 0, ldc = 0, stride_c = 0;
  int64_t rows_each = 0, across = 0;
  Array<T> c{};
  // True if the pass writes C.
  bool writes = false;
  EpilogueSource source{};
  Array<Any> bias{};
  GemmEpilogue::Function function = GemmEpilogue::Function::none;
  ActivationKind activation = ActivationKind::gelu;
  Array<T> auxiliary{};
  // [blocks of rows, n], and [blocks]; null: none.
  float *column_partials = nullptr, *maxima = nullptr;
};

__device__ inline ActivationValue activation_at(ActivationKind kind, float x) {
  switch (kind) {
    case ActivationKind::gelu:
      return Gelu::of(x);
    case ActivationKind::gelu_tanh:
      return GeluTanh::of(x);
    case ActivationKind::silu:
      return Silu::of(x);
    case ActivationKind::relu:
      return Relu::of(x);
    case ActivationKind::squared_relu:
      break;
  }
  return SquaredRelu::of(x);
}

// Computes, stores and returns the new values of `count` elements of a row, from `column` on. row: counted
// over all batches.
template <class T>
__device__ Group<kGroup<T>> finish_group(const EpiloguePass<T>& e, int64_t row, int64_t column) {
  constexpr int kSize = kGroup<T>;
  const int64_t count = e.n - column, matrix = e.batch == 1 ? 0 : row / e.m;
  const int64_t at = matrix * e.stride_c + (row - matrix * e.m) * e.ldc + column;
  Group<kSize> group = {};
  if (!e.source.replaces || e.source.beta != 0) group = e.c.load(at, count);
  if (!e.writes) return group;
  if (e.source.replaces)
    for (int k = 0; k < kSize && k < count; ++k)
      group[k] = (e.source.values ? e.source.values[row * e.n + column + k] : 0.0f) +
                 (e.source.beta != 0 ? e.source.beta * group[k] : 0.0f);
  if (e.bias) {
    const auto bias = e.bias.template group<kSize>(column, count);
    for (int k = 0; k < kSize; ++k) group[k] += bias[k];
  }
  if (e.function == GemmEpilogue::Function::activation) {
    if (e.auxiliary) e.auxiliary.store(at, count, group);
    // The activation of the stored, rounded pre-activation, which the backward pass reads.
    for (int k = 0; k < kSize; ++k)
      group[k] = activation_at(e.activation, to_float(from_float<T>(group[k]))).value;
  } else if (e.function == GemmEpilogue::Function::derivative) {
    const auto inner = e.auxiliary.load(at, count);
    for (int k = 0; k < kSize; ++k) group[k] *= activation_at(e.activation, inner[k]).derivative;
  }
  e.c.store(at, count, group);
  for (int k = 0; k < kSize; ++k) group[k] = to_float(from_float<T>(group[k]));
  return group;
}

template <class T, bool kReduces>
__global__ void epilogue_kernel(EpiloguePass<T> e) {
  constexpr int kSize = kGroup<T>;
  const int64_t block = block_index() / e.across, across = block_index() % e.across;
  const int64_t column = (across * kWarp + lane_index()) * kSize, begin = block * e.rows_each;
  const int64_t rows = e.batch * e.m, end = rows < begin + e.rows_each ? rows : begin + e.rows_each;
  Group<kSize> sums = {};
  float largest = 0;
  if (column < e.n)
    for (int64_t row = begin + warp_index(); row < end; row += kEpilogueWarps) {
      const auto group = finish_group(e, row, column);
      if constexpr (kReduces)
        for (int k = 0; k < kSize && column + k < e.n; ++k) {
          sums[k] += group[k];
          largest = Max()(largest, std::fabs(group[k]));
        }
    }
  if constexpr (kReduces) {
    if (e.column_partials) {
      constexpr int kColumns = kWarp * kSize;
      CAPSTAN_SHARED(float, of_warps, kEpilogueWarps* kColumns);
      for (int k = 0; k < kSize; ++k) of_warps[warp_index() * kColumns + lane_index() * kSize + k] = sums[k];
      sync_threads();
      const int64_t first = across * kColumns;
      for (int i = thread_index(); i < kColumns && first + i < e.n; i += block_threads()) {
        float sum = 0;
        for (int warp = 0; warp < kEpilogueWarps; ++warp) sum += of_warps[warp * kColumns + i];
        e.column_partials[block * e.n + first + i] = sum;
      }
    }
    if (e.maxima) {
      largest = block_max(largest);
      if (thread_index() == 0) e.maxima[block_index()] = largest;
    }
  }
}

// out[j] (+)= the sum of column j of partials [blocks, n].
__global__ void add_columns_kernel(const float* partials, int64_t blocks, int64_t n, float* out,
                                   bool accumulate) {
  const int64_t j = global_thread();
  if (j >= n) return;
  float sum = accumulate ? out[j] : 0.0f;
  for (int64_t block = 0; block < blocks; ++block) sum += partials[block * n + j];
  out[j] = sum;
}
__global__ void join_maxima_kernel(const float* maxima, int64_t count, float* amax) {
  float largest = 0;
  for (int64_t i = thread_index(); i < count; i += block_threads()) largest = Max()(largest, maxima[i]);
  largest = block_max(largest);
  if (thread_index() == 0) *amax = Max()(*amax, largest);
}

void add_columns(Context& c, const float* partials, int64_t blocks, int64_t n, float* out, bool accumulate) {
  launch(c, {ceil_div(n, int64_t{kEpilogueThreads}), kEpilogueThreads}, add_columns_kernel, partials, blocks,
         n, out, accumulate);
}

template <class T>
void run_pass(Context& c, const EpiloguePass<T>& pass, int64_t down) {
  const Grid grid{down * pass.across, kEpilogueThreads};
  if (pass.column_partials || pass.maxima)
    launch(c, grid, epilogue_kernel<T, true>, pass);
  else
    launch(c, grid, epilogue_kernel<T, false>, pass);
}

}  // namespace

int64_t epilogue_partials(int64_t rows, int64_t cols) {
  const EpilogueBlocks blocks(rows, cols);
  return blocks.down * (cols + blocks.across(kGroup<float>));
}

void run_epilogue(Context& c, const GemmShape& s, Out out, const EpilogueSource& source,
                  const GemmEpilogue& epilogue, float* partials) {
  const bool writes = source.replaces || epilogue.bias || epilogue.function != GemmEpilogue::Function::none;
  if (!writes && !epilogue.bias_gradient && !epilogue.amax) return;
  const EpilogueBlocks blocks(s.batch * s.m, s.n);
  by_type({out}, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, Any>) {
      const int64_t across = blocks.across(kGroup<T>);
      float* const maxima = partials ? partials + blocks.down * s.n : nullptr;
      run_pass(c,
               EpiloguePass<T>{.batch = s.batch,
                               .m = s.m,
                               .n = s.n,
                               .ldc = s.ldc,
                               .stride_c = s.stride_c,
                               .rows_each = blocks.rows_each,
                               .across = across,
                               .c = array_of<T>(out),
                               .writes = writes,
                               .source = source,
                               .bias = array_of<Any>(epilogue.bias),
                               .function = epilogue.function,
                               .activation = epilogue.activation,
                               .auxiliary = array_of<T>(epilogue.auxiliary),
                               .column_partials = epilogue.bias_gradient ? partials : nullptr,
                               .maxima = epilogue.amax ? maxima : nullptr},
               blocks.down);
      if (epilogue.bias_gradient) add_columns(c, partials, blocks.down, s.n, epilogue.bias_gradient, true);
      if (epilogue.amax)
        launch(c, {1, kEpilogueThreads}, join_maxima_kernel, maxima, blocks.down * across, epilogue.amax);
    }
  });
}

WorkspaceSize column_sum_workspace(int64_t rows, int64_t cols) {
  if (cols <= 0) return {};
  return {static_cast<size_t>(epilogue_partials(std::max<int64_t>(rows, 1), cols)) * sizeof(float), 0};
}
void column_sum(Context& c, In x, float* out, int64_t rows, int64_t cols, int64_t row_stride,
                bool accumulate) {
  if (cols <= 0) return;
  auto* const partials = workspace_of<float>(c, column_sum_workspace(rows, cols));
  if (!partials) return;
  const EpilogueBlocks blocks(rows, cols);
  by_type({x}, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, Any>)
      run_pass(c,
               EpiloguePass<T>{.m = rows,
                               .n = cols,
                               .ldc = row_stride,
                               .rows_each = blocks.rows_each,
                               .across = blocks.across(kGroup<T>),
                               .c = array_of<T>(x),
                               .column_partials = partials},
               blocks.down);
  });
  add_columns(c, partials, blocks.down, cols, out, accumulate);
}

}  // namespace capstan::kernels::CAPSTAN_GPU
