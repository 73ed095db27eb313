// RMSNorm across the heads of a token, one block of threads per row of packed QKV. Bytes moved in fp32, R
// elements of packed QKV: squares 4 R, forward 8 R, dots 8 R, backward 12 R. Gradients of gamma: a block adds
// those of consecutive rows in shared memory, and a second kernel adds the blocks in a fixed order.
#include "kernels/head_norm.hpp"

#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// Largest number of partial rows of the gradients of gamma.
constexpr int64_t kMaxGradientBlocks = 256;

enum class QkvSlice : uint8_t { queries, key, value };
// The slice of packed QKV to which an element belongs, and its index in the gamma of all queries or keys.
struct QkvIndex {
  QkvSlice slice;
  uint32_t gamma;
};
struct QkvRow {
  uint32_t width, head_dim, heads_per_group;
  __device__ QkvIndex index_of(int64_t i) const {
    const auto at = narrow<uint32_t>(i);
    const uint32_t head = at / head_dim, slots = heads_per_group + 2, group = head / slots,
                   slot = head % slots, within = at % head_dim;
    if (slot < heads_per_group)
      return {QkvSlice::queries, (group * heads_per_group + slot) * head_dim + within};
    return {slot == heads_per_group ? QkvSlice::key : QkvSlice::value, group * head_dim + within};
  }
};
QkvRow row_of(const QkvLayout& qkv) {
  return {narrow<uint32_t>(qkv.row()), narrow<uint32_t>(qkv.head_dim), narrow<uint32_t>(qkv.heads_per_group)};
}

// body(k, index) for the elements i + k of a row, k < kSize. Where no group crosses heads, only the first
// index is computed.
template <int kSize, class Body>
__device__ void for_elements(const QkvRow& row, int64_t i, const Body& body) {
  const bool one_head = row.head_dim % kSize == 0;
  QkvIndex index = row.index_of(i);
  for (int k = 0; k < kSize && i + k < row.width; ++k) {
    body(k, index);
    ++index.gamma;
    if (!one_head) index = row.index_of(i + k + 1);
  }
}

// One value for the queries and one for the keys.
struct QkvPair {
  float queries, keys;
  __device__ float of(QkvSlice slice) const { return slice == QkvSlice::key ? keys : queries; }
  __device__ void add(QkvSlice slice, float value) {
    if (slice == QkvSlice::queries) queries += value;
    if (slice == QkvSlice::key) keys += value;
  }
};
struct RowStatistics {
  float query_cols, key_cols, eps;
  // [rows, 2]
  const float* squares;
  __device__ QkvPair rstd(int64_t row) const {
    return {1.0f / std::sqrt(squares[2 * row] / query_cols + eps),
            1.0f / std::sqrt(squares[2 * row + 1] / key_cols + eps)};
  }
};
RowStatistics statistics_of(const HeadNormShape& s, const float* squares) {
  return {static_cast<float>(s.query_cols), static_cast<float>(s.key_cols), s.eps, squares};
}
// fp32, bf16 or fp16.
struct QkvGamma {
  Array<Any> queries, keys;
  float offset;
  // By members: an address of one of two parameters would put both on the stack.
  __device__ Array<Any> of(QkvSlice slice) const {
    const bool key = slice == QkvSlice::key;
    return {key ? keys.p : queries.p, key ? keys.type : queries.type};
  }
  // Those of elements i to i + kSize of a row; 0 for values.
  template <int kSize>
  __device__ Group<kSize> of(const QkvRow& row, int64_t i) const {
    Group<kSize> group = {};
    if (row.head_dim % kSize == 0) {
      const QkvIndex index = row.index_of(i);
      if (index.slice == QkvSlice::value) return group;
      group = of(index.slice).group<kSize>(index.gamma, kSize);
      for (int k = 0; k < kSize; ++k) group[k] += offset;
    } else {
      for_elements<kSize>(row, i, [&](int k, QkvIndex index) {
        if (index.slice == QkvSlice::value) return;
        group[k] = of(index.slice).at(index.gamma) + offset;
      });
    }
    return group;
  }
};
QkvGamma gamma_of(const HeadNormShape& s, In queries, In keys) {
  return {array_of<Any>(queries), array_of<Any>(keys), s.gamma_offset};
}

template <class T>
__global__ void head_squares_kernel(QkvRow row, Array<T> x, bool counts_keys, float* squares) {
  constexpr int kSize = kGroup<T>;
  QkvPair sums{0, 0};
  for (int64_t i = int64_t{thread_index()} * kSize; i < row.width; i += block_threads() * kSize) {
    const auto group = x.load(block_index() * row.width + i, row.width - i);
    for_elements<kSize>(row, i, [&](int k, QkvIndex index) { sums.add(index.slice, group[k] * group[k]); });
  }
  sums = {block_sum(sums.queries), block_sum(sums.keys)};
  if (thread_index() != 0) return;
  squares[2 * block_index()] = sums.queries;
  squares[2 * block_index() + 1] = counts_keys ? sums.keys : 0.0f;
}
void squares(Context& c, HeadNormShape s, In qkv, float* out) {
  by_type({qkv}, [&](auto type) {
    using T = decltype(type);
    launch(c, {s.rows, threads_for(s.qkv.row(), kGroup<T>)}, head_squares_kernel<T>, row_of(s.qkv),
           array_of<T>(qkv), s.counts_keys, out);
  });
}

template <class T>
__global__ void head_norm_forward_kernel(QkvRow row, Array<T> x, RowStatistics statistics, QkvGamma gamma,
                                         Array<T> y) {
  constexpr int kSize = kGroup<T>;
  const int64_t at = block_index() * row.width;
  const QkvPair rstd = statistics.rstd(block_index());
  for (int64_t i = int64_t{thread_index()} * kSize; i < row.width; i += block_threads() * kSize) {
    auto group = x.load(at + i, row.width - i);
    const auto factors = gamma.of<kSize>(row, i);
    for_elements<kSize>(row, i, [&](int k, QkvIndex index) {
      if (index.slice != QkvSlice::value) group[k] = group[k] * rstd.of(index.slice) * factors[k];
    });
    y.store(at + i, row.width - i, group);
  }
}
void forward(Context& c, HeadNormShape s, In qkv, const float* squares, In query_gamma, In key_gamma, Out y) {
  by_type({qkv, y}, [&](auto type) {
    using T = decltype(type);
    launch(c, {s.rows, threads_for(s.qkv.row(), kGroup<T>)}, head_norm_forward_kernel<T>, row_of(s.qkv),
           array_of<T>(qkv), statistics_of(s, squares), gamma_of(s, query_gamma, key_gamma), array_of<T>(y));
  });
}

template <class T>
__global__ void head_dots_kernel(QkvRow row, Array<T> dy, Array<T> x, RowStatistics statistics,
                                 QkvGamma gamma, float* dots) {
  constexpr int kSize = kGroup<T>;
  const int64_t at = block_index() * row.width;
  QkvPair sums{0, 0};
  for (int64_t i = int64_t{thread_index()} * kSize; i < row.width; i += block_threads() * kSize) {
    const auto d = dy.load(at + i, row.width - i), v = x.load(at + i, row.width - i),
               factors = gamma.of<kSize>(row, i);
    for_elements<kSize>(row, i, [&](int k, QkvIndex index) {
      if (index.slice != QkvSlice::value) sums.add(index.slice, d[k] * factors[k] * v[k]);
    });
  }
  sums = {block_sum(sums.queries), block_sum(sums.keys)};
  if (thread_index() != 0) return;
  const QkvPair rstd = statistics.rstd(block_index());
  dots[2 * block_index()] = sums.queries * rstd.queries;
  dots[2 * block_index() + 1] = sums.keys * rstd.keys;
}
void dots(Context& c, HeadNormShape s, In dy, In qkv, const float* squares, In query_gamma, In key_gamma,
          float* out) {
  by_type({dy, qkv}, [&](auto type) {
    using T = decltype(type);
    launch(c, {s.rows, threads_for(s.qkv.row(), kGroup<T>)}, head_dots_kernel<T>, row_of(s.qkv),
           array_of<T>(dy), array_of<T>(qkv), statistics_of(s, squares), gamma_of(s, query_gamma, key_gamma),
           out);
  });
}

// ---- backward: with xhat = x rstd and h = dy gamma,  dx = rstd (h - xhat mean(h xhat)). Only the rank that
// counts the keys subtracts their mean.

template <class T>
struct HeadNormBackward {
  QkvRow row;
  int64_t rows, block;
  Array<T> dy, x, dx;
  RowStatistics statistics;
  const float* dots;
  bool counts_keys;
  QkvGamma gamma;
  // [blocks, row]; null: without gradients of gamma.
  float* partials;
};
template <class T>
__global__ void head_norm_backward_kernel(HeadNormBackward<T> b) {
  // Sums of the gradients of gamma in the order of a row. A thread accesses its own columns only.
  CAPSTAN_DYNAMIC_SHARED(float, sums);
  constexpr int kSize = kGroup<T>;
  const int64_t width = b.row.width, begin = block_index() * b.block;
  const int64_t end = b.rows < begin + b.block ? b.rows : begin + b.block;
  for (int64_t r = begin; r < end; ++r) {
    const QkvPair rstd = b.statistics.rstd(r);
    const QkvPair mean{b.dots[2 * r] / b.statistics.query_cols,
                       b.counts_keys ? b.dots[2 * r + 1] / b.statistics.key_cols : 0.0f};
    for (int64_t i = int64_t{thread_index()} * kSize; i < width; i += block_threads() * kSize) {
      auto d = b.dy.load(r * width + i, width - i);
      const auto x = b.x.load(r * width + i, width - i), factors = b.gamma.template of<kSize>(b.row, i);
      for_elements<kSize>(b.row, i, [&](int k, QkvIndex index) {
        if (index.slice == QkvSlice::value) return;
        const float factor = rstd.of(index.slice), hat = x[k] * factor;
        if (b.partials) sums[i + k] = (r == begin ? 0.0f : sums[i + k]) + d[k] * hat;
        d[k] = factor * (d[k] * factors[k] - hat * mean.of(index.slice));
      });
      b.dx.store(r * width + i, width - i, d);
    }
  }
  if (!b.partials) return;
  float* mine = b.partials + block_index() * width;
  for (int64_t i = int64_t{thread_index()} * kSize; i < width; i += block_threads() * kSize)
    for_elements<kSize>(b.row, i, [&](int k, QkvIndex index) {
      if (index.slice != QkvSlice::value) mine[i + k] = sums[i + k];
    });
}

// The gradients of gamma += the sums of their partial rows.
__global__ void head_gamma_kernel(QkvRow row, const float* partials, int64_t blocks, float* dquery_gamma,
                                  float* dkey_gamma) {
  const int64_t i = block_index() * kWarp + lane_index();
  const QkvIndex index = row.index_of(i);
  float* to = index.slice == QkvSlice::key ? dkey_gamma : dquery_gamma;
  if (i >= row.width || index.slice == QkvSlice::value) to = nullptr;
  const float sum = column_sum(to ? partials + i : nullptr, blocks, row.width);
  if (to && warp_index() == 0) to[index.gamma] += sum;
}

int64_t gradient_block(const HeadNormShape& s) {
  return std::max<int64_t>(1, ceil_div(s.rows, kMaxGradientBlocks));
}
WorkspaceSize backward_workspace(HeadNormShape s, bool parameter_gradients) {
  if (s.rows <= 0 || !parameter_gradients) return {};
  return {static_cast<size_t>(ceil_div(s.rows, gradient_block(s)) * s.qkv.row()) * sizeof(float), 0};
}
void backward(Context& c, HeadNormShape s, In dy, In qkv, const float* squares, const float* dots,
              In query_gamma, In key_gamma, Out dx, float* dquery_gamma, float* dkey_gamma) {
  if (s.rows <= 0) return;
  const bool gradients = dquery_gamma || dkey_gamma;
  const int64_t width = s.qkv.row();
  // A block's sums of these gradients.
  const size_t shared = gradients ? static_cast<size_t>(width) * sizeof(float) : 0;
  if (shared > most_shared_bytes())
    return refuse(c, "the gradients of head norm weights of such wide QKV do not fit into shared memory");
  auto* partials = gradients ? workspace_of<float>(c, backward_workspace(s, true)) : nullptr;
  if (gradients && !partials) return;
  // Without weight gradients each row has its own block.
  const int64_t block = gradients ? gradient_block(s) : 1, blocks = ceil_div(s.rows, block);
  by_type({dy, qkv, dx}, [&](auto type) {
    using T = decltype(type);
    const HeadNormBackward<T> b{row_of(s.qkv),
                                s.rows,
                                block,
                                array_of<T>(dy),
                                array_of<T>(qkv),
                                array_of<T>(dx),
                                statistics_of(s, squares),
                                dots,
                                s.counts_keys,
                                gamma_of(s, query_gamma, key_gamma),
                                partials};
    launch(c, {blocks, threads_for(width, kGroup<T>), shared}, head_norm_backward_kernel<T>, b);
  });
  if (gradients)
    launch(c, {ceil_div(width, int64_t{kWarp}), kColumnSumThreads}, head_gamma_kernel, row_of(s.qkv),
           static_cast<const float*>(partials), blocks, dquery_gamma, dkey_gamma);
}

WorkspaceSize no_workspace(HeadNormShape) {
  return {};
}

}  // namespace

const HeadNorm& head_norm_family() {
  static const HeadNorm family{.squares = squares,
                               .forward = forward,
                               .dots = dots,
                               .backward = backward,
                               .forward_workspace = no_workspace,
                               .dots_workspace = no_workspace,
                               .backward_workspace = backward_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
