#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool is_wsd(const Config& c) {
  return c.scheduler.lr_decay_style == LrDecayStyle::wsd;
}
bool decay_varies(const Config& c) {
  return c.scheduler.weight_decay_incr_style != WeightDecayStyle::constant;
}
}  // namespace

void describe(Section<SchedulerConfig>& s) {
  using S = SchedulerConfig;
  const char* wsd = "`scheduler.lr_decay_style` is WSD";
  const char* varies = "`scheduler.weight_decay_incr_style` is linear or cosine";
  s.doc("learning-rate and weight-decay schedules");
  s.field("lr_decay_style", &S::lr_decay_style)
      .doc("decay function of the learning rate from its peak to min_lr; typical: cosine");
  s.field("lr_wsd_decay_style", &S::lr_wsd_decay_style)
      .doc("decay function of the final WSD phase")
      .used_when<Config>(wsd, is_wsd);
  s.field("lr_decay_iters", &S::lr_decay_iters)
      .doc("step at which the learning rate reaches min_lr, warm-up included")
      .unit("iterations")
      .count()
      .range(1, int64_t{1} << 32);
  s.field("lr_decay_samples", &S::lr_decay_samples)
      .doc("lr_decay_iters in samples, for runs whose length is given in samples")
      .unit("samples")
      .count()
      .range(1, int64_t{1} << 60);
  s.field("lr_wsd_decay_iters", &S::lr_wsd_decay_iters)
      .doc("length of the final WSD decay phase; typical: 10 to 20 % of the run")
      .unit("iterations")
      .count()
      .range(1, int64_t{1} << 32)
      .used_when<Config>(wsd, is_wsd);
  s.field("lr_wsd_decay_samples", &S::lr_wsd_decay_samples)
      .doc("lr_wsd_decay_iters in samples, for runs whose length is given in samples")
      .unit("samples")
      .count()
      .range(1, int64_t{1} << 60)
      .used_when<Config>(wsd, is_wsd);
  s.field("lr_wsd_decay_fraction", &S::lr_wsd_decay_fraction)
      .doc("length of the final WSD decay phase as a fraction of the decay length")
      .fraction()
      .above(0)
      .max(1)
      .used_when<Config>(wsd, is_wsd);
  s.field("lr_warmup_fraction", &S::lr_warmup_fraction)
      .doc("length of linear warm-up as a fraction of the decay length; typical: 0.01 to 0.05")
      .fraction()
      .min(0)
      .below(1)
      .alias("warmup_fraction")
      .known_as("warmup_ratio");
  s.field("lr_warmup_iters", &S::lr_warmup_iters)
      .doc("linear warm-up steps")
      .unit("iterations")
      .count()
      .range(0, int64_t{1} << 32)
      .alias("warmup_iters")
      .known_as("warmup_steps");
  s.field("lr_warmup_samples", &S::lr_warmup_samples)
      .doc("linear warm-up in samples, for runs whose length is given in samples")
      .unit("samples")
      .count()
      .range(0, int64_t{1} << 60);
  s.field("lr_warmup_init", &S::lr_warmup_init).doc("learning rate at the start of warm-up").min(0);
  s.field("start_weight_decay", &S::start_weight_decay)
      .doc("weight-decay coefficient at the start of the run")
      .min(0)
      .used_when<Config>(varies, decay_varies);
  s.field("end_weight_decay", &S::end_weight_decay)
      .doc("weight-decay coefficient at the end of the run")
      .min(0)
      .used_when<Config>(varies, decay_varies);
  s.field("weight_decay_incr_style", &S::weight_decay_incr_style)
      .doc("schedule of the weight-decay coefficient");
  s.field("override_opt_param_scheduler", &S::override_opt_param_scheduler)
      .doc("on resume, use the full schedule of this recipe instead of that of the checkpoint");
  s.field("use_checkpoint_opt_param_scheduler", &S::use_checkpoint_opt_param_scheduler)
      .doc("on resume, use the full schedule of the checkpoint, even where this recipe sets fields of it");
}

}  // namespace capstan::config
