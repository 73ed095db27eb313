// Softmax cross-entropy over rows of logits.
#include "kernels/cross_entropy.hpp"

#include <cstring>
#include <limits>

#include "kernels/common/cross_entropy.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cross_entropy.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE float value_at(const Array<T>& x, int64_t i) {
  return hn::GetLane(x.part(i, 1));
}

void softcap(Context& c, Out logits, float cap, int64_t n) {
  by_type({logits}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(logits);
    parallel_blocks(c, n, 16384, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      const VF most = splat(cap), inverse = splat(1.0f / cap);
      for_vectors(
          end - begin, [&](int64_t i) HWY_ATTR { x.put(begin + i, softcap(x.at(begin + i), most, inverse)); },
          [&](int64_t i, int64_t m)
              HWY_ATTR { x.put_part(begin + i, softcap(x.part(begin + i, m), most, inverse), m); });
    });
  });
}

// ---- one row, of `cols` logits from `at` on

template <class T>
HWY_INLINE float max_of_row(const Array<T>& x, int64_t at, int64_t cols) {
  VF m0 = splat(-std::numeric_limits<float>::infinity()), m1 = m0;
  int64_t i = 0;
  for (; i + 2 * kStep <= cols; i += 2 * kStep) {
    m0 = hn::Max(m0, x.at(at + i));
    m1 = hn::Max(m1, x.at(at + i + kStep));
  }
  for (; i + kStep <= cols; i += kStep) m0 = hn::Max(m0, x.at(at + i));
  float m = max_lanes(hn::Max(m0, m1));
  for (; i < cols; ++i) m = std::max(m, value_at(x, at + i));
  return m;
}

template <class T>
HWY_INLINE float sum_exp_of_row(const Array<T>& x, int64_t at, int64_t cols, float max) {
  const VF m = splat(max);
  VF s0 = hn::Zero(DF()), s1 = s0;
  int64_t i = 0;
  for (; i + 2 * kStep <= cols; i += 2 * kStep) {
    s0 = hn::Add(s0, exp_not_positive(hn::Sub(x.at(at + i), m)));
    s1 = hn::Add(s1, exp_not_positive(hn::Sub(x.at(at + i + kStep), m)));
  }
  for (; i + kStep <= cols; i += kStep) s0 = hn::Add(s0, exp_not_positive(hn::Sub(x.at(at + i), m)));
  float s = sum_lanes(hn::Add(s0, s1));
  if (i < cols) {
    HWY_ALIGN float last[kLanes];
    hn::Store(exp_not_positive(hn::Sub(x.part(at + i, cols - i), m)), DF(), last);
    for (int64_t j = 0; j < cols - i; ++j) s += last[j];
  }
  return s;
}

// `label` counts from the row's first logit and may lie outside.
template <class T>
HWY_INLINE float target_of_row(const Array<T>& x, int64_t at, int64_t cols, int64_t label) {
  return label >= 0 && label < cols ? value_at(x, at + label) : 0.0f;
}

// The inputs of a row's gradient, and the number of logits including padding.
struct RowGradient {
  float max, sum_exp, weight, cap;
  int64_t cols, padded;
};
// From front to back, so that a narrower gradient may overwrite logits that were read. Prefetches the logits
// from `next` on, because a thread mostly processes consecutive rows.
template <bool kCapped, class T, class D>
HWY_INLINE void gradient_of_row(const RowGradient& g, const Array<T> x, int64_t at, int64_t label,
                                const Array<D> dx, int64_t to, int64_t next) {
  const VF inverse_cap = splat(kCapped ? 1.0f / g.cap : 0.0f);
  // The gradient of a logit before the cap, from that after it.
  const auto before_cap = [&](VF gradient, VF logit) HWY_ATTR {
    if constexpr (!kCapped) return gradient;
    const VF t = hn::Mul(logit, inverse_cap);
    return hn::Mul(gradient, hn::NegMulAdd(t, t, splat(1.0f)));
  };
  const VF m = splat(g.max), f = splat(g.weight / g.sum_exp);
  const VF at_label = splat(target_of_row(x, at, g.cols, label));
  const auto gradient = [&](VF logit) HWY_ATTR {
    return before_cap(hn::Mul(exp_not_positive(hn::Sub(logit, m)), f), logit);
  };
  for_vectors(
      g.cols,
      [&](int64_t i) HWY_ATTR {
        x.fetch(next + i);
        dx.put(to + i, gradient(x.at(at + i)));
      },
      [&](int64_t i, int64_t n) HWY_ATTR { dx.put_part(to + i, gradient(x.part(at + i, n)), n); });
  if (label >= 0 && label < g.cols) {
    const VF p = hn::Mul(exp_not_positive(hn::Sub(at_label, m)), f);
    dx.put_part(to + label, before_cap(hn::Sub(p, splat(g.weight)), at_label), 1);
  }
  for (int64_t i = g.cols; i < g.padded; i += kStep)
    dx.put_part(to + i, hn::Zero(DF()), std::min(kStep, g.padded - i));
}

// body(T{}, D{}) with the types of the logits and of their gradient; the gradient of fp32 logits often
// has 16 bits.
template <class Body>
HWY_INLINE void by_types(In logits, In dlogits, Body&& body) {
  if (logits.dtype == DType::f32 && dlogits.dtype == DType::bf16)
    body(float{}, bf16{});
  else if (logits.dtype == DType::f32 && dlogits.dtype == DType::f16)
    body(float{}, f16{});
  else
    by_type({logits, dlogits}, [&](auto type) HWY_ATTR { body(type, type); });
}

// ---- the kernels

void row_max(Context& c, In logits, int64_t rows, int64_t cols, int64_t row_stride, float* out) {
  by_type({logits}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(logits);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) out[r] = max_of_row(x, r * row_stride, cols);
    });
  });
}

void row_sums(Context& c, In logits, const int32_t* labels, const float* max, int64_t rows, int64_t cols,
              int64_t row_stride, int64_t first_col, float* sum_exp, float* target) {
  by_type({logits}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(logits);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        sum_exp[r] = sum_exp_of_row(x, r * row_stride, cols, max[r]);
        target[r] = target_of_row(x, r * row_stride, cols, labels[r] - first_col);
      }
    });
  });
}

void loss(Context& c, const float* max, const float* sum_exp, const float* target, int64_t rows, float* out) {
  parallel_blocks(c, rows, 4096, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) out[r] = loss_of_row(max[r], sum_exp[r], target[r]);
  });
}

template <bool kCapped>
void backward_of(Context& c, In logits, const int32_t* labels, const float* max, const float* sum_exp,
                 const float* weight, int64_t rows, int64_t cols, int64_t row_stride, int64_t first_col,
                 float cap, Out dlogits, int64_t dlogits_stride) {
  by_types(logits, dlogits, [&](auto type, auto gradient_type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(logits);
    const auto dx = array_of<decltype(gradient_type)>(dlogits);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r)
        gradient_of_row<kCapped>({max[r], sum_exp[r], weight[r], cap, cols, row_stride}, x, r * row_stride,
                                 labels[r] - first_col, dx, r * dlogits_stride, (r + 1) * row_stride);
    });
  });
}

void backward(Context& c, In logits, const int32_t* labels, const float* max, const float* sum_exp,
              const float* weight, int64_t rows, int64_t cols, int64_t row_stride, int64_t first_col,
              float cap, Out dlogits, int64_t dlogits_stride) {
  const auto run = cap > 0 ? backward_of<true> : backward_of<false>;
  run(c, logits, labels, max, sum_exp, weight, rows, cols, row_stride, first_col, cap, dlogits,
      dlogits_stride);
}

template <bool kCapped>
void full_of(Context& c, Out logits, const int32_t* labels, const float* weight, int64_t rows, int64_t cols,
             int64_t row_stride, float cap, float* losses, Out dlogits, int64_t dlogits_stride) {
  by_types(logits, dlogits ? dlogits : logits, [&](auto type, auto gradient_type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(logits);
    const auto dx = array_of<decltype(gradient_type)>(dlogits);
    const VF most = splat(cap), inverse = splat(kCapped ? 1.0f / cap : 0.0f);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = r * row_stride, label = labels[r];
        if constexpr (kCapped)
          for_vectors(
              cols, [&](int64_t i) HWY_ATTR { x.put(at + i, softcap(x.at(at + i), most, inverse)); },
              [&](int64_t i, int64_t n)
                  HWY_ATTR { x.put_part(at + i, softcap(x.part(at + i, n), most, inverse), n); });
        const float max = max_of_row(x, at, cols), sum_exp = sum_exp_of_row(x, at, cols, max);
        losses[r] = loss_of_row(max, sum_exp, target_of_row(x, at, cols, label));
        if (dlogits)
          gradient_of_row<kCapped>({max, sum_exp, weight[r], cap, cols, row_stride}, x, at, label, dx,
                                   r * dlogits_stride, at + row_stride);
      }
    });
  });
}

void full(Context& c, Out logits, const int32_t* labels, const float* weight, int64_t rows, int64_t cols,
          int64_t row_stride, float cap, float* losses, Out dlogits, int64_t dlogits_stride) {
  const auto run = cap > 0 ? full_of<true> : full_of<false>;
  run(c, logits, labels, weight, rows, cols, row_stride, cap, losses, dlogits, dlogits_stride);
}

// Logits of a chunk within 256 MiB, or 384 MiB with a gradient in 16 bits, whose GEMMs are fast relative to
// the accumulation of the weight gradient. A multiple of 16.
int64_t chunk_rows(int64_t rows, int64_t columns, DType compute, bool differentiates) {
  constexpr int64_t kLogitBytes = int64_t{256} << 20, kMinRows = 256, kMaxRows = 1024;
  int64_t wanted = std::clamp(kLogitBytes / (4 * std::max<int64_t>(columns, 1)), kMinRows, kMaxRows);
  if (differentiates && compute != DType::f32) wanted *= 2;
  const int64_t chunks = std::max<int64_t>(1, ceil_div(rows, wanted));
  return std::max<int64_t>(16, round_up(ceil_div(rows, chunks), 16));
}

DType logits_type(DType /*compute*/) {
  return DType::f32;
}

CrossEntropy cross_entropy_family() {
  return {.softcap = softcap,
          .row_max = row_max,
          .row_sums = row_sums,
          .loss = loss,
          .backward = backward,
          .full = full,
          .chunk_rows = chunk_rows,
          .logits_type = logits_type};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(CrossEntropy, cross_entropy)
#endif
