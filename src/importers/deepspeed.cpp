// Imports a DeepSpeed JSON, which describes training but neither the model nor its data.
#include <utility>

#include "base/checked.hpp"
#include "importers/batch.hpp"
#include "importers/format_readers.hpp"

namespace capstan::importers {

using config::Node;

namespace {

constexpr std::string_view kTuning = "tunes DeepSpeed's buffers; the numbers are the same";
constexpr std::string_view kOffloadTuning = "tunes DeepSpeed's offload";

void bucket(Reader& r, const SourceItem& item) {
  // Capstan has one bucket size for all-gather and reduce-scatter; DeepSpeed's reduce_bucket_size has
  // precedence.
  r.draft.set("ddp.bucket_size", *item.value, item.from);
}

constexpr Rule kTable[] = {
    deferred("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"),
    copy("steps_per_print", "logger.log_interval"),
    copy("seed", "rng.seed"),

    translate("zero_optimization.stage", "ddp.data_parallel_sharding_strategy",
              "0=no_shard 1=optim 2=optim_grads 3=optim_grads_params"),
    copy("zero_optimization.overlap_comm", "ddp.overlap_grad_reduce"),
    call("zero_optimization.reduce_bucket_size", bucket),
    no_effect("zero_optimization.allgather_bucket_size", "one bucket size serves both: ddp.bucket_size"),
    no_effect("zero_optimization.allgather_partitions zero_optimization.reduce_scatter "
              "zero_optimization.contiguous_gradients zero_optimization.round_robin_gradients "
              "zero_optimization.sub_group_size zero_optimization.stage3_* "
              "zero_optimization.memory_efficient_linear",
              kTuning),
    no_effect("zero_optimization.ignore_unused_parameters", "every parameter is used"),
    no_effect("zero_optimization.load_from_fp32_weights", "weights are loaded in fp32"),
    no_effect("zero_optimization.elastic_checkpoint", "checkpoints load into any layout"),
    no_effect("zero_optimization.param_persistence_threshold zero_optimization.model_persistence_threshold "
              "zero_optimization.prefetch_bucket_size zero_optimization.max_live_parameters "
              "zero_optimization.max_reuse_distance zero_optimization.use_multi_rank_bucket_allreduce",
              kTuning),
    unsupported("zero_optimization.zero_hpz_partition_size", "a second copy of the parameters on each node"),
    unsupported("zero_optimization.zero_quantized_*", "quantized collectives"),
    unsupported("zero_optimization.mics_*",
                "sharding inside groups; see ddp.num_distributed_optimizer_instances"),
    deferred("zero_optimization.offload_optimizer.device"),
    deferred("zero_optimization.offload_optimizer.nvme_path", "optimizer.optimizer_offload_path"),
    copy("zero_optimization.offload_optimizer.ratio", "optimizer.optimizer_offload_fraction"),
    no_effect("zero_optimization.offload_optimizer.*", kOffloadTuning),
    set_if_present("zero_optimization.cpu_offload", "optimizer.optimizer_cpu_offload", "true"),
    unsupported("zero_optimization.offload_param zero_optimization.cpu_offload_params",
                "parameters in host memory"),

    deferred("fp16.enabled fp16.loss_scale fp16.initial_scale_power"),
    copy("fp16.loss_scale_window", "mixed_precision.loss_scale_window"),
    copy("fp16.hysteresis", "mixed_precision.hysteresis"),
    copy("fp16.min_loss_scale", "mixed_precision.min_loss_scale"),
    no_effect("fp16.consecutive_hysteresis", "the count begins again when the scale grows, as with false"),
    no_effect("fp16.auto_cast", "inputs are token ids"),
    unsupported("fp16.fp16_master_weights_and_grads",
                "main parameters and gradients in fp16; an fp16 model has fp32 ones"),
    deferred("bf16.enabled bfloat16.enabled"),
    deferred("bf16.bf16_master_weights_and_grads", "optimizer.main_params_dtype, optimizer.main_grads_dtype"),
    deferred("bf16.bf16_optimizer_states", "optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype"),
    no_effect("bf16.immediate_grad_update", "a gradient is added as soon as it is computed"),
    no_effect("bf16.check_grad_overflow", "see resilience.check_for_nan"),
    unsupported("torch_autocast", "casting of single operations"),
    deferred("communication_data_type", "mixed_precision.grad_reduce_in_fp32"),
    deferred("data_types.grad_accum_dtype", "optimizer.main_grads_dtype"),
    unsupported("amp", "NVIDIA Apex; see fp16 and bf16"),

    deferred("optimizer.type"),
    copy("optimizer.params.lr", "optimizer.lr"),
    deferred("optimizer.params.betas optimizer.params.weight_decay optimizer.params.eps "
             "optimizer.params.momentum optimizer.params.adam_w_mode optimizer.params.muon_lr "
             "optimizer.params.adam_lr"),
    no_effect("optimizer.params.torch_adam optimizer.params.fused", "a choice of kernels"),
    no_effect("optimizer.params.bias_correction", "the bias of the moments is corrected"),
    unsupported("optimizer.params.freeze_step optimizer.params.cuda_aware optimizer.params.comm_backend_name",
                "a variant with compressed communication"),
    unsupported("optimizer.legacy_fusion", "a choice of kernels"),

    deferred("scheduler.type scheduler.params.warmup_num_steps scheduler.params.warmup_min_lr "
             "scheduler.params.warmup_max_lr scheduler.params.total_num_steps scheduler.params.warmup_type "
             "scheduler.params.cos_min_ratio scheduler.params.warmup_min_ratio"),

    unsupported("activation_checkpointing.cpu_checkpointing",
                "saved activations of all layers in host memory; see model.cpu_offloading_num_layers"),
    copy("activation_checkpointing.partition_activations", "model.distribute_saved_activations"),
    copy("activation_checkpointing.number_checkpoints", "model.recompute_num_layers"),
    no_effect("activation_checkpointing.*", kTuning),
    copy("tensorboard.enabled", "logger.tensorboard"),
    copy("tensorboard.output_path", "logger.tensorboard_dir"),
    no_effect("tensorboard.job_name", "the run directory has the recipe's name"),
    external("wandb comet", "a service; metrics.jsonl and TensorBoard events are what a run writes"),
    no_effect("csv_monitor", "metrics.jsonl has every logged step"),
    no_effect("flops_profiler", "`capstan bench` and each log line have the rate"),
    no_effect("comms_logger", "`profiling.trace=true` writes collectives too"),
    no_effect("wall_clock_breakdown", "`capstan trace` shows where the time goes"),
    no_effect("dump_state", "`capstan show` prints the recipe in full"),
    no_effect("memory_breakdown", "`capstan trace` shows memory too"),
    no_effect("prescale_gradients gradient_predivide_factor",
              "gradients are sums, divided once by the number of tokens"),
    no_effect("sparse_gradients", "gradients are dense"),
    no_effect("disable_allgather", kTuning),
    no_effect("zero_allow_untested_optimizer", "any optimizer is sharded alike"),
    no_effect("zero_force_ds_cpu_optimizer", kOffloadTuning),
    no_effect("checkpoint.*", "checkpoints load into any layout"),
    no_effect("dataloader_drop_last", "a run ends after its steps"),
    no_effect("aio", "tunes DeepSpeed's reads and writes"),
    unsupported("autotuning", "a search for settings"),
    unsupported("elasticity", "a world that grows and shrinks"),
    unsupported("compression_training", "compression"),
    unsupported("sparse_attention", "sparse attention"),
    unsupported("curriculum_learning data_efficiency", "a curriculum"),
    unsupported("pipeline", "DeepSpeed's pipeline engine; see dist.pipeline_model_parallel_size"),
    copy("tensor_parallel.autotp_size", "dist.tensor_model_parallel_size"),
    copy("sequence_parallel_size", "dist.context_parallel_size"),
    unsupported("compile", "compilation"),
};

constexpr const char* kAuto =
    "`auto`: DeepSpeed gets it from the trainer's arguments; import those, or fill it in";

// Lists every `auto` value once, and treats it as absent.
Node without_auto(Draft& draft, const Node& node, const std::string& prefix) {
  if (node.kind != Node::Kind::map) return node;
  Node result = node;
  result.keys.clear();
  result.key_locations.clear();
  result.items.clear();
  for (size_t i = 0; i < node.items.size(); ++i) {
    const std::string key = prefix + node.keys[i];
    if (node.items[i].kind == Node::Kind::scalar && node.items[i].text == "auto")
      draft.omit({key, node.key_locations[i]}, "auto", OmissionReason::to_fill_in, kAuto);
    else if (Node item = without_auto(draft, node.items[i], key + ".");
             item.kind != Node::Kind::map || !item.items.empty() || node.items[i].items.empty())
      result.add(node.keys[i], node.key_locations[i], std::move(item));
  }
  return result;
}

// The value is neither given nor `auto`.
bool absent(const Reader& r, std::string_view key) {
  return !r.find(key) && !r.draft.mentions(key);
}

void batch(Reader& r) {
  const auto global = r.integer("train_batch_size"), micro = r.integer("train_micro_batch_size_per_gpu"),
             steps = r.integer("gradient_accumulation_steps");
  for (const auto& [key, value] :
       {std::pair("train_batch_size", global), std::pair("train_micro_batch_size_per_gpu", micro),
        std::pair("gradient_accumulation_steps", steps)})
    if (value && (*value < 1 || *value > (1 << 30))) {
      r.omit(key, std::to_string(*value), OmissionReason::value, "not a batch size");
      return;
    }
  Draft& draft = r.draft;
  if (micro) r.set("train.micro_batch_size", std::to_string(*micro), "train_micro_batch_size_per_gpu");
  const auto each = micro ? try_mul(*micro, steps.value_or(1)) : std::nullopt;
  if (global) {
    r.set("train.global_batch_size", std::to_string(*global), "train_batch_size");
    const Layout layout = layout_of_base(draft);
    const auto together = steps ? try_mul(*steps, layout.data_parallel_size) : std::nullopt;
    const auto ranks =
        each && *global % *each == 0 ? try_mul(*global / *each, layout.ranks_of_replica) : std::nullopt;
    if (micro && steps && ranks && *ranks < (1 << 24)) {
      r.set("dist.world_size", std::to_string(*ranks), "train_batch_size",
            layout.ranks_of_replica > 1 ? "over micro-batch and accumulation, times the " +
                                              std::to_string(layout.ranks_of_replica) + " ranks of a replica"
                                        : "over micro-batch and accumulation");
    } else if (!micro && together && *global % *together == 0) {
      const std::string note = layout.data_parallel_size > 1 ? "over accumulation and the " +
                                                                   std::to_string(layout.data_parallel_size) +
                                                                   " data-parallel ranks of the base recipe"
                                                             : "over accumulation, on one data-parallel rank";
      r.set("train.micro_batch_size", std::to_string(*global / *together), "train_batch_size", note);
      if (layout.data_parallel_size == 1) draft.list_as_assumed("train.micro_batch_size", note);
    } else if (!micro) {
      draft.assume("train.micro_batch_size", "1",
                   "to fill in: it depends on the number of ranks, which the file does not give");
    } else if (steps) {
      r.omit("gradient_accumulation_steps", std::to_string(*steps), OmissionReason::value,
             "train_batch_size is not a multiple of micro-batch times accumulation");
    }
  } else if (each) {
    set_global_batch(r, *each, "micro-batch times accumulation",
                     steps ? "gradient_accumulation_steps" : "train_micro_batch_size_per_gpu");
  } else if (steps) {
    r.omit("gradient_accumulation_steps", std::to_string(*steps), OmissionReason::to_fill_in,
           "accumulation of a micro-batch that the file does not name");
  }
}

void precision(Reader& r) {
  Draft& draft = r.draft;
  const char* bf16 = r.given("bfloat16.enabled") ? "bfloat16.enabled" : "bf16.enabled";
  if (r.is_true("fp16.enabled")) {
    r.choose("mixed_precision", "fp16_mixed", "fp16.enabled");
    if (const auto scale = r.real("fp16.loss_scale"); scale && *scale != 0)
      r.copy("mixed_precision.loss_scale", "fp16.loss_scale");
    else if (scale)
      r.set("mixed_precision.loss_scale", "null", "fp16.loss_scale", "0 is dynamic");
    const auto power = r.integer("fp16.initial_scale_power");
    if (power && (*power < 0 || *power > 62))
      r.omit("fp16.initial_scale_power", std::to_string(*power), OmissionReason::value,
             "a power from 0 to 62 is expected");
    else if (power)
      r.set("mixed_precision.initial_loss_scale", std::to_string(int64_t{1} << *power),
            "fp16.initial_scale_power", "2 to this power");
    else
      draft.assume("mixed_precision.initial_loss_scale", "65536", "DeepSpeed's default");
    return;
  }
  if (r.is_true(bf16)) {
    r.choose("mixed_precision", "bf16_mixed", bf16);
  } else if (!r.draft.extends()) {
    draft.assume_preset("mixed_precision", "fp32", "neither fp16 nor bf16 is enabled");
  }
  for (const std::string& path : draft.paths_of("mixed_precision"))
    draft.withdraw(path, OmissionReason::no_effect, "fp16 is not enabled");
}

void gradients(Reader& r) {
  constexpr const char* sent = "communication_data_type";
  if (const auto type = r.text(sent))
    r.set("mixed_precision.grad_reduce_in_fp32", *type == "fp32" || *type == "float32" ? "true" : "false",
          sent);
  if (const auto clip = r.real("gradient_clipping"))
    r.copy("optimizer.clip_grad", "gradient_clipping");
  else if (absent(r, "gradient_clipping"))
    r.draft.assume("optimizer.clip_grad", "0", "DeepSpeed clips only where gradient_clipping is set");
}

// DeepSpeed's Muon updates matrices with `muon_lr`, and the other parameters by Adam with `adam_lr`; `lr` is
// the default of both. In a recipe optimizer.lr is the rate of all.
void muon_rates(Reader& r) {
  constexpr std::string_view lr = "optimizer.params.lr", muon_lr = "optimizer.params.muon_lr",
                             adam_lr = "optimizer.params.adam_lr";
  const std::string_view of_adam = r.given(adam_lr) ? adam_lr : lr;
  const auto muon_rate = r.real(r.given(muon_lr) ? muon_lr : lr), adam_rate = r.real(of_adam);
  // WarmupLR and WarmupDecayLR give all parameter groups one learning rate.
  if (r.given("scheduler.params.warmup_max_lr") && r.text("scheduler.type") != "WarmupCosineLR") {
    if (r.given(muon_lr)) r.copy("optimizer.lr", muon_lr);
    if (r.given(adam_lr))
      r.omit(adam_lr, OmissionReason::no_effect,
             "the schedule sets the learning rate of all parameters to warmup_max_lr");
    return;
  }
  const std::string reason =
      "the learning rate of the parameters that Adam updates beside Muon; optimizer.decoupled_lr is that of "
      "the embedding and the output layer";
  if (r.given(muon_lr)) {
    if (of_adam == lr && adam_rate != muon_rate)
      r.draft.withdraw("optimizer.lr", OmissionReason::unsupported, reason);
    r.copy("optimizer.lr", muon_lr);
  }
  if (adam_rate && of_adam == adam_lr) {
    if (adam_rate == muon_rate)
      r.omit(adam_lr, OmissionReason::same, "the learning rate of Muon");
    else
      r.omit(adam_lr, OmissionReason::unsupported, reason);
  }
}

// Gradients, main parameters and moments in bf16.
void state_formats(Reader& r) {
  const auto optimizer = r.text("optimizer.type");
  const bool adam = !optimizer || *optimizer == "Adam" || *optimizer == "AdamW";
  bool aware = false;
  const auto set_bf16 = [&](const char* key, std::initializer_list<const char*> fields) {
    if (!adam) return r.omit(key, OmissionReason::unsupported, "optimizer state in bf16 is for Adam");
    for (const char* field : fields) r.set(field, "bf16", key);
    if (!std::exchange(aware, true)) r.set("optimizer.use_precision_aware_optimizer", "true", key);
  };
  const auto set_if_true = [&](const char* key, std::initializer_list<const char*> fields) {
    if (r.is_true(key))
      set_bf16(key, fields);
    else if (r.given(key))
      r.omit(key, OmissionReason::off, "in fp32");
  };
  constexpr const char* accumulated = "data_types.grad_accum_dtype";
  const auto type = r.text(accumulated);
  if (type == "bf16")
    set_bf16(accumulated, {"optimizer.main_grads_dtype"});
  else if (type)
    r.omit(accumulated, *type, type == "fp32" ? OmissionReason::same : OmissionReason::unsupported,
           "gradients are accumulated in fp32 or bf16");
  constexpr const char* main = "bf16.bf16_master_weights_and_grads";
  if (type)
    set_if_true(main, {"optimizer.main_params_dtype"});
  else
    set_if_true(main, {"optimizer.main_params_dtype", "optimizer.main_grads_dtype"});
  set_if_true("bf16.bf16_optimizer_states", {"optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype"});
}

void optimizer(Reader& r) {
  Draft& draft = r.draft;
  const auto type = r.text("optimizer.type");
  if (const auto device = r.text("zero_optimization.offload_optimizer.device")) {
    const SourceKey from = r.from("zero_optimization.offload_optimizer.device");
    const bool files = *device == "nvme";
    if (*device == "cpu" || files)
      draft.set("optimizer.optimizer_cpu_offload", "true", from);
    else
      draft.omit(from, *device, *device == "none" ? OmissionReason::off : OmissionReason::unsupported,
                 "a place of optimizer state: cpu or nvme");
    constexpr const char* kPath = "zero_optimization.offload_optimizer.nvme_path";
    const auto path = r.text(kPath);
    if (path && files)
      draft.set("optimizer.optimizer_offload_path", *path, r.from(kPath));
    else if (path)
      draft.omit(r.from(kPath), *path, OmissionReason::no_effect, "the device is not nvme");
    else if (files)
      draft.omit(from, *device, OmissionReason::to_fill_in,
                 "`nvme_path` is missing: optimizer.optimizer_offload_path names the directory");
  } else if (const auto path = r.text("zero_optimization.offload_optimizer.nvme_path")) {
    draft.omit(r.from("zero_optimization.offload_optimizer.nvme_path"), *path, OmissionReason::no_effect,
               "the device is not nvme");
  }
  if (!type) return;
  const SourceKey from = r.from("optimizer.type");
  const bool adamw =
      *type == "AdamW" || (*type == "Adam" && r.boolean("optimizer.params.adam_w_mode").value_or(true));
  if (*type == "Adam" || *type == "AdamW") {
    draft.set("optimizer.optimizer", "adam", from);
    draft.set("optimizer.decoupled_weight_decay", adamw ? "true" : "false",
              r.given("optimizer.params.adam_w_mode") ? r.from("optimizer.params.adam_w_mode") : from);
  } else if (*type == "SGD") {
    draft.set_torch_sgd(from);
  } else if (*type == "Lion") {
    draft.set("optimizer.optimizer", "lion", from);
  } else if (*type == "Muon") {
    draft.set("optimizer.optimizer", "muon", from);
    const char* reason = "DeepSpeed's Muon";
    draft.assume("optimizer.muon_coefficient_type", "simple", reason);
    draft.assume("optimizer.muon_use_nesterov", "true", reason);
    draft.assume("optimizer.muon_scale_mode", "shape_scaling", reason);
    muon_rates(r);
  } else {
    draft.omit(from, *type, OmissionReason::unsupported, "optimizers are adam, sgd, lion and muon");
  }
  for (const char* key : {"optimizer.params.muon_lr", "optimizer.params.adam_lr"})
    if (*type != "Muon" && r.given(key))
      r.omit(key, OmissionReason::no_effect, "for the optimizer Muon only");
  const std::string prefix = *type == "Lion" ? "optimizer.lion_beta" : "optimizer.adam_beta";
  if (const Node* betas = r.find("optimizer.params.betas")) {
    if (betas->kind == Node::Kind::list && betas->items.size() == 2 && *type != "SGD")
      for (size_t i = 0; i < 2; ++i)
        r.set(prefix + std::to_string(i + 1), betas->items[i], "optimizer.params.betas");
    else
      r.omit("optimizer.params.betas", *betas, OmissionReason::value,
             "two numbers for Adam, Lion or Muon are expected");
  }
  r.copy("optimizer.adam_eps", "optimizer.params.eps");
  r.copy(*type == "Muon" ? "optimizer.muon_momentum" : "optimizer.sgd_momentum", "optimizer.params.momentum");
  if (!r.copy("optimizer.weight_decay", "optimizer.params.weight_decay") &&
      absent(r, "optimizer.params.weight_decay"))
    draft.assume("optimizer.weight_decay", *type == "AdamW" ? "0.01" : "0", "DeepSpeed's default");
}

void scheduler(Reader& r) {
  Draft& draft = r.draft;
  const auto type = r.text("scheduler.type");
  const bool floor = type == "WarmupCosineLR" && r.given("scheduler.params.cos_min_ratio");
  if (floor)
    r.copy("optimizer.min_lr_ratio", "scheduler.params.cos_min_ratio");
  else if (r.given("optimizer.params.lr") || r.given("optimizer.params.muon_lr") ||
           r.given("scheduler.params.warmup_max_lr"))
    draft.assume("optimizer.min_lr", "0", "DeepSpeed's schedules end at 0");
  if (!type) return;
  const SourceKey from = r.from("scheduler.type");
  const bool cosine = *type == "WarmupCosineLR";
  if (*type == "WarmupLR" || *type == "WarmupDecayLR" || cosine) {
    draft.set("scheduler.lr_decay_style",
              cosine                ? "cosine"
              : *type == "WarmupLR" ? "constant"
                                    : "linear",
              from);
  } else {
    draft.omit(from, *type, OmissionReason::unsupported,
               "schedules with a warm-up that are constant, linear or cosine are");
    return;
  }
  const auto warmup = r.integer("scheduler.params.warmup_num_steps");
  if (warmup)
    r.set("scheduler.lr_warmup_iters", std::to_string(*warmup), "scheduler.params.warmup_num_steps");
  else if (absent(r, "scheduler.params.warmup_num_steps"))
    draft.assume("scheduler.lr_warmup_iters", "1000", "DeepSpeed's default");
  draft.assume("scheduler.lr_warmup_fraction", "null", "the steps are given");
  r.copy("scheduler.lr_warmup_init", "scheduler.params.warmup_min_lr");
  r.copy("optimizer.lr", "scheduler.params.warmup_max_lr");
  r.copy("train.train_iters", "scheduler.params.total_num_steps", "the length of the schedule");
  if (r.given("scheduler.params.warmup_min_ratio"))
    r.omit("scheduler.params.warmup_min_ratio", OmissionReason::to_fill_in,
           "a fraction of the peak; give it as a learning rate in scheduler.lr_warmup_init");
  const auto curve = r.text("scheduler.params.warmup_type");
  if (curve && *curve != "linear")
    r.omit("scheduler.params.warmup_type", *curve, OmissionReason::unsupported,
           "a warm-up that is not linear");
  else if (!curve && *type != "WarmupCosineLR" && absent(r, "scheduler.params.warmup_type"))
    draft.omit({"scheduler.params.warmup_type", {}}, "log", OmissionReason::unsupported,
               "DeepSpeed's default; the warm-up here is a straight line");
}

}  // namespace

void read_deepspeed(Draft& draft, const Node& root) {
  if (!draft.extends())
    draft.extend("quickstart",
                 "to fill in: the file does not describe model and data; {extend_recipe} that does");
  const Node known = without_auto(draft, root, {});
  static const std::vector<Rule> rules = one_rule_per_key(kTable);
  Reader reader(draft, known, rules);
  reader.apply();
  batch(reader);
  precision(reader);
  gradients(reader);
  state_formats(reader);
  optimizer(reader);
  scheduler(reader);
  reader.account();
}

}  // namespace capstan::importers
