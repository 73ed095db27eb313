// The optimizer, its schedules, and the overlaps of data parallelism.
#include <cmath>

#include "config/sections/rule_tools.hpp"

namespace capstan::config {

RULES_OF_FILE(optimizer_rules)

namespace {

RULE("R0601", gather_needs_sharding, "overlap_param_gather needs sharding and overlap_grad_reduce",
     "ddp.overlap_param_gather", "ddp.data_parallel_sharding_strategy", "ddp.overlap_grad_reduce") {
  if (!c.ddp.overlap_param_gather) return;
  if (!shards(c))
    report
        .error(
            "`ddp.overlap_param_gather` gathers sharded parameters, but "
            "`ddp.data_parallel_sharding_strategy` is no_shard")
        .help("set ddp.data_parallel_sharding_strategy=optim, or ddp.overlap_param_gather=false");
  else if (!c.ddp.overlap_grad_reduce)
    report.error("`ddp.overlap_param_gather` needs `ddp.overlap_grad_reduce`")
        .help("set ddp.overlap_grad_reduce=true");
}

RULE("R0602", gather_with_step_fits,
     "overlap_param_gather_with_optimizer_step needs overlap_param_gather and virtual stages",
     "comm_overlap.overlap_param_gather_with_optimizer_step", "ddp.overlap_param_gather",
     "dist.virtual_pipeline_model_parallel_size") {
  if (!c.comm_overlap.overlap_param_gather_with_optimizer_step) return;
  if (!c.ddp.overlap_param_gather)
    report.error("`comm_overlap.overlap_param_gather_with_optimizer_step` needs `ddp.overlap_param_gather`")
        .help("set ddp.overlap_param_gather=true");
  else if (virtual_stages(c) == 1)
    report.error("`comm_overlap.overlap_param_gather_with_optimizer_step` needs virtual pipeline stages")
        .help("set dist.virtual_pipeline_model_parallel_size to 2 or more");
}

RULE("R0603", aligned_gather_overlaps, "align_param_gather needs overlap_param_gather",
     "ddp.align_param_gather", "ddp.overlap_param_gather") {
  if (!c.ddp.align_param_gather || c.ddp.overlap_param_gather) return;
  report.error("`ddp.align_param_gather` needs `ddp.overlap_param_gather`")
      .help("set ddp.overlap_param_gather=true");
}

RULE("R0604", min_lr_at_most_lr, "min_lr is at most lr", "optimizer.min_lr", "optimizer.lr") {
  const auto& o = c.optimizer;
  if (o.min_lr && *o.min_lr > o.lr)
    report.error("`optimizer.min_lr` " + to_text(*o.min_lr) + " is above `optimizer.lr` " + to_text(o.lr))
        .help("set min_lr to at most " + to_text(o.lr));
  if (o.decoupled_lr && o.decoupled_min_lr && *o.decoupled_min_lr > *o.decoupled_lr)
    report
        .error("`optimizer.decoupled_min_lr` " + to_text(*o.decoupled_min_lr) +
               " is above `optimizer.decoupled_lr` " + to_text(*o.decoupled_lr))
        .at("optimizer.decoupled_min_lr")
        .help("set decoupled_min_lr to at most " + to_text(*o.decoupled_lr));
}

RULE("R0605", warmup_starts_below_peak, "warm-up starts at or below the peak", "scheduler.lr_warmup_init",
     "optimizer.lr") {
  if (c.scheduler.lr_warmup_init <= c.optimizer.lr) return;
  report
      .error("`scheduler.lr_warmup_init` " + to_text(c.scheduler.lr_warmup_init) +
             " is above `optimizer.lr` " + to_text(c.optimizer.lr))
      .help("set lr_warmup_init to at most " + to_text(c.optimizer.lr));
}

RULE("R0606", warmup_before_decay, "warm-up ends before the decay does", "scheduler.lr_warmup_iters",
     "scheduler.lr_decay_iters", "scheduler.lr_warmup_samples", "scheduler.lr_decay_samples") {
  const auto& s = c.scheduler;
  const auto check = [&](const char* warmup_path, const char* decay_path,
                         const std::optional<int64_t>& warmup, const std::optional<int64_t>& decay) {
    if (!warmup || !decay || *warmup < *decay) return;
    report
        .error("`" + std::string(warmup_path) + "` " + to_text(*warmup) + " is not below `" + decay_path +
               "` " + to_text(*decay))
        .at(warmup_path)
        .operand(warmup_path)
        .operand(decay_path)
        .help("set it to at most " + to_text(*decay - 1) +
              "; scheduler.lr_warmup_fraction follows the length of the run");
  };
  check("scheduler.lr_warmup_iters", "scheduler.lr_decay_iters", s.lr_warmup_iters, s.lr_decay_iters);
  check("scheduler.lr_warmup_samples", "scheduler.lr_decay_samples", s.lr_warmup_samples, s.lr_decay_samples);
}

RULE("R0607", one_warmup, "warm-up is given as a fraction or as a length", "scheduler.lr_warmup_fraction",
     "scheduler.lr_warmup_iters", "scheduler.lr_decay_iters") {
  const auto& s = c.scheduler;
  if (!s.lr_warmup_fraction) return;
  const auto check = [&](const char* path, const std::optional<int64_t>& warmup,
                         const std::optional<int64_t>& decay) {
    if (!warmup || !decay) return;
    const double exact = *s.lr_warmup_fraction * static_cast<double>(*decay);
    if (std::abs(exact - static_cast<double>(*warmup)) <= 0.5 + 1e-6 * exact) return;
    report
        .error("`" + std::string(path) + "` " + to_text(*warmup) + " and `scheduler.lr_warmup_fraction` " +
               to_text(*s.lr_warmup_fraction) + " (" + to_text(exact) + ") disagree")
        .at(path)
        .help("give one of the two: " + std::string(path) +
              " with scheduler.lr_warmup_fraction=null, or the fraction alone");
  };
  check("scheduler.lr_warmup_iters", s.lr_warmup_iters, s.lr_decay_iters);
  check("scheduler.lr_warmup_samples", s.lr_warmup_samples, s.lr_decay_samples);
}

RULE("R0608", schedule_in_unit_of_run, "a run measured in samples has a schedule in samples",
     "train.train_samples", "scheduler.lr_decay_iters", "scheduler.lr_warmup_iters",
     "scheduler.lr_wsd_decay_iters", "scheduler.lr_decay_samples", "scheduler.lr_warmup_samples",
     "scheduler.lr_wsd_decay_samples") {
  const auto& s = c.scheduler;
  const bool samples = c.train.train_samples.has_value();
  const std::pair<const char*, bool> fields[] = {
      {"scheduler.lr_decay_iters", samples && s.lr_decay_iters},
      {"scheduler.lr_warmup_iters", samples && s.lr_warmup_iters && *s.lr_warmup_iters > 0},
      {"scheduler.lr_wsd_decay_iters", samples && s.lr_wsd_decay_iters},
      {"scheduler.lr_decay_samples", !samples && s.lr_decay_samples},
      {"scheduler.lr_warmup_samples", !samples && s.lr_warmup_samples && *s.lr_warmup_samples > 0},
      {"scheduler.lr_wsd_decay_samples", !samples && s.lr_wsd_decay_samples}};
  for (const auto& [path, wrong] : fields)
    if (wrong)
      report
          .error("`" + std::string(path) + "` does not fit a run measured in " +
                 (samples ? "samples (`train.train_samples`)" : "iterations (`train.train_iters`)"))
          .at(path)
          .operand(path)
          .help(samples ? "give the field that ends in _samples" : "give the field that ends in _iters");
}

RULE("R0609", stable_phase_ends, "WSD's final decay has a length that fits after the warm-up",
     "scheduler.lr_decay_style", "scheduler.lr_wsd_decay_iters", "scheduler.lr_warmup_iters",
     "scheduler.lr_decay_iters", "scheduler.lr_wsd_decay_samples", "scheduler.lr_warmup_samples",
     "scheduler.lr_decay_samples", "train.train_samples") {
  const auto& s = c.scheduler;
  if (s.lr_decay_style != LrDecayStyle::wsd) return;
  const bool samples = c.train.train_samples.has_value();
  const auto length = samples ? s.lr_wsd_decay_samples : s.lr_wsd_decay_iters;
  const auto decay_length = samples ? s.lr_decay_samples : s.lr_decay_iters;
  const auto warmup = samples ? s.lr_warmup_samples : s.lr_warmup_iters;
  if (!length) {
    report.error("`scheduler.lr_decay_style` WSD needs the length of its final decay")
        .at("scheduler.lr_decay_style")
        .operand(samples ? "scheduler.lr_wsd_decay_samples" : "scheduler.lr_wsd_decay_iters")
        .help("set scheduler.lr_wsd_decay_fraction=0.1");
    return;
  }
  if (!decay_length || *length + warmup.value_or(0) <= *decay_length) return;
  report
      .error("WSD's warm-up and final decay, " + to_text(warmup.value_or(0)) + " + " + to_text(*length) +
             ", are longer than the full decay, " + to_text(*decay_length))
      .operand(samples ? "scheduler.lr_wsd_decay_samples" : "scheduler.lr_wsd_decay_iters")
      .operand(samples ? "scheduler.lr_warmup_samples" : "scheduler.lr_warmup_iters")
      .operand(samples ? "scheduler.lr_decay_samples" : "scheduler.lr_decay_iters")
      .help("set the length of the final decay to at most " + to_text(*decay_length - warmup.value_or(0)));
}

RULE("R0610", one_final_decay, "WSD's final decay is given as a fraction or as a length",
     "scheduler.lr_wsd_decay_iters", "scheduler.lr_wsd_decay_fraction", "scheduler.lr_decay_iters") {
  const auto& s = c.scheduler;
  if (s.lr_decay_style != LrDecayStyle::wsd || !s.lr_wsd_decay_fraction || !s.lr_wsd_decay_iters ||
      !s.lr_decay_iters)
    return;
  const double exact = *s.lr_wsd_decay_fraction * static_cast<double>(*s.lr_decay_iters);
  if (std::abs(exact - static_cast<double>(*s.lr_wsd_decay_iters)) <= 1 + 1e-6 * exact) return;
  report
      .error("`scheduler.lr_wsd_decay_iters` " + to_text(*s.lr_wsd_decay_iters) +
             " and `scheduler.lr_wsd_decay_fraction` " + to_text(*s.lr_wsd_decay_fraction) + " (" +
             to_text(exact) + ") disagree")
      .help("give one of the two, and set the other to null");
}

RULE("R0611", varying_weight_decay_has_start_and_end,
     "a weight decay that varies has a start and an end; a constant one is optimizer.weight_decay",
     "scheduler.weight_decay_incr_style", "scheduler.start_weight_decay", "scheduler.end_weight_decay") {
  const auto& s = c.scheduler;
  const bool varies = s.weight_decay_incr_style != WeightDecayStyle::constant;
  // Start and end without effect are reported by their fields.
  if (!varies) return;
  if (s.start_weight_decay && s.end_weight_decay) return;
  report
      .error("`scheduler.weight_decay_incr_style` " + std::string(enum_name(s.weight_decay_incr_style)) +
             " needs start_weight_decay and end_weight_decay")
      .help("set both, or scheduler.weight_decay_incr_style=constant with optimizer.weight_decay");
}

RULE("R0612", weight_decay_grows, "end_weight_decay is at least start_weight_decay",
     "scheduler.end_weight_decay", "scheduler.start_weight_decay") {
  const auto& s = c.scheduler;
  if (!s.start_weight_decay || !s.end_weight_decay || *s.end_weight_decay >= *s.start_weight_decay) return;
  report
      .error("`scheduler.end_weight_decay` " + to_text(*s.end_weight_decay) +
             " is below `scheduler.start_weight_decay` " + to_text(*s.start_weight_decay))
      .help("set end_weight_decay to at least " + to_text(*s.start_weight_decay));
}

// Values that another choice of the schedule leaves without a reader.
RULE("R0616", schedule_values_are_read,
     "every field of the schedule and of weight decay is used by the chosen styles", "optimizer.min_lr",
     "optimizer.min_lr_ratio", "optimizer.decoupled_min_lr", "scheduler.lr_decay_iters",
     "scheduler.lr_decay_samples", "scheduler.lr_warmup_init", "optimizer.weight_decay",
     "optimizer.apply_wd_to_qk_layernorm", "optimizer.decoupled_weight_decay", "scheduler.lr_decay_style") {
  const auto& s = c.scheduler;
  const auto& o = c.optimizer;
  const bool constant = s.lr_decay_style == LrDecayStyle::constant;
  const auto warn_no_effect = [&](const char* path, const std::string& why, const char* help) -> Violation& {
    return report.warning("`" + std::string(path) + "` has no effect: " + why)
        .at(path)
        .operand(path)
        .help(help);
  };
  const std::string style = "`scheduler.lr_decay_style` is constant";
  const char* const decay = "remove it, or choose another scheduler.lr_decay_style";
  if (constant && o.min_lr.value_or(0) > 0)
    warn_no_effect(o.min_lr_ratio ? "optimizer.min_lr_ratio" : "optimizer.min_lr", style, decay);
  if (constant && o.decoupled_min_lr.value_or(0) > 0)
    warn_no_effect("optimizer.decoupled_min_lr", style, decay);
  // A warm-up that is a fraction of the decay length reads the length.
  if (constant && !s.lr_warmup_fraction) {
    if (s.lr_decay_iters && s.lr_decay_iters != c.train.train_iters)
      warn_no_effect("scheduler.lr_decay_iters", style, decay);
    if (s.lr_decay_samples && s.lr_decay_samples != c.train.train_samples)
      warn_no_effect("scheduler.lr_decay_samples", style, decay);
  }
  if (s.lr_warmup_init > 0 && s.lr_warmup_iters.value_or(0) == 0 && s.lr_warmup_samples.value_or(0) == 0)
    warn_no_effect("scheduler.lr_warmup_init", "the schedule has no warm-up",
                   "remove it, or set scheduler.lr_warmup_iters");
  const bool varies = s.weight_decay_incr_style != WeightDecayStyle::constant;
  if (varies && s.end_weight_decay && o.weight_decay != *s.end_weight_decay) {
    Violation& unread = warn_no_effect("optimizer.weight_decay",
                                       "`scheduler.weight_decay_incr_style` is " +
                                           std::string(enum_name(s.weight_decay_incr_style)) +
                                           ", from start_weight_decay to end_weight_decay",
                                       "remove it, or set scheduler.weight_decay_incr_style=constant");
    if (o.weight_decay == OptimizerConfig{}.weight_decay) unread.if_given();
  }
  if (o.apply_wd_to_qk_layernorm && !c.model.qk_layernorm)
    warn_no_effect("optimizer.apply_wd_to_qk_layernorm", "`model.qk_layernorm` is false",
                   "remove it, or set model.qk_layernorm=true");
  if (o.weight_decay == 0 && !varies) {
    const char* const why = "`optimizer.weight_decay` is 0";
    const char* const help = "remove it, or set optimizer.weight_decay above 0";
    if (o.apply_wd_to_qk_layernorm && c.model.qk_layernorm)
      warn_no_effect("optimizer.apply_wd_to_qk_layernorm", why, help);
    if (!o.decoupled_weight_decay) warn_no_effect("optimizer.decoupled_weight_decay", why, help);
  }
}

RULE("R0613", one_schedule_on_resume,
     "on resume, the schedule is either that of the recipe or that of the checkpoint",
     "scheduler.override_opt_param_scheduler", "scheduler.use_checkpoint_opt_param_scheduler") {
  if (!c.scheduler.override_opt_param_scheduler || !c.scheduler.use_checkpoint_opt_param_scheduler) return;
  report
      .error(
          "`scheduler.override_opt_param_scheduler` and `scheduler.use_checkpoint_opt_param_scheduler` "
          "exclude each other")
      .help("set one of them to false");
}

// Muon orthogonalizes full matrices, with GEMMs that take a CPU many times as long as an element-wise update.
RULE("R0618", offloaded_updates_are_element_wise,
     "optimizer offload is for element-wise updates, not for Muon", "optimizer.optimizer_cpu_offload",
     "optimizer.optimizer") {
  if (!c.optimizer.optimizer_cpu_offload || c.optimizer.optimizer != OptimizerKind::muon) return;
  report.error("`optimizer.optimizer_cpu_offload` does not support `optimizer.optimizer` muon")
      .operand("optimizer.optimizer")
      .help("set optimizer.optimizer=adam, or optimizer.optimizer_cpu_offload=false");
}

RULE("R0615", newton_schulz_steps_fit, "muon_num_ns_steps fits the iterations of muon_coefficient_type",
     "optimizer.muon_num_ns_steps", "optimizer.muon_coefficient_type", "optimizer.optimizer") {
  const auto& o = c.optimizer;
  if (o.optimizer != OptimizerKind::muon) return;
  if (o.muon_coefficient_type == MuonCoefficients::quintic && o.muon_num_ns_steps % 5 != 0)
    report
        .error("`optimizer.muon_num_ns_steps` " + to_text(o.muon_num_ns_steps) +
               " is not a multiple of the 5 iterations of `optimizer.muon_coefficient_type` quintic")
        .help("set optimizer.muon_num_ns_steps=5, or optimizer.muon_coefficient_type=simple");
  if (o.muon_coefficient_type == MuonCoefficients::polar_express && o.muon_num_ns_steps < 8)
    report
        .error("`optimizer.muon_num_ns_steps` " + to_text(o.muon_num_ns_steps) +
               " is below the 8 iterations of `optimizer.muon_coefficient_type` polar_express")
        .help("set optimizer.muon_num_ns_steps=8, or optimizer.muon_coefficient_type=simple");
}

RULE("R0617", muon_updates_replicated_heads_alike,
     "Muon with replicated key/value heads needs muon_split_qkv or muon_tp_mode duplicated",
     "optimizer.muon_tp_mode", "optimizer.muon_split_qkv", "dist.tensor_model_parallel_size",
     "model.num_query_groups", "optimizer.optimizer") {
  const auto& o = c.optimizer;
  const int64_t ranks = c.dist.tensor_model_parallel_size;
  if (o.optimizer != OptimizerKind::muon || o.muon_split_qkv || o.muon_tp_mode == MuonTpMode::duplicated ||
      !c.model.num_query_groups || ranks <= *c.model.num_query_groups)
    return;
  report
      .error("`optimizer.muon_tp_mode` " + std::string(enum_name(o.muon_tp_mode)) +
             " without `optimizer.muon_split_qkv`: " + to_text(ranks) +
             " tensor-parallel ranks share the keys and values of " +
             counted(*c.model.num_query_groups, "group") + ", whose copies would be updated differently")
      .help("set optimizer.muon_split_qkv=true, or optimizer.muon_tp_mode=duplicated");
}

}  // namespace

}  // namespace capstan::config
