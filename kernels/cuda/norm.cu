// LayerNorm and RMSNorm, one block of threads per row. Bytes moved in fp32: forward 8 rows cols (16 with the
// residual), backward 12 (16 when accumulating); a row is kept in shared memory (forward) or in registers
// (backward), and wider ones are read again from the L2 cache. Gradients of gamma and beta: a block adds
// those of consecutive rows, and a second kernel adds the blocks in a fixed order. The maximum and the
// row-wise codes of a quantized output are written with y, its column-wise codes by a second kernel, which
// reads y again.
#include "kernels/norm.hpp"

#include "kernels/cuda/families.hpp"
#include "kernels/cuda/quantize_tile.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// Vectors of shared memory that a block may use, with some left for reductions.
int64_t shared_vectors() {
  constexpr size_t kForReductions = size_t{3} << 10;
  return static_cast<int64_t>((most_shared_bytes() - kForReductions) / sizeof(Bytes16));
}
// Partial rows of the gradients of gamma and beta, at most.
constexpr int64_t kMaxPartials = 256;

// Elements of x in shared memory: of x's type, since all values are rounded to it.
template <class T>
using Cached = Array<std::conditional_t<std::is_same_v<T, Any>, float, T>>;

template <class T>
struct ForwardNorm {
  bool rms;
  NormRows rows;
  // Groups of columns that are kept in shared memory.
  int cached;
  Array<T> x, residual, sum, y;
  // fp32, bf16 or fp16, not always as x.
  Array<Any> gamma, beta;
  float gamma_offset, eps;
  float *mean, *rstd;
};

// The quantized output that is written with y, whose codes have a layout, or none.
template <ScaleLayout kLayout>
struct QuantizedRows {
  static constexpr bool kExists = true;
  static constexpr ScaleLayout kCodes = kLayout;
  EncodedRows rows;
  float* amax;
};
struct NotQuantized {
  static constexpr bool kExists = false;
};

// What is known of rows at compile time: nothing, or that they consist of aligned vectors, with gamma and
// beta of the same type, and which norm it is.
enum class KnownRows : uint8_t { none, layer_vectors, rms_vectors };

// Each thread reads and writes the same columns in every pass: no barrier but those of the sums.
template <class T, class Output, KnownRows kRows>
__global__ void norm_forward_kernel(ForwardNorm<T> f, Output quantized) {
  // A vector for each group of columns: lanes access neighboring ones, without bank conflicts.
  CAPSTAN_DYNAMIC_SHARED(Bytes16, row);
  constexpr int kSize = kGroup<T>;
  constexpr bool kVectors = kRows != KnownRows::none;
  const bool rms = kVectors ? kRows == KnownRows::rms_vectors : f.rms;
  const int cols = narrow<int>(f.rows.cols), groups = narrow<int>(ceil_div(cols, kSize));
  const int64_t at = f.rows.start(block_index());
  const auto load = [&](const Array<T>& array, int g) {
    if constexpr (kVectors)
      return array.unpack(load_16(array.p + at + g * kSize));
    else
      return array.load(at + g * kSize, cols - g * kSize);
  };
  const auto store = [&](const Array<T>& array, int g, const Group<kSize>& group) {
    if constexpr (kVectors)
      store_16(array.p + at + g * kSize, array.pack(group));
    else
      array.store(at + g * kSize, cols - g * kSize, group);
  };
  const auto load_weights = [&](const Array<Any>& weights, int g) {
    if constexpr (kVectors)
      return Array<T>::unpack(load_16(static_cast<const T*>(weights.p) + g * kSize));
    else
      return weights.template group<kSize>(g * kSize, cols - g * kSize);
  };
  const auto load_again = [&](int g) {
    if (g < f.cached) return Cached<T>::unpack(row[g]);
    return f.residual ? load(f.sum, g) : load(f.x, g);
  };

  float total = 0, squares = 0;
  for (int g = thread_index(); g < groups; g += block_threads()) {
    auto group = load(f.x, g);
    if (f.residual) {
      const auto other = load(f.residual, g);
      for (int k = 0; k < kSize; ++k) group[k] += other[k];
      store(f.sum, g, group);
      // Normalizes the sum as stored (rounded), because the backward pass reads it.
      if constexpr (std::is_same_v<T, Any>)
        group = load(f.sum, g);
      else
        group = f.sum.unpack(f.sum.pack(group));
    }
    if (g < f.cached) row[g] = Cached<T>::pack(group);
    for (int k = 0; k < kSize; ++k) {
      total += group[k];
      squares += group[k] * group[k];
    }
  }
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  float mean = 0;
  if (!rms) {
    mean = block_sum(total) * inverse_cols;
    squares = 0;
    for (int g = thread_index(); g < groups; g += block_threads()) {
      const auto group = load_again(g);
      for (int k = 0; k < kSize; ++k)
        if (kVectors || g * kSize + k < cols) squares += (group[k] - mean) * (group[k] - mean);
    }
  }
  const float rstd = 1.0f / std::sqrt(block_sum(squares) * inverse_cols + f.eps);
  if (thread_index() == 0) {
    if (!rms) f.mean[block_index()] = mean;
    f.rstd[block_index()] = rstd;
  }
  uint32_t largest = 0;
  // All threads of a warp take part in the codes of its columns.
  for (int begin = 0; begin < groups; begin += block_threads()) {
    const int g = begin + thread_index();
    Group<kSize> group = {};
    if (g < groups) {
      group = load_again(g);
      const auto gamma = load_weights(f.gamma, g);
      for (int k = 0; k < kSize; ++k) group[k] = (group[k] - mean) * rstd * (gamma[k] + f.gamma_offset);
      if (!(kVectors && rms) && f.beta) {
        const auto beta = load_weights(f.beta, g);
        for (int k = 0; k < kSize; ++k) group[k] += beta[k];
      }
      store(f.y, g, group);
    }
    if constexpr (Output::kExists) {
      // Encodes y as it is stored, after rounding, and zeros after the last column.
      if constexpr (std::is_same_v<T, Any>) {
        group = load(f.y, g);
      } else {
        for (int k = 0; k < kSize; ++k)
          if (g * kSize + k >= cols) group[k] = 0;
        group = f.y.unpack(f.y.pack(group));
      }
      largest = Max<uint32_t>()(largest_of_values<kSize>(group.v), largest);
      if (quantized.rows.to.codes)
        encode_row<Output::kCodes, kSize>(quantized.rows, block_index(), g * kSize, group.v);
    }
  }
  if constexpr (Output::kExists)
    if (quantized.amax) record_maximum(largest, quantized.amax);
}
// Whether rows consist of vectors of `size` elements, aligned in all arrays of one type, as are those of the
// weights, which are of that type as well.
bool has_vectors(const NormRows& rows, int size, std::initializer_list<In> arrays,
                 std::initializer_list<In> weights) {
  const auto divides = [=](int64_t value) { return value % size == 0; };
  const auto fits = [&](const In& x) {
    return !x || (reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.dtype == arrays.begin()->dtype);
  };
  return divides(rows.cols) && divides(rows.inner_stride) && divides(rows.outer_stride) &&
         std::all_of(arrays.begin(), arrays.end(), fits) && std::all_of(weights.begin(), weights.end(), fits);
}

WorkspaceSize forward_workspace(NormRows) {
  return {};
}
void forward(Context& c, bool rms, NormRows rows, In x, In residual, Out sum, In gamma, float gamma_offset,
             In beta, float eps, Out y, float* mean, float* rstd, QuantizedOutput quantized) {
  if (refuse_quantized_output(c, quantized)) return;
  QuantizeTask task = task_of(quantized, rows.rows, rows.cols);
  by_type({x, residual, sum, y}, [&](auto type) {
    using T = decltype(type);
    const int64_t cached = std::min(ceil_div(rows.cols, int64_t{kGroup<T>}), shared_vectors());
    const ForwardNorm<T> f{rms,
                           rows,
                           narrow<int>(cached),
                           array_of<T>(x),
                           array_of<T>(residual),
                           array_of<T>(sum),
                           array_of<T>(y),
                           array_of<Any>(gamma),
                           array_of<Any>(beta),
                           gamma_offset,
                           eps,
                           mean,
                           rstd};
    // Few threads, each with several vectors: a warp's work for the row itself is that for one of them.
    constexpr int kThreads = 128;
    const Grid grid{rows.rows, threads_for(rows.cols, kGroup<T>, kThreads),
                    static_cast<size_t>(cached) * sizeof(Bytes16)};
    const auto launch_kernel = [&]<KnownRows kRows>(std::integral_constant<KnownRows, kRows>) {
      if (quantized)
        by_layout_of_output(task, [&]<ScaleLayout kLayout>(Layout<kLayout>) {
          using Output = QuantizedRows<kLayout>;
          launch(c, grid, norm_forward_kernel<T, Output, kRows>, f, Output{task.rows, task.amax});
        });
      else
        launch(c, grid, norm_forward_kernel<T, NotQuantized, kRows>, f, NotQuantized());
    };
    if constexpr (!std::is_same_v<T, Any>)
      if (has_vectors(rows, kGroup<T>, {x, residual, sum, y}, {gamma, beta}))
        return rms ? launch_kernel(std::integral_constant<KnownRows, KnownRows::rms_vectors>())
                   : launch_kernel(std::integral_constant<KnownRows, KnownRows::layer_vectors>());
    launch_kernel(std::integral_constant<KnownRows, KnownRows::none>());
  });
  fill_scale_gaps(c, task.rows);
  if (!quantized.columns.codes) return;
  task.rows.to = {};
  task.amax = nullptr;
  quantize_array(c, y, rows.cols, task);
}

// ---- backward: with xhat = (x - mean) rstd and h = dy g,  dx = rstd (h - mean(h) - xhat mean(h xhat));
// RMSNorm lacks mean(h).

template <class T>
struct BackwardNorm {
  bool rms, accumulate;
  NormRows rows;
  // Rows per block of threads.
  int64_t block;
  Array<T> dy, x, dx;
  Array<Any> gamma;
  float gamma_offset;
  const float *mean, *rstd;
  // [blocks, 2, cols]; null: without gradients of gamma and beta. The second half is written for beta only.
  float* partials;
  bool beta;

  // The partial row of this block, for gamma or beta.
  __device__ Array<float> partial(bool of_beta) const {
    return {partials + (2 * block_index() + (of_beta ? 1 : 0)) * rows.cols};
  }
  // One after the last row of this block.
  __device__ int64_t end_row() const {
    const int64_t end = (block_index() + 1) * block;
    return rows.rows < end ? rows.rows : end;
  }
};

struct RowStatistics {
  float mean, rstd;
};
template <class T>
__device__ Group<kGroup<T>> gamma_of(const BackwardNorm<T>& b, int i, int count) {
  auto gamma = b.gamma.template group<kGroup<T>>(i, count);
  for (int k = 0; k < kGroup<T>; ++k) gamma[k] += b.gamma_offset;
  return gamma;
}
// h and xhat of a group. Where dy is 0, as after the last column, neither changes a sum of products.
template <int kSize>
struct NormTerms {
  Group<kSize> h, hat;
};
template <int kSize>
__device__ NormTerms<kSize> terms_of(const Group<kSize>& dy, const Group<kSize>& x, const Group<kSize>& gamma,
                                     const RowStatistics& row) {
  NormTerms<kSize> terms;
  for (int k = 0; k < kSize; ++k) {
    terms.h[k] = dy[k] * gamma[k];
    terms.hat[k] = (x[k] - row.mean) * row.rstd;
  }
  return terms;
}
// The sums over a row that its gradient needs, then their means.
struct RowSums {
  float hx = 0, h = 0;
  template <int kSize>
  __device__ void add(const NormTerms<kSize>& terms) {
    for (int k = 0; k < kSize; ++k) {
      h += terms.h[k];
      hx += terms.h[k] * terms.hat[k];
    }
  }
  __device__ RowSums means(bool rms, float inverse_cols) const {
    if (rms) return {block_sum(hx) * inverse_cols, 0};
    float sums[2] = {hx, h};
    block_sums(sums);
    return {sums[0] * inverse_cols, sums[1] * inverse_cols};
  }
};
// dx += the gradient of a group.
template <int kSize>
__device__ void add_gradient(Group<kSize>& dx, const NormTerms<kSize>& terms, float rstd,
                             const RowSums& means) {
  for (int k = 0; k < kSize; ++k) dx[k] += rstd * (terms.h[k] - means.h - terms.hat[k] * means.hx);
}

// Most threads of a block whose threads have one group of each row. It leaves 64 registers for each.
constexpr int kMostRowThreads = 1024;

// Rows of one group for each thread, which sums in registers. The next row is on its way while this one waits
// for its sums. kRms: RMSNorm, without a mean and beta.
template <class T, bool kRms>
__global__ void CAPSTAN_LAUNCH_BOUNDS(kMostRowThreads, 1) norm_backward_kernel(BackwardNorm<T> b) {
  // gamma, which would need too many registers: [vectors of a group, threads].
  CAPSTAN_DYNAMIC_SHARED(Bytes16, gammas);
  constexpr int kSize = kGroup<T>, kVectors = kSize / 4;
  const int i = thread_index() * kSize, count = narrow<int>(b.rows.cols) - i;
  const float inverse_cols = 1.0f / static_cast<float>(b.rows.cols);
  const auto part_of = [](const Group<kSize>& group, int part) {
    return Group<4>{group[4 * part], group[4 * part + 1], group[4 * part + 2], group[4 * part + 3]};
  };
  {
    const auto gamma = gamma_of(b, i, count);
    for (int part = 0; part < kVectors; ++part)
      gammas[part * block_threads() + thread_index()] = Array<float>::pack(part_of(gamma, part));
  }
  Group<kSize> dgamma = {}, dbeta = {};
  // The next row.
  int64_t row = block_index() * b.block, at = 0;
  Bytes16 next_dy, next_x;
  RowStatistics next;
  const auto load_next = [&] {
    at = b.rows.start(row) + i;
    next = {kRms ? 0.0f : b.mean[row], b.rstd[row]};
    next_dy = b.dy.load_bytes(at, count), next_x = b.x.load_bytes(at, count);
  };
  load_next();
  for (int left = narrow<int>(b.end_row() - row); left > 0; --left) {
    const RowStatistics statistics = next;
    const int64_t to = at;
    const auto dy = Array<T>::unpack(next_dy);
    Group<kSize> gamma;
    for (int part = 0; part < kVectors; ++part) {
      const auto vector = Array<float>::unpack(gammas[part * block_threads() + thread_index()]);
      for (int k = 0; k < 4; ++k) gamma[4 * part + k] = vector[k];
    }
    const auto terms = terms_of(dy, Array<T>::unpack(next_x), gamma, statistics);
    Bytes16 dx = {};
    if (b.accumulate) dx = b.dx.load_bytes(to, count);
    ++row;
    if (left > 1) load_next();
    for (int k = 0; k < kSize; ++k) {
      dgamma[k] += dy[k] * terms.hat[k];
      if (!kRms) dbeta[k] += dy[k];
    }
    RowSums sums;
    sums.add(terms);
    const RowSums means = sums.means(kRms, inverse_cols);
    auto gradient = Array<T>::unpack(dx);
    add_gradient(gradient, terms, statistics.rstd, means);
    b.dx.store(to, count, gradient);
  }
  if (!b.partials) return;
  for (int part = 0; part < kVectors; ++part) {
    b.partial(false).store(i + 4 * part, count - 4 * part, part_of(dgamma, part));
    if (!kRms && b.beta) b.partial(true).store(i + 4 * part, count - 4 * part, part_of(dbeta, part));
  }
}

// Rows of any size, read twice. kShared: sums the gradients of gamma and beta in shared memory; else in the
// block's partial row, in the L2 cache.
template <class T, bool kShared>
__global__ void norm_backward_wide_kernel(BackwardNorm<T> b) {
  // [2, vectors of a group, groups]: lanes access neighboring vectors, without bank conflicts. A thread
  // accesses its own groups only.
  CAPSTAN_DYNAMIC_SHARED(Bytes16, shared);
  constexpr int kSize = kGroup<T>, kVectors = kSize / 4;
  const int cols = narrow<int>(b.rows.cols), groups = narrow<int>(ceil_div(cols, kSize));
  const auto add = [&](bool of_beta, int g, const Group<kSize>& values, bool first) {
    for (int part = 0; part < kVectors; ++part) {
      const int i = g * kSize + part * 4, count = cols - i;
      const int vector = ((of_beta ? kVectors : 0) + part) * groups + g;
      Group<4> sum = {};
      if (!first) sum = kShared ? Array<float>::unpack(shared[vector]) : b.partial(of_beta).load(i, count);
      for (int k = 0; k < 4; ++k) sum[k] += values[part * 4 + k];
      if (kShared)
        shared[vector] = Array<float>::pack(sum);
      else
        b.partial(of_beta).store(i, count, sum);
    }
  };
  const int64_t begin = block_index() * b.block, end = b.end_row();
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  for (int64_t row = begin; row < end; ++row) {
    const RowStatistics statistics{b.rms ? 0.0f : b.mean[row], b.rstd[row]};
    // body(group, index of its first element, number of elements, dy, terms)
    const auto for_groups = [&](const auto& body) {
      for (int g = thread_index(); g < groups; g += block_threads()) {
        const int i = g * kSize, count = cols - i;
        const int64_t at = b.rows.start(row) + i;
        const auto dy = b.dy.load(at, count);
        body(g, at, count, dy, terms_of(dy, b.x.load(at, count), gamma_of(b, i, count), statistics));
      }
    };
    RowSums sums;
    for_groups([&](int g, int64_t, int, const Group<kSize>& dy, const NormTerms<kSize>& terms) {
      sums.add(terms);
      if (!b.partials) return;
      Group<kSize> products;
      for (int k = 0; k < kSize; ++k) products[k] = dy[k] * terms.hat[k];
      add(false, g, products, row == begin);
      if (b.beta) add(true, g, dy, row == begin);
    });
    const RowSums means = sums.means(b.rms, inverse_cols);
    for_groups([&](int, int64_t at, int count, const Group<kSize>&, const NormTerms<kSize>& terms) {
      Group<kSize> dx = {};
      if (b.accumulate) dx = b.dx.load(at, count);
      add_gradient(dx, terms, statistics.rstd, means);
      b.dx.store(at, count, dx);
    });
  }
  if constexpr (kShared)
    for (int g = thread_index(); g < groups; g += block_threads())
      for (int vector = 0; vector < (b.beta ? 2 : 1) * kVectors; ++vector) {
        const int i = g * kSize + vector % kVectors * 4;
        b.partial(vector >= kVectors).store(i, cols - i, Array<float>::unpack(shared[vector * groups + g]));
      }
}

// dgamma and dbeta += the sums of their partial rows.
__global__ void norm_gradients_kernel(const float* partials, int64_t blocks, int64_t cols, float* dgamma,
                                      float* dbeta) {
  const int64_t i = block_index() * kWarp + lane_index();
  float* to = i < cols ? dgamma : dbeta;
  if (i >= 2 * cols) to = nullptr;
  const float sum = column_sum(to ? partials + i : nullptr, blocks, 2 * cols);
  if (to && warp_index() == 0) to[i < cols ? i : i - cols] += sum;
}

int64_t backward_block(const NormRows& rows) {
  return std::max<int64_t>(1, ceil_div(rows.rows, kMaxPartials));
}
WorkspaceSize backward_workspace(NormRows rows, bool parameter_gradients) {
  if (rows.rows <= 0 || !parameter_gradients) return {};
  const int64_t blocks = ceil_div(rows.rows, backward_block(rows));
  return {static_cast<size_t>(blocks * 2 * rows.cols) * sizeof(float), 0};
}
void backward(Context& c, bool rms, NormRows rows, In dy, In x, In gamma, float gamma_offset,
              const float* mean, const float* rstd, Out dx, bool accumulate, float* dgamma, float* dbeta) {
  if (rows.rows <= 0) return;
  const bool gradients = dgamma || dbeta;
  auto* partials = gradients ? workspace_of<float>(c, backward_workspace(rows, true)) : nullptr;
  if (gradients && !partials) return;
  // Rows without gradients of the weights need not share a block.
  const int64_t block = gradients ? backward_block(rows) : 1, blocks = ceil_div(rows.rows, block);
  by_type({dy, x, dx}, [&](auto type) {
    using T = decltype(type);
    const BackwardNorm<T> b{rms,
                            accumulate,
                            rows,
                            block,
                            array_of<T>(dy),
                            array_of<T>(x),
                            array_of<T>(dx),
                            array_of<Any>(gamma),
                            gamma_offset,
                            mean,
                            rstd,
                            partials,
                            !rms && dbeta};
    if constexpr (!std::is_same_v<T, Any>)
      if (rows.cols <= kMostRowThreads * kGroup<T>) {
        const int threads = threads_for(rows.cols, kGroup<T>, kMostRowThreads);
        const size_t gammas = static_cast<size_t>(threads) * kGroup<T> * sizeof(float);
        return launch(c, {blocks, threads, gammas},
                      rms ? norm_backward_kernel<T, true> : norm_backward_kernel<T, false>, b);
      }
    const int64_t vectors = gradients ? (b.beta ? 2 : 1) * ceil_div(rows.cols, kGroup<T>) * kGroup<T> / 4 : 0;
    const int threads = threads_for(rows.cols, kGroup<T>);
    if (gradients && vectors <= shared_vectors())
      launch(c, {blocks, threads, static_cast<size_t>(vectors) * sizeof(Bytes16)},
             norm_backward_wide_kernel<T, true>, b);
    else
      launch(c, {blocks, threads}, norm_backward_wide_kernel<T, false>, b);
  });
  if (gradients)
    launch(c, {ceil_div((rms ? 1 : 2) * rows.cols, int64_t{kWarp}), kColumnSumThreads}, norm_gradients_kernel,
           static_cast<const float*>(partials), blocks, rows.cols, dgamma, dbeta);
}

}  // namespace

const Norm& norm_family() {
  static const Norm family{.forward = forward,
                           .backward = backward,
                           .forward_workspace = forward_workspace,
                           .backward_workspace = backward_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
