// Scalar work at the end of a step: a few numbers, in a fixed order.
#include "kernels/step_control.hpp"

#include <cmath>

#include "kernels/common/step_control.hpp"
#include "kernels/cpu/families.hpp"

namespace capstan::kernels {

namespace {

void sum_losses(Context&, const double* sums, int64_t count, double tokens, double* total) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += sums[i];
  total[0] = sum;
  total[1] = tokens;
}

template <class T>
void add_in_order(const T* parts, int64_t ranks, T* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    T total = parts[i];
    for (int64_t r = 1; r < ranks; ++r) total += parts[r * n + i];
    sum[i] = total;
  }
}

void sum_ranks(Context&, In parts, int64_t ranks, Out sum, int64_t n) {
  if (parts.dtype == DType::i64)
    add_in_order(parts.as<int64_t>(), ranks, sum.as<int64_t>(), n);
  else
    add_in_order(parts.as<double>(), ranks, sum.as<double>(), n);
}

void control(Context&, StepLimits limits, Out values) {
  StepValues& v = *values.as<StepValues>();
  const double scale = v.loss_tokens > 0 ? 1.0 / v.loss_tokens : 0.0, unscale = 1.0 / limits.loss_scale;
  v.loss = v.loss_sum * scale * unscale;
  v.norm = std::sqrt(v.gradient_squares) * scale * unscale;
  const bool finite_loss = std::isfinite(v.loss), finite_norm = std::isfinite(v.norm);
  const bool skip = (limits.require_finite != 0 && !(finite_loss && finite_norm)) ||
                    (finite_loss && v.loss > limits.loss_spike) ||
                    (finite_norm && v.norm > limits.norm_spike) || v.norm > limits.largest_norm;
  v.control = {.gradient = static_cast<float>(scale * clip_factor(v.norm, limits.clip) * unscale),
               .skip = skip ? 1 : 0};
}

}  // namespace

const StepControlKernels& cpu_step_control() {
  static const StepControlKernels family{
      .sum_losses = sum_losses, .sum_ranks = sum_ranks, .control = control};
  return family;
}

}  // namespace capstan::kernels
