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
  s.doc("learning rate and weight decay over the run");
  s.field("lr_decay_style", &S::lr_decay_style).doc("the learning rate's way from its peak to min_lr");
  s.field("lr_wsd_decay_style", &S::lr_wsd_decay_style)
      .doc("shape of WSD's final decay")
      .used_when<Config>(wsd, is_wsd);
  s.field("lr_decay_iters", &S::lr_decay_iters)
      .doc("steps from the start of the run to min_lr")
      .unit("iterations")
      .count()
      .range(1, int64_t{1} << 32);
  s.field("lr_decay_samples", &S::lr_decay_samples)
      .doc("the same in samples, for a run measured in samples")
      .unit("samples")
      .count()
      .range(1, int64_t{1} << 60);
  s.field("lr_wsd_decay_iters", &S::lr_wsd_decay_iters)
      .doc("length of WSD's final decay")
      .unit("iterations")
      .count()
      .range(1, int64_t{1} << 32)
      .used_when<Config>(wsd, is_wsd);
  s.field("lr_wsd_decay_samples", &S::lr_wsd_decay_samples)
      .doc("the same in samples, for a run measured in samples")
      .unit("samples")
      .count()
      .range(1, int64_t{1} << 60)
      .used_when<Config>(wsd, is_wsd);
  s.field("lr_wsd_decay_fraction", &S::lr_wsd_decay_fraction)
      .doc("the same as a share of the decay length")
      .fraction()
      .above(0)
      .max(1)
      .used_when<Config>(wsd, is_wsd);
  s.field("lr_warmup_fraction", &S::lr_warmup_fraction)
      .doc("warm-up as a share of the decay length")
      .fraction()
      .min(0)
      .below(1)
      .alias("warmup_fraction")
      .known_as("warmup_ratio");
  s.field("lr_warmup_iters", &S::lr_warmup_iters)
      .doc("steps of warm-up")
      .unit("iterations")
      .count()
      .range(0, int64_t{1} << 32)
      .alias("warmup_iters")
      .known_as("warmup_steps");
  s.field("lr_warmup_samples", &S::lr_warmup_samples)
      .doc("samples of warm-up, for a run measured in samples")
      .unit("samples")
      .count()
      .range(0, int64_t{1} << 60);
  s.field("lr_warmup_init", &S::lr_warmup_init).doc("learning rate at the start of warm-up").min(0);
  s.field("start_weight_decay", &S::start_weight_decay)
      .doc("weight decay at the start of the run")
      .min(0)
      .used_when<Config>(varies, decay_varies);
  s.field("end_weight_decay", &S::end_weight_decay)
      .doc("weight decay at the end of the run")
      .min(0)
      .used_when<Config>(varies, decay_varies);
  s.field("weight_decay_incr_style", &S::weight_decay_incr_style).doc("weight decay's way from start to end");
  s.field("override_opt_param_scheduler", &S::override_opt_param_scheduler)
      .doc("on resume take the whole schedule of this recipe, not that of the checkpoint");
  s.field("use_checkpoint_opt_param_scheduler", &S::use_checkpoint_opt_param_scheduler)
      .doc("on resume take the whole schedule of the checkpoint, whatever this recipe sets");
}

}  // namespace capstan::config
