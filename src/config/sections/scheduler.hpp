// Learning rate and weight decay over the run. The unit of the schedule is the consumed sample (iterations *
// global_batch_size); formulas in src/optim.
#pragma once

#include <cstdint>
#include <optional>

#include "config/core/types.hpp"

namespace capstan::config {

enum class LrDecayStyle : uint8_t { constant, linear, cosine, inverse_square_root, wsd };
enum class WsdDecayStyle : uint8_t { exponential, linear, cosine, minus_sqrt };
enum class WeightDecayStyle : uint8_t { constant, linear, cosine };

template <>
struct EnumNames<LrDecayStyle> {
  static constexpr EnumEntry<LrDecayStyle> list[] = {
      {LrDecayStyle::constant, "constant", "no decay"},
      {LrDecayStyle::linear, "linear", "linear decay to min_lr"},
      {LrDecayStyle::cosine, "cosine", "cosine decay to min_lr"},
      {LrDecayStyle::inverse_square_root, "inverse-square-root", "peak * sqrt(warm-up / step)",
       "inverse_square_root"},
      {LrDecayStyle::wsd, "WSD", "warm-up, stable, decay: constant, then a short decay at the end", "wsd"},
  };
};

template <>
struct EnumNames<WsdDecayStyle> {
  static constexpr EnumEntry<WsdDecayStyle> list[] = {
      {WsdDecayStyle::exponential, "exponential", "2 * 0.5^q - 1"},
      {WsdDecayStyle::linear, "linear", "1 - q"},
      {WsdDecayStyle::cosine, "cosine", "(1 + cos(pi q)) / 2"},
      {WsdDecayStyle::minus_sqrt, "minus_sqrt", "1 - sqrt(q)"},
  };
};

template <>
struct EnumNames<WeightDecayStyle> {
  static constexpr EnumEntry<WeightDecayStyle> list[] = {
      {WeightDecayStyle::constant, "constant", "optimizer.weight_decay throughout"},
      {WeightDecayStyle::linear, "linear", "linear from start_weight_decay to end_weight_decay"},
      {WeightDecayStyle::cosine, "cosine", "cosine from start_weight_decay to end_weight_decay"},
  };
};

struct SchedulerConfig {
  LrDecayStyle lr_decay_style = LrDecayStyle::linear;
  WsdDecayStyle lr_wsd_decay_style = WsdDecayStyle::exponential;
  // Derived: train.train_iters.
  std::optional<int64_t> lr_decay_iters;
  // Derived: train.train_samples.
  std::optional<int64_t> lr_decay_samples;
  std::optional<int64_t> lr_wsd_decay_iters;
  std::optional<int64_t> lr_wsd_decay_samples;
  std::optional<double> lr_wsd_decay_fraction;
  std::optional<double> lr_warmup_fraction;
  // Derived: round(lr_warmup_fraction * lr_decay_iters), else 0.
  std::optional<int64_t> lr_warmup_iters;
  // Derived: round(lr_warmup_fraction * lr_decay_samples), else 0.
  std::optional<int64_t> lr_warmup_samples;
  double lr_warmup_init = 0.0;
  std::optional<double> start_weight_decay;
  std::optional<double> end_weight_decay;
  WeightDecayStyle weight_decay_incr_style = WeightDecayStyle::constant;
  bool override_opt_param_scheduler = false;
  bool use_checkpoint_opt_param_scheduler = false;
};

}  // namespace capstan::config
