// LayerNorm and RMSNorm, one block of threads per row. Bytes moved in fp32: forward 8 rows cols (16 with the
// residual), backward 12 (16 when accumulating); a row is kept in shared memory, or read again from the L2
// cache. Gradients of gamma and beta: a block adds those of consecutive rows, and a second kernel adds the
// blocks in order. The maximum and the row-wise codes of a quantized output are written with y, its
// column-wise codes by a second kernel, which reads y again.
#include "kernels/norm.hpp"

#include "kernels/cuda/families.hpp"
#include "kernels/cuda/quantize_tile.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// Floats of shared memory that a block may use, with some left for reductions.
int64_t shared_floats() {
  constexpr size_t kForReductions = size_t{3} << 10;
  return static_cast<int64_t>((most_shared_bytes() - kForReductions) / sizeof(float));
}
// Partial rows of the gradients of gamma and beta, at most.
constexpr int64_t kMaxPartials = 256;

template <class T>
struct ForwardNorm {
  bool rms;
  NormRows rows;
  // Columns that are kept in shared memory.
  int64_t cached;
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

// Each thread reads and writes the same columns in every pass: no barrier but those of the sums.
template <class T, class Output>
__global__ void norm_forward_kernel(ForwardNorm<T> f, Output quantized) {
  CAPSTAN_DYNAMIC_SHARED(float, row);
  constexpr int kSize = kGroup<T>;
  const int64_t cols = f.rows.cols, at = f.rows.start(block_index());
  const Array<T>& stored = f.residual ? f.sum : f.x;
  // body(column, value) for the values of this thread, in fp32.
  const auto for_values = [&](auto&& body) {
    for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize)
      for (int k = 0; k < kSize && i + k < cols; ++k)
        body(i + k, i + k < f.cached ? static_cast<float>(row[i + k]) : stored.at(at + i + k));
  };

  float total = 0;
  for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize) {
    auto group = f.x.load(at + i, cols - i);
    if (f.residual) {
      const auto other = f.residual.load(at + i, cols - i);
      for (int k = 0; k < kSize; ++k) group[k] += other[k];
      f.sum.store(at + i, cols - i, group);
      // Normalizes the sum as stored (rounded), because the backward pass reads it.
      if constexpr (std::is_same_v<T, Any>)
        group = f.sum.load(at + i, cols - i);
      else
        for (int k = 0; k < kSize; ++k) group[k] = to_float(from_float<T>(group[k]));
    }
    for (int k = 0; k < kSize && i + k < cols; ++k) {
      if (i + k < f.cached) row[i + k] = group[k];
      total += group[k];
    }
  }
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const float mean = f.rms ? 0.0f : block_sum(total) * inverse_cols;
  float squares = 0;
  for_values([&](int64_t, float value) { squares += (value - mean) * (value - mean); });
  const float rstd = 1.0f / std::sqrt(block_sum(squares) * inverse_cols + f.eps);
  if (thread_index() == 0) {
    if (!f.rms) f.mean[block_index()] = mean;
    f.rstd[block_index()] = rstd;
  }
  uint32_t largest = 0;
  // All threads of a warp take part in the codes of its columns.
  for (int64_t begin = 0; begin < cols; begin += block_threads() * kSize) {
    const int64_t i = begin + thread_index() * kSize;
    Group<kSize> group = {};
    const auto gamma = f.gamma.template group<kSize>(i, cols - i);
    for (int k = 0; k < kSize && i + k < cols; ++k) {
      const float value = i + k < f.cached ? static_cast<float>(row[i + k]) : stored.at(at + i + k);
      group[k] = (value - mean) * rstd * (gamma[k] + f.gamma_offset);
    }
    if (f.beta) {
      const auto beta = f.beta.template group<kSize>(i, cols - i);
      for (int k = 0; k < kSize; ++k) group[k] += beta[k];
    }
    f.y.store(at + i, cols - i, group);
    if constexpr (Output::kExists) {
      // Encodes y as it is stored, after rounding.
      if constexpr (std::is_same_v<T, Any>)
        group = f.y.load(at + i, cols - i);
      else
        for (int k = 0; k < kSize; ++k) group[k] = to_float(from_float<T>(group[k]));
      largest = Max<uint32_t>()(largest_of_values<kSize>(group.v), largest);
      if (quantized.rows.to.codes)
        encode_row<Output::kCodes, kSize>(quantized.rows, block_index(), i, group.v);
    }
  }
  if constexpr (Output::kExists)
    if (quantized.amax) record_maximum(largest, quantized.amax);
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
    const int64_t cached = std::min(rows.cols, shared_floats());
    const ForwardNorm<T> f{rms,
                           rows,
                           cached,
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
    const Grid grid{rows.rows, threads_for(rows.cols, kGroup<T>),
                    static_cast<size_t>(cached) * sizeof(float)};
    if (quantized)
      by_layout_of_output(task, [&]<ScaleLayout kLayout>(Layout<kLayout>) {
        using Output = QuantizedRows<kLayout>;
        launch(c, grid, norm_forward_kernel<T, Output>, f, Output{task.rows, task.amax});
      });
    else
      launch(c, grid, norm_forward_kernel<T, NotQuantized>, f, NotQuantized());
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
  // [blocks, 2, cols]; null: without gradients of gamma and beta.
  float* partials;
};

// kShared: sums the gradients of gamma and beta in shared memory; else in the block's partial row, in the L2
// cache.
template <class T, bool kShared>
__global__ void norm_backward_kernel(BackwardNorm<T> b) {
  // [2, cols]. A thread accesses its own columns only.
  CAPSTAN_DYNAMIC_SHARED(float, shared);
  float* const partial = b.partials ? b.partials + block_index() * 2 * b.rows.cols : nullptr;
  const auto add = [&](int64_t i, float value, bool first) {
    if constexpr (kShared)
      shared[i] = (first ? 0.0f : static_cast<float>(shared[i])) + value;
    else
      partial[i] = (first ? 0.0f : partial[i]) + value;
  };
  constexpr int kSize = kGroup<T>;
  const int64_t cols = b.rows.cols, begin = block_index() * b.block;
  const int64_t end = b.rows.rows < begin + b.block ? b.rows.rows : begin + b.block;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = b.rows.start(row);
    const float mean = b.rms ? 0.0f : b.mean[row], rstd = b.rstd[row];
    float sum_h = 0, sum_hx = 0;
    for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize) {
      const auto dy = b.dy.load(at + i, cols - i), x = b.x.load(at + i, cols - i);
      const auto gamma = b.gamma.template group<kSize>(i, cols - i);
      for (int k = 0; k < kSize && i + k < cols; ++k) {
        const float hat = (x[k] - mean) * rstd, h = dy[k] * (gamma[k] + b.gamma_offset);
        sum_h += h;
        sum_hx += h * hat;
        if (partial) {
          add(i + k, dy[k] * hat, row == begin);
          add(cols + i + k, dy[k], row == begin);
        }
      }
    }
    const float mean_h = b.rms ? 0.0f : block_sum(sum_h) * inverse_cols;
    const float mean_hx = block_sum(sum_hx) * inverse_cols;
    for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize) {
      const auto dy = b.dy.load(at + i, cols - i), x = b.x.load(at + i, cols - i);
      const auto gamma = b.gamma.template group<kSize>(i, cols - i);
      Group<kSize> dx = {};
      if (b.accumulate) dx = b.dx.load(at + i, cols - i);
      for (int k = 0; k < kSize && i + k < cols; ++k) {
        const float hat = (x[k] - mean) * rstd, h = dy[k] * (gamma[k] + b.gamma_offset);
        dx[k] += rstd * (h - mean_h - hat * mean_hx);
      }
      b.dx.store(at + i, cols - i, dx);
    }
  }
  if constexpr (kShared) {
    if (!partial) return;
    for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize)
      for (int k = 0; k < kSize && i + k < cols; ++k) {
        partial[i + k] = shared[i + k];
        partial[cols + i + k] = shared[cols + i + k];
      }
  }
}

// dgamma and dbeta += the sums of their partial rows, in order.
__global__ void norm_gradients_kernel(const float* partials, int64_t blocks, int64_t cols, float* dgamma,
                                      float* dbeta) {
  const int64_t i = global_thread();
  if (i >= cols) return;
  float of_gamma = 0, of_beta = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    of_gamma += partials[block * 2 * cols + i];
    of_beta += partials[block * 2 * cols + cols + i];
  }
  if (dgamma) dgamma[i] += of_gamma;
  if (dbeta) dbeta[i] += of_beta;
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
                            partials};
    const bool shared = gradients && 2 * rows.cols <= shared_floats();
    const Grid grid{blocks, threads_for(rows.cols, kGroup<T>),
                    shared ? static_cast<size_t>(2 * rows.cols) * sizeof(float) : 0};
    launch(c, grid, shared ? norm_backward_kernel<T, true> : norm_backward_kernel<T, false>, b);
  });
  if (gradients)
    launch(c, {ceil_div(rows.cols, int64_t{128}), 128}, norm_gradients_kernel,
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
