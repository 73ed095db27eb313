// Imports a JSON of Transformers' TrainingArguments, complete or with some of the keys.
#include "base/checked.hpp"
#include "importers/batch.hpp"
#include "importers/format_readers.hpp"
#include "importers/reasons.hpp"
#include "importers/schedules.hpp"

namespace capstan::importers {

using config::Node;

namespace {

constexpr std::string_view kLoader = "tunes the data loader of another library";

void timeout(Reader& r, const SourceItem& item) {
  if (r.real(item.key)) r.draft.set("resilience.timeout", item.value->text + "s", item.from);
}

void chat_template(Reader& r, const SourceItem& item) {
  if (item.value->text.ends_with(".jinja"))
    r.draft.set("tokenizer.chat_template", *item.value, item.from);
  else
    r.draft.omit(
        item.from, *item.value, OmissionReason::to_fill_in,
        "a directory or a name on a hub: name its template's .jinja file in tokenizer.chat_template");
}

constexpr Rule kTable[] = {
    deferred("per_device_train_batch_size per_gpu_train_batch_size gradient_accumulation_steps max_steps "
             "num_train_epochs"),
    no_effect("per_device_eval_batch_size",
              "evaluation uses the batch sizes of training; see validation.eval_global_batch_size"),
    no_effect("auto_find_batch_size", "the recipe sets the batch size; a step that does not fit is refused"),
    no_effect("train_batch_size eval_batch_size", "follows from the size for each device"),

    copy("learning_rate", "optimizer.lr"),
    copy("weight_decay", "optimizer.weight_decay"),
    copy("adam_beta1", "optimizer.adam_beta1"),
    copy("adam_beta2", "optimizer.adam_beta2"),
    copy("adam_epsilon", "optimizer.adam_eps"),
    copy("max_grad_norm", "optimizer.clip_grad"),
    deferred("optim"),
    unsupported("optim_args", "arguments of an optimizer of another library"),
    unsupported("optim_target_modules", "low-rank optimizers"),
    unsupported("adafactor", "Adafactor"),
    deferred("lr_scheduler_type lr_scheduler_kwargs"),
    copy("warmup_ratio", "scheduler.lr_warmup_fraction"),
    deferred("warmup_steps seed"),
    copy("data_seed", "dataset.random_seed"),
    no_effect("full_determinism", "runs are deterministic anyway"),
    unsupported("neftune_noise_alpha", "noise on embeddings"),
    unsupported("label_smoothing_factor", "label smoothing"),
    no_effect("average_tokens_across_devices", "gradients are divided once by the number of tokens"),

    deferred("bf16 fp16"),
    deferred("tf32", "mixed_precision.tf32"),
    no_effect("bf16_full_eval fp16_full_eval", "evaluation has the model's number format"),
    no_effect("fp16_opt_level half_precision_backend fp16_backend", kKernels),
    deferred("gradient_checkpointing"),
    no_effect("gradient_checkpointing_kwargs", "recomputation has one implementation"),
    unsupported("activation_offloading",
                "saved activations of all layers in host memory; see model.cpu_offloading_num_layers"),
    no_effect(
        "torch_compile* jit_mode_eval use_liger_kernel liger_kernel_config use_ipex torch_empty_cache_steps",
        kKernels),

    deferred("eval_strategy evaluation_strategy eval_steps save_strategy save_steps logging_strategy "
             "logging_steps"),
    copy("save_total_limit", "checkpoint.most_recent_k"),
    negate("save_only_model", "checkpoint.save_optim"),
    copy("output_dir", "checkpoint.save"),
    no_effect("overwrite_output_dir", "{resume_existing}"),
    copy("logging_dir", "logger.tensorboard_dir"),
    external("resume_from_checkpoint", kResumeOrOther),
    no_effect("restore_callback_states_from_checkpoint", "there are no callbacks"),
    no_effect("save_safetensors", "checkpoints have one format, which is safe to read"),
    no_effect("save_on_each_node", "each rank saves its part"),
    no_effect(
        "load_best_model_at_end metric_for_best_model greater_is_better prediction_loss_only "
        "eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object "
        "batch_eval_metrics include_for_metrics include_inputs_for_metrics use_legacy_prediction_loop",
        kEvaluation),
    no_effect("do_train do_eval do_predict", "given by the command"),
    no_effect("logging_first_step", "the first step is always logged"),
    no_effect("logging_nan_inf_filter", "a loss that is not finite stops the run: resilience.check_for_nan"),
    no_effect("log_level*", kVerbosity),
    no_effect("log_on_each_node", "one rank prints"),
    no_effect("disable_tqdm", "progress is plain text without a terminal"),
    no_effect("skip_memory_metrics", "memory is in every log line"),
    no_effect("include_tokens_per_second", "the rate is in every log line"),
    no_effect("include_num_input_tokens_seen", "the tokens are in every log line"),
    external("report_to", kService),
    external("run_name", "{run_dir_name}"),
    external("project trackio_space_id", kService),
    external("push_to_hub* hub_*", kHub),
    external("mp_parameters", "another launcher"),

    copy("dataloader_num_workers", "dataset.num_workers"),
    no_effect("dataloader_*", kLoader),
    no_effect("group_by_length length_column_name", "rows have one length"),
    no_effect("train_sampling_strategy remove_unused_columns label_names past_index accelerator_config",
              kLoader),
    no_effect("ignore_data_skip", "a resumed run goes on where it stopped"),

    // Keys of TRL's SFTConfig. Those that only fine-tuning reads apply if the base recipe is of that kind.
    copy("max_length", "model.seq_length"),
    copy("max_seq_length", "model.seq_length"),
    copy("packing", "dataset.packing"),
    no_effect("packing_strategy", "packing of another library"),
    no_effect("eval_packing", "evaluation packs rows as training does"),
    no_effect("padding_free", "packed samples do not attend to each other"),
    no_effect("pad_to_multiple_of", "rows have one length"),
    set_if_present("assistant_only_loss completion_only_loss", "dataset.loss_mode", "assistant"),
    call("chat_template_path", chat_template),
    to_fill_in("dataset_text_field", "the key of a plain text is called text here"),
    no_effect("dataset_num_proc", kLoader),
    to_fill_in("dataset_kwargs", "see `capstan explain dataset`"),
    copy("eos_token", "tokenizer.eod_token"),
    no_effect("pad_token", "padding is masked from loss and attention"),
    to_fill_in("model_init_kwargs", "see `capstan explain mixed_precision` and `capstan explain peft`"),

    deferred("fsdp"),
    no_effect("fsdp_*", "wrapping of layers by another library"),
    to_fill_in("deepspeed", "a second file: `capstan recipe import` reads it too"),
    no_effect("ddp_backend", "follows the device"),
    call("ddp_timeout", timeout),
    no_effect("ddp_*", "gradient reduction of another library"),
    no_effect("local_rank", "the launcher sets the rank"),
    no_effect("_n_gpu n_gpu", kRanks),
    no_effect("no_cuda", "`train.device=cpu` chooses the CPU"),
    set_if_present("use_cpu", "train.device", "cpu"),
    no_effect("use_mps_device xpu_backend tpu_*", "this device is not supported"),
    no_effect("debug", kVerbosity),
    no_effect("use_cache", "training uses no key/value cache"),
    unsupported("parallelism_config",
                "parallel axes described by another library; see `capstan explain dist`"),
};

// Reads the steps of an interval, if its strategy is `steps`.
void interval(Reader& r, const char* steps, std::initializer_list<const char*> strategies, const char* path,
              const char* otherwise) {
  std::string strategy = otherwise;
  const char* named = *strategies.begin();
  for (const char* key : strategies)
    if (const auto text = r.text(key)) strategy = *text, named = key;
  if (strategy == "steps") {
    const auto value = r.real(steps);
    if (value && *value > 0 && *value < 1)
      r.omit(steps, OmissionReason::to_fill_in, "a fraction of the run: give the number of steps");
    else if (value)
      r.copy(path, steps);
    return;
  }
  if (r.given(steps))
    r.omit(steps, strategy == "no" ? OmissionReason::off : OmissionReason::no_effect,
           "read only where " + std::string(named) + " is steps");
  if (strategy == "no" && std::string_view(path) == "validation.eval_interval")
    r.draft.assume(path, "null", "no evaluation is asked for");
  if (r.given(named))
    r.omit(named, strategy, strategy == "no" ? OmissionReason::off : OmissionReason::to_fill_in,
           strategy == "no" ? "" : "intervals here are counted in steps");
}

void batch(Reader& r) {
  Draft& draft = r.draft;
  const char* key = r.given("per_device_train_batch_size") || !r.given("per_gpu_train_batch_size")
                        ? "per_device_train_batch_size"
                        : "per_gpu_train_batch_size";
  const auto steps = r.integer("gradient_accumulation_steps");
  const int64_t micro = r.integer(key).value_or(8);
  if (!r.copy("train.micro_batch_size", key))
    draft.assume("train.micro_batch_size", "8", "Transformers' default");
  const auto together = micro > 0 ? try_mul(micro, steps.value_or(1)) : std::nullopt;
  if (!together || *together < 1 || *together > (1 << 30)) {
    if (steps)
      r.omit("gradient_accumulation_steps", std::to_string(*steps), OmissionReason::value,
             "not a number of steps");
    return;
  }
  set_global_batch(r, *together, "micro-batch times accumulation",
                   steps ? "gradient_accumulation_steps" : "");
}

void schedule(Reader& r) {
  Draft& draft = r.draft;
  const auto given = r.text("lr_scheduler_type");
  const std::string type = given.value_or("linear");
  if (!given)
    draft.assume("scheduler.lr_decay_style", "linear", "Transformers' default");
  else
    transformers_schedule(r, "lr_scheduler_type", type);
  transformers_schedule_options(r, type);
  if (!draft.has("optimizer.min_lr_ratio"))
    draft.assume("optimizer.min_lr", "0", "Transformers' schedules end at 0");
  transformers_warmup(r);
  transformers_schedule_defaults(draft, type);
  if (type == "constant" &&
      (draft.has("scheduler.lr_warmup_fraction") || draft.has("scheduler.lr_warmup_iters")))
    for (const char* path : {"scheduler.lr_warmup_fraction", "scheduler.lr_warmup_iters"})
      draft.withdraw(path, OmissionReason::no_effect, "lr_scheduler_type constant has no warm-up");
  if (!draft.has("scheduler.lr_warmup_fraction"))
    draft.assume("scheduler.lr_warmup_fraction", draft.has("scheduler.lr_warmup_iters") ? "null" : "0",
                 draft.has("scheduler.lr_warmup_iters") ? "the steps are given" : "no warm-up is named");
}

void optimizer(Reader& r) {
  const auto name = r.text("optim");
  if (name) {
    const SourceKey from = r.from("optim");
    if (name->starts_with("adamw_torch") || *name == "adamw_hf" || *name == "adamw_apex_fused")
      r.draft.set("optimizer.optimizer", "adam", from);
    else if (*name == "sgd")
      r.draft.set_torch_sgd(from);
    else if (name->starts_with("lion"))
      r.draft.set("optimizer.optimizer", "lion", from);
    else if (name->starts_with("adamw_") || name->starts_with("paged_adamw"))
      r.draft.set("optimizer.optimizer", "adam", from, "with moments in fp32");
    else
      r.draft.omit(from, *name, OmissionReason::unsupported, "optimizers are adam, sgd, lion and muon");
  }
  const char* reason = "Transformers' default";
  r.draft.assume("optimizer.lr", "5e-5", reason);
  r.draft.assume("optimizer.weight_decay", "0", reason);
  r.draft.assume("optimizer.adam_beta1", "0.9", reason);
  r.draft.assume("optimizer.adam_beta2", "0.999", reason);
  r.draft.assume("optimizer.adam_eps", "1e-8", reason);
  r.draft.assume("optimizer.clip_grad", "1", reason);
}

void precision(Reader& r) {
  if (r.is_true("bf16"))
    r.choose("mixed_precision", "bf16_mixed", "bf16", "autocast keeps fp32 weights in the other program");
  else if (r.is_true("fp16"))
    r.choose("mixed_precision", "fp16_mixed", "fp16", "autocast keeps fp32 weights in the other program");
  else
    r.draft.assume_preset("mixed_precision", "fp32", "neither bf16 nor fp16");
  for (const char* key : {"bf16", "fp16"})
    if (r.find(key) && !r.is_true(key)) r.omit(key, OmissionReason::off, "");
  take_tf32(r, !r.is_true("bf16") && !r.is_true("fp16"));
}

void sharding(Reader& r) {
  const Node* fsdp = r.find("fsdp");
  if (!fsdp) return;
  std::string words;
  if (fsdp->kind == Node::Kind::scalar) words = fsdp->text;
  for (const Node& item : fsdp->items) words += " " + item.text;
  const char* field_path = "ddp.data_parallel_sharding_strategy";
  if (words.find("full_shard") != std::string::npos)
    r.set(field_path, "optim_grads_params", "fsdp");
  else if (words.find("shard_grad_op") != std::string::npos)
    r.set(field_path, "optim_grads", "fsdp");
  else
    r.omit("fsdp", *fsdp, is_off(*fsdp) ? OmissionReason::off : OmissionReason::value,
           "full_shard and shard_grad_op have a counterpart");
  if (words.find("offload") != std::string::npos)
    r.omit("fsdp", *fsdp, OmissionReason::unsupported, "parameters in host memory");
}

}  // namespace

void read_training_arguments(Draft& draft, const Node& root) {
  if (!draft.extends())
    draft.extend("quickstart",
                 "to fill in: the file does not describe model and data; {extend_recipe} that does, such as "
                 "llama3-8b-lora");
  static const std::vector<Rule> rules = one_rule_per_key(kTable);
  Reader reader(draft, root, rules);
  reader.apply();
  batch(reader);
  transformers_length(reader, "num_train_epochs", {"3", "Transformers' default"});
  schedule(reader);
  optimizer(reader);
  precision(reader);
  sharding(reader);
  if (reader.is_true("gradient_checkpointing"))
    reader.set("model.recompute_granularity", "full", "gradient_checkpointing");
  else if (reader.find("gradient_checkpointing"))
    reader.omit("gradient_checkpointing", "false", OmissionReason::off, "");
  interval(reader, "eval_steps", {"eval_strategy", "evaluation_strategy"}, "validation.eval_interval", "no");
  interval(reader, "save_steps", {"save_strategy"}, "checkpoint.save_interval", "steps");
  interval(reader, "logging_steps", {"logging_strategy"}, "logger.log_interval", "steps");
  const SourceKey seed = reader.from("seed");
  if (const auto value = reader.text("seed")) {
    draft.set("rng.seed", *value, seed);
    if (!draft.has("dataset.random_seed")) draft.set("dataset.random_seed", *value, seed);
  } else {
    draft.assume("rng.seed", "42", "Transformers' default");
  }
  reader.account();
}

}  // namespace capstan::importers
