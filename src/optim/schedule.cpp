#include "optim/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::optim {

using config::LrDecayStyle;
using config::WeightDecayStyle;
using config::WsdDecayStyle;

Schedule::Schedule(const ScheduleOptions& o) : options_(o) {
  if (o.min_lr > o.max_lr)
    fail(ErrorCode::config, "min_lr " + to_text(o.min_lr) + " is above lr " + to_text(o.max_lr));
  if (o.decay_samples <= 0)
    fail(ErrorCode::config, "the decay length is " + std::to_string(o.decay_samples) + " samples");
  if (o.warmup_samples < 0 || o.warmup_samples >= o.decay_samples)
    fail(ErrorCode::config, "the warm-up of " + std::to_string(o.warmup_samples) +
                                " samples is not below the decay length of " +
                                std::to_string(o.decay_samples));
  if (o.style == LrDecayStyle::wsd && (o.wsd_decay_samples <= 0 || o.wsd_decay_samples > o.decay_samples))
    fail(ErrorCode::config, "the final decay of " + std::to_string(o.wsd_decay_samples) +
                                " samples does not fit the decay length of " +
                                std::to_string(o.decay_samples));
}

double Schedule::learning_rate(int64_t consumed) const {
  const ScheduleOptions& o = options_;
  const auto n = static_cast<double>(consumed), warmup = static_cast<double>(o.warmup_samples),
             decay = static_cast<double>(o.decay_samples);
  if (o.warmup_samples > 0 && consumed <= o.warmup_samples)
    return o.init_lr + (o.max_lr - o.init_lr) * n / warmup;
  if (o.style == LrDecayStyle::constant) return o.max_lr;
  if (consumed > o.decay_samples) return o.min_lr;
  if (o.style == LrDecayStyle::inverse_square_root)
    return std::max(o.min_lr, o.max_lr * std::sqrt(std::max(warmup, 1.0)) / std::sqrt(std::max(n, 1.0)));
  const auto half_cosine = [](double x) { return 0.5 * (1.0 + std::cos(std::numbers::pi * x)); };
  const double ratio = (n - warmup) / (decay - warmup);
  double share = 0;
  switch (o.style) {
    case LrDecayStyle::linear:
      share = 1.0 - ratio;
      break;
    case LrDecayStyle::cosine:
      share = half_cosine(ratio);
      break;
    case LrDecayStyle::wsd: {
      const auto length = static_cast<double>(o.wsd_decay_samples), start = decay - length;
      if (n <= start) {
        share = 1.0;
        break;
      }
      const double q = (n - start) / length;
      switch (o.wsd_style) {
        case WsdDecayStyle::linear:
          share = 1.0 - q;
          break;
        case WsdDecayStyle::cosine:
          share = half_cosine(q);
          break;
        case WsdDecayStyle::exponential:
          share = 2.0 * std::pow(0.5, q) - 1.0;
          break;
        case WsdDecayStyle::minus_sqrt:
          share = 1.0 - std::sqrt(q);
          break;
      }
      break;
    }
    case LrDecayStyle::constant:
    case LrDecayStyle::inverse_square_root:
      // Returned above.
      break;
  }
  return o.min_lr + share * (o.max_lr - o.min_lr);
}

double Schedule::weight_decay(int64_t consumed) const {
  const ScheduleOptions& o = options_;
  if (consumed > o.weight_decay_samples || o.weight_decay_style == WeightDecayStyle::constant)
    return o.end_weight_decay;
  const double ratio = static_cast<double>(consumed) / static_cast<double>(o.weight_decay_samples);
  const double share = o.weight_decay_style == WeightDecayStyle::linear
                           ? ratio
                           : 0.5 * (std::cos(std::numbers::pi * (1.0 - ratio)) + 1.0);
  return o.start_weight_decay + share * (o.end_weight_decay - o.start_weight_decay);
}

}  // namespace capstan::optim
