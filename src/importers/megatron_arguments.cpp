// Imports a command line of Megatron-LM's pretrain_gpt.py, alone or in a shell script, with current and
// retired options.
#include <algorithm>
#include <set>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/core/text_lines.hpp"
#include "importers/format_readers.hpp"
#include "importers/reasons.hpp"
#include "importers/shell_words.hpp"

namespace capstan::importers {

using config::Node;

namespace {

void window_size(Reader& reader, const SourceItem& item) {
  // Megatron counts the tokens before the query, and has a second number for those after it.
  std::string text = item.value->kind == Node::Kind::scalar ? item.value->text : "";
  if (item.value->kind == Node::Kind::list && !item.value->items.empty()) text = item.value->items[0].text;
  std::string digits = text.substr(0, text.find(','));
  std::erase_if(digits, [](char c) { return c == '(' || c == ' '; });
  const auto before = parse_int(digits);
  if (before && *before >= 0 && *before < (int64_t{1} << 31))
    reader.draft.set("model.window_size", std::to_string(*before + 1), item.from,
                     "the query itself counts here");
  else
    reader.draft.omit(item.from, *item.value, OmissionReason::value, "a pair such as 4095,0 is expected");
}

// Megatron takes every run of digits and points as a number, whatever is between them, such as quotes inside
// quotes.
void data_split(Reader& reader, const SourceItem& item) {
  if (item.value->kind != Node::Kind::scalar) {
    reader.draft.set("dataset.split", *item.value, item.from);
    return;
  }
  std::string numbers;
  int count = 0;
  bool inside = false;
  for (const char c : item.value->text) {
    const bool part = is_digit(c) || c == '.';
    if (part && !inside && count++ > 0) numbers += ',';
    if (part) numbers += c;
    inside = part;
  }
  for (; count > 0 && count < 3; ++count) numbers += ",0";
  reader.draft.set("dataset.split", numbers.empty() ? item.value->text : numbers, item.from);
}

void loss_scale(Reader& reader, const SourceItem& item) {
  const auto scale = reader.real(item.key);
  if (!scale) return;
  if (*scale == 0)
    reader.draft.set("mixed_precision.loss_scale", "null", item.from, "0 is dynamic");
  else
    reader.draft.set("mixed_precision.loss_scale", *item.value, item.from);
}

void interpolation(Reader& reader, const SourceItem& item) {
  const auto factor = reader.real(item.key);
  if (!factor) return;
  if (*factor == 1) {
    reader.draft.omit(item.from, *item.value, OmissionReason::off, "positions as they are");
    return;
  }
  reader.draft.set("model.rope_scaling", "true", item.from);
  reader.draft.set("model.rope_scaling_type", "linear", item.from);
  reader.draft.set("model.rope_scaling_factor", *item.value, item.from);
}

void dataloader_type(Reader& reader, const SourceItem& item) {
  const bool single = item.value->text == "single";
  reader.draft.omit(
      item.from, *item.value, single ? OmissionReason::no_effect : OmissionReason::unsupported,
      single ? "samples are read in the dataset's order" : "samples are read in the dataset's order, once");
}

// Options that have another name than the recipe's field, or the same name with another meaning.
constexpr Rule kTable[] = {
    // model
    copy("--encoder-num-layers", "model.num_layers"),
    copy("--encoder-seq-length", "model.seq_length"),
    deferred("--vocab-size", "model.vocab_size"),
    deferred("--padded-vocab-size", {}, "follows from the vocabulary; padded rows never enter the softmax"),
    flag("--group-query-attention", "model.num_query_groups"),
    deferred("--num-query-groups", "model.num_query_groups"),
    copy("--num-key-value-heads", "model.num_query_groups"),
    flag("--swiglu --quick-geglu", "model.gated_linear_unit, model.activation_func"),
    flag("--squared-relu --openai-gelu --no-bias-gelu-fusion", "model.activation_func"),
    deferred("--position-embedding-type", "model.position_embedding_type"),
    flag("--use-rotary-position-embeddings --no-position-embedding", "model.position_embedding_type"),
    set_if_present("--use-rope-scaling", "model.rope_scaling", "true"),
    copy("--norm-epsilon", "model.layernorm_epsilon"),
    copy("--layer-norm-epsilon", "model.layernorm_epsilon"),
    set_if_present("--apply-layernorm-1p", "model.layernorm_zero_centered_gamma", "true"),
    set_if_present("--disable-bias-linear", "model.add_bias_linear", "false"),
    set_if_present("--untie-embeddings-and-output-weights", "model.share_embeddings_and_output_weights",
                   "false"),
    call("--window-size", window_size, "model.window_size"),
    copy("--num-experts", "model.num_moe_experts"),
    call("--moe-layer-freq", take_moe_layers, "model.moe_layer_freq, model.moe_first_dense_layers"),
    copy("--moe-router-load-balancing-type", "model.moe_router_load_balancing_type"),
    deferred("--moe-aux-loss-coeff", "model.moe_aux_loss_coeff"),
    unsupported("--init-method-xavier-uniform",
                "Xavier initialization; weights are initialized from a normal distribution"),
    call("--rotary-seq-len-interpolation-factor", interpolation,
         "model.rope_scaling, model.rope_scaling_type, model.rope_scaling_factor"),
    deferred("--rope-type", "model.rope_scaling, model.rope_scaling_type"),
    deferred("--rotary-scaling-factor", "model.rope_scaling_factor"),
    deferred("--mscale", "model.rope_scaling_mscale, model.rope_scaling_attention_factor"),
    deferred("--mscale-all-dim", "model.rope_scaling_mscale_all_dim"),
    unsupported("--fp16-lm-cross-entropy", "cross entropy in fp16; it is computed in fp32"),
    unsupported("--spec", "layers specified by a Python module"),
    unsupported("--kitchen-*", "quantization by another library"),
    unsupported("--mamba-* --hybrid-*", "Mamba layers"),
    unsupported("--retro-*", "retrieval"),
    unsupported("--img-* --vision-*", "images"),
    unsupported("--decoder-num-layers --decoder-seq-length --pipeline-model-parallel-split-rank "
                "--encoder-*-parallel-size",
                "encoder-decoder models"),
    unsupported("--mask-prob --short-seq-prob --bert-*", "masked language models"),
    no_effect("--attention-softmax-in-fp32", "the softmax is computed in fp32 anyway"),
    no_effect("--apply-query-key-layer-scaling", "avoids overflow in fp16; softmax is computed in fp32"),
    no_effect("--no-query-key-layer-scaling", "softmax is computed in fp32 without rescaling"),
    no_effect("--no-persist-layer-norm --no-*-fusion --use-mcore-models --use-legacy-models "
              "--transformer-impl --use-flash-attn* --attention-backend --scaled-*-softmax-fusion "
              "--cross-entropy-loss-fusion --cross-entropy-* --te-rng-tracker",
              kKernels),
    translate("--cuda-graph-impl", "model.cuda_graph_impl",
              "none=none local=local transformer_engine=local full_iteration=local"),
    set_if_present("--enable-cuda-graph --external-cuda-graph", "model.cuda_graph_impl", "local"),
    copy("--cuda-graph-warmup-steps", "model.cuda_graph_warmup_steps"),
    no_effect("--cuda-graph-*", "a graph has the kernels of a layer between two transfers"),
    no_effect("--inference-*", "this is a recipe for training"),
    no_effect("--deterministic-mode", "runs are deterministic anyway"),

    // recomputation, in three generations of options
    flag("--recompute-activations", "model.recompute_granularity"),
    flag("--checkpoint-activations", "model.recompute_granularity, model.recompute_method"),
    deferred("--activations-checkpoint-method", "model.recompute_method, model.recompute_granularity"),
    deferred("--activations-checkpoint-granularity", "model.recompute_granularity"),
    deferred("--activations-checkpoint-num-layers --checkpoint-num-layers", "model.recompute_num_layers"),
    flag("--deepspeed-activation-checkpointing", "model.recompute_granularity, model.recompute_method"),
    set_if_present("--distribute-checkpointed-activations", "model.distribute_saved_activations", "true"),
    no_effect("--partition-activations", "see --distribute-saved-activations"),

    // precision
    flag("--fp16 --bf16", "mixed_precision (preset)"),
    flag("--accumulate-allreduce-grads-in-fp32", "mixed_precision.grad_reduce_in_fp32"),
    flag("--grad-reduce-in-bf16", "mixed_precision (preset)"),
    call("--loss-scale", loss_scale, "mixed_precision.loss_scale"),
    copy("--min-scale", "mixed_precision.min_loss_scale"),
    no_effect("--dynamic-loss-scale", "the loss scale is dynamic unless --loss-scale gives it"),
    copy("--fp8-format", "mixed_precision.fp8"),
    set_if_present("--fp8-hybrid", "mixed_precision.fp8", "hybrid"),
    set_if_present("--fp8-e4m3", "mixed_precision.fp8", "e4m3"),
    set_if_present("--no-fp8-wgrad", "mixed_precision.fp8_wgrad", "false"),
    no_effect("--fp8-interval", "scales are updated in each step"),

    // ranks
    copy("--model-parallel-size", "dist.tensor_model_parallel_size"),
    copy("--num-virtual-stages-per-pipeline-rank", "dist.virtual_pipeline_model_parallel_size"),
    copy("--decoder-first-pipeline-num-layers", "dist.num_layers_in_first_pipeline_stage"),
    copy("--decoder-last-pipeline-num-layers", "dist.num_layers_in_last_pipeline_stage"),
    flag("--sequence-parallel", "dist.sequence_parallel"),
    set_if_present("--no-overlap-p2p-communication", "comm_overlap.overlap_p2p_comm", "false"),
    copy("--distributed-timeout-minutes", "resilience.timeout"),
    no_effect("--distributed-backend", "follows the device: `capstan explain dist.distributed_backend`"),
    no_effect("--DDP-impl", "there is one implementation of data parallelism"),
    no_effect("--local-rank", "the launcher sets the rank"),
    no_effect("--lazy-mpu-init", kPython),
    no_effect("--use-cpu-initialization", "initial weights are the same on any device"),
    no_effect("--use-contiguous-buffers-in-* --no-contiguous-buffers-in-* --use-ring-exchange-p2p "
              "--no-scatter-gather-tensors-in-pipeline --scatter-gather-tensors-in-pipeline "
              "--no-async-tensor-model-parallel-allreduce --async-tensor-model-parallel-allreduce "
              "--no-delay-grad-reduce --delay-grad-reduce --ddp-average-in-collective --ddp-pad-buckets-* "
              "--tp-comm-* --nccl-* --use-sharp* --high-priority-* --disable-gloo-process-groups "
              "--enable-gloo-process-groups",
              kLayout),
    copy("--ddp-bucket-size", "ddp.bucket_size"),
    flag("--use-distributed-optimizer --use-torch-fsdp2 --use-megatron-fsdp --use-custom-fsdp",
         "ddp.data_parallel_sharding_strategy"),
    deferred("--data-parallel-sharding-strategy", "ddp.data_parallel_sharding_strategy"),
    translate("--zero-stage", "ddp.data_parallel_sharding_strategy",
              "0=no_shard 1=optim 2=optim_grads 3=optim_grads_params"),
    no_effect("--deepspeed", "which trainer runs"),
    to_fill_in("--deepspeed-config", "a second file: `capstan recipe import` reads it too"),
    no_effect("--no-pipeline-parallel", "the number of stages is --pipeline-model-parallel-size"),

    // optimizer
    copy("--muon-nesterov", "optimizer.muon_use_nesterov"),
    set_if_present("--muon-no-split-qkv", "optimizer.muon_split_qkv", "false"),
    no_effect("--muon-fp32-matmul-prec", "the iterations compute in fp32"),
    no_effect("--overlap-cpu-optimizer-d2h-h2d", "copies of an offloaded optimizer always overlap"),
    no_effect("--no-pin-cpu-grads --no-pin-cpu-params", kLayout),
    no_effect("--use-torch-optimizer-for-cpu-offload", kKernels),

    // training
    copy("--batch-size", "train.micro_batch_size"),
    copy("--warmup", "scheduler.lr_warmup_fraction"),
    deferred("--seed", "rng.seed, dataset.random_seed"),
    copy("--rampup-batch-size", "train.rampup_batch_size"),
    unsupported("--step-batch-size-schedule", "batch sizes by step"),
    set_if_present("--decrease-batch-size-if-needed", "train.decrease_batch_size_if_needed", "true"),
    unsupported("--iterations-to-skip", "skipping of iterations"),
    set_if_present("--check-for-nan-in-loss-and-grad", "resilience.check_for_nan", "true"),
    set_if_present("--no-check-for-nan-in-loss-and-grad", "resilience.check_for_nan", "false"),
    no_effect("--check-for-large-grads", "see `capstan explain resilience.grad_norm_spike_action`"),
    no_effect("--check-weight-hash-across-dp-replicas-interval",
              "replicas cannot differ: reductions are bitwise"),
    set_if_present("--exit-signal-handler", "train.exit_signal_handler", "true"),
    no_effect(
        "--exit-signal-handler-for-dataloader --manual-gc* --empty-unused-memory-level --train-sync-interval",
        kPython),
    unsupported("--skip-train", "evaluation alone; `capstan eval` does it"),
    no_effect("--full-validation", "eval_iters counts the batches"),

    // data and tokenizer
    deferred("--data-path", "dataset.data_path"),
    flag("--mock-data", "dataset (preset)"),
    call("--split", data_split, "dataset.split"),
    deferred("--train-data-path", "dataset.train_blend"),
    deferred("--valid-data-path", "dataset.valid_blend"),
    deferred("--test-data-path", "dataset.test_blend"),
    to_fill_in("--data-args-path",
               "a second file with the paths of the data; write them into dataset.data_path"),
    to_fill_in("--per-split-data-args-path", "a second file with the data's paths"),
    copy("--data-cache-path", "dataset.path_to_cache"),
    deferred("--tokenizer-type", "tokenizer (preset), tokenizer.tokenizer_type"),
    deferred("--tokenizer-model", "tokenizer.tokenizer_model, model.vocab_size"),
    deferred("--vocab-file", "tokenizer.vocab_file"),
    deferred("--merge-file", "tokenizer.merge_file"),
    external("--tokenizer-name-or-path", "a name on a model hub; give a tokenizer.json"),
    external("--tokenizer-hf-* --tiktoken-*", "options of another tokenizer library"),
    external("--trust-remote-code", "nothing is downloaded, and no code from a file runs"),
    unsupported("--vocab-extra-ids", "ids beside the tokenizer's"),
    no_effect("--dataset-impl --data-impl", "indexed datasets are mapped, whatever their history"),
    no_effect("--mmap-warmup --no-mmap-bin-files", kLayout),
    no_effect("--no-create-attention-mask-in-dataloader", kKernels),
    no_effect("--num-dataset-builder-threads", kLayout),
    call("--dataloader-type", dataloader_type, {},
         "samples are read in the order of the dataset; only `single` corresponds to it"),
    no_effect("--mid-level-dataset-surplus", "blends are built exactly"),

    // fine-tuning
    to_fill_in("--sft", "dataset=sft with dataset.train_files, and a tokenizer: see `capstan help data`"),
    to_fill_in("--sft-tokenizer-prompt-format", "see tokenizer.chat_template"),

    // checkpoints
    deferred("--save", "checkpoint.save"),
    deferred("--load", {}, "{resume_run}; weights of another trainer come through Hugging Face files"),
    flag("--finetune", {}, "`checkpoint.pretrained_checkpoint` starts from weights alone"),
    external("--pretrained-checkpoint", kCheckpoint),
    set_if_present("--no-save-optim", "checkpoint.save_optim", "false"),
    set_if_present("--no-load-optim", "checkpoint.load_optim", "false"),
    no_effect("--no-save-rng --no-load-rng", "randomness has no state: it follows from seed and step"),
    no_effect("--use-checkpoint-args",
              "the recipe defines the model, and a checkpoint that differs is refused"),
    no_effect("--use-mp-args-from-checkpoint-args", "checkpoints load into any layout"),
    no_effect("--exit-on-missing-checkpoint", "a missing checkpoint is an error anyway"),
    no_effect("--ckpt-* --dist-ckpt-* --use-dist-ckpt --auto-detect-ckpt-format --use-persistent-ckpt-worker "
              "--non-persistent-*",
              kStore),

    // records
    no_effect("--log-*", kLog),
    copy("--log-interval", "logger.log_interval"),
    copy("--log-params-norm", "logger.log_params_norm"),
    copy("--log-num-zeros-in-grad", "logger.log_num_zeros_in_grad"),
    no_effect("--timing-log-* --no-log-* --tensorboard-queue-size", kLog),
    no_effect("--profile --use-pytorch-profiler", "`profiling.trace=true` writes a trace"),
    external("--wandb-* --mlflow-*", "a service; metrics.jsonl and TensorBoard events are what a run writes"),
    external("--one-logger-* --enable-one-logger --no-one-logger", "a service"),
    external("--enable-ft-package", "a service that restarts jobs"),
};

// Finds the field with the name of an option: `--num-layers` is model.num_layers. Excludes sections whose
// short names have other meanings in Megatron.
const config::FieldInfo* field_of(std::string_view option) {
  std::string name(option.substr(2));
  std::replace(name.begin(), name.end(), '-', '_');
  for (const config::FieldInfo* field : config::schema().fields())
    if (field->name == name && !field->section.empty() && field->section != "peft" &&
        field->section != "tokenizer" && name != "trace" && name != "kind" && name != "device" &&
        name != "threads" && name != "preset")
      return field;
  return nullptr;
}

bool by_name(Reader& reader, const SourceItem& item) {
  const config::FieldInfo* field = field_of(item.key);
  if (field) reader.draft.set(field->path, *item.value, item.from);
  return field != nullptr;
}

// Whether the option takes no value.
bool is_flag(std::string_view option) {
  if (const Rule* rule = find_rule(megatron_rules(), option)) {
    if (rule->kind == Rule::Kind::set_if_present) return true;
    if (rule->kind == Rule::Kind::deferred) return rule->flag;
    if (rule->kind == Rule::Kind::copy) {
      const config::FieldInfo* field = config::schema().find_field(rule->path);
      return field && field->type->kind == config::Type::Kind::boolean;
    }
    return false;
  }
  const config::FieldInfo* field = field_of(option);
  return field && field->type->kind == config::Type::Kind::boolean;
}

// Maximum number of values of an option; further words are reported as stray.
size_t most_values(std::string_view option) {
  constexpr size_t kAny = SIZE_MAX;
  const Rule* rule = find_rule(megatron_rules(), option);
  if (rule && (rule->kind == Rule::Kind::omit || rule->kind == Rule::Kind::call)) return kAny;
  if (rule && rule->kind == Rule::Kind::deferred)
    return option.ends_with("data-path") || option == "--moe-aux-loss-coeff" ? kAny : 1;
  const config::FieldInfo* field = rule ? config::schema().find_field(rule->path) : field_of(option);
  if (!field) return kAny;
  const auto kind = field->type->kind;
  return kind == config::Type::Kind::list || kind == config::Type::Kind::map ? kAny : 1;
}

// Maximum number of words of a command, because the lookup of options takes linear time.
constexpr size_t kMaxWords = 10'000;

std::string program_of(const std::string& word) {
  const std::string name = word.substr(word.rfind('/') + 1);
  return name.ends_with(".py") && name.find("pretrain") != std::string::npos ? name : std::string();
}

bool is_option(const std::string& word) {
  return word.size() > 2 && word.starts_with("--") && word[2] != '-' && word[2] != '=';
}

// Splits words that are quoted commands ("srun bash -c '…'") into their words. Each byte keeps its offset.
ShellCommand split_quoted(const ShellCommand& command) {
  ShellCommand result;
  for (const ShellWord& word : command) {
    if (word.text.find("pretrain") == std::string::npos ||
        word.text.find_first_of(" \n") == std::string::npos) {
      result.push_back(word);
      continue;
    }
    ShellWord part;
    for (size_t i = 0; i <= word.text.size(); ++i) {
      const char c = i < word.text.size() ? word.text[i] : ' ';
      if (c == ' ' || c == '\n' || c == '\t' || c == '\\') {
        if (!part.text.empty()) result.push_back(std::move(part));
        part = {};
        continue;
      }
      if (part.text.empty()) part.begin = word.offsets[i], part.unknown_reason = word.unknown_reason;
      part.text += c;
      part.offsets.push_back(word.offsets[i]);
    }
  }
  return result;
}

// Reads the number of ranks from the launcher's words before the program.
class Launcher {
 public:
  Launcher(Draft& draft, const config::TextLines& lines) : draft_(draft), lines_(lines) {}

  // Returns true if the word belongs to the launcher.
  void read(const ShellCommand& command, size_t program, MegatronLaunch& launch) {
    for (size_t i = 0; i < program; ++i) {
      std::string key = command[i].text.substr(0, command[i].text.find('='));
      const bool joined = key.size() < command[i].text.size();
      std::replace(key.begin() + static_cast<long>(std::min<size_t>(2, key.size())), key.end(), '_', '-');
      const bool mpi = key == "-np" || key == "-n" || key == "--ntasks";
      if (key == "torchrun" || key == "deepspeed" || key == "torch.distributed.launch" ||
          key == "torch.distributed.run" || key.ends_with("mpirun") || key == "srun")
        launch.launched = true;
      if (!mpi && key != "--nproc-per-node" && key != "--nnodes" && key != "--num-gpus" &&
          key != "--num-nodes") {
        if (key.starts_with("--")) other(command[i]);
        continue;
      }
      const ShellWord& value = joined || i + 1 >= program ? command[i] : command[i + 1];
      const std::string text = joined ? value.text.substr(key.size() + 1) : value.text;
      const SourceKey from{key, lines_.location(command[i].begin)};
      const auto number = parse_int(text);
      if (number && *number > 0 && *number < (1 << 24) && ranks_ * *number < (1 << 24)) {
        ranks_ *= *number;
        if (!known_) first_ = from;
        known_ = true;
      } else {
        draft_.omit(from, text, OmissionReason::to_fill_in,
                    (value.unknown_reason.empty() ? "not a number of ranks" : value.unknown_reason) +
                        "; dist.world_size gives the number of ranks");
        unclear_ = true;
      }
      if (!joined) ++i;
    }
    if (known_ && !unclear_)
      draft_.set("dist.world_size", std::to_string(ranks_), first_, "ranks of all nodes");
  }

 private:
  void other(const ShellWord& word) {
    draft_.omit({word.text.substr(0, word.text.find('=')), lines_.location(word.begin)}, "",
                OmissionReason::no_effect, "the launcher's; " + std::string(kRanks));
  }
  Draft& draft_;
  const config::TextLines& lines_;
  int64_t ranks_ = 1;
  bool known_ = false, unclear_ = false;
  SourceKey first_;
};

// Converts the options and their values to a mapping, to which the table applies.
class CommandLine {
 public:
  using Alternatives = std::map<uint32_t, std::vector<ShellAlternative>>;
  CommandLine(Draft& draft, const config::TextLines& lines, const Alternatives& alternatives)
      : draft_(draft), lines_(lines), alternatives_(alternatives) {
    root_.kind = Node::Kind::map;
  }

  void read(const ShellCommand& command, size_t begin) {
    size_t i = begin;
    while (i < command.size()) {
      const ShellWord& word = command[i++];
      read_alternatives(word);
      if (word.text.starts_with('>') || word.text == "2>" || word.text.starts_with("2>") ||
          word.text.starts_with("&>") || word.text == "<") {
        // Skips the file name of a redirection.
        if (word.text.ends_with('>') || word.text == "<") ++i;
        continue;
      }
      if (!is_option(word.text)) {
        stray(word);
        continue;
      }
      const auto equals = word.text.find('=');
      std::string key = word.text.substr(0, equals);
      std::replace(key.begin() + 2, key.end(), '_', '-');
      const SourceKey from{key, lines_.location(word.begin)};
      std::vector<Node> values;
      std::string unknown_reason = word.unknown_reason;
      if (equals != std::string::npos)
        values.push_back(Node::scalar(word.text.substr(equals + 1), from.location));
      else if (!is_flag(key))
        while (i < command.size() && values.size() < most_values(key) && !is_option(command[i].text) &&
               !command[i].text.starts_with('>') && !command[i].text.starts_with("2>") &&
               !command[i].text.starts_with("&>")) {
          const ShellWord& value = command[i++];
          if (unknown_reason.empty()) unknown_reason = value.unknown_reason;
          values.push_back(Node::scalar(with_alternatives(value), lines_.location(value.begin)));
        }
      add(key, from, std::move(values), unknown_reason);
    }
  }
  const Node& root() const { return root_; }

 private:
  // Calls see(offset in the word, value) for each value that other branches give to a part of the word.
  template <class See>
  void each_alternative(const ShellWord& word, See see) const {
    for (size_t k = 0; k < std::min(word.offsets.size(), word.marks.size()); ++k)
      if (word.marks[k] > 0)
        if (const auto found = alternatives_.find(word.offsets[k]); found != alternatives_.end())
          for (const ShellAlternative& one : found->second) see(k, one);
  }

  // Lists the options that other branches give in place of this word.
  void read_alternatives(const ShellWord& word) {
    each_alternative(word, [&](size_t at, const ShellAlternative& one) {
      ShellCommand command;
      std::string text = one.text;
      std::replace_if(
          text.begin(), text.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
      for (const std::string_view part : split(text, ' ')) {
        if (part.empty()) continue;
        ShellWord& next = command.emplace_back();
        next.text = part;
        next.unknown_reason = word.unknown_reason;
        next.begin = one.begin;
      }
      if (at == 0 && !command.empty() && is_option(command[0].text)) read(command, 0);
    });
  }

  // The text of a value, with those that other branches give: "32 or 40".
  std::string with_alternatives(const ShellWord& word) const {
    std::string text;
    each_alternative(word, [&](size_t at, const ShellAlternative& one) {
      if (!one.text.starts_with("--")) text += word.text.substr(0, at) + one.text + " or ";
    });
    return text + word.text;
  }

  void stray(const ShellWord& word) {
    const SourceKey from{word.text, lines_.location(word.begin)};
    if (!word.unknown_reason.empty())
      draft_.omit(from, "", OmissionReason::to_fill_in, word.unknown_reason);
    else
      draft_.omit(from, "", OmissionReason::unknown, "an argument without an option before it");
  }

  void add(const std::string& key, const SourceKey& from, std::vector<Node> values,
           const std::string& unknown_reason) {
    Node value = Node::scalar("true", from.location);
    if (values.size() == 1) value = std::move(values[0]);
    if (values.size() > 1) {
      value = Node{.kind = Node::Kind::list, .location = values[0].location};
      value.items = std::move(values);
    } else if (values.empty() && !is_flag(key) && needs_value(key)) {
      draft_.omit(from, "", OmissionReason::value, "the option needs a value");
      return;
    }
    if (!unknown_reason.empty()) {
      draft_.omit(from, value, OmissionReason::to_fill_in, unknown_reason);
      return;
    }
    for (size_t i = 0; i < root_.keys.size(); ++i)
      if (root_.keys[i] == key) {
        if (shown(root_.items[i]) != shown(value))
          draft_.omit({key, root_.key_locations[i]}, root_.items[i], OmissionReason::replaced,
                      "the option is given again");
        root_.items[i] = std::move(value);
        root_.key_locations[i] = from.location;
        return;
      }
    root_.add(key, from.location, std::move(value));
  }

  static bool needs_value(const std::string& key) {
    const Rule* rule = find_rule(megatron_rules(), key);
    return rule ? rule->kind != Rule::Kind::omit : field_of(key) != nullptr;
  }

  Draft& draft_;
  const config::TextLines& lines_;
  const Alternatives& alternatives_;
  Node root_;
};

// Lists the undecided branches and loops on which the command depends.
void report_branches(Draft& draft, const ShellScript& script, const ShellCommand& options, size_t around,
                     const config::TextLines& lines) {
  std::set<size_t> used;
  if (around > 0) used.insert(around);
  for (const ShellWord& word : options)
    for (const uint16_t mark : word.marks)
      if (mark > 0) used.insert(mark);
  for (const size_t index : used) {
    const ShellBranch& branch = script.branches[index - 1];
    const bool loop = branch.text.starts_with("for ") || branch.text.starts_with("while ") ||
                      branch.text.starts_with("until ") || branch.text.starts_with("select ");
    std::string reason =
        loop ? "a loop is not run" : "not decided: commands are not executed, and files are not looked at";
    if (!branch.variables.empty()) {
      reason = "not decided: the script does not set `$" + join(branch.variables, "`, `$") + "`; choose with";
      for (const std::string& name : branch.variables) {
        reason += " {variable}" + name + "=VALUE";
        if (const auto found = branch.defaults.find(name); found != branch.defaults.end())
          reason += " (the script's default: `" + found->second + "`)";
      }
    } else {
      reason += "; write what it sets into the recipe";
    }
    if (index == around) reason = "the command runs in it; " + reason;
    draft.omit_branch({branch.text, lines.location(branch.begin)}, reason);
  }
}

}  // namespace

std::span<const Rule> megatron_rules() {
  static const std::vector<Rule> rules = one_rule_per_key(kTable);
  return rules;
}

void read_megatron(Draft& draft, const config::Source& source,
                   const std::map<std::string, std::string>& variables) {
  const ShellScript script = read_shell(source.text, variables);
  const config::TextLines lines(0, source.text);
  MegatronLaunch launch;
  CommandLine options(draft, lines, script.alternatives);
  Launcher launcher(draft, lines);
  bool found = false;
  for (size_t index = 0; index < script.commands.size(); ++index) {
    const ShellCommand& full = script.commands[index];
    if (full.size() > kMaxWords)
      fail(ErrorCode::format, "a command of more than " + std::to_string(kMaxWords) + " words");
    const ShellCommand command = split_quoted(full);
    size_t program = 0;
    while (program < command.size() && program_of(command[program].text).empty()) ++program;
    const bool bare = program == command.size() && !command.empty() && is_option(command[0].text);
    if (program == command.size() && !bare) continue;
    const ShellWord& first = command[bare ? 0 : program];
    if (found) {
      draft.omit({first.text, lines.location(first.begin)}, "", OmissionReason::to_fill_in,
                 "a second command; the first one is the recipe");
      continue;
    }
    found = true;
    if (!bare) {
      launch.program = program_of(first.text);
      launcher.read(command, program, launch);
      if (!launch.program.starts_with("pretrain_gpt"))
        draft.omit({first.text, lines.location(first.begin)}, "", OmissionReason::unsupported,
                   "another kind of model; read as if it were pretrain_gpt.py");
    }
    const size_t from = bare ? 0 : program + 1;
    report_branches(draft, script, {command.begin() + static_cast<long>(from), command.end()},
                    script.branch_of[index], lines);
    options.read(command, from);
  }
  for (const ShellUnread& unread : script.unread)
    draft.omit({unread.text, lines.location(unread.begin)}, "", OmissionReason::to_fill_in,
               "not executed, and may set variables; write those that matter into the recipe");
  if (!found)
    draft.omit({source.name, {}}, "", OmissionReason::to_fill_in,
               "no command with pretrain_gpt.py, and no options");
  Reader reader(draft, options.root(), megatron_rules());
  for (const config::FieldInfo* field : config::schema().fields()) {
    std::string option = "--" + field->name;
    std::replace(option.begin(), option.end(), '_', '-');
    if (field_of(option) == field) reader.also_known.push_back(std::move(option));
  }
  reader.apply(by_name);
  finish_megatron(reader, launch);
}

}  // namespace capstan::importers
