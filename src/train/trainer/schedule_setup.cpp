#include "train/trainer/schedule_setup.hpp"

#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "config/sections/batch_ramp.hpp"

namespace capstan::train {

int64_t total_iterations(const config::Config& config) {
  if (config.train.train_iters) return *config.train.train_iters;
  if (config.train.train_samples) return config::BatchRamp(config).steps_in(*config.train.train_samples);
  fail(ErrorCode::config,
       config.train.epochs ? "the length of the run, train.epochs, is not known before its data is opened"
                           : "none of train.train_iters, train.train_samples and train.epochs is given",
       "train.train_iters=1000");
}

std::string rounded_batch_note(const config::Config& config) {
  const int64_t given = *config.train.global_batch_size, rounded = config::full_batch_size(config);
  if (given == rounded) return "";
  const int64_t micro = config.train.micro_batch_size, ranks = config.dist.data_parallel_size.value_or(1);
  return "global batch: " + counted(given, "sample") + " rounded down to " + with_separators(rounded) +
         ", a multiple of micro-batch " + with_separators(micro) + " * data-parallel size " +
         with_separators(ranks) + " (train.decrease_batch_size_if_needed)";
}

optim::Schedule make_schedule(const config::Config& config, bool decoupled) {
  const config::SchedulerConfig& s = config.scheduler;
  const config::OptimizerConfig& o = config.optimizer;
  const int64_t batch = config::full_batch_size(config),
                all_samples = config::BatchRamp(config).samples_of(total_iterations(config));
  const auto samples = [&](const std::optional<int64_t>& in_samples, const std::optional<int64_t>& iters,
                           int64_t otherwise) {
    return in_samples ? *in_samples : iters ? *iters * batch : otherwise;
  };
  optim::ScheduleOptions options;
  options.style = s.lr_decay_style;
  options.wsd_style = s.lr_wsd_decay_style;
  options.max_lr = decoupled ? o.decoupled_lr.value_or(o.lr) : o.lr;
  options.min_lr = (decoupled ? o.decoupled_min_lr : o.min_lr).value_or(0.0);
  options.init_lr = s.lr_warmup_init;
  options.decay_samples = samples(s.lr_decay_samples, s.lr_decay_iters, all_samples);
  const int64_t by_fraction = s.lr_warmup_fraction
                                  ? static_cast<int64_t>(std::llround(
                                        *s.lr_warmup_fraction * static_cast<double>(options.decay_samples)))
                                  : 0;
  options.warmup_samples = samples(s.lr_warmup_samples, s.lr_warmup_iters, by_fraction);
  const int64_t wsd_by_fraction =
      s.lr_wsd_decay_fraction ? static_cast<int64_t>(std::llround(*s.lr_wsd_decay_fraction *
                                                                  static_cast<double>(options.decay_samples)))
                              : 0;
  options.wsd_decay_samples = samples(s.lr_wsd_decay_samples, s.lr_wsd_decay_iters, wsd_by_fraction);
  options.weight_decay_style = s.weight_decay_incr_style;
  options.weight_decay_samples = all_samples;
  options.start_weight_decay = s.start_weight_decay.value_or(o.weight_decay);
  options.end_weight_decay = s.end_weight_decay.value_or(o.weight_decay);
  return optim::Schedule(options);
}

}  // namespace capstan::train
