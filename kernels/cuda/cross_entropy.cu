// Softmax cross-entropy, one block of threads for each row of logits. Bytes moved for rows x cols logits of e
// bytes and gradients of g bytes: softcap 2 e, row_max e, row_sums e, backward e + g; full e + g if the L2
// cache holds the rows that are being processed, else 3 e + g.
#include "kernels/cross_entropy.hpp"

#include "kernels/common/cross_entropy.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

constexpr int kMaxThreads = 512;

__device__ float capped(float x, float cap) {
  return cap * std::tanh(x / cap);
}

template <class T>
struct Softcap {
  Array<T> x;
  float cap;
  __device__ void operator()(int64_t i, int64_t count) const {
    auto group = x.load(i, count);
    for (int k = 0; k < kGroup<T>; ++k) group[k] = capped(group[k], cap);
    x.store(i, count, group);
  }
};
void softcap(Context& c, Out logits, float cap, int64_t n) {
  by_type({logits}, [&](auto type) {
    using T = decltype(type);
    map<kGroup<T>>(c, n, Softcap<T>{array_of<T>(logits), cap});
  });
}

// ---- one row, of `cols` logits from `at` on; all threads of the block take part

// body(logit) for those of this thread, with -inf for elements that lie outside of the row.
template <class T, class Body>
__device__ void for_logits(const Array<T>& x, int64_t at, int64_t cols, const Body& body) {
  for (int64_t i = int64_t{thread_index()} * kGroup<T>; i < cols; i += block_threads() * kGroup<T>) {
    auto group = x.load(at + i, cols - i);
    if (cols - i < kGroup<T>)
      for (int k = 0; k < kGroup<T>; ++k)
        if (k >= cols - i) group[k] = -INFINITY;
    for (int k = 0; k < kGroup<T>; ++k) body(group[k]);
  }
}

template <class T>
__device__ float max_of_row(const Array<T>& x, int64_t at, int64_t cols) {
  float most = -INFINITY;
  for_logits(x, at, cols, [&](float logit) { most = Max()(logit, most); });
  return block_max(most);
}

template <class T>
__device__ float sum_exp_of_row(const Array<T>& x, int64_t at, int64_t cols, float max) {
  float sum = 0;
  for_logits(x, at, cols, [&](float logit) { sum += std::exp(logit - max); });
  return block_sum(sum);
}

// `label` counts from the row's first logit and may lie outside.
template <class T>
__device__ float target_of_row(const Array<T>& x, int64_t at, int64_t cols, int64_t label) {
  return label >= 0 && label < cols ? x.at(at + label) : 0.0f;
}

// The inputs of a row's gradient, and the number of logits including padding.
struct RowGradient {
  float max, sum_exp, weight, cap;
  int64_t cols, padded;
};
// A gradient may overwrite the logits, also by values of half their size in the first half of the row: all
// threads read a stretch of the row before one of them writes to it.
template <class T, class D>
__device__ void gradient_of_row(const RowGradient& g, const Array<T>& x, int64_t at, int64_t label,
                                const Array<D>& dx, int64_t to) {
  // The groups of the gradient: those of the logits may be smaller.
  constexpr int kSize = kGroup<D>;
  const float factor = g.weight / g.sum_exp;
  const int64_t stretch = int64_t{block_threads()} * kSize;
  for (int64_t begin = 0; begin < g.cols; begin += stretch) {
    const int64_t i = begin + thread_index() * kSize, count = g.cols - i;
    const int at_label = label >= i && label - i < kSize ? narrow<int>(label - i) : -1;
    Group<kSize> group;
    for (int part = 0; part < kSize; part += kGroup<T>) {
      const auto logits = x.load(at + i + part, count - part);
      for (int k = 0; k < kGroup<T>; ++k) {
        float d = std::exp(logits[k] - g.max) * factor;
        if (part + k == at_label) d -= g.weight;
        if (g.cap > 0) d *= 1.0f - logits[k] / g.cap * (logits[k] / g.cap);
        group[part + k] = d;
      }
    }
    if constexpr (!std::is_same_v<T, D>) sync_threads();
    dx.store(to + i, count, group);
  }
  for (int64_t i = g.cols + thread_index(); i < g.padded; i += block_threads()) dx.put(to + i, 0.0f);
}

// body(T{}, D{}) with the types of the logits and of their gradient; the gradient of fp32 logits often
// has 16 bits.
template <class Body>
void by_types(In logits, In dlogits, const Body& body) {
  if (logits.dtype == DType::f32 && dlogits.dtype == DType::bf16)
    body(float{}, bf16{});
  else if (logits.dtype == DType::f32 && dlogits.dtype == DType::f16)
    body(float{}, f16{});
  else
    by_type({logits, dlogits}, [&](auto type) { body(type, type); });
}

// ---- the kernels

template <class T>
__global__ void row_max_kernel(Array<T> x, int64_t cols, int64_t row_stride, float* row_max) {
  const float most = max_of_row(x, block_index() * row_stride, cols);
  if (thread_index() == 0) row_max[block_index()] = most;
}
void row_max(Context& c, In logits, int64_t rows, int64_t cols, int64_t row_stride, float* out) {
  by_type({logits}, [&](auto type) {
    using T = decltype(type);
    launch(c, {rows, threads_for(cols, kGroup<T>, kMaxThreads)}, row_max_kernel<T>, array_of<T>(logits), cols,
           row_stride, out);
  });
}

template <class T>
__global__ void row_sums_kernel(Array<T> x, const int32_t* labels, const float* row_max, int64_t cols,
                                int64_t row_stride, int64_t first_col, float* sum_exp, float* target) {
  const int64_t row = block_index(), at = row * row_stride;
  const float sum = sum_exp_of_row(x, at, cols, row_max[row]);
  if (thread_index() != 0) return;
  sum_exp[row] = sum;
  target[row] = target_of_row(x, at, cols, labels[row] - first_col);
}
void row_sums(Context& c, In logits, const int32_t* labels, const float* max, int64_t rows, int64_t cols,
              int64_t row_stride, int64_t first_col, float* sum_exp, float* target) {
  by_type({logits}, [&](auto type) {
    using T = decltype(type);
    launch(c, {rows, threads_for(cols, kGroup<T>, kMaxThreads)}, row_sums_kernel<T>, array_of<T>(logits),
           labels, max, cols, row_stride, first_col, sum_exp, target);
  });
}

struct Loss {
  const float *max, *sum_exp, *target;
  float* loss;
  __device__ void operator()(int64_t i, int64_t) const {
    loss[i] = loss_of_row(max[i], sum_exp[i], target[i]);
  }
};
void loss(Context& c, const float* max, const float* sum_exp, const float* target, int64_t rows, float* out) {
  map<1>(c, rows, Loss{max, sum_exp, target, out});
}

template <class T, class D>
__global__ void logits_backward_kernel(Array<T> x, const int32_t* labels, const float* max,
                                       const float* sum_exp, const float* weight, int64_t cols,
                                       int64_t row_stride, int64_t first_col, float cap, Array<D> dx,
                                       int64_t dx_stride) {
  const int64_t row = block_index();
  gradient_of_row({max[row], sum_exp[row], weight[row], cap, cols, row_stride}, x, row * row_stride,
                  labels[row] - first_col, dx, row * dx_stride);
}
void backward(Context& c, In logits, const int32_t* labels, const float* max, const float* sum_exp,
              const float* weight, int64_t rows, int64_t cols, int64_t row_stride, int64_t first_col,
              float cap, Out dlogits, int64_t dlogits_stride) {
  by_types(logits, dlogits, [&](auto type, auto gradient_type) {
    using T = decltype(type);
    using D = decltype(gradient_type);
    launch(c, {rows, threads_for(cols, kGroup<T>, kMaxThreads)}, logits_backward_kernel<T, D>,
           array_of<T>(logits), labels, max, sum_exp, weight, cols, row_stride, first_col, cap,
           array_of<D>(dlogits), dlogits_stride);
  });
}

template <class T, class D>
__global__ void CAPSTAN_LAUNCH_BOUNDS(kMaxThreads, 4)
    full_loss_kernel(Array<T> x, const int32_t* labels, const float* weight, int64_t cols, int64_t row_stride,
                     float cap, float* losses, Array<D> dx, int64_t dx_stride) {
  const int64_t row = block_index(), at = row * row_stride, label = labels[row];
  if (cap > 0) {
    for (int64_t i = int64_t{thread_index()} * kGroup<T>; i < cols; i += block_threads() * kGroup<T>) {
      auto group = x.load(at + i, cols - i);
      for (int k = 0; k < kGroup<T>; ++k) group[k] = capped(group[k], cap);
      x.store(at + i, cols - i, group);
    }
    sync_threads();
  }
  const float max = max_of_row(x, at, cols), sum_exp = sum_exp_of_row(x, at, cols, max);
  if (thread_index() == 0) losses[row] = loss_of_row(max, sum_exp, target_of_row(x, at, cols, label));
  if (!dx) return;
  // The label's logit is read before the gradient overwrites it.
  sync_threads();
  gradient_of_row({max, sum_exp, weight[row], cap, cols, row_stride}, x, at, label, dx, row * dx_stride);
}
void full(Context& c, Out logits, const int32_t* labels, const float* weight, int64_t rows, int64_t cols,
          int64_t row_stride, float cap, float* losses, Out dlogits, int64_t dlogits_stride) {
  by_types(logits, dlogits ? dlogits : logits, [&](auto type, auto gradient_type) {
    using T = decltype(type);
    using D = decltype(gradient_type);
    launch(c, {rows, threads_for(cols, kGroup<T>, kMaxThreads)}, full_loss_kernel<T, D>, array_of<T>(logits),
           labels, weight, cols, row_stride, cap, losses, array_of<D>(dlogits), dlogits_stride);
  });
}

// Logits of a chunk within 1 GiB, or 1.5 GiB with a gradient in 16 bits: GEMMs of at least 1024 rows. A
// multiple of 128.
int64_t chunk_rows(int64_t rows, int64_t columns, DType compute, bool differentiates) {
  constexpr int64_t kLogitBytes = int64_t{1} << 30, kMinRows = 1024, kMaxRows = 8192;
  int64_t wanted = std::clamp(kLogitBytes / (4 * std::max<int64_t>(columns, 1)), kMinRows, kMaxRows);
  if (differentiates && compute != DType::f32) wanted = wanted * 3 / 2;
  const int64_t chunks = std::max<int64_t>(1, ceil_div(rows, wanted));
  return std::max<int64_t>(1, std::min(rows, round_up(ceil_div(rows, chunks), 128)));
}

DType logits_type(DType /*compute*/) {
  return DType::f32;
}

}  // namespace

const CrossEntropy& cross_entropy_family() {
  static const CrossEntropy family{.softcap = softcap,
                                   .row_max = row_max,
                                   .row_sums = row_sums,
                                   .loss = loss,
                                   .backward = backward,
                                   .full = full,
                                   .chunk_rows = chunk_rows,
                                   .logits_type = logits_type};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
