// Element-wise kernels and fixed-shape reductions. Bytes moved for each element of e bytes: fill e, cast the
// sizes of both types, add 3 e, axpy e + 8, scale, dropout, jitter and copy_rows 2 e, bias_dropout_add 2 e
// (3 e with a residual), sum_parts and max_parts (count + 1) e, sum and count_nonfinite e, weighted_sum 8.
#include "kernels/elementwise.hpp"

#include "kernels/common/dropout.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// ---- one array element after the other

template <class T>
struct Fill {
  Array<T> x;
  float value;
  __device__ void operator()(int64_t i, int64_t count) const {
    Group<kGroup<T>> group;
    for (int k = 0; k < kGroup<T>; ++k) group[k] = value;
    x.store(i, count, group);
  }
};
void fill(Context& c, Out x, float value, int64_t n) {
  by_type({x}, [&](auto type) {
    using T = decltype(type);
    map<kGroup<T>>(c, n, Fill<T>{array_of<T>(x), value});
  });
}

// By vectors of 16-bit elements, and two of fp32.
struct Convert {
  static constexpr int kSize = 8;
  Array<Any> x, y;
  __device__ void operator()(int64_t i, int64_t count) const {
    y.store_group(i, count, x.group<kSize>(i, count));
  }
};

// Rows of `units` values of type U, strided by units as well: a copy of bits.
template <class U>
__global__ void copy_units_kernel(const U* x, int64_t x_stride, U* y, int64_t y_stride, int64_t units) {
  for (int64_t i = thread_index(); i < units; i += block_threads())
    y[block_index() * y_stride + i] = x[block_index() * x_stride + i];
}
template <class U>
bool copy_units(Context& c, const void* x, int64_t x_stride, void* y, int64_t y_stride, int64_t rows,
                int64_t bytes) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(U));
  const auto divides = [](int64_t value) { return value % kBytes == 0; };
  if (!divides(reinterpret_cast<intptr_t>(x)) || !divides(reinterpret_cast<intptr_t>(y)) ||
      !divides(x_stride) || !divides(y_stride) || !divides(bytes))
    return false;
  launch(c, {rows, threads_for(bytes, kBytes)}, copy_units_kernel<U>, static_cast<const U*>(x),
         x_stride / kBytes, static_cast<U*>(y), y_stride / kBytes, bytes / kBytes);
  return true;
}
// All in bytes. Uses the largest units of which everything is a multiple.
void copy_bytes(Context& c, const void* x, int64_t x_stride, void* y, int64_t y_stride, int64_t rows,
                int64_t bytes) {
  if (rows <= 0 || bytes <= 0) return;
  copy_units<Bytes16>(c, x, x_stride, y, y_stride, rows, bytes) ||
      copy_units<uint64_t>(c, x, x_stride, y, y_stride, rows, bytes) ||
      copy_units<uint32_t>(c, x, x_stride, y, y_stride, rows, bytes) ||
      copy_units<uint16_t>(c, x, x_stride, y, y_stride, rows, bytes) ||
      copy_units<uint8_t>(c, x, x_stride, y, y_stride, rows, bytes);
}

void cast(Context& c, In x, Out y, int64_t n) {
  if (x.dtype != y.dtype) return map<Convert::kSize>(c, n, Convert{array_of<Any>(x), array_of<Any>(y)});
  // Rows of 64 KiB, and what is left.
  constexpr int64_t kRow = int64_t{64} << 10;
  const int64_t bytes = n * size_of(x.dtype), rows = bytes / kRow, rest = bytes % kRow;
  copy_bytes(c, x.data, kRow, y.data, kRow, rows, kRow);
  copy_bytes(c, x.as<char>() + rows * kRow, kRow, y.as<char>() + rows * kRow, kRow, 1, rest);
}

template <class T>
struct Add {
  Array<T> a, b, y;
  __device__ void operator()(int64_t i, int64_t count) const {
    auto sum = a.load(i, count);
    const auto other = b.load(i, count);
    for (int k = 0; k < kGroup<T>; ++k) sum[k] += other[k];
    y.store(i, count, sum);
  }
};
// fp32 values added to bf16 ones: two vectors of the first for each of the second.
struct AddToBf16 {
  Array<bf16> a;
  Array<float> b;
  Array<bf16> y;
  __device__ void operator()(int64_t i, int64_t count) const {
    auto sum = a.load(i, count);
    constexpr int kFloats = kGroup<float>;
    for (int part = 0; part < kGroup<bf16>; part += kFloats) {
      const auto other = b.load(i + part, count - part);
      for (int k = 0; k < kFloats; ++k) sum[part + k] += other[k];
    }
    y.store(i, count, sum);
  }
};
void add(Context& c, In a, In b, Out y, int64_t n) {
  if (a.dtype == DType::bf16 && b.dtype == DType::f32 && y.dtype == DType::bf16)
    return map<kGroup<bf16>>(c, n, AddToBf16{array_of<bf16>(a), array_of<float>(b), array_of<bf16>(y)});
  by_type({a, b, y}, [&](auto type) {
    using T = decltype(type);
    map<kGroup<T>>(c, n, Add<T>{array_of<T>(a), array_of<T>(b), array_of<T>(y)});
  });
}

template <class T>
struct Axpy {
  float alpha;
  Array<T> x;
  Array<float> y;
  __device__ void operator()(int64_t i, int64_t count) const {
    const auto a = x.load(i, count);
    constexpr int kFloats = kGroup<float>;
    for (int part = 0; part < kGroup<T>; part += kFloats) {
      if (part >= count) return;
      auto sum = y.load(i + part, count - part);
      for (int k = 0; k < kFloats; ++k) sum[k] += alpha * a[part + k];
      y.store(i + part, count - part, sum);
    }
  }
};
void axpy(Context& c, float alpha, In x, float* y, int64_t n) {
  by_type({x}, [&](auto type) {
    using T = decltype(type);
    map<kGroup<T>>(c, n, Axpy<T>{alpha, array_of<T>(x), {y}});
  });
}

template <class T>
struct Scale {
  Array<T> x;
  float factor;
  __device__ void operator()(int64_t i, int64_t count) const {
    auto group = x.load(i, count);
    for (int k = 0; k < kGroup<T>; ++k) group[k] *= factor;
    x.store(i, count, group);
  }
};
void scale(Context& c, Out x, float factor, int64_t n) {
  by_type({x}, [&](auto type) {
    using T = decltype(type);
    map<kGroup<T>>(c, n, Scale<T>{array_of<T>(x), factor});
  });
}

template <class T, bool kLargest>
struct CombineArrays {
  Array<T> parts;
  int64_t part_count;
  Array<T> y;
  int64_t n;
  __device__ void operator()(int64_t i, int64_t count) const {
    auto result = parts.load(i, count);
    for (int64_t part = 1; part < part_count; ++part) {
      const auto next = parts.load(part * n + i, count);
      for (int k = 0; k < kGroup<T>; ++k) {
        if constexpr (kLargest)
          result[k] = Max()(result[k], next[k]);
        else
          result[k] += next[k];
      }
    }
    y.store(i, count, result);
  }
};
template <bool kLargest>
void combine_arrays(Context& c, In parts, int64_t count, Out y, int64_t n) {
  by_type({parts, y}, [&](auto type) {
    using T = decltype(type);
    map<kGroup<T>>(c, n, CombineArrays<T, kLargest>{array_of<T>(parts), count, array_of<T>(y), n});
  });
}

// ---- rows

__global__ void convert_rows_kernel(Convert convert, int64_t x_stride, int64_t y_stride, int64_t cols) {
  const Convert row{convert.x.from(block_index() * x_stride), convert.y.from(block_index() * y_stride)};
  constexpr int kSize = Convert::kSize;
  for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize) row(i, cols - i);
}
void copy_rows(Context& c, In x, int64_t x_stride, Out y, int64_t y_stride, int64_t rows, int64_t cols) {
  if (rows <= 0 || cols <= 0) return;
  if (x.dtype == y.dtype) {
    const int64_t bytes = size_of(x.dtype);
    return copy_bytes(c, x.data, x_stride * bytes, y.data, y_stride * bytes, rows, cols * bytes);
  }
  launch(c, {rows, threads_for(cols, Convert::kSize)}, convert_rows_kernel,
         Convert{array_of<Any>(x), array_of<Any>(y)}, x_stride, y_stride, cols);
}

struct DropoutShape {
  int64_t cols, first_column;
  bool mask;
  PhiloxKey key;
  uint32_t threshold;
  float factor;
};
DropoutShape dropout_shape(int64_t cols, int64_t first_column, float p, PhiloxKey key) {
  const bool mask = p > 0;
  return {cols, first_column, mask, key, dropout_threshold(p), mask ? 1.0f / (1.0f - p) : 1.0f};
}

template <class T>
__global__ void dropout_kernel(DropoutShape s, Array<T> x, Array<T> bias, Array<T> residual, Array<T> y,
                               const int64_t* dropout_rows) {
  const int64_t row = block_index() * s.cols;
  const uint64_t dropout_row = s.mask ? static_cast<uint64_t>(dropout_rows[block_index()]) : 0;
  for (int64_t i = int64_t{thread_index()} * kGroup<T>; i < s.cols; i += block_threads() * kGroup<T>) {
    auto value = x.load(row + i, s.cols - i);
    if (bias) {
      const auto b = bias.load(i, s.cols - i);
      for (int k = 0; k < kGroup<T>; ++k) value[k] += b[k];
    }
    if (s.mask) {
      const RandomWords<kGroup<T>> random(static_cast<uint64_t>(s.first_column + i), [&](uint64_t block) {
        return philox4x32(s.key, dropout_row, block);
      });
      for (int k = 0; k < kGroup<T>; ++k)
        value[k] = random.words[k] >= s.threshold ? value[k] * s.factor : 0.0f;
    }
    if (residual) {
      const auto r = residual.load(row + i, s.cols - i);
      for (int k = 0; k < kGroup<T>; ++k) value[k] += r[k];
    }
    y.store(row + i, s.cols - i, value);
  }
}

void bias_dropout_add(Context& c, In x, In bias, In residual, Out y, int64_t rows, int64_t cols, float p,
                      PhiloxKey key, const int64_t* dropout_rows) {
  by_type({x, bias, residual, y}, [&](auto type) {
    using T = decltype(type);
    launch(c, {rows, threads_for(cols, kGroup<T>)}, dropout_kernel<T>, dropout_shape(cols, 0, p, key),
           array_of<T>(x), array_of<T>(bias), array_of<T>(residual), array_of<T>(y), dropout_rows);
  });
}
void dropout(Context& c, In x, Out y, int64_t rows, int64_t cols, int64_t first_column, float p,
             PhiloxKey key, const int64_t* dropout_rows) {
  by_type({x, y}, [&](auto type) {
    using T = decltype(type);
    launch(c, {rows, threads_for(cols, kGroup<T>)}, dropout_kernel<T>,
           dropout_shape(cols, first_column, p, key), array_of<T>(x), Array<T>{}, Array<T>{}, array_of<T>(y),
           dropout_rows);
  });
}

template <class T>
__global__ void jitter_kernel(int64_t cols, float epsilon, PhiloxKey key, Array<T> x, Array<T> y,
                              const int64_t* dropout_rows) {
  const int64_t row = block_index() * cols;
  const auto dropout_row = static_cast<uint64_t>(dropout_rows[block_index()]);
  for (int64_t i = int64_t{thread_index()} * kGroup<T>; i < cols; i += block_threads() * kGroup<T>) {
    auto value = x.load(row + i, cols - i);
    const RandomWords<kGroup<T>> random(static_cast<uint64_t>(i),
                                        [&](uint64_t block) { return philox4x32(key, dropout_row, block); });
    for (int k = 0; k < kGroup<T>; ++k) value[k] *= jitter_factor(random.words[k], epsilon);
    y.store(row + i, cols - i, value);
  }
}
void jitter(Context& c, In x, Out y, int64_t rows, int64_t cols, float epsilon, PhiloxKey key,
            const int64_t* dropout_rows) {
  by_type({x, y}, [&](auto type) {
    using T = decltype(type);
    launch(c, {rows, threads_for(cols, kGroup<T>)}, jitter_kernel<T>, cols, epsilon, key, array_of<T>(x),
           array_of<T>(y), dropout_rows);
  });
}

// ---- reductions: fp32 within a group of elements, double beyond; blocks are summed in order.

constexpr int kReductionThreads = 256;
constexpr int64_t kReductionBlock = 32768;  // elements per block

// One value for each block.
WorkspaceSize reduction_workspace(int64_t n) {
  static_assert(sizeof(double) == sizeof(int64_t));
  return {static_cast<size_t>(ceil_div(std::max<int64_t>(n, 0), kReductionBlock)) * sizeof(double), 0};
}

// value(i, count): what a group of kSize elements contributes.
template <int kSize, class Number, class Value>
__global__ void reduce_kernel(Value value, int64_t n, Number* partial) {
  const int64_t begin = block_index() * kReductionBlock;
  const int64_t end = n < begin + kReductionBlock ? n : begin + kReductionBlock;
  Number sum = 0;
  for (int64_t i = begin + int64_t{thread_index()} * kSize; i < end; i += block_threads() * kSize)
    sum += static_cast<Number>(value(i, end - i));
  sum = block_sum(sum);
  if (thread_index() == 0) partial[block_index()] = sum;
}
template <int kSize, class Number, class Value>
void reduce(Context& c, const Value& value, int64_t n, Number* out, bool accumulate) {
  const WorkspaceSize need = reduction_workspace(n);
  auto* partial = workspace_of<Number>(c, need);
  if (!partial && need.shared > 0) return;
  const int64_t blocks = ceil_div(n, kReductionBlock);
  launch(c, {blocks, kReductionThreads}, reduce_kernel<kSize, Number, Value>, value, n, partial);
  add_partials(c, partial, blocks, out, accumulate);
}

template <class T>
struct SumOf {
  Array<T> x;
  __device__ float operator()(int64_t i, int64_t count) const {
    const auto group = x.load(i, count);
    float sum = 0;
    for (int k = 0; k < kGroup<T>; ++k) sum += group[k];
    return sum;
  }
};
void sum(Context& c, In x, int64_t n, double* out, bool accumulate) {
  by_type({x}, [&](auto type) {
    using T = decltype(type);
    reduce<kGroup<T>>(c, SumOf<T>{array_of<T>(x)}, n, out, accumulate);
  });
}

struct WeightedSumOf {
  Array<float> x, weight;
  __device__ float operator()(int64_t i, int64_t count) const {
    const auto a = x.load(i, count), b = weight.load(i, count);
    float sum = 0;
    for (int k = 0; k < kGroup<float>; ++k) sum += a[k] * b[k];
    return sum;
  }
};
void weighted_sum(Context& c, const float* x, const float* weight, int64_t n, double* out, bool accumulate) {
  const WeightedSumOf value{{const_cast<float*>(x)}, {const_cast<float*>(weight)}};
  reduce<kGroup<float>>(c, value, n, out, accumulate);
}

template <class T>
struct CountNonfinite {
  Array<T> x;
  __device__ int operator()(int64_t i, int64_t count) const {
    const auto group = x.load(i, count);
    int found = 0;
    for (int k = 0; k < kGroup<T>; ++k)
      found += (std::bit_cast<uint32_t>(group[k]) & 0x7F800000u) == 0x7F800000u ? 1 : 0;
    return found;
  }
};
void count_nonfinite(Context& c, In x, int64_t n, int64_t* out, bool accumulate) {
  by_type({x}, [&](auto type) {
    using T = decltype(type);
    reduce<kGroup<T>>(c, CountNonfinite<T>{array_of<T>(x)}, n, out, accumulate);
  });
}

// The bias is read in its own type.
WorkspaceSize bias_dropout_add_workspace(bool, int64_t) {
  return {};
}

}  // namespace

const Elementwise& elementwise_family() {
  static const Elementwise family{.fill = fill,
                                  .cast = cast,
                                  .add = add,
                                  .axpy = axpy,
                                  .scale = scale,
                                  .bias_dropout_add = bias_dropout_add,
                                  .dropout = dropout,
                                  .jitter = jitter,
                                  .copy_rows = copy_rows,
                                  .sum_parts = combine_arrays<false>,
                                  .max_parts = combine_arrays<true>,
                                  .sum = sum,
                                  .weighted_sum = weighted_sum,
                                  .count_nonfinite = count_nonfinite,
                                  .bias_dropout_add_workspace = bias_dropout_add_workspace,
                                  .sum_workspace = reduction_workspace,
                                  .weighted_sum_workspace = reduction_workspace,
                                  .count_nonfinite_workspace = reduction_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
