// Softmax cross-entropy over rows of logits.
#include "kernels/cross_entropy.hpp"

#include <cmath>
#include <cstring>
#include <limits>

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

void row_max(Context& c, In logits, int64_t rows, int64_t cols, int64_t row_stride, float* out) {
  by_type({logits}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(logits);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = r * row_stride;
        const VF lowest = splat(-std::numeric_limits<float>::infinity());
        VF m0 = lowest, m1 = lowest;
        int64_t i = 0;
        for (; i + 2 * kStep <= cols; i += 2 * kStep) {
          m0 = hn::Max(m0, x.at(at + i));
          m1 = hn::Max(m1, x.at(at + i + kStep));
        }
        for (; i + kStep <= cols; i += kStep) m0 = hn::Max(m0, x.at(at + i));
        float m = max_lanes(hn::Max(m0, m1));
        for (; i < cols; ++i) m = std::max(m, value_at(x, at + i));
        out[r] = m;
      }
    });
  });
}

void row_sums(Context& c, In logits, const int32_t* labels, const float* max, int64_t rows, int64_t cols,
              int64_t row_stride, int64_t first_col, float* sum_exp, float* target) {
  by_type({logits}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(logits);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = r * row_stride;
        const VF m = splat(max[r]);
        VF s0 = hn::Zero(DF()), s1 = s0;
        int64_t i = 0;
        for (; i + 2 * kStep <= cols; i += 2 * kStep) {
          s0 = hn::Add(s0, exp(hn::Sub(x.at(at + i), m)));
          s1 = hn::Add(s1, exp(hn::Sub(x.at(at + i + kStep), m)));
        }
        for (; i + kStep <= cols; i += kStep) s0 = hn::Add(s0, exp(hn::Sub(x.at(at + i), m)));
        float s = sum_lanes(hn::Add(s0, s1));
        if (i < cols) {
          HWY_ALIGN float last[kLanes];
          hn::Store(exp(hn::Sub(x.part(at + i, cols - i), m)), DF(), last);
          for (int64_t j = 0; j < cols - i; ++j) s += last[j];
        }
        sum_exp[r] = s;
        const int64_t label = labels[r] - first_col;
        target[r] = label >= 0 && label < cols ? value_at(x, at + label) : 0.0f;
      }
    });
  });
}

void loss(Context& c, const float* max, const float* sum_exp, const float* target, int64_t rows, float* out) {
  parallel_blocks(c, rows, 4096, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) out[r] = std::log(sum_exp[r]) + (max[r] - target[r]);
  });
}

template <bool kCapped>
void backward_of(Context& c, In logits, const int32_t* labels, const float* max, const float* sum_exp,
                 const float* weight, int64_t rows, int64_t cols, int64_t row_stride, int64_t first_col,
                 float cap, Out dlogits) {
  by_type({logits, dlogits}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto x = array_of<T>(logits), dx = array_of<T>(dlogits);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      const VF inverse_cap = splat(kCapped ? 1.0f / cap : 0.0f);
      // The gradient for a logit before its cap, of that after it.
      const auto before_cap = [&](VF gradient, VF logit) HWY_ATTR {
        if constexpr (!kCapped) return gradient;
        const VF t = hn::Mul(logit, inverse_cap);
        return hn::Mul(gradient, hn::NegMulAdd(t, t, splat(1.0f)));
      };
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = r * row_stride;
        const int64_t label = labels[r] - first_col;
        const bool here = label >= 0 && label < cols;
        const float factor = weight[r] / sum_exp[r];
        const VF at_label = splat(here ? value_at(x, at + label) : 0.0f);
        const VF m = splat(max[r]), f = splat(factor);
        const auto gradient = [&](VF logit)
                                  HWY_ATTR { return before_cap(hn::Mul(exp(hn::Sub(logit, m)), f), logit); };
        for_vectors(
            cols, [&](int64_t i) HWY_ATTR { dx.put(at + i, gradient(x.at(at + i))); },
            [&](int64_t i, int64_t n) HWY_ATTR { dx.put_part(at + i, gradient(x.part(at + i, n)), n); });
        if (here) {
          const VF p = hn::Mul(exp(hn::Sub(at_label, m)), f);
          dx.put_part(at + label, before_cap(hn::Sub(p, splat(weight[r])), at_label), 1);
        }
        for (int64_t i = cols; i < row_stride; i += kStep)
          dx.put_part(at + i, hn::Zero(DF()), std::min(kStep, row_stride - i));
      }
    });
  });
}

void backward(Context& c, In logits, const int32_t* labels, const float* max, const float* sum_exp,
              const float* weight, int64_t rows, int64_t cols, int64_t row_stride, int64_t first_col,
              float cap, Out dlogits) {
  const auto run = cap > 0 ? backward_of<true> : backward_of<false>;
  run(c, logits, labels, max, sum_exp, weight, rows, cols, row_stride, first_col, cap, dlogits);
}

CrossEntropy cross_entropy_family() {
  return {softcap, row_max, row_sums, loss, backward};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace capstan::kernels {
const CrossEntropy& cpu_cross_entropy() {
  static const CrossEntropy family = CAPSTAN_BEST(cross_entropy_family)();
  return family;
}
}  // namespace capstan::kernels
#endif
