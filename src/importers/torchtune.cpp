// Imports a torchtune YAML. Components are matched by name and never loaded.
#include "base/checked.hpp"
#include "importers/batch.hpp"
#include "importers/finetuning.hpp"
#include "importers/format_readers.hpp"
#include "importers/known_models.hpp"
#include "importers/reasons.hpp"
#include "importers/schedules.hpp"

namespace capstan::importers {

using config::Node;

namespace {

constexpr std::string_view kProfiler = "`profiling.trace=true` writes a trace";

void builder(Reader& r, const SourceItem& item) {
  const std::string name = item.value->text;
  const auto preset = preset_of_builder(name);
  if (!preset) {
    r.draft.omit(item.from, name, OmissionReason::value,
                 name.starts_with("torchtune.") ? "no preset for this model: `capstan recipe ls model`"
                                                : "not a model that is known here");
    return;
  }
  r.draft.choose("model", *preset, item.from);
  if (const auto positions = positions_of_chat_model(name))
    r.draft.set("model.max_position_embeddings", std::to_string(*positions), item.from);
}

bool builder_has(const Reader& r, std::string_view what) {
  const std::string name = r.text("model._component_").value_or("");
  return std::string_view(name).substr(name.rfind('.') + 1).starts_with(what);
}

constexpr Rule kTable[] = {
    call("model._component_", builder,
         "model (preset), model.max_position_embeddings, peft.scheme, peft.target_modules, "
         "peft.base_quantization, checkpoint.pretrained_checkpoint"),
    deferred("model.lora_attn_modules", "peft.target_modules, peft.scheme"),
    deferred("model.apply_lora_to_mlp", "peft.target_modules"),
    unsupported("model.apply_lora_to_output", "an adapter on the output layer"),
    copy("model.lora_rank", "peft.dim"),
    copy("model.lora_alpha", "peft.alpha"),
    copy("model.lora_dropout", "peft.dropout"),
    deferred("model.use_dora", "peft.scheme"),
    deferred("model.quantize_base", "peft.base_quantization"),

    deferred("tokenizer._component_", "tokenizer.chat_template"),
    no_effect("tokenizer.path tokenizer.merges_file",
              "the tokenizer.json in the directory of the weights is used; see tokenizer.tokenizer_model"),
    copy("tokenizer.max_seq_len", "model.seq_length"),
    deferred("tokenizer.prompt_template", "tokenizer.chat_template"),

    deferred("checkpointer._component_", {}, "the files are recognized by their content"),
    deferred("checkpointer.checkpoint_dir", "checkpoint.pretrained_checkpoint"),
    no_effect("checkpointer.checkpoint_files*", "a directory's own index names its files"),
    external("checkpointer.adapter_checkpoint", "a pickle; peft.adapter reads a directory as PEFT writes it"),
    external("checkpointer.recipe_checkpoint", kResume),
    no_effect("checkpointer.output_dir", "given by output_dir"),
    no_effect("checkpointer.model_type", "given by the model"),
    no_effect("checkpointer.safe_serialization", "checkpoints have one format, which is safe to read"),
    copy("output_dir", "checkpoint.save"),
    no_effect("resume_from_checkpoint should_load_recipe_state", kResume),
    no_effect("save_adapter_weights_only", "adapters are saved by themselves"),
    no_effect("enable_async_checkpointing", "see checkpoint.async_save"),

    deferred("dataset", "dataset.train_files, dataset.format, dataset.packing, dataset.loss_mode"),
    deferred("dataset_val", "dataset.valid_files"),
    no_effect("shuffle", "dataset.random_seed determines the sample order"),
    deferred("seed", "rng.seed, dataset.random_seed"),
    deferred("batch_size", "train.micro_batch_size"),
    deferred("gradient_accumulation_steps", "train.global_batch_size"),
    deferred("epochs", "train.epochs, train.train_iters"),
    deferred("max_steps_per_epoch", "train.train_iters"),
    no_effect("batch_size_val", "see validation.eval_micro_batch_size"),
    deferred("run_val_every_n_steps", "validation.eval_interval"),
    deferred("packed", "dataset.packing"),

    deferred("optimizer._component_", "optimizer.optimizer, optimizer.decoupled_weight_decay"),
    copy("optimizer.lr", "optimizer.lr"),
    copy("optimizer.weight_decay", "optimizer.weight_decay"),
    copy("optimizer.eps", "optimizer.adam_eps"),
    copy("optimizer.momentum", "optimizer.sgd_momentum"),
    deferred("optimizer.betas", "optimizer.adam_beta1, optimizer.adam_beta2"),
    no_effect("optimizer.fused optimizer.foreach", kKernels),
    no_effect("optimizer_in_bwd", "the update follows the complete backward pass"),
    deferred("lr_scheduler._component_", "scheduler.lr_decay_style"),
    copy("lr_scheduler.num_warmup_steps", "scheduler.lr_warmup_iters"),
    unsupported("lr_scheduler.num_cycles", "more than half a cosine period"),
    deferred("clip_grad_norm", "optimizer.clip_grad"),
    no_effect("loss", "cross entropy over the tokens of dataset.loss_mode"),

    deferred("dtype", "mixed_precision (preset)"),
    deferred("device", "train.device"),
    deferred("enable_activation_checkpointing", "model.recompute_granularity"),
    deferred("ac_mode", {}, "`full` only: complete layers are recomputed"),
    unsupported("enable_activation_offloading",
                "saved activations of all layers in host memory; see model.cpu_offloading_num_layers"),
    copy("tensor_parallel_dim", "dist.tensor_model_parallel_size"),
    copy("context_parallel_dim", "dist.context_parallel_size"),
    no_effect("tensor_parallel_plan", "the model defines how it is sharded"),
    no_effect("data_parallel_*", "follows from the ranks"),
    set_if_present("fsdp_cpu_offload", "optimizer.optimizer_cpu_offload", "true"),
    no_effect("fsdp_reshard_after_forward", "see ddp.data_parallel_sharding_strategy"),
    no_effect("custom_sharded_layers", "parameters are sharded evenly"),
    no_effect("compile", kKernels),
    deferred("enable_fp8_training fp8_recipe_name", "mixed_precision (preset)"),
    no_effect("low_cpu_ram", "weights are read when they are needed"),

    copy("log_every_n_steps", "logger.log_interval"),
    no_effect("log_peak_memory_stats", "memory is in every log line"),
    no_effect("log_level", kVerbosity),
    no_effect("metric_logger", kLog),
    no_effect("profiler", kProfiler),
};

void batch(Reader& r) {
  const auto micro = r.integer("batch_size");
  const auto steps = r.integer("gradient_accumulation_steps");
  if (micro) r.copy("train.micro_batch_size", "batch_size");
  const auto together = try_mul(micro.value_or(1), steps.value_or(1));
  if (steps && together && *together > 0 && *together <= (1 << 30))
    set_global_batch(r, *together, "batch size times accumulation", "gradient_accumulation_steps");
}

void length(Reader& r) {
  const auto epochs = r.integer("epochs"), each = r.integer("max_steps_per_epoch");
  const auto steps = each ? try_mul(*each, epochs.value_or(1)) : std::nullopt;
  if (steps && *steps > 0) {
    r.set("train.train_iters", std::to_string(*steps), "max_steps_per_epoch",
          epochs.value_or(1) == 1 ? "" : "times the epochs");
    return;
  }
  length_in_epochs(r, "epochs", {});
}

void adapters(Reader& r) {
  Draft& draft = r.draft;
  const bool quantized = builder_has(r, "qlora_") || builder_has(r, "qdora_");
  const bool named = quantized || builder_has(r, "lora_") || builder_has(r, "dora_");
  if (!named) return;
  const bool dora = r.is_true("model.use_dora") || builder_has(r, "dora_") || builder_has(r, "qdora_");
  const SourceKey scheme = r.from(r.is_true("model.use_dora") ? "model.use_dora" : "model._component_");
  AdaptedModules adapted{
      .modules = {}, .from = r.from("model.lora_attn_modules"), .scheme = scheme, .dora = dora, .layers = {}};
  if (const Node* modules = r.find("model.lora_attn_modules"); modules && modules->kind == Node::Kind::list)
    adapted.modules = modules->items;
  if (r.is_true("model.apply_lora_to_mlp")) {
    if (adapted.modules.empty()) adapted.from = r.from("model.apply_lora_to_mlp");
    for (const char* name : {"w1", "w2", "w3"})
      adapted.modules.push_back(Node::scalar(name, adapted.from.location));
  }
  if (adapted.modules.empty())
    adapt_all_modules(draft, scheme, dora, {}, "the file names no modules");
  else
    adapt_modules(draft, adapted);
  draft.assume("peft.dim", "8", "torchtune's default");
  draft.assume("peft.alpha", "16", "torchtune's default");
  draft.assume("peft.lora_A_init", "kaiming", "torchtune's initial values");
  if (r.is_true("model.quantize_base") || quantized)
    r.set("peft.base_quantization", "nf4",
          r.is_true("model.quantize_base") ? "model.quantize_base" : "model._component_");
}

void weights(Reader& r) {
  Draft& draft = r.draft;
  const auto directory = r.text("checkpointer.checkpoint_dir");
  const std::string kind = r.text("checkpointer._component_").value_or("");
  const SourceKey from = r.from("checkpointer.checkpoint_dir");
  if (directory && kind.ends_with("FullModelHFCheckpointer")) {
    base_weights(draft, is_path(*directory) ? *directory : "./" + *directory, from);
    return;
  }
  if (!kind.empty())
    r.omit("checkpointer._component_", kind, OmissionReason::external, std::string(kCheckpoint));
  // A Llama model from the hub has Meta's own files in `original`, beside the files that Capstan reads.
  std::string name = directory.value_or("");
  while (name.ends_with('/')) name.pop_back();
  const bool meta = kind.ends_with("FullModelMetaCheckpointer") && name.ends_with("/original");
  if (meta) name.resize(name.size() - std::string_view("/original").size());
  if (meta && is_path(name))
    base_weights(draft, name, from);
  else if (!draft.preset("model").empty())
    base_weights(draft, draft.preset("model"), r.from("model._component_"));
}

void optimizer(Reader& r) {
  Draft& draft = r.draft;
  if (const auto name = r.text("optimizer._component_")) {
    const std::string last = name->substr(name->rfind('.') + 1);
    const SourceKey from = r.from("optimizer._component_");
    if (last == "AdamW" || last == "PagedAdamW8bit" || last == "AdamW8bit" || last == "PagedAdamW")
      draft.set("optimizer.optimizer", "adam", from, last == "AdamW" ? "" : "with moments in fp32");
    else if (last == "Adam") {
      draft.set("optimizer.optimizer", "adam", from);
      draft.set("optimizer.decoupled_weight_decay", "false", from);
    } else if (last == "SGD")
      draft.set_torch_sgd(from);
    else
      draft.omit(from, *name, OmissionReason::unsupported, "optimizers are adam, sgd, lion and muon");
    draft.assume("optimizer.weight_decay", last.find("AdamW") != std::string::npos ? "0.01" : "0",
                 "PyTorch's default");
  }
  if (const Node* betas = r.find("optimizer.betas")) {
    if (betas->kind == Node::Kind::list && betas->items.size() == 2)
      for (size_t i = 0; i < 2; ++i)
        r.set("optimizer.adam_beta" + std::to_string(i + 1), betas->items[i], "optimizer.betas");
    else
      r.omit("optimizer.betas", *betas, OmissionReason::value, "two numbers are expected");
  }
  if (!r.copy("optimizer.clip_grad", "clip_grad_norm"))
    draft.assume("optimizer.clip_grad", "0", "torchtune clips only where clip_grad_norm is set");

  const auto schedule = r.text("lr_scheduler._component_");
  if (!schedule)
    draft.assume("scheduler.lr_decay_style", "constant", "the file names no schedule");
  else if (schedule->ends_with("get_cosine_schedule_with_warmup"))
    r.set("scheduler.lr_decay_style", "cosine", "lr_scheduler._component_");
  else
    r.omit("lr_scheduler._component_", *schedule, OmissionReason::unsupported,
           "see `capstan explain scheduler`");
}

// FP8 GEMMs with one scale for a tensor, from its current maximum. Returns whether the file asks for them.
bool low_precision(Reader& r) {
  constexpr const char *enabled = "enable_fp8_training", *recipe = "fp8_recipe_name";
  const auto name = r.text(recipe);
  if (!r.is_true(enabled)) {
    if (name) r.omit(recipe, *name, OmissionReason::no_effect, "enable_fp8_training is not set");
    return false;
  }
  if (name && *name != "tensorwise") {
    r.omit(recipe, *name, OmissionReason::unsupported, "see `capstan explain mixed_precision.fp8_recipe`");
    return false;
  }
  r.choose("mixed_precision", "bf16_with_fp8_current_scaling_mixed", enabled,
           "with fp32 main parameters and moments");
  return true;
}

void precision(Reader& r) {
  const auto type = r.text("dtype");
  const SourceKey from = r.from("dtype");
  if (low_precision(r) && type == "bf16")
    r.omit("dtype", *type, OmissionReason::same, "the preset's");
  else if (!type || *type == "fp32")
    r.draft.choose("mixed_precision", "fp32", from);
  else if (*type == "bf16")
    r.draft.choose("mixed_precision", "bf16_mixed", from, "with fp32 main parameters and moments");
  else if (*type == "fp16")
    r.draft.choose("mixed_precision", "fp16_mixed", from, "with fp32 main parameters and moments");
  else
    r.draft.omit(from, *type, OmissionReason::value, "number formats are fp32, bf16 and fp16");
  const auto device = r.text("device");
  if (device == "cpu")
    r.set("train.device", "cpu", "device");
  else if (device)
    r.omit("device", *device, OmissionReason::no_effect, "train.device chooses what is there");
}

}  // namespace

std::span<const Rule> torchtune_rules() {
  static const std::vector<Rule> rules = one_rule_per_key(kTable);
  return rules;
}

void read_torchtune(Draft& draft, const Node& root) {
  Reader reader(draft, root, torchtune_rules());
  reader.apply();
  batch(reader);
  adapters(reader);
  weights(reader);
  read_torchtune_data(reader);
  length(reader);
  optimizer(reader);
  precision(reader);
  if (reader.is_true("enable_activation_checkpointing")) {
    const auto mode = reader.text("ac_mode");
    reader.set("model.recompute_granularity", "full", "enable_activation_checkpointing");
    if (mode && *mode != "full")
      reader.omit("ac_mode", *mode, OmissionReason::unsupported,
                  "a choice of single operations to recompute");
  }
  take_seed(reader, "seed");
  draft.assume_preset("tokenizer", "none", "to fill in with the data");
  if (!draft.has_preset("model"))
    draft.omit({"model", {}}, "", OmissionReason::to_fill_in,
               "the file names no model that is known here: `capstan recipe ls model`");
  reader.account();
}

}  // namespace capstan::importers
