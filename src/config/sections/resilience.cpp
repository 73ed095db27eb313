#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool watches_loss(const Config& c) {
  return c.resilience.loss_spike_action != SpikeAction::off;
}
bool watches_norm(const Config& c) {
  return c.resilience.grad_norm_spike_action != SpikeAction::off;
}
bool watches(const Config& c) {
  return watches_loss(c) || watches_norm(c);
}
bool rewinds(const Config& c) {
  return c.resilience.loss_spike_action == SpikeAction::rewind ||
         c.resilience.grad_norm_spike_action == SpikeAction::rewind;
}
}  // namespace

void describe(Section<ResilienceConfig>& s) {
  using R = ResilienceConfig;
  const char* any = "`resilience.loss_spike_action` or `resilience.grad_norm_spike_action` is not off";
  s.doc("detection of anomalies, memory limits and stalled ranks");
  s.field("timeout", &R::timeout)
      .doc("time without progress after which a rank is reported as stalled and the run ends")
      .duration_unit("m")
      .above(0)
      .effect(Effect::io)
      .alias("dist.distributed_timeout_minutes");
  s.field("memory_limit", &R::memory_limit)
      .doc(
          "limit of the device memory of one rank: of the estimate of a step, before it starts, and of the "
          "allocator in training, eval and generate")
      .min(1)
      .effect(Effect::memory);
  s.field("memory_limit_host", &R::memory_limit_host)
      .doc(
          "limit of the host memory that one rank uses for its device (snapshots, offload); "
          "train.device=cpu: the smaller limit applies")
      .min(1)
      .effect(Effect::memory);
  s.field("check_for_nan", &R::check_for_nan)
      .doc("stop before a NaN or infinite loss or gradient reaches the parameters or optimizer state")
      .alias("check_for_nan_in_loss")
      .alias("ddp.check_for_nan_in_grad");
  s.field("loss_spike_action", &R::loss_spike_action).doc("action on a loss spike");
  s.field("loss_spike_factor", &R::loss_spike_factor)
      .doc("a spike is a loss above this multiple of its running mean")
      .above(1)
      .alias("spiky_loss_factor")
      .used_when<Config>("`resilience.loss_spike_action` is not off", watches_loss);
  s.field("grad_norm_spike_action", &R::grad_norm_spike_action).doc("action on a spike of the gradient norm");
  s.field("grad_norm_spike_factor", &R::grad_norm_spike_factor)
      .doc("a spike is a gradient norm above this multiple of its running mean")
      .above(1)
      .used_when<Config>("`resilience.grad_norm_spike_action` is not off", watches_norm);
  s.field("spike_window", &R::spike_window)
      .doc("steps over which the running mean is taken")
      .unit("iterations")
      .count()
      .min(1)
      .used_when<Config>(any, watches);
  s.field("max_rewinds", &R::max_rewinds)
      .doc("maximum number of rewinds before the run stops")
      .min(0)
      .used_when<Config>("one of the spike actions is rewind", rewinds);
  s.field("rerun_mode", &R::rerun_mode)
      .doc(
          "recompute a suspicious step to distinguish faulty hardware from bad data; costs one more read of "
          "the gradients per step")
      .effect(Effect::perf)
      .used_when<Config>("`resilience.check_for_nan` or a spike action is on", [](const Config& c) {
        return c.resilience.check_for_nan || c.resilience.loss_spike_action != SpikeAction::off ||
               c.resilience.grad_norm_spike_action != SpikeAction::off;
      });
}

}  // namespace capstan::config
