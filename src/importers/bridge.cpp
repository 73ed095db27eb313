// Imports a run_config.yaml of Megatron-Bridge. Most of its sections and fields have the same names in
// Capstan; the table lists the others. Classes and functions (`_target_`) are matched by name and never
// loaded.
#include <algorithm>
#include <iterator>
#include <span>

#include "base/text.hpp"
#include "importers/finetuning.hpp"
#include "importers/format_readers.hpp"
#include "importers/reasons.hpp"

namespace capstan::importers {

using config::Node;

namespace {

constexpr std::string_view kFunction = "a function that Megatron-Bridge puts there itself";
constexpr std::string_view kCopied = "given by mixed_precision";
constexpr std::string_view kComputed = "computed from the iterations";
constexpr std::string_view kResilienceHelp = "see `capstan explain resilience`";

std::string target_of(const Node& node) {
  if (node.kind == Node::Kind::scalar) return node.text;
  const Node* target = node.find("_target_");
  return target ? target->text : std::string();
}

// The recipe's counterpart of a class or function.
struct Counterpart {
  std::string_view target, value;
};
constexpr Counterpart kActivations[] = {
    {"torch.nn.functional.silu", "silu"},
    {"torch.nn.functional.gelu", "gelu"},
    {"torch.nn.functional.relu", "relu"},
    {"torch._C._nn.gelu", "gelu"},
    {"torch._C._nn.silu", "silu"},
    {"megatron.core.activations.squared_relu", "squared_relu"},
    {"megatron.core.activations.fast_gelu", "gelu_tanh"},
    {"megatron.core.activations.quick_gelu", "quick_gelu"},
    {"megatron.core.fusions.fused_bias_geglu.quick_gelu", "quick_gelu"},
};
constexpr Counterpart kMomentTypes[] = {
    {"torch.float32", "fp32"}, {"torch.float", "fp32"}, {"torch.bfloat16", "bf16"},
    {"torch.float16", "fp16"}, {"torch.half", "fp16"},  {"torch.uint8", "fp8"},
};
// Only moments can be fp8.
constexpr auto kTypes = std::span(kMomentTypes).first<std::size(kMomentTypes) - 1>();
constexpr Counterpart kRouterTypes[] = {{"fp32", "fp32"}, {"fp64", "fp64"}};

void from_table(Reader& r, const SourceItem& item, const char* path, std::span<const Counterpart> table) {
  const std::string target = target_of(*item.value);
  for (const Counterpart& one : table)
    if (one.target == target) {
      const std::string value(one.value);
      r.draft.set_if_other(path, Node::scalar(value, item.value->location), item.from);
      return;
    }
  std::string names;
  for (const Counterpart& one : table) names += (names.empty() ? "" : ", ") + std::string(one.target);
  r.draft.omit(item.from, target.empty() ? shown(*item.value) : target, OmissionReason::value,
               "counterparts are known for: " + names);
}

void activation(Reader& r, const SourceItem& item) {
  // If there are biases, Megatron fuses bias and GELU, and the fused kernel computes the tanh approximation.
  const bool fused = r.is_true("model.bias_activation_fusion") &&
                     r.boolean("model.add_bias_linear").value_or(true) &&
                     !r.is_true("model.gated_linear_unit");
  if (target_of(*item.value).ends_with("gelu") && fused)
    r.draft.set("model.activation_func", "gelu_tanh", item.from, "the fused form");
  else
    from_table(r, item, "model.activation_func", kActivations);
}
void params_type(Reader& r, const SourceItem& item) {
  from_table(r, item, "mixed_precision.params_dtype", kTypes);
}
void pipeline_type(Reader& r, const SourceItem& item) {
  from_table(r, item, "mixed_precision.pipeline_dtype", kTypes);
}
// The names of the optimizer's number formats are the same in Capstan.
void optimizer_type(Reader& r, const SourceItem& item) {
  from_table(r, item, item.key.c_str(), kTypes);
}
void moment_type(Reader& r, const SourceItem& item) {
  from_table(r, item, item.key.c_str(), kMomentTypes);
}
void router_format(Reader& r, const SourceItem& item) {
  from_table(r, item, "model.moe_router_dtype", kRouterTypes);
}

// Class names of a section, without their modules.
struct Classes {
  std::string_view section, names;
};
constexpr Classes kClasses[] = {
    {"", "ConfigContainer"},
    {"model",
     "GPTModelProvider LlamaModelProvider Llama2ModelProvider Llama3ModelProvider Llama31ModelProvider "
     "MistralModelProvider Qwen2ModelProvider Qwen3ModelProvider Qwen3MoEModelProvider"},
    {"checkpoint", "CheckpointConfig"},
    {"comm_overlap", "CommOverlapConfig"},
    {"dataset", "FinetuningDatasetConfig GPTDatasetConfig GPTSFTDatasetConfig MockGPTDatasetConfig"},
    {"ddp", "DistributedDataParallelConfig"},
    {"dist", "DistributedInitConfig"},
    {"logger", "LoggerConfig"},
    {"mixed_precision", "MixedPrecisionConfig"},
    {"optimizer", "OptimizerConfig"},
    {"peft", "LoRA DoRA CanonicalLoRA"},
    {"profiling", "ProfilingConfig"},
    {"rerun_state_machine", "RerunStateMachineConfig"},
    {"rng", "RNGConfig"},
    {"scheduler", "SchedulerConfig"},
    {"tokenizer", "TokenizerConfig"},
    {"train", "TrainingConfig"},
    {"validation", "ValidationConfig"},
};

void section_class(Reader& r, const SourceItem& item) {
  const std::string section = item.key == "_target_" ? "" : item.key.substr(0, item.key.find('.'));
  const std::string target = item.value->text;
  const std::string name = target.substr(target.rfind('.') + 1);
  const bool known = std::any_of(std::begin(kClasses), std::end(kClasses), [&](const Classes& row) {
    const auto names = split(row.names, ' ');
    return row.section == section && std::find(names.begin(), names.end(), name) != names.end();
  });
  if (!known) {
    r.draft.omit(item.from, target, OmissionReason::value,
                 section == "model" ? "not a known model: make sure that the recipe describes it"
                                    : "not a class that is known for this section");
  } else if (name == "Llama31ModelProvider") {
    r.draft.set("model.rope_scaling", "true", item.from, name);
  } else if (section == "peft") {
    r.draft.set("peft.scheme",
                name == "LoRA"   ? "lora"
                : name == "DoRA" ? "dora"
                                 : "canonical_lora",
                item.from);
  }
}

void window_size(Reader& r, const SourceItem& item) {
  // Megatron's window counts the tokens before and after the query; Capstan's includes the query itself.
  const Node& value = *item.value;
  const Node* before = value.kind == Node::Kind::list && value.items.size() == 2 ? &value.items[0] : nullptr;
  const Node shown_as = before ? *before : value;
  Node root{.kind = Node::Kind::map};
  root.add("n", item.from.location, shown_as);
  const auto number = Reader(r.draft, root, {}).integer("n");
  if (number && *number >= 0 && *number < (int64_t{1} << 31))
    r.draft.set("model.window_size", std::to_string(*number + 1), item.from, "the query itself counts here");
}

void dataloader_type(Reader& r, const SourceItem& item) {
  if (item.value->text == "single")
    r.draft.set("dataset.kind", "gpt", item.from);
  else
    r.draft.omit(item.from, *item.value, OmissionReason::no_effect,
                 "the order of samples follows dataset.random_seed");
}

void interpolation(Reader& r, const SourceItem& item) {
  r.draft.set("model.rope_scaling", "true", item.from);
  r.draft.set("model.rope_scaling_type", "linear", item.from);
  r.draft.set("model.rope_scaling_factor", *item.value, item.from);
}

void cp_comm_type(Reader& r, const SourceItem& item) {
  r.draft.set_if_other("dist.cp_comm_type", *item.value, item.from);
}

// Text as in Capstan, or a list of the layers of each stage.
void pipeline_layout(Reader& r, const SourceItem& item) {
  constexpr Counterpart kLayers[] = {{"embedding", "E"}, {"decoder", "t"}, {"mtp", "m"}, {"loss", "L"}};
  const char* const path = "dist.pipeline_model_parallel_layout";
  if (item.value->kind != Node::Kind::list) {
    r.draft.set(path, *item.value, item.from);
    return;
  }
  std::string text;
  for (const Node& stage : item.value->items) {
    if (&stage != &item.value->items.front()) text += '|';
    for (const Node& layer : stage.items) {
      const auto* found = std::ranges::find(kLayers, layer.text, &Counterpart::target);
      if (found == std::end(kLayers))
        return r.draft.omit(item.from, *item.value, OmissionReason::value,
                            "layers are embedding, decoder, mtp and loss, not " + layer.text);
      text += found->value;
    }
  }
  r.draft.set(path, text, item.from);
}

constexpr Rule kTable[] = {
    call("_target_ model._target_ checkpoint._target_ comm_overlap._target_ dataset._target_ ddp._target_ "
         "dist._target_ logger._target_ mixed_precision._target_ optimizer._target_ peft._target_ "
         "profiling._target_ rerun_state_machine._target_ rng._target_ scheduler._target_ tokenizer._target_ "
         "train._target_ validation._target_",
         section_class),

    call("model.activation_func", activation),
    deferred("model.bias_activation_fusion model.moe_aux_loss_coeff model.seq_length"),
    call("model.window_size", window_size),
    copy("model.moe_router_load_balancing_type", "model.moe_router_load_balancing_type"),
    call("model.moe_layer_freq", take_moe_layers, "model.moe_layer_freq, model.moe_first_dense_layers"),
    call("model.moe_router_dtype", router_format),
    call("model.cp_comm_type", cp_comm_type),
    call("model.pipeline_model_parallel_layout", pipeline_layout, "dist.pipeline_model_parallel_layout",
         "text, or a list of the layers of each stage"),
    deferred("model.hf_model_id"),
    call("model.seq_len_interpolation_factor", interpolation),
    copy("model.scale_factor", "model.rope_scaling_factor"),
    copy("model.low_freq_factor", "model.rope_scaling_low_freq_factor"),
    copy("model.high_freq_factor", "model.rope_scaling_high_freq_factor"),
    copy("model.old_context_len", "model.rope_scaling_original_max_position_embeddings"),
    deferred("model.attention_softmax_in_fp32 model.rope_type model.rotary_scaling_factor "
             "model.original_max_position_embeddings model.beta_fast model.beta_slow model.mscale "
             "model.mscale_all_dim"),
    call("model.params_dtype", params_type),
    call("model.pipeline_dtype", pipeline_type),
    no_effect("model.should_pad_vocab", "the vocabulary is padded by make_vocab_size_divisible_by"),
    no_effect("model.bf16 model.fp16 model.autocast_dtype model.enable_autocast model.fp8_* model.fp4_* "
              "model.first_last_layers_bf16 model.num_layers_at_*",
              kCopied),
    no_effect("model.init_method model.output_layer_init_method", "given by model.init_method_std"),
    no_effect("model.embedding_init_method", "given by model.embedding_init_method_std"),
    no_effect("model.finalize_model_grads_func model.grad_scale_func model.grad_sync_func model.no_sync_func "
              "model.param_sync_func model.timers model.transformer_layer_spec",
              kFunction),
    no_effect("model.generation_config", "generation options: see `capstan generate`"),
    no_effect("model.attention_backend model.bias_dropout_fusion model.masked_softmax_fusion "
              "model.persist_layer_norm model.apply_rope_fusion model.cross_entropy_loss_fusion "
              "model.cross_entropy_* model.gradient_accumulation_fusion model.transformer_impl "
              "model.use_te_* model.moe_router_fusion",
              kKernels),
    translate("model.cuda_graph_impl", "model.cuda_graph_impl",
              "none=none local=local transformer_engine=local full_iteration=local"),
    set_if_present("model.enable_cuda_graph model.external_cuda_graph", "model.cuda_graph_impl", "local"),
    copy("model.cuda_graph_warmup_steps", "model.cuda_graph_warmup_steps"),
    no_effect("model.cuda_graph_*", "a graph has the kernels of a layer between two transfers"),
    no_effect("model.apply_query_key_layer_scaling", "the softmax is computed in fp32 without rescaling"),
    no_effect("model.calculate_per_token_loss", "gradients are divided once by the number of tokens"),
    no_effect("model.batch_p2p_sync model.deallocate_pipeline_outputs "
              "model.clone_scatter_output_in_embedding model.scatter_embedding_sequence_parallel "
              "model.parallel_output model.tp_comm_* model.async_tensor_model_parallel_allreduce",
              kLayout),
    unsupported("model.cpu_offloading_weights", "weights in host memory"),
    no_effect("model.cpu_offloading_activations", "see model.cpu_offloading"),
    no_effect("model.cpu_offloading_double_buffering", "offload always has two buffers"),
    no_effect("model.perform_initialization", "weights are initialized unless a checkpoint provides them"),
    no_effect("model.barrier_with_L1_time", kLog),
    no_effect("model.inference_*", "this is a recipe for training"),
    no_effect("model.mamba_*", "there are no Mamba layers"),
    no_effect("model.mlp_chunks_for_prefill", "this is a recipe for training"),
    no_effect("model.moe_deepep_num_sms", kKernels),
    no_effect("model.use_mamba_mem_eff_path", "there are no Mamba layers"),
    no_effect("model.is_hybrid_model", "there are no Mamba layers"),
    no_effect("model.deterministic_mode", "runs are deterministic anyway"),
    no_effect("model.microbatch_group_size_per_vp_stage", "follows from the stages"),

    copy("peft.lora_A_init_method", "peft.lora_A_init"),
    copy("peft.lora_B_init_method", "peft.lora_B_init"),
    no_effect("peft.lora_dtype", "adapters have the format of the model, and main parameters in fp32"),

    deferred("mixed_precision mixed_precision.bf16 mixed_precision.fp16 mixed_precision.fp32"),
    call("mixed_precision.params_dtype", params_type),
    call("mixed_precision.pipeline_dtype", pipeline_type),
    no_effect("mixed_precision.autocast_*", "there is no autocast"),
    no_effect("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag", kLayout),
    no_effect("mixed_precision.fp8_param", "given by mixed_precision.fp8_param_gather"),

    call("optimizer.params_dtype", params_type),
    call("optimizer.main_grads_dtype optimizer.main_params_dtype", optimizer_type),
    call("optimizer.exp_avg_dtype optimizer.exp_avg_sq_dtype", moment_type),
    copy("optimizer.muon_nesterov", "optimizer.muon_use_nesterov"),
    no_effect("optimizer.muon_fp32_matmul_prec", "the iterations compute in fp32"),
    deferred("optimizer.weight_decay scheduler.start_weight_decay scheduler.end_weight_decay "
             "optimizer.use_distributed_optimizer"),
    no_effect("optimizer.bf16 optimizer.fp16 optimizer.fp8_recipe", kCopied),
    no_effect("optimizer.timers", kFunction),
    no_effect("optimizer.barrier_with_L1_time", kLog),
    no_effect("optimizer.store_param_remainders optimizer.pin_cpu_* optimizer.overlap_cpu_optimizer_d2h_h2d",
              kLayout),
    no_effect("optimizer.use_torch_optimizer_for_cpu_offload", kKernels),
    no_effect("optimizer.reuse_grad_buf_for_mxfp8_param_ag", kLayout),
    no_effect("scheduler.lr_decay_steps scheduler.lr_warmup_steps scheduler.wd_incr_steps "
              "scheduler.wsd_decay_steps",
              kComputed),

    deferred("ddp.use_distributed_optimizer ddp.use_megatron_fsdp ddp.data_parallel_sharding_strategy"),
    no_effect("ddp.average_in_collective", "gradients are sums, divided once by the number of tokens"),
    no_effect("ddp.gradient_reduce_div_fusion", kLayout),
    no_effect("ddp.preserve_fp32_weights", "main parameters are fp32"),
    no_effect("ddp.pad_buckets_for_high_nccl_busbw ddp.fsdp_*", kLayout),
    no_effect("ddp.check_for_large_grads", kResilienceHelp),

    no_effect("dist.distributed_backend", "follows the device"),
    no_effect("dist.align_grad_reduce", kLayout),
    no_effect("dist.local_rank", "the launcher sets the rank"),
    no_effect("dist.lazy_init", kPython),
    no_effect("dist.use_gloo_process_groups", kLayout),
    no_effect("dist.flight_recorder_*", kResilienceHelp),

    deferred("dataset.sequence_length dataset.blend dataset.blend_per_split dataset.data_path dataset.mock "
             "dataset.split dataset.dataset_root dataset.seq_length dataset.packed_sequence_specs* "
             "dataset.offline_packing_specs* dataset.enable_offline_packing"),
    copy("dataset.seed", "dataset.random_seed"),
    copy("dataset.memmap_workers", "dataset.num_workers"),
    no_effect("dataset.do_validation",
              "validation.jsonl of dataset_root is read where validation.eval_interval is set"),
    no_effect("dataset.do_test", "test.jsonl of dataset_root is used: see dataset.test_files"),
    to_fill_in("dataset.preprocessing dataset.dataset_kwargs",
               "see dataset.format, dataset.loss_mode and tokenizer.chat_template"),
    no_effect("dataset.split_matrix", "given by dataset.split"),
    no_effect("dataset.tokenizer", "given by the section tokenizer"),
    call("dataset.dataloader_type", dataloader_type),
    no_effect("dataset.data_sharding dataset.pin_memory dataset.persistent_workers", kPython),
    no_effect("dataset.drop_last", "a run ends after its steps"),
    no_effect("dataset.trust_remote_code", "nothing is downloaded, and no code from a file runs"),
    no_effect("dataset.add_extra_token_to_sequence", "samples have one more token, as there"),
    no_effect("dataset.create_attention_mask dataset.skip_getting_attention_mask_from_dataset", kKernels),
    no_effect("dataset.drop_last_partial_validation_sequence", "as there"),
    no_effect("dataset.mid_level_dataset_surplus", "blends are built exactly"),
    no_effect("dataset.mmap_bin_files dataset.num_dataset_builder_threads", kLayout),

    deferred("tokenizer.tokenizer_type tokenizer.tokenizer_model tokenizer.vocab_file tokenizer.merge_file "
             "tokenizer.vocab_size"),
    no_effect("tokenizer.tiktoken_* tokenizer.hf_*", "options of another tokenizer library"),
    no_effect("tokenizer.pad_vocab_size", "the vocabulary is padded by model.make_vocab_size_divisible_by"),
    no_effect("tokenizer.make_vocab_size_divisible_by", "given by model.make_vocab_size_divisible_by"),
    no_effect("tokenizer.null_tokenizer_pad_id", "no padding"),

    deferred("checkpoint.save checkpoint.load checkpoint.pretrained_checkpoint"),
    no_effect("checkpoint.finetune", "`checkpoint.pretrained_checkpoint` starts from weights alone"),
    no_effect("checkpoint.save_rng checkpoint.load_rng",
              "randomness has no state: it follows from seed and step"),
    no_effect("checkpoint.ckpt_format checkpoint.fully_parallel_* checkpoint.dist_ckpt_* "
              "checkpoint.use_persistent_ckpt_worker checkpoint.non_persistent_* "
              "checkpoint.replication_factor checkpoint.ckpt_* checkpoint.async_*",
              kStore),
    copy("checkpoint.async_save", "checkpoint.async_save"),
    copy("checkpoint.ckpt_step", "checkpoint.ckpt_step"),
    no_effect("checkpoint.storage_writers_per_rank", kStore),

    copy("logger.log_params_norm", "logger.log_params_norm"),
    copy("logger.log_interval", "logger.log_interval"),
    copy("logger.log_num_zeros_in_grad", "logger.log_num_zeros_in_grad"),
    no_effect("logger.log_* logger.timing_* logger.filter_warnings logger.logging_level "
              "logger.tensorboard_queue_size logger.throughput_window_size logger.runtime_time_unit",
              kLog),
    external("logger.wandb_* logger.mlflow_* logger.comet_*", kService),

    no_effect("rng.te_rng_tracker", kKernels),
    no_effect("rng.inference_rng_tracker", "this is a recipe for training"),
    unsupported("rng.data_parallel_random_init", "initial weights that differ between replicas"),
    copy("rerun_state_machine.check_for_nan_in_loss", "resilience.check_for_nan"),
    copy("rerun_state_machine.rerun_mode", "resilience.rerun_mode"),
    deferred("rerun_state_machine.check_for_spiky_loss"),
    copy("rerun_state_machine.spiky_loss_factor", "resilience.loss_spike_factor"),
    no_effect("rerun_state_machine.error_injection_*", "faults of a test"),

    copy("train.rampup_batch_size", "train.rampup_batch_size"),
    unsupported("train.step_batch_size_schedule", "batch sizes by step"),
    copy("train.decrease_batch_size_if_needed", "train.decrease_batch_size_if_needed"),
    no_effect("train.manual_gc* train.empty_unused_memory_level", kPython),
    no_effect("train.exit_signal", "SIGINT and SIGTERM: save, then stop"),
    no_effect("train.check_optimizer_step_success", kResilienceHelp),
    no_effect("train.exit_signal_handler", "SIGINT and SIGTERM: save, then stop"),

    no_effect("comm_overlap.tp_comm_overlap_cfg comm_overlap.tp_comm_bootstrap_backend", kLayout),
    no_effect("comm_overlap.data_parallel_size", kComputed),
    no_effect("env_vars.*", "variables of another program"),
    external("ft inprocess_restart", "a service that restarts jobs"),
    external("nvrx_straggler straggler", "a service that watches ranks; see `capstan explain resilience`"),
    unsupported("tensor_inspect", "recording of single tensors"),
};

// Sets a field of the same name or alias. Values that equal the default are omitted from the recipe.
bool by_name(Reader& r, const SourceItem& item) {
  const auto dot = item.key.find('.');
  if (dot == std::string::npos) return false;
  const config::FieldInfo* field = config::schema().find_spelling(item.key);
  if (!field || (item.value->kind == Node::Kind::map && field->type->kind != config::Type::Kind::map))
    return false;
  if (item.value->kind == Node::Kind::null) {
    r.draft.omit(item.from, *item.value, OmissionReason::off, "null");
    return true;
  }
  r.draft.set_if_other(field->path, *item.value, item.from);
  return true;
}

void precision(Reader& r) {
  Draft& draft = r.draft;
  const Node* section = r.find("mixed_precision");
  if (section && section->kind == Node::Kind::scalar) {
    std::string name = section->text;
    std::replace(name.begin(), name.end(), '-', '_');
    r.choose("mixed_precision", name, "mixed_precision");
    return;
  }
  if (draft.has("mixed_precision.params_dtype")) return;
  for (const char* key : {"mixed_precision.bf16", "mixed_precision.fp16"})
    if (r.is_true(key))
      r.set("mixed_precision.params_dtype", key + std::string("mixed_precision.").size(), key);
}

void sharding(Reader& r) {
  const char* field_path = "ddp.data_parallel_sharding_strategy";
  if (r.is_true("ddp.use_megatron_fsdp")) {
    r.copy(field_path, "ddp.data_parallel_sharding_strategy");
    return;
  }
  for (const char* key : {"ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"})
    if (r.is_true(key)) r.set(field_path, "optim", key);
}

void weight_decay(Reader& r) {
  // Megatron's scheduler sets the weight decay at every step, so the optimizer's own value has no effect.
  const auto style = r.text("scheduler.weight_decay_incr_style").value_or("constant");
  const bool constant = style == "constant";
  const auto start = r.real("scheduler.start_weight_decay"), end = r.real("scheduler.end_weight_decay");
  if (start && end && constant) {
    r.copy("optimizer.weight_decay", "scheduler.start_weight_decay",
           "the schedule's value is the one that counts there");
    if (r.given("optimizer.weight_decay") && r.real("optimizer.weight_decay") != start)
      r.omit("optimizer.weight_decay", OmissionReason::replaced,
             "scheduler.start_weight_decay overwrites it at every step");
    return;
  }
  r.copy("optimizer.weight_decay", "optimizer.weight_decay");
  for (const char* key : {"scheduler.start_weight_decay", "scheduler.end_weight_decay"}) r.copy(key, key);
}

// Sets training.jsonl, validation.jsonl and test.jsonl of a directory. Returns true if the dataset is of this
// kind.
bool samples(Reader& r) {
  Draft& draft = r.draft;
  const Node* target = r.find("dataset._target_");
  const auto root = r.text("dataset.dataset_root");
  if (!root && !(target && (target->text.ends_with("FinetuningDatasetConfig") ||
                            target->text.ends_with("GPTSFTDatasetConfig"))))
    return false;
  const SourceKey from = r.from(root ? "dataset.dataset_root" : "dataset._target_");
  draft.choose("dataset", "sft", from);
  draft.withdraw("dataset.kind", OmissionReason::no_effect, "samples are JSON lines");
  for (const auto& [field_path, file] : {std::pair("dataset.train_files", "training.jsonl"),
                                         std::pair("dataset.valid_files", "validation.jsonl"),
                                         std::pair("dataset.test_files", "test.jsonl")}) {
    if (root)
      draft.set(field_path, *root + "/" + file, from);
    else
      draft.assume(field_path, std::string("data/") + file, "to fill in: the file names no dataset_root");
  }
  bool packs = r.is_true("dataset.enable_offline_packing");
  for (const char* key : {"dataset.packed_sequence_specs", "dataset.offline_packing_specs"})
    if (const Node* specs = r.find(key); specs && !is_off(*specs)) {
      packs = true;
      r.omit(key, *specs, OmissionReason::no_effect, "rows are packed as they are read: dataset.packing");
    }
  draft.assume("dataset.packing", packs ? "true" : "false",
               packs ? "the file packs beforehand" : "Megatron-Bridge's default");
  for (const char* key : {"dataset.seq_length", "model.seq_length"})
    if (r.given(key)) {
      r.copy("model.seq_length", key);
      break;
    }
  return true;
}

void data(Reader& r) {
  Draft& draft = r.draft;
  if (samples(r)) return;
  const Node* blend = r.find("dataset.blend");
  if (r.given("dataset.data_path")) {
    r.copy("dataset.data_path", "dataset.data_path");
  } else if (blend && blend->kind == Node::Kind::list && !blend->items.empty() &&
             blend->items[0].kind == Node::Kind::list) {
    // The value is [prefixes, weights or null].
    const Node& prefixes = blend->items[0];
    const Node* weights =
        blend->items.size() > 1 && blend->items[1].kind == Node::Kind::list ? &blend->items[1] : nullptr;
    Node list{.kind = Node::Kind::list, .location = blend->location};
    for (size_t i = 0; i < prefixes.items.size(); ++i) {
      if (weights && i < weights->items.size()) list.items.push_back(weights->items[i]);
      list.items.push_back(prefixes.items[i]);
    }
    r.set("dataset.data_path", list, "dataset.blend");
  } else if (blend && blend->kind != Node::Kind::null) {
    r.omit("dataset.blend", *blend, OmissionReason::to_fill_in,
           "see dataset.blend: a prefix and its weight on each line");
  }
  if (r.given("dataset.blend_per_split"))
    r.omit("dataset.blend_per_split", OmissionReason::to_fill_in,
           "see dataset.train_blend, dataset.valid_blend and dataset.test_blend");
  const Node* target = r.find("dataset._target_");
  const bool mock = r.is_true("dataset.mock") || (target && target->text.ends_with("MockGPTDatasetConfig"));
  if (mock || !draft.has("dataset.data_path")) {
    if (mock)
      r.choose("dataset", "mock", r.given("dataset.mock") ? "dataset.mock" : "dataset._target_");
    else
      draft.assume_preset("dataset", "mock",
                          "to fill in: no data that is known here, these are generated tokens");
    if (r.given("dataset.split"))
      r.omit("dataset.split", OmissionReason::no_effect, "generated tokens are not split");
    draft.withdraw("dataset.kind", OmissionReason::no_effect, "the data is generated");
  } else {
    r.copy("dataset.split", "dataset.split");
    draft.assume("dataset.sample_order", "megatron",
                 "the samples that Megatron-LM would train on, in its order");
  }
  for (const char* key : {"dataset.sequence_length", "model.seq_length"})
    if (r.given(key)) {
      // The dataset determines the length of samples; the model's own value is the maximum.
      r.copy("model.seq_length", key);
      break;
    }
  if (r.given("dataset.sequence_length") && r.given("model.seq_length") &&
      r.integer("model.seq_length") != r.integer("dataset.sequence_length"))
    r.copy("model.max_position_embeddings", "model.seq_length", "samples are dataset.sequence_length long");
}

void tokenizer(Reader& r) {
  Draft& draft = r.draft;
  const auto type = r.text("tokenizer.tokenizer_type");
  const auto model = r.text("tokenizer.tokenizer_model");
  const SourceKey from = r.from("tokenizer.tokenizer_type");
  if (type == "NullTokenizer") {
    draft.choose("tokenizer", "none", from);
  } else if (type == "GPT2BPETokenizer") {
    draft.choose("tokenizer", "gpt2_bpe", from);
    for (const char* key : {"tokenizer.vocab_file", "tokenizer.merge_file"}) r.copy(key, key);
    return;
  } else if (type == "HuggingFaceTokenizer" && model &&
             (model->ends_with(".json") || model->starts_with('/') || model->starts_with('.'))) {
    draft.choose("tokenizer", "huggingface", from);
    r.set("tokenizer.tokenizer_model", model->ends_with(".json") ? *model : *model + "/tokenizer.json",
          "tokenizer.tokenizer_model");
    return;
  } else if (draft.has("tokenizer.tokenizer_model")) {
    for (const char* key : {"tokenizer.tokenizer_type", "tokenizer.tokenizer_model"})
      if (r.given(key)) r.omit(key, OmissionReason::no_effect, "the tokenizer beside the weights counts");
  } else if (model && model->ends_with(".model")) {
    draft.set("tokenizer.tokenizer_type", "sentencepiece", type ? from : r.from("tokenizer.tokenizer_model"));
    r.set("tokenizer.tokenizer_model", *model, "tokenizer.tokenizer_model");
  } else {
    draft.assume_preset("tokenizer", "none", "to fill in: the data's ids are taken as they are");
    if (type)
      draft.omit(from, *type, OmissionReason::to_fill_in,
                 "give a tokenizer.json in tokenizer.tokenizer_model");
    if (model)
      r.omit("tokenizer.tokenizer_model", *model, OmissionReason::to_fill_in, "give its tokenizer.json");
  }
  if (!draft.has("model.vocab_size") && r.given("tokenizer.vocab_size"))
    r.copy("model.vocab_size", "tokenizer.vocab_size");
}

void checkpoints(Reader& r) {
  save_and_load(r, "checkpoint.save", "checkpoint.load");
  const auto weights = r.text("checkpoint.pretrained_checkpoint");
  const auto model = r.text("model.hf_model_id");
  if (weights)
    r.omit("checkpoint.pretrained_checkpoint", *weights, OmissionReason::external, std::string(kCheckpoint));
  if (!weights && !r.draft.has("peft.scheme") && r.draft.preset("dataset") != "sft") return;
  if (model && !model->empty()) {
    base_weights(r.draft, *model, r.from("model.hf_model_id"));
    return;
  }
  r.draft.assume("checkpoint.pretrained_checkpoint", "hf:models/base",
                 "to fill in: the model whose weights are the start, as Hugging Face has it");
  if (r.draft.preset("dataset") == "sft") tokenizer_of_base(r.draft);
}

}  // namespace

void read_bridge(Draft& draft, const Node& root) {
  static const std::vector<Rule> rules = one_rule_per_key(kTable);
  Reader reader(draft, root, rules);
  for (const config::FieldInfo* field : config::schema().fields()) reader.also_known.push_back(field->path);
  reader.apply(by_name);
  precision(reader);
  sharding(reader);
  weight_decay(reader);
  data(reader);
  checkpoints(reader);
  tokenizer(reader);
  if (reader.is_true("rerun_state_machine.check_for_spiky_loss"))
    reader.set("resilience.loss_spike_action", "warn", "rerun_state_machine.check_for_spiky_loss");
  if (const auto value = reader.boolean("model.attention_softmax_in_fp32"))
    reader.omit("model.attention_softmax_in_fp32", *value ? "true" : "false",
                *value ? OmissionReason::no_effect : OmissionReason::off,
                "the softmax is computed in fp32 anyway");
  take_latent_rope(reader, "model.", 40);
  take_balance_coefficients(reader, "model.moe_aux_loss_coeff",
                            reader.integer("comm_overlap.data_parallel_size"));
  reader.account();
  const int64_t least = [&] {
    int64_t product = 1;
    for (const char* key : {"model.tensor_model_parallel_size", "model.pipeline_model_parallel_size",
                            "model.context_parallel_size"})
      product = std::min<int64_t>(product * std::clamp<int64_t>(reader.integer(key).value_or(1), 1, 1 << 24),
                                  1 << 24);
    return product;
  }();
  if (least > 1)
    draft.assume("dist.world_size", std::to_string(least),
                 "the minimum for one replica; the file does not give the number of ranks");
}

}  // namespace capstan::importers
