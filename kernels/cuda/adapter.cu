// Adapters. Bytes moved, e the size of an element: row_lengths e out in (and e + 4 bytes of out rank);
// scale_columns 2 e rows columns; magnitude_gradient 2 e rows columns; nf4_quantize 4.5 n; nf4_dequantize
// (0.5 + e) n; the scales of blocks of 64 add 0.06 n bytes.
#include "kernels/adapter.hpp"

#include "kernels/common/nf4.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// ---- DoRA

template <class T>
struct RowLengths {
  Array<T> w;
  const float* p;
  Array<Any> b;
  const float* g;
  float s;
  float* n2;
  int64_t in, rank;
};
// One block for each row.
template <class T>
__global__ void row_lengths_kernel(RowLengths<T> l) {
  constexpr int kSize = kGroup<T>;
  // Number of squares that are summed in fp32 before they are added to the double sum.
  constexpr int kMaxSquares = 64;
  const int64_t j = block_index(), step = block_threads() * kSize, begin = j * l.rank;
  double total = 0;
  float squares = 0;
  int count = 0;
  for (int64_t i = int64_t{thread_index()} * kSize; i < l.in; i += step) {
    const auto group = l.w.load(j * l.in + i, l.in - i);
    for (int k = 0; k < kSize; ++k) squares += group[k] * group[k];
    if ((count += kSize) >= kMaxSquares) {
      total += static_cast<double>(squares);
      squares = 0;
      count = 0;
    }
  }
  total += static_cast<double>(squares);
  // Each thread sums some columns of G.
  double linear = 0, quadratic = 0;
  for (int64_t column = thread_index(); column < l.rank; column += block_threads()) {
    const auto own = static_cast<double>(l.b.at(begin + column));
    linear += static_cast<double>(l.p[begin + column]) * own;
    double inner = 0;
    for (int64_t k = 0; k < l.rank; ++k)
      inner += static_cast<double>(l.g[k * l.rank + column]) * static_cast<double>(l.b.at(begin + k));
    quadratic += inner * own;
  }
  const auto scale = static_cast<double>(l.s);
  total = block_sum(total + 2.0 * scale * linear + scale * scale * quadratic);
  if (thread_index() == 0) l.n2[j] = static_cast<float>(total);
}
void row_lengths(Context& c, In w, const float* p, In b, const float* g, float s, float* n2, int64_t out,
                 int64_t in, int64_t rank) {
  by_type({w}, [&](auto type) {
    using T = decltype(type);
    launch(c, {out, threads_for(in, kGroup<T>)}, row_lengths_kernel<T>,
           RowLengths<T>{array_of<T>(w), p, array_of<Any>(b), g, s, n2, in, rank});
  });
}

// Rows for which a thread reuses the factors of its columns.
constexpr int64_t kScaledRows = 16;
template <class T>
__global__ void scale_columns_kernel(Array<T> u, Array<Any> m, const float* n2, Array<T> y, int64_t rows,
                                     int64_t columns, int64_t slices) {
  constexpr int kSize = kGroup<T>;
  const int64_t j = (block_index() % slices * block_threads() + thread_index()) * kSize,
                begin = block_index() / slices * kScaledRows, count = columns - j;
  if (count <= 0) return;
  auto factors = m.template group<kSize>(j, count);
  for (int k = 0; k < kSize; ++k) factors[k] /= k < count ? std::sqrt(n2[j + k]) : 1.0f;
  for (int64_t r = begin; r < begin + kScaledRows && r < rows; ++r) {
    auto group = u.load(r * columns + j, count);
    for (int k = 0; k < kSize; ++k) group[k] *= factors[k];
    y.store(r * columns + j, count, group);
  }
}
void scale_columns(Context& c, In u, In m, const float* n2, Out y, int64_t rows, int64_t columns) {
  by_type({u, y}, [&](auto type) {
    using T = decltype(type);
    const int threads = threads_for(columns, kGroup<T>);
    const int64_t slices = ceil_div(columns, int64_t{threads} * kGroup<T>);
    launch(c, {slices * ceil_div(rows, kScaledRows), threads}, scale_columns_kernel<T>, array_of<T>(u),
           array_of<Any>(m), n2, array_of<T>(y), rows, columns, slices);
  });
}

// One block for each 32 columns. A few lanes read a row; the lanes of a warp, and then the warps, add their
// sums in an order that depends on the shape alone.
template <class T>
__global__ void CAPSTAN_LAUNCH_BOUNDS(kWarp* kWarp, 1)
    magnitude_gradient_kernel(Array<T> dy, Array<T> u, const float* n2, float* dm, int64_t rows,
                              int64_t columns) {
  CAPSTAN_SHARED(double, sums, kWarp* kWarp);
  constexpr int kSize = kGroup<T>, kLanes = kWarp / kSize;
  // Number of products that are summed in fp32 before they are added to the double sum.
  constexpr int kMaxProducts = 64;
  const int64_t first = block_index() * kWarp, j = first + thread_index() % kLanes * kSize;
  double totals[kSize] = {};
  Group<kSize> products = {};
  const auto flush = [&] {
    for (int k = 0; k < kSize; ++k) totals[k] += static_cast<double>(products[k]);
    products = {};
  };
  int count = 0;
  for (int64_t r = thread_index() / kLanes; j < columns && r < rows; r += block_threads() / kLanes) {
    const auto a = dy.load(r * columns + j, columns - j), b = u.load(r * columns + j, columns - j);
    for (int k = 0; k < kSize; ++k) products[k] += a[k] * b[k];
    if (++count % kMaxProducts == 0) flush();
  }
  flush();
  for (int k = 0; k < kSize; ++k) {
    for (int distance = kLanes; distance < kWarp; distance *= 2)
      totals[k] += shuffle_xor(totals[k], distance);
    if (lane_index() < kLanes) sums[warp_index() * kWarp + lane_index() * kSize + k] = totals[k];
  }
  sync_threads();
  const int64_t column = first + thread_index();
  if (thread_index() >= kWarp || column >= columns) return;
  double total = 0;
  for (int warp = 0; warp < block_threads() / kWarp; ++warp) total += sums[warp * kWarp + thread_index()];
  dm[column] += static_cast<float>(total / std::sqrt(static_cast<double>(n2[column])));
}
void magnitude_gradient(Context& c, In dy, In u, const float* n2, float* dm, int64_t rows, int64_t columns) {
  by_type({dy, u}, [&](auto type) {
    using T = decltype(type);
    const int threads = threads_for(rows * (kWarp / kGroup<T>), 4, kWarp * kWarp);
    launch(c, {ceil_div(columns, int64_t{kWarp}), threads}, magnitude_gradient_kernel<T>, array_of<T>(dy),
           array_of<T>(u), n2, dm, rows, columns);
  });
}

// ---- NF4

// Decision boundaries and values of the NF4 codes, as compile-time constants.
struct Nf4 {
  static __device__ uint32_t code(float fraction) {
    constexpr auto kLimits = nf4_limits();
    uint32_t code = 0;
    for (const float limit : kLimits) code += fraction > limit ? 1 : 0;
    return code;
  }
  static __device__ float value(int code) {
    constexpr auto kValues = nf4_values();
    float value = 0;
    CAPSTAN_UNROLL
    for (int i = 0; i < 16; ++i)
      if (i == code) value = kValues[static_cast<size_t>(i)];
    return value;
  }
};

// One warp for each quantization block. A lane encodes pairs of elements, which share a byte.
__global__ void nf4_quantize_kernel(const float* x, int64_t n, int64_t block, uint8_t* codes, float* scales) {
  const int64_t i = block_index() * (block_threads() / kWarp) + warp_index(), first = i * block;
  if (first >= n) return;
  const int64_t last = n < first + block ? n : first + block;
  float largest = 0;
  // Ignores NaN.
  const auto larger = [](float a, float b) { return a < b ? b : a; };
  for (int64_t j = first + lane_index(); j < last; j += kWarp) largest = larger(largest, std::fabs(x[j]));
  largest = warp_reduce(largest, larger);
  if (lane_index() == 0) scales[i] = largest;
  // Avoids a division by 0 for a block of zeros.
  const float inverse = 1.0f / larger(largest, 1e-38f);
  for (int64_t j = first + 2 * lane_index(); j < last; j += 2 * kWarp) {
    // Code 7 is zero; it pads an odd count.
    const uint32_t second = j + 1 < last ? Nf4::code(x[j + 1] * inverse) : 7;
    codes[j / 2] = static_cast<uint8_t>(Nf4::code(x[j] * inverse) << 4 | second);
  }
}
void nf4_quantize(Context& c, const float* x, int64_t n, int64_t block, uint8_t* codes, float* scales) {
  constexpr int kThreads = 256;
  launch(c, {ceil_div(ceil_div(n, block), int64_t{kThreads / kWarp}), kThreads}, nf4_quantize_kernel, x, n,
         block, codes, scales);
}

// The scales of the blocks of a region.
struct Nf4Scales {
  // The first element of the region in its matrix, and the columns of both.
  int64_t first, columns, matrix_columns, block;
  // Where the region has all columns, its blocks follow one another in the matrix, from this one on; else -1.
  int64_t first_block;
  const float* scales;
  const uint8_t* codes;
  const float *nested, *map, *offset;

  __device__ float of(int64_t i) const {
    if (scales) return scales[i];
    int64_t k = first_block + i;
    if (first_block < 0) {
      const int64_t row = i * block / columns, column = i * block % columns;
      k = (first + row * matrix_columns + column) / block;
    }
    return rounded_product(map[codes[i]], nested[k / kNf4NestedBlock]) + *offset;
  }
};
template <class T>
__global__ void nf4_dequantize_kernel(Nf4Scales scales, const uint8_t* codes, int64_t n, Array<T> y) {
  CAPSTAN_SHARED(float, values, 16);
  constexpr int kSize = kGroup<T>;
  if (thread_index() < 16) values[thread_index()] = Nf4::value(thread_index());
  sync_threads();
  const int64_t i = global_thread() * kSize;
  if (i >= n) return;
  Group<kSize> group = {};
  const auto decode = [&](int k, float scale) {
    const uint32_t pair = codes[i / 2 + k / 2];
    group[k] = values[pair >> 4] * scale;
    group[k + 1] = values[pair & 15] * scale;
  };
  // A block has an even number of elements, unless it is the last one.
  const int64_t block = i / scales.block;
  if (i + kSize <= n && i + kSize <= (block + 1) * scales.block) {
    const float scale = scales.of(block);
    for (int k = 0; k < kSize; k += 2) decode(k, scale);
  } else {
    for (int k = 0; k < kSize && i + k < n; k += 2) decode(k, scales.of((i + k) / scales.block));
  }
  y.store(i, n - i, group);
}
void nf4_dequantize(Context& c, Region region, int64_t matrix_columns, int64_t block, const uint8_t* codes,
                    const float* scales, const uint8_t* scale_codes, const float* nested, const float* map,
                    const float* offset, Out y) {
  constexpr int kThreads = 256;
  const int64_t columns = region.sizes[1], n = region.sizes[0] * columns,
                first = region.offsets[0] * matrix_columns + region.offsets[1];
  by_type({y}, [&](auto type) {
    using T = decltype(type);
    launch(c, {ceil_div(n, int64_t{kThreads} * kGroup<T>), kThreads}, nf4_dequantize_kernel<T>,
           Nf4Scales{first, columns, matrix_columns, block, columns == matrix_columns ? first / block : -1,
                     scales, scale_codes, nested, map, offset},
           codes, n, array_of<T>(y));
  });
}

WorkspaceSize row_lengths_workspace(int64_t) {
  return {};
}
WorkspaceSize scale_columns_workspace(int64_t) {
  return {};
}
WorkspaceSize magnitude_gradient_workspace() {
  return {};
}

}  // namespace

const Adapter& adapter_family() {
  static const Adapter family{.row_lengths = row_lengths,
                              .scale_columns = scale_columns,
                              .magnitude_gradient = magnitude_gradient,
                              .nf4_quantize = nf4_quantize,
                              .nf4_dequantize = nf4_dequantize,
                              .row_lengths_workspace = row_lengths_workspace,
                              .scale_columns_workspace = scale_columns_workspace,
                              .magnitude_gradient_workspace = magnitude_gradient_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
