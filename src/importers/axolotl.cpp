// Imports an Axolotl YAML, which describes the fine-tuning of a model from a hub with all keys at the top
// level.
#include "base/checked.hpp"
#include "base/text.hpp"
#include "importers/batch.hpp"
#include "importers/finetuning.hpp"
#include "importers/format_readers.hpp"
#include "importers/known_models.hpp"
#include "importers/reasons.hpp"
#include "importers/schedules.hpp"

namespace capstan::importers {

using config::Node;

namespace {

constexpr std::string_view kRows = "rows have one length";
constexpr std::string_view kPreparation = "data preparation of another library";
constexpr std::string_view kHubClass = "a class of another library";

constexpr Rule kTable[] = {
    deferred("base_model", "model (preset), checkpoint.pretrained_checkpoint, model.max_position_embeddings"),
    external("base_model_config base_model_ignore_patterns revision_of_model", kHub),
    external("model_type tokenizer_type", kHubClass),
    deferred("tokenizer_config", "tokenizer.tokenizer_model"),
    external("tokenizer_use_fast tokenizer_legacy", kHubClass),
    external("trust_remote_code", "nothing is downloaded, and no code from a file runs"),
    external("plugins", kHubClass),
    no_effect("is_llama_derived_model is_mistral_derived_model", "given by the model preset"),
    no_effect("special_tokens.pad_token", "padding is masked from loss and attention"),
    copy("special_tokens.eos_token", "tokenizer.eod_token"),
    to_fill_in("special_tokens.*", "the tokenizer files define the special tokens"),
    to_fill_in("tokens", "see tokenizer.tokenizer_model"),
    to_fill_in("overrides_of_model_config model_config", "see `capstan explain model`"),

    deferred("datasets", "dataset.train_files, dataset.format, tokenizer.chat_template"),
    deferred("test_datasets", "dataset.valid_files"),
    deferred("pretraining_dataset", "dataset.train_files"),
    deferred("val_set_size", "dataset.split"),
    external("dataset_prepared_path", kPreparation),
    no_effect("dataset_processes dataset_keep_in_memory dataset_num_proc dataset_exact_deduplication "
              "shuffle_merged_datasets skip_prepare_dataset remove_unused_columns",
              kPreparation),
    deferred("chat_template chat_template_jinja", "tokenizer.chat_template"),
    deferred("train_on_inputs", "dataset.loss_mode"),
    deferred("sample_packing", "dataset.packing"),
    no_effect("sample_packing_*", "packing of another library"),
    no_effect("eval_sample_packing", "evaluation packs rows as training does"),
    no_effect("pad_to_sequence_len group_by_length", kRows),
    no_effect("multipack_real_batches", "packed samples are one row"),
    copy("sequence_len", "model.seq_length"),
    deferred("excess_length_strategy", "dataset.too_long"),
    unsupported("rl rl_beta trl", kPreferences),
    unsupported("reward_model", "reward models"),

    deferred("adapter", "peft.scheme, peft.base_quantization"),
    copy("lora_model_dir", "peft.adapter"),
    copy("lora_r", "peft.dim"),
    copy("lora_alpha", "peft.alpha"),
    copy("lora_dropout", "peft.dropout"),
    deferred("lora_target_modules lora_target_linear", "peft.target_modules"),
    deferred("peft_use_dora", "peft.scheme"),
    copy("peft_use_rslora", "peft.use_rslora"),
    unsupported("peft.loftq_config", "adapters initialized to compensate for quantization"),
    unsupported("peft_init_lora_weights", "other initializations of adapters; see peft.lora_A_init"),
    deferred("lora_fan_in_fan_out", {}, "follows from the model"),
    unsupported("lora_modules_to_save", "layers trained in addition to adapters"),
    no_effect("lora_mlp_kernel lora_qkv_kernel lora_o_kernel", kKernels),
    deferred("peft_layers_to_transform", "peft.target_modules"),
    copy("loraplus_lr_ratio", "peft.lora_plus_ratio"),
    no_effect("loraplus_lr_embedding", "embeddings have no adapter"),
    deferred("load_in_4bit", "peft.base_quantization"),
    unsupported("load_in_8bit", "frozen weights in 8 bits; in 4 they can be: peft.base_quantization=nf4"),
    translate("bnb_config_kwargs.bnb_4bit_quant_type", "peft.base_quantization", "nf4=nf4"),
    copy("bnb_config_kwargs.bnb_4bit_use_double_quant", "peft.quantization_double"),
    no_effect("bnb_config_kwargs.*", "4-bit weights are dequantized to the model's format"),
    unsupported("unfrozen_parameters", "frozen layers"),
    unsupported("relora_*", "adapters that are merged during training"),

    deferred("micro_batch_size", "train.micro_batch_size, train.global_batch_size"),
    deferred("batch_size gradient_accumulation_steps", "train.global_batch_size"),
    no_effect("eval_batch_size",
              "evaluation uses the batch sizes of training; see validation.eval_global_batch_size"),
    deferred("num_epochs", "train.epochs"),
    deferred("max_steps", "train.train_iters"),
    deferred("seed", "rng.seed, dataset.random_seed"),

    deferred("optimizer", "optimizer.optimizer"),
    unsupported("optim_args", "arguments of an optimizer of another library"),
    copy("learning_rate", "optimizer.lr"),
    copy("weight_decay", "optimizer.weight_decay"),
    copy("adam_beta1", "optimizer.adam_beta1"),
    copy("adam_beta2", "optimizer.adam_beta2"),
    copy("adam_epsilon", "optimizer.adam_eps"),
    copy("max_grad_norm", "optimizer.clip_grad"),
    deferred("lr_scheduler", "scheduler.lr_decay_style"),
    deferred("lr_scheduler_kwargs",
             "optimizer.min_lr, optimizer.min_lr_ratio, scheduler.lr_warmup_iters, "
             "scheduler.lr_wsd_decay_iters, scheduler.lr_wsd_decay_style"),
    deferred("cosine_min_lr_ratio", "optimizer.min_lr_ratio"),
    unsupported("cosine_constant_lr_ratio", "a cosine that ends early"),
    unsupported("lr_quadratic_warmup", "a warm-up that is not linear"),
    copy("warmup_ratio", "scheduler.lr_warmup_fraction"),
    deferred("warmup_steps", "scheduler.lr_warmup_iters, scheduler.lr_warmup_fraction"),
    unsupported("neftune_noise_alpha", "noise on embeddings"),
    deferred("loss_watchdog_threshold", {},
             "see `resilience.loss_spike_action`, which compares with the running mean"),
    no_effect("loss_watchdog_patience", "see resilience.spike_window"),

    deferred("bf16 fp16 bfloat16 float16", "mixed_precision (preset)"),
    deferred("tf32", "mixed_precision.tf32"),
    deferred("gradient_checkpointing", "model.recompute_granularity"),
    no_effect("gradient_checkpointing_kwargs", "recomputation has one implementation"),
    unsupported("activation_offloading",
                "saved activations of all layers in host memory; see model.cpu_offloading_num_layers"),
    no_effect("flash_attention flash_attn_* xformers_attention sdp_attention eager_attention flex_attention",
              kKernels),
    unsupported("s2_attention", "shifted sparse attention"),
    no_effect("unsloth_* liger_* torch_compile* cut_cross_entropy", kKernels),

    external("deepspeed", "a second file: `capstan recipe import` reads it too"),
    deferred("fsdp fsdp_config", "ddp.data_parallel_sharding_strategy"),
    copy("context_parallel_size", "dist.context_parallel_size"),
    copy("sequence_parallel_degree", "dist.context_parallel_size"),
    copy("tensor_parallel_size", "dist.tensor_model_parallel_size"),
    no_effect("dp_shard_size", "follows from the ranks"),
    no_effect("dp_replicate_size", "see ddp.num_distributed_optimizer_instances"),
    no_effect("ddp*", "gradient reduction of another library"),
    no_effect("local_rank device_map", "the launcher sets the rank"),
    no_effect("gpu_memory_limit", "see resilience.memory_limit"),
    no_effect("heads_k_stride", kKernels),

    copy("output_dir", "checkpoint.save"),
    external("resume_from_checkpoint", kResumeOrOther),
    external("auto_resume_from_checkpoints", kResume),
    deferred("save_steps", "checkpoint.save_interval"),
    deferred("saves_per_epoch save_strategy", {}, "intervals are counted in steps"),
    copy("save_total_limit", "checkpoint.most_recent_k"),
    negate("save_only_model", "checkpoint.save_optim"),
    no_effect("save_safetensors", "checkpoints have one format, which is safe to read"),
    deferred("eval_steps", "validation.eval_interval"),
    deferred("evals_per_epoch eval_strategy evaluation_strategy", {}, "intervals are counted in steps"),
    no_effect("eval_table_size eval_max_new_tokens eval_causal_lm_metrics do_bench_eval "
              "early_stopping_patience load_best_model_at_end",
              kEvaluation),
    copy("logging_steps", "logger.log_interval"),
    copy("use_tensorboard", "logger.tensorboard"),
    external("wandb_* mlflow_* use_mlflow comet_* use_comet", kService),
    external("hub_* push_dataset_to_hub hf_use_auth_token", kHub),
    no_effect("dataloader_*", "tunes the data loader of another library"),
    no_effect("strict", "unknown keys are errors here"),
    no_effect("debug", kVerbosity),
    no_effect("ray_* use_ray", kRanks),
};

void model(Reader& r) {
  const auto name = r.text("base_model");
  if (!name || name->empty()) {
    r.draft.omit({"model", {}}, "", OmissionReason::to_fill_in, "the file names no base_model");
    return;
  }
  const SourceKey from = r.from("base_model");
  base_weights(r.draft, *name, from);
  if (const auto preset = preset_of_model(*name)) {
    r.draft.choose("model", *preset, from, *name);
    if (const auto positions = positions_of_chat_model(*name))
      r.draft.set("model.max_position_embeddings", std::to_string(*positions), from);
  } else if (is_path(*name)) {
    r.draft.choose("model", "hf:" + *name, from, "from its config.json");
  } else {
    r.draft.omit(from, *name, OmissionReason::to_fill_in,
                 "no preset is known for it: model=hf:DIR reads its config.json, `capstan recipe ls model` "
                 "lists what there is");
  }
  if (const auto tokenizer = r.text("tokenizer_config"); tokenizer && !tokenizer->empty()) {
    if (is_path(*tokenizer))
      r.set("tokenizer.tokenizer_model", *tokenizer, "tokenizer_config");
    else
      r.omit("tokenizer_config", *tokenizer, OmissionReason::to_fill_in,
             "a tokenizer from a hub: name its directory in tokenizer.tokenizer_model");
  }
}

void adapter(Reader& r) {
  Draft& draft = r.draft;
  const auto kind = r.text("adapter");
  if (!kind || kind->empty()) {
    for (const std::string& path : draft.paths_of("peft"))
      draft.withdraw(path, OmissionReason::no_effect, "no adapter is chosen");
    if (r.is_true("load_in_4bit"))
      r.omit("load_in_4bit", "true", OmissionReason::no_effect, "no adapter is chosen");
    return;
  }
  if (*kind != "lora" && *kind != "qlora") {
    r.omit("adapter", *kind, OmissionReason::unsupported, "adapters are LoRA and DoRA");
    return;
  }
  if (r.is_true("load_in_4bit") || *kind == "qlora")
    r.set("peft.base_quantization", "nf4", r.is_true("load_in_4bit") ? "load_in_4bit" : "adapter");
  const bool dora = r.is_true("peft_use_dora");
  const SourceKey scheme = r.from(dora ? "peft_use_dora" : "adapter");
  AdaptedModules adapted{
      .modules = {}, .from = r.from("lora_target_modules"), .scheme = scheme, .dora = dora, .layers = {}};
  const Node* modules = r.find("lora_target_modules");
  if (modules && modules->kind == Node::Kind::list) adapted.modules = modules->items;
  if (const Node* layers = r.find("peft_layers_to_transform"); layers && !is_off(*layers)) {
    for (const Node& layer : layers->items)
      if (parse_int(layer.text).value_or(-1) >= 0) adapted.layers.push_back(layer);
    if (adapted.layers.size() != layers->items.size() || layers->items.empty())
      r.omit("peft_layers_to_transform", *layers, OmissionReason::value, "numbers of layers are expected");
  }
  if (r.is_true("lora_target_linear"))
    adapt_all_modules(draft, scheme, dora, r.from("lora_target_linear"), "");
  else if (modules && modules->text == "all-linear")
    adapt_all_modules(draft, scheme, dora, adapted.from, "");
  else if (!adapted.modules.empty())
    adapt_modules(draft, adapted);
  else
    adapt_all_modules(draft, scheme, dora, {}, "the file names no modules");
  draft.assume("peft.lora_A_init", "kaiming", "PEFT's initial values");
}

void batch(Reader& r) {
  const auto micro = r.integer("micro_batch_size"), steps = r.integer("gradient_accumulation_steps"),
             global = r.integer("batch_size");
  if (micro) r.copy("train.micro_batch_size", "micro_batch_size");
  if (global) {
    r.copy("train.global_batch_size", "batch_size");
    return;
  }
  const auto together = try_mul(micro.value_or(1), steps.value_or(1));
  if (together && *together > 0 && *together <= (1 << 30) && (steps || micro))
    set_global_batch(r, *together, "micro-batch times accumulation",
                     steps ? "gradient_accumulation_steps" : "micro_batch_size");
}

void intervals(Reader& r) {
  for (const auto& [key, path] : {std::pair("save_steps", "checkpoint.save_interval"),
                                  std::pair("eval_steps", "validation.eval_interval")})
    if (const auto value = r.real(key)) {
      if (*value >= 1)
        r.copy(path, key);
      else
        r.omit(key, OmissionReason::to_fill_in, "a fraction of the run: give the number of steps");
    }
  for (const char* key :
       {"saves_per_epoch", "evals_per_epoch", "save_strategy", "eval_strategy", "evaluation_strategy"})
    if (r.given(key) && *r.text(key) != "steps")
      r.omit(key, OmissionReason::to_fill_in, "intervals here are counted in steps");
}

void optimizer(Reader& r) {
  Draft& draft = r.draft;
  if (const auto name = r.text("optimizer")) {
    const SourceKey from = r.from("optimizer");
    if (*name == "adamw_torch" || *name == "adamw_torch_fused" || *name == "adamw_hf" ||
        *name == "adamw_apex_fused")
      draft.set("optimizer.optimizer", "adam", from);
    else if (name->find("adamw") != std::string::npos)
      draft.set("optimizer.optimizer", "adam", from, "with moments in fp32");
    else if (*name == "sgd")
      draft.set_torch_sgd(from);
    else if (*name == "muon")
      draft.set("optimizer.optimizer", *name, from);
    else if (name->find("lion") != std::string::npos)
      draft.set("optimizer.optimizer", "lion", from);
    else
      draft.omit(from, *name, OmissionReason::unsupported, "optimizers are adam, sgd, lion and muon");
  }
  draft.assume("optimizer.weight_decay", "0", "Axolotl's default");
  draft.assume("optimizer.clip_grad", "1", "Axolotl's default");

  const std::string type = r.text("lr_scheduler").value_or("cosine");
  if (!r.given("lr_scheduler"))
    draft.assume("scheduler.lr_decay_style", "cosine", "Axolotl's default");
  else
    transformers_schedule(r, "lr_scheduler", type);
  transformers_schedule_options(r, type);
  r.copy("optimizer.min_lr_ratio", "cosine_min_lr_ratio");
  transformers_warmup(r);
  transformers_schedule_defaults(draft, type);
  if (r.given("loss_watchdog_threshold"))
    r.omit("loss_watchdog_threshold", OmissionReason::to_fill_in,
           "see resilience.loss_spike_action, which compares with the running mean");
}

// Chooses the preset; returns whether it computes in 16 bits.
bool choose_16_bit(Reader& r) {
  for (const char* key : {"bf16", "bfloat16"}) {
    const auto value = r.text(key);
    if (value && (*value == "auto" || *value == "full" || truth(*value) == true)) {
      r.choose("mixed_precision", "bf16_mixed", key, *value == "auto" ? "where the device has it" : "");
      if (r.is_true("fp16")) r.omit("fp16", "true", OmissionReason::no_effect, "bf16 is given");
      return true;
    }
  }
  for (const char* key : {"fp16", "float16"})
    if (const auto value = r.text(key); value && truth(*value) == true) {
      r.choose("mixed_precision", "fp16_mixed", key);
      return true;
    }
  return false;
}

void precision(Reader& r) {
  const bool in_16_bits = choose_16_bit(r);
  if (!in_16_bits) r.draft.assume_preset("mixed_precision", "fp32", "neither bf16 nor fp16");
  take_tf32(r, !in_16_bits);
}

void sharding(Reader& r) {
  const Node* fsdp = r.find("fsdp");
  std::string words = fsdp ? shown(*fsdp, 200) : "";
  if (const Node* section = r.find("fsdp_config")) {
    words += shown(*section, 4000);
    r.omit("fsdp_config", *section, is_off(*section) ? OmissionReason::off : OmissionReason::no_effect,
           "wrapping of layers by another library");
  }
  if (words.find("full_shard") != std::string::npos || words.find("FULL_SHARD") != std::string::npos)
    r.set("ddp.data_parallel_sharding_strategy", "optim_grads_params", fsdp ? "fsdp" : "fsdp_config");
}

}  // namespace

std::span<const Rule> axolotl_rules() {
  static const std::vector<Rule> rules = one_rule_per_key(kTable);
  return rules;
}

void read_axolotl(Draft& draft, const Node& root) {
  Reader reader(draft, root, axolotl_rules());
  reader.apply();
  model(reader);
  adapter(reader);
  batch(reader);
  intervals(reader);
  optimizer(reader);
  precision(reader);
  sharding(reader);
  // The value is `true` or a method of recomputation ("unsloth", "offload").
  if (const auto value = reader.text("gradient_checkpointing")) {
    if (truth(*value) == false)
      reader.omit("gradient_checkpointing", "false", OmissionReason::off, "");
    else
      reader.set("model.recompute_granularity", "full", "gradient_checkpointing");
  }
  if (!take_seed(reader, "seed")) draft.assume("rng.seed", "42", "Axolotl's default");
  read_axolotl_data(reader);
  transformers_length(reader, "num_epochs", {"1", "Axolotl's default"});
  draft.assume_preset("tokenizer", "none", "to fill in with the data");
  reader.account();
}

}  // namespace capstan::importers
