// Learning rate and weight decay as functions of consumed samples: Megatron's schedules.
//
// n = consumed samples; W = warm-up, D = decay length, A = length of WSD's final decay, all in samples.
//   n <= W (W > 0):  init + (max - init) n / W          n > D:  min (constant: max)
//   inverse-square-root:  max(min, max sqrt(max(W, 1)) / sqrt(max(n, 1)))
//   r = (n - W) / (D - W);  linear 1 - r, cosine (1 + cos(pi r)) / 2;  lr = min + c (max - min)
//   WSD: c = 1 while n <= D - A; then q = (n - (D - A)) / A: linear 1 - q, cosine (1 + cos(pi q)) / 2,
//        exponential 2 * 0.5^q - 1, minus_sqrt 1 - sqrt(q)
// Weight decay over I samples: constant; linear start + (n / I) d; cosine start + (cos(pi (1 - n / I)) + 1) /
// 2 d; end after I.
#pragma once

#include <cstdint>

#include "config/sections/scheduler.hpp"

namespace capstan::optim {

struct ScheduleOptions {
  config::LrDecayStyle style = config::LrDecayStyle::linear;
  config::WsdDecayStyle wsd_style = config::WsdDecayStyle::exponential;
  config::WeightDecayStyle weight_decay_style = config::WeightDecayStyle::constant;
  double max_lr = 0, min_lr = 0, init_lr = 0;
  int64_t warmup_samples = 0, decay_samples = 1, wsd_decay_samples = 0, weight_decay_samples = 1;
  double start_weight_decay = 0, end_weight_decay = 0;
};

class Schedule {
 public:
  // ErrorCode::config when W >= D, min > max or a length is not positive.
  explicit Schedule(const ScheduleOptions& options);
  double learning_rate(int64_t consumed_samples) const;
  double weight_decay(int64_t consumed_samples) const;
  const ScheduleOptions& options() const { return options_; }

 private:
  ScheduleOptions options_;
};

}  // namespace capstan::optim
