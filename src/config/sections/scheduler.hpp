// Learning rate and weight decay over the run. The unit of the schedule is the consumed sample (iterations *
// global_batch_size); formulas in src/optim.
#pragma once

#include <cstdint>
#include <optional>

namespace capstan::config {

enum class LrDecayStyle : uint8_t { constant, linear, cosine, inverse_square_root, wsd };
enum class WsdDecayStyle : uint8_t { exponential, linear, cosine, minus_sqrt };
enum class WeightDecayStyle : uint8_t { constant, linear, cosine };

struct SchedulerConfig {
  LrDecayStyle lr_decay_style = LrDecayStyle::linear;
  WsdDecayStyle lr_wsd_decay_style = WsdDecayStyle::exponential;
  std::optional<int64_t> lr_decay_iters;      // derived: train.train_iters
  std::optional<int64_t> lr_decay_samples;    // derived: train.train_samples
  std::optional<int64_t> lr_wsd_decay_iters;  // length of the final decay of WSD
  std::optional<int64_t> lr_wsd_decay_samples;
  std::optional<double> lr_wsd_decay_fraction;  // the same as a share of the decay length
  std::optional<double> lr_warmup_fraction;     // share of the decay length
  std::optional<int64_t> lr_warmup_iters;       // derived: round(lr_warmup_fraction * lr_decay_iters), else 0
  std::optional<int64_t> lr_warmup_samples;  // derived: round(lr_warmup_fraction * lr_decay_samples), else 0
  double lr_warmup_init = 0.0;
  std::optional<double> start_weight_decay;  // only with weight_decay_incr_style other than constant
  std::optional<double> end_weight_decay;
  WeightDecayStyle weight_decay_incr_style = WeightDecayStyle::constant;
  bool override_opt_param_scheduler = false;        // on resume: this recipe's schedule
  bool use_checkpoint_opt_param_scheduler = false;  // on resume: the checkpoint's schedule
};

}  // namespace capstan::config
