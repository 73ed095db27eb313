// Element-wise kernels and fixed-shape reductions. All are memory-bound: one pass, full vectors.
#include "kernels/elementwise.hpp"

#include <cstring>
#include <initializer_list>

#include "kernels/common/dropout.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/elementwise.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kBlock = 32768;  // elements per tile

void fill(Context& c, Out x, float value, int64_t n) {
  by_type({x}, [&](auto type) HWY_ATTR {
    const auto a = array_of<decltype(type)>(x);
    parallel_blocks(c, n, kBlock, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      const VF v = splat(value);
      for_vectors(
          end - begin, [&](int64_t i) HWY_ATTR { a.put(begin + i, v); },
          [&](int64_t i, int64_t k) HWY_ATTR { a.put_part(begin + i, v, k); });
    });
  });
}

void cast(Context& c, In x, Out y, int64_t n) {
  if (x.dtype == y.dtype) {
    const auto bytes = size_of(x.dtype);
    parallel_blocks(c, n, 2 * kBlock, [&](int64_t begin, int64_t end, int) {
      std::memcpy(y.as<char>() + begin * bytes, x.as<char>() + begin * bytes,
                  static_cast<size_t>((end - begin) * bytes));
    });
    return;
  }
  const auto a = array_of<Any>(x);
  const auto b = array_of<Any>(y);
  parallel_blocks(c, n, kBlock, [&](int64_t begin, int64_t end, int) HWY_ATTR {
    for_vectors(
        end - begin, [&](int64_t i) HWY_ATTR { b.put(begin + i, a.at(begin + i)); },
        [&](int64_t i, int64_t k) HWY_ATTR { b.put_part(begin + i, a.part(begin + i, k), k); });
  });
}

void add(Context& c, In x, In z, Out y, int64_t n) {
  by_type({x, z, y}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto a = array_of<T>(x), b = array_of<T>(z), out = array_of<T>(y);
    parallel_blocks(c, n, kBlock, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for_vectors(
          end - begin,
          [&](int64_t i) HWY_ATTR { out.put(begin + i, hn::Add(a.at(begin + i), b.at(begin + i))); },
          [&](int64_t i, int64_t k)
              HWY_ATTR { out.put_part(begin + i, hn::Add(a.part(begin + i, k), b.part(begin + i, k)), k); });
    });
  });
}

void axpy(Context& c, float alpha, In x, float* y, int64_t n) {
  by_type({x}, [&](auto type) HWY_ATTR {
    const auto a = array_of<decltype(type)>(x);
    parallel_blocks(c, n, kBlock, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      const VF factor = splat(alpha);
      for_vectors(
          end - begin,
          [&](int64_t i)
              HWY_ATTR { store(hn::MulAdd(factor, a.at(begin + i), load(y + begin + i)), y + begin + i); },
          [&](int64_t i, int64_t k) HWY_ATTR {
            store_part(hn::MulAdd(factor, a.part(begin + i, k), load_part(y + begin + i, k)), y + begin + i,
                       k);
          });
    });
  });
}

void scale(Context& c, Out x, float factor, int64_t n) {
  by_type({x}, [&](auto type) HWY_ATTR {
    const auto a = array_of<decltype(type)>(x);
    parallel_blocks(c, n, kBlock, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      const VF f = splat(factor);
      for_vectors(
          end - begin, [&](int64_t i) HWY_ATTR { a.put(begin + i, hn::Mul(f, a.at(begin + i))); },
          [&](int64_t i, int64_t k) HWY_ATTR { a.put_part(begin + i, hn::Mul(f, a.part(begin + i, k)), k); });
    });
  });
}

template <bool kLargest>
void combine_arrays(Context& c, In parts, int64_t count, Out y, int64_t n) {
  by_type({parts, y}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto a = array_of<T>(parts), out = array_of<T>(y);
    parallel_blocks(c, n, kBlock / 2, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      const auto join = [](VF u, VF v) HWY_ATTR { return kLargest ? hn::Max(u, v) : hn::Add(u, v); };
      for_vectors(
          end - begin,
          [&](int64_t i) HWY_ATTR {
            VF v = a.at(begin + i);
            for (int64_t part = 1; part < count; ++part) v = join(v, a.at(part * n + begin + i));
            out.put(begin + i, v);
          },
          [&](int64_t i, int64_t k) HWY_ATTR {
            VF v = a.part(begin + i, k);
            for (int64_t part = 1; part < count; ++part) v = join(v, a.part(part * n + begin + i, k));
            out.put_part(begin + i, v, k);
          });
    });
  });
}

// y = residual + mask / (1 - p) * (x + bias) on one chunk of 4 * kLanes columns from column `begin` (a
// multiple of it).
template <class T>
HWY_INLINE void dropout_row(const Array<T>& x, const float* bias, const Array<T>* residual, const Array<T>& y,
                            int64_t row, int64_t cols, float p, PhiloxKey key, int64_t dropout_row,
                            int64_t first_column = 0) {
  const bool dropout_mask = p > 0;
  const auto threshold = hn::Set(DU(), dropout_threshold(p));
  const VF factor = splat(dropout_mask ? 1.0f / (1.0f - p) : 1.0f);
  HWY_ALIGN uint32_t words[4 * kLanes];
  const int64_t base = row * cols;
  auto value = [&](int64_t col, VF v, VF b, VF r) HWY_ATTR {
    v = hn::Add(v, b);
    if (dropout_mask) {
      // words >= threshold, unsigned: max(w, t) == w.
      const auto w = hn::Load(DU(), words + col % (4 * kStep));
      const auto keep = hn::RebindMask(DF(), hn::Eq(hn::Max(w, threshold), w));
      v = hn::IfThenElseZero(keep, hn::Mul(v, factor));
    }
    return hn::Add(v, r);
  };
  for (int64_t col = 0; col < cols; col += kStep) {
    if (dropout_mask && col % (4 * kStep) == 0)
      philox_words(key, static_cast<uint64_t>(dropout_row), static_cast<uint64_t>(first_column + col) >> 2,
                   words);
    const VF zero = hn::Zero(DF());
    if (const int64_t n = cols - col; n >= kStep)
      y.put(base + col, value(col, x.at(base + col), bias ? load(bias + col) : zero,
                              residual ? residual->at(base + col) : zero));
    else
      y.put_part(base + col,
                 value(col, x.part(base + col, n), bias ? load_part(bias + col, n) : zero,
                       residual ? residual->part(base + col, n) : zero),
                 n);
  }
}

template <class T>
HWY_INLINE void dropout_row_from(const Array<T>& x, const Array<T>& y, int64_t row, int64_t cols, float p,
                                 PhiloxKey key, int64_t dropout_row, int64_t first_column) {
  const uint32_t threshold = dropout_threshold(p);
  const float factor = 1.0f / (1.0f - p);
  HWY_ALIGN float mask[kLanes];
  for (int64_t col = 0; col < cols; col += kStep) {
    const int64_t n = std::min(kStep, cols - col);
    for (int64_t i = 0; i < n; ++i)
      mask[i] = keep_hidden(key, dropout_row, first_column + col + i, threshold) ? factor : 0.0f;
    y.put_part(row * cols + col, hn::Mul(x.part(row * cols + col, n), load_part(mask, n)), n);
  }
}

WorkspaceSize bias_dropout_add_workspace(bool bias, int64_t cols) {
  return {bias ? static_cast<size_t>(cols) * sizeof(float) : 0, 0};
}
void bias_dropout_add(Context& c, In x, In bias, In residual, Out y, int64_t rows, int64_t cols, float p,
                      PhiloxKey key, const int64_t* dropout_rows) {
  const WorkspaceParts workspace(c, bias_dropout_add_workspace(static_cast<bool>(bias), cols));
  if (!workspace) return;
  float* wide = bias ? workspace.shared<float>() : nullptr;
  if (bias) widen(bias, wide, cols);
  by_type({x, residual, y}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto a = array_of<T>(x), r = array_of<T>(residual), out = array_of<T>(y);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t row = begin; row < end; ++row)
        dropout_row<T>(a, wide, residual ? &r : nullptr, out, row, cols, p, key,
                       p > 0 ? dropout_rows[row] : 0);
    });
  });
}

void dropout(Context& c, In x, Out y, int64_t rows, int64_t cols, int64_t first_column, float p,
             PhiloxKey key, const int64_t* dropout_rows) {
  by_type({x, y}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto a = array_of<T>(x), out = array_of<T>(y);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t row = begin; row < end; ++row)
        if (first_column % 4 == 0)
          dropout_row<T>(a, nullptr, nullptr, out, row, cols, p, key, dropout_rows[row], first_column);
        else
          // The columns do not begin at a block of the generator.
          dropout_row_from<T>(a, out, row, cols, p, key, dropout_rows[row], first_column);
    });
  });
}

template <class T>
HWY_INLINE void jitter_row(const Array<T>& x, const Array<T>& y, int64_t row, int64_t cols, float epsilon,
                           PhiloxKey key, int64_t dropout_row) {
  HWY_ALIGN uint32_t words[4 * kLanes];
  const int64_t base = row * cols;
  for (int64_t col = 0; col < cols; col += kStep) {
    if (col % (4 * kStep) == 0)
      philox_words(key, static_cast<uint64_t>(dropout_row), static_cast<uint64_t>(col) >> 2, words);
    // As jitter_factor(): words of 24 bits are exact in fp32.
    const auto word = hn::ShiftRight<8>(hn::Load(DU(), words + col % (4 * kStep)));
    const VF uniform = hn::ConvertTo(DF(), hn::BitCast(DI(), word));
    const VF factor = hn::Add(splat(1.0f - epsilon), hn::Mul(uniform, splat(epsilon * 0x1p-23f)));
    if (const int64_t n = cols - col; n >= kStep)
      y.put(base + col, hn::Mul(x.at(base + col), factor));
    else
      y.put_part(base + col, hn::Mul(x.part(base + col, n), factor), n);
  }
}

void jitter(Context& c, In x, Out y, int64_t rows, int64_t cols, float epsilon, PhiloxKey key,
            const int64_t* dropout_rows) {
  by_type({x, y}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto a = array_of<T>(x), out = array_of<T>(y);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t row = begin; row < end; ++row)
        jitter_row<T>(a, out, row, cols, epsilon, key, dropout_rows[row]);
    });
  });
}

void copy_rows(Context& c, In x, int64_t x_stride, Out y, int64_t y_stride, int64_t rows, int64_t cols) {
  if (x.dtype == y.dtype) {
    const auto bytes = size_of(x.dtype);
    parallel_blocks(c, rows, 4 * rows_per_block(cols), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r)
        std::memcpy(y.as<char>() + r * y_stride * bytes, x.as<char>() + r * x_stride * bytes,
                    static_cast<size_t>(cols * bytes));
    });
    return;
  }
  const auto a = array_of<Any>(x), b = array_of<Any>(y);
  parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
    for (int64_t r = begin; r < end; ++r)
      for_vectors(
          cols, [&](int64_t i) HWY_ATTR { b.put(r * y_stride + i, a.at(r * x_stride + i)); },
          [&](int64_t i, int64_t k)
              HWY_ATTR { b.put_part(r * y_stride + i, a.part(r * x_stride + i, k), k); });
  });
}

// ---- reductions: float lanes within 1024 elements, double beyond, blocks summed in order.

// One value for each block.
WorkspaceSize reduction_workspace(int64_t n) {
  static_assert(sizeof(double) == sizeof(int64_t));
  return {static_cast<size_t>(ceil_div(std::max<int64_t>(n, 0), kBlock)) * sizeof(double), 0};
}

template <class Chunk>
HWY_INLINE void reduce(Context& c, int64_t n, double* out, bool accumulate, Chunk&& chunk) {
  const int64_t blocks = ceil_div(n, kBlock);
  const WorkspaceParts workspace(c, reduction_workspace(n));
  if (!workspace) return;
  auto* partial = workspace.shared<double>();
  parallel_blocks(c, n, kBlock, [&](int64_t begin, int64_t end, int) HWY_ATTR {
    double sum = 0;
    for (int64_t at = begin; at < end; at += 1024) {
      VF s0 = hn::Zero(DF()), s1 = s0;
      const int64_t stop = std::min(end, at + 1024);
      int64_t i = at;
      for (; i + 2 * kStep <= stop; i += 2 * kStep) {
        s0 = chunk(i, kStep, s0);
        s1 = chunk(i + kStep, kStep, s1);
      }
      for (; i + kStep <= stop; i += kStep) s0 = chunk(i, kStep, s0);
      if (i < stop) s0 = chunk(i, stop - i, s0);
      sum += static_cast<double>(sum_lanes(hn::Add(s0, s1)));
    }
    partial[begin / kBlock] = sum;
  });
  double total = accumulate ? *out : 0;
  for (int64_t b = 0; b < blocks; ++b) total += partial[b];
  *out = total;
}

void sum(Context& c, In x, int64_t n, double* out, bool accumulate) {
  by_type({x}, [&](auto type) HWY_ATTR {
    const auto a = array_of<decltype(type)>(x);
    reduce(c, n, out, accumulate, [&](int64_t i, int64_t k, VF s) HWY_ATTR {
      return hn::Add(s, k == kStep ? a.at(i) : a.part(i, k));
    });
  });
}

void weighted_sum(Context& c, const float* x, const float* weight, int64_t n, double* out, bool accumulate) {
  reduce(c, n, out, accumulate, [&](int64_t i, int64_t k, VF s) HWY_ATTR {
    return hn::MulAdd(load_lanes(x + i, k), load_lanes(weight + i, k), s);
  });
}

void count_nonfinite(Context& c, In x, int64_t n, int64_t* out, bool accumulate) {
  const int64_t blocks = ceil_div(n, kBlock);
  const WorkspaceParts workspace(c, reduction_workspace(n));
  if (!workspace) return;
  auto* partial = workspace.shared<int64_t>();
  by_type({x}, [&](auto type) HWY_ATTR {
    const auto a = array_of<decltype(type)>(x);
    parallel_blocks(c, n, kBlock, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      const auto exponent = hn::Set(DU(), 0x7F800000u);
      int64_t found = 0;
      auto look = [&](VF v) HWY_ATTR {
        const auto bad = hn::Eq(hn::And(hn::BitCast(DU(), v), exponent), exponent);
        found += static_cast<int64_t>(hn::CountTrue(DU(), bad));
      };
      for_vectors(
          end - begin, [&](int64_t i) HWY_ATTR { look(a.at(begin + i)); },
          [&](int64_t i, int64_t k) HWY_ATTR { look(a.part(begin + i, k)); });
      partial[begin / kBlock] = found;
    });
  });
  int64_t total = accumulate ? *out : 0;
  for (int64_t b = 0; b < blocks; ++b) total += partial[b];
  *out = total;
}

Elementwise elementwise_family() {
  return {.fill = fill,
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
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Elementwise, elementwise)
#endif
