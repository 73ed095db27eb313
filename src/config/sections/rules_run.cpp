// Checkpoints, tokenizer, adapters and anomaly detection of a run.
#include <algorithm>
#include <functional>

#include "base/text.hpp"
#include "config/sections/adapter_targets.hpp"
#include "config/sections/conditions.hpp"
#include "config/sections/moe_layers.hpp"
#include "config/sections/rule_tools.hpp"

namespace capstan::config {

RULES_OF_FILE(run_rules)

namespace {

// Vocabulary of the byte tokenizer: one id for each byte, and one for the end of a document.
constexpr int64_t kByteVocabulary = 257;

// With adapters checkpoint.load holds the adapters alone, and checkpoint.pretrained_checkpoint their base.
RULE("R0901", resume_excludes_initial_weights, "a run continues another or starts from weights, not both",
     "checkpoint.load", "checkpoint.pretrained_checkpoint") {
  if (!c.checkpoint.load || !c.checkpoint.pretrained_checkpoint || c.peft) return;
  report
      .error(
          "`checkpoint.load` continues a run, `checkpoint.pretrained_checkpoint` starts one from weights; "
          "they exclude each other")
      .help("keep one of them");
}

RULE("R0902", retained_are_saved, "save_retain_interval is a multiple of save_interval",
     "checkpoint.save_retain_interval", "checkpoint.save_interval") {
  const auto& k = c.checkpoint;
  if (!k.save_retain_interval) return;
  if (!k.save_interval)
    report.error("`checkpoint.save_retain_interval` needs `checkpoint.save_interval`")
        .help("set checkpoint.save_interval");
  else if (*k.save_retain_interval % *k.save_interval != 0)
    report
        .error("`checkpoint.save_retain_interval` " + to_text(*k.save_retain_interval) +
               " is not a multiple of `checkpoint.save_interval` " + to_text(*k.save_interval))
        .help("nearest legal save_retain_interval: " +
              nearest_multiples(*k.save_retain_interval, *k.save_interval));
}

RULE("R0903", some_checkpoint_is_kept, "at least one checkpoint is kept", "checkpoint.most_recent_k") {
  if (c.checkpoint.most_recent_k != 0) return;
  report.error("`checkpoint.most_recent_k` 0 keeps no checkpoint")
      .help("set it to 1 or more, or to -1 to keep all checkpoints");
}

RULE("R0904", adapters_need_a_model,
     "adapters need a base model: checkpoint.pretrained_checkpoint, or peft.random_base",
     "checkpoint.pretrained_checkpoint", "peft.random_base") {
  if (!c.peft) return;
  if (c.peft->random_base && c.checkpoint.pretrained_checkpoint)
    report.error("`peft.random_base` and `checkpoint.pretrained_checkpoint` exclude each other")
        .help("keep the checkpoint, unless the recipe is only tried out");
  if (c.peft->random_base || c.checkpoint.pretrained_checkpoint) return;
  report.error("`peft` needs a base model, and `checkpoint.pretrained_checkpoint` is not set")
      .help(
          "set checkpoint.pretrained_checkpoint to a run, a checkpoint, or hf:DIR for a model of "
          "Transformers");
}

RULE("R0905", adapters_have_targets, "peft.target_modules is not empty", "peft.target_modules") {
  if (!c.peft || !c.peft->target_modules.empty()) return;
  report.error("`peft.target_modules` is empty")
      .help("for example, set peft.target_modules=[linear_qkv, linear_proj, linear_fc1, linear_fc2]");
}

bool matches_any(const std::string& name, const std::vector<std::string>& layers) {
  return std::any_of(layers.begin(), layers.end(),
                     [&](const auto& layer) { return matches_layer(name, layer); });
}

// The scheme without magnitudes, with which experts have adapters too.
PeftScheme without_magnitudes(PeftScheme scheme) {
  return adapts_parts(scheme) ? PeftScheme::canonical_lora : PeftScheme::lora;
}

RULE("R0912", adapter_targets_exist,
     "every target module is a layer of the model; experts have no adapters with magnitudes (DoRA)",
     "peft.target_modules", "peft.exclude_modules", "peft.scheme", "model.num_moe_experts",
     "model.moe_layer_freq", "model.moe_first_dense_layers", "model.moe_shared_expert_intermediate_size") {
  if (!c.peft) return;
  const auto layers = adaptable_layers(c.model, c.peft->scheme);
  if (layers.empty()) return;
  const PeftScheme other = without_magnitudes(c.peft->scheme);
  const auto with_experts = adaptable_layers(c.model, other);
  std::vector<std::string> modules;
  for (const std::string& layer : layers) {
    std::string module = layer.substr(layer.rfind('.') + 1);
    if (std::find(modules.begin(), modules.end(), module) == modules.end())
      modules.push_back(std::move(module));
  }
  const auto check = [&](const char* field, const std::vector<std::string>& names,
                         const std::vector<std::string>& known) {
    for (const std::string& name : names) {
      if (matches_any(name, known)) continue;
      const bool of_experts = matches_any(name, with_experts);
      const auto near = near_matches(name, modules, 2);
      report
          .error("`" + std::string(field) + "`: " +
                 (of_experts
                      ? "experts have no adapters with magnitudes, " + in_quotes(name) + " is not adapted"
                      : in_quotes(name) + " is not a layer of this model"))
          .at(field)
          .help((of_experts     ? "set peft.scheme=" + std::string(enum_name(other)) + ", or leave it out; "
                 : near.empty() ? ""
                                : "did you mean `" + near[0] + "`? ") +
                "layers are " + join(modules, ", ") + ", or a pattern such as `*.layers.0.*." + modules[0] +
                "`");
    }
  };
  check("peft.target_modules", c.peft->target_modules, layers);
  check("peft.exclude_modules", c.peft->exclude_modules, with_experts);
}

RULE("R0922", experts_have_no_magnitudes,
     "with DoRA, targets that experts would have too adapt the other layers alone", "peft.target_modules",
     "peft.exclude_modules", "peft.scheme", "model.num_moe_experts", "model.moe_layer_freq",
     "model.moe_first_dense_layers", "model.moe_shared_expert_intermediate_size") {
  if (!c.peft || !has_magnitudes(c.peft->scheme)) return;
  const auto layers = adaptable_layers(c.model, c.peft->scheme);
  auto experts = adaptable_layers(c.model, without_magnitudes(c.peft->scheme));
  std::erase_if(experts, [&](const auto& layer) {
    return !is_layer_of_experts(layer) || std::ranges::any_of(c.peft->exclude_modules, [&](const auto& name) {
      return matches_layer(name, layer);
    });
  });
  for (const std::string& name : c.peft->target_modules)
    if (matches_any(name, experts) && matches_any(name, layers))
      report
          .warning("`peft.target_modules`: " + in_quotes(name) +
                   " adapts no experts, which have no adapters with magnitudes")
          .at("peft.target_modules")
          .help("to adapt them too, set peft.scheme=" +
                std::string(enum_name(without_magnitudes(c.peft->scheme))) +
                "; else exclude them: peft.exclude_modules=[\"*.mlp.experts.*\"]");
}

RULE("R0913", something_is_adapted, "at least one layer has an adapter", "peft.exclude_modules",
     "peft.target_modules") {
  if (!c.peft || c.peft->target_modules.empty()) return;
  const auto layers = adaptable_layers(c.model, c.peft->scheme);
  if (layers.empty() ||
      std::any_of(layers.begin(), layers.end(), [&](const auto& layer) { return adapts(*c.peft, layer); }))
    return;
  const bool excluded = std::any_of(layers.begin(), layers.end(), [&](const auto& layer) {
    return std::any_of(c.peft->target_modules.begin(), c.peft->target_modules.end(),
                       [&](const auto& name) { return matches_layer(name, layer); });
  });
  // The rule adapter_targets_exist reports it.
  if (!excluded) return;
  report.error("`peft.exclude_modules` leaves no layer of `peft.target_modules`: nothing would train")
      .help("exclude less");
}

RULE("R0920", excluded_modules_are_targets,
     "each pattern of exclude_modules matches a layer that target_modules matches", "peft.exclude_modules",
     "peft.target_modules") {
  if (!c.peft || c.peft->target_modules.empty()) return;
  // With DoRA a target may match experts, which the rule experts_have_no_magnitudes asks to exclude.
  std::vector<std::string> targets = adaptable_layers(c.model, without_magnitudes(c.peft->scheme));
  std::erase_if(targets, [&](const std::string& layer) {
    return std::ranges::none_of(c.peft->target_modules,
                                [&](const auto& name) { return matches_layer(name, layer); });
  });
  // The rule adapter_targets_exist reports targets that are no layers.
  if (targets.empty()) return;
  for (const std::string& name : c.peft->exclude_modules)
    if (std::ranges::none_of(targets, [&](const auto& layer) { return matches_layer(name, layer); }))
      report
          .warning("`peft.exclude_modules`: " + in_quotes(name) +
                   " has no effect: `peft.target_modules` selects none of its layers")
          .at("peft.exclude_modules")
          .help("remove it");
}

RULE("R0923", adapters_predict_one_token, "adapters are trained without multi-token prediction",
     "peft.scheme", "model.mtp_num_layers") {
  if (!c.peft || !c.model.mtp_num_layers) return;
  report
      .error("`model.mtp_num_layers` " + to_text(*c.model.mtp_num_layers) +
             " excludes adapters (`peft.scheme`): the layers of multi-token prediction would have none")
      .help("leave model.mtp_num_layers out; a base model with such layers is read without them");
}

RULE("R0924", predicted_tokens_have_labels,
     "layers of multi-token prediction have labels: fewer of them than tokens of a sequence",
     "model.mtp_num_layers", "model.seq_length") {
  const int64_t layers = c.model.mtp_num_layers.value_or(0), length = c.model.seq_length;
  if (layers < length) return;
  report
      .warning("`model.mtp_num_layers` " + to_text(layers) + ": a sequence of " + counted(length, "token") +
               " has no label that many tokens further, and the last layers do not learn")
      .at("model.mtp_num_layers")
      .operand("model.seq_length")
      .help("choose a longer model.seq_length, or at most " + to_text(length - 1) + " layers");
}

RULE("R0921", new_adapters_learn, "lora_A_init and lora_B_init are not both zero", "peft.lora_A_init",
     "peft.lora_B_init") {
  if (!c.peft || c.peft->adapter || c.peft->lora_a_init != LoraInit::zero ||
      c.peft->lora_b_init != LoraInit::zero)
    return;
  report
      .error(
          "`peft.lora_A_init` and `peft.lora_B_init` are both zero: the gradient of each is a product with "
          "the other, so neither would change")
      .help("set peft.lora_A_init=xavier");
}

RULE("R0917", adapters_have_the_models_format, "lora_dtype is the data type of the model", "peft.lora_dtype",
     "mixed_precision.params_dtype") {
  if (!c.peft || !c.peft->lora_dtype || *c.peft->lora_dtype == c.mixed_precision.params_dtype) return;
  report
      .error("`peft.lora_dtype` " + std::string(enum_name(*c.peft->lora_dtype)) +
             ": adapters are computed in the format of the model, " +
             std::string(enum_name(c.mixed_precision.params_dtype)))
      .help("leave it out; adapters' main parameters and moments are fp32 anyway");
}

RULE("R0914", quantized_blocks, "quantization blocks are powers of two", "peft.quantization_block") {
  if (!c.peft || c.peft->base_quantization == BaseQuantization::none) return;
  const int64_t block = c.peft->quantization_block;
  if ((block & (block - 1)) == 0) return;
  report.error("`peft.quantization_block` " + to_text(block) + " is not a power of two").help("set 64");
}

// The share of a matrix that a tensor-parallel rank holds, if blocks of its elements have a common scale.
struct QuantizedShard {
  std::string layer;
  // Description such as "704 of 2816 columns".
  std::string part;
  // Number of elements between two shard boundaries, in the order of the matrix.
  int64_t elements;
};

// The shares of the matrices of a model over a number of ranks.
class QuantizedShards {
 public:
  explicit QuantizedShards(int64_t ranks) : ranks_(ranks) {}
  // `count` of `of` rows of `width` elements.
  void rows(const std::string& layer, int64_t count, int64_t of, int64_t width, const char* what = "") {
    list.push_back({layer, to_text(count) + " of " + to_text(of) + " rows" + what, count * width});
  }
  void columns(const std::string& layer, int64_t of) {
    list.push_back({layer, to_text(of / ranks_) + " of " + to_text(of) + " columns", of / ranks_});
  }
  void mlp(const std::string& module, int64_t ffn, const ModelConfig& m) {
    rows(module + "linear_fc1", ffn / ranks_, m.gated_linear_unit ? 2 * ffn : ffn, m.hidden_size);
    columns(module + "linear_fc2", ffn);
  }
  std::vector<QuantizedShard> list;

 private:
  int64_t ranks_;
};

// Over tensor-parallel ranks: all but experts. A size that the ranks do not divide is reported by another
// rule.
std::vector<QuantizedShard> quantized_shards(const Config& c, int64_t ranks) {
  const ModelConfig& m = c.model;
  const int64_t hidden = m.hidden_size, d = m.kv_channels.value_or(0), heads = m.num_attention_heads * d,
                values = m.multi_latent_attention ? m.num_attention_heads * m.v_head_dim : heads;
  const int64_t ffn = m.ffn_hidden_size.value_or(0),
                shared = m.moe_shared_expert_intermediate_size.value_or(0),
                groups = m.num_query_groups.value_or(m.num_attention_heads);
  if (heads % ranks != 0 || values % ranks != 0 || ffn % ranks != 0 || shared % ranks != 0) return {};
  QuantizedShards shards(ranks);
  const int64_t qkv = heads + 2 * groups * d;
  if (m.multi_latent_attention) {
    // The down-projections are not sharded.
    shards.rows(m.q_lora_rank ? "linear_q_up_proj" : "linear_q_proj", heads / ranks, heads,
                m.q_lora_rank.value_or(hidden));
    const int64_t keys_values = m.num_attention_heads * (m.qk_head_dim + m.v_head_dim);
    shards.rows("linear_kv_up_proj", keys_values / ranks, keys_values, m.kv_lora_rank);
  } else if (ranks <= groups) {
    shards.rows("linear_qkv", qkv / ranks, qkv, hidden);
  } else {
    shards.rows("linear_qkv", heads / ranks, qkv, hidden, " (queries)");
    shards.rows("linear_qkv", 2 * d, qkv, hidden, " (keys and values)");
  }
  shards.columns("linear_proj", values);
  if (!every_layer_has_experts(m)) shards.mlp("", ffn, m);
  if (has_experts(c) && shared > 0) shards.mlp("shared_experts.", shared, m);
  return shards.list;
}

// Over expert tensor-parallel ranks: each expert's matrices.
std::vector<QuantizedShard> quantized_expert_shards(const Config& c, int64_t ranks) {
  const int64_t ffn = c.model.moe_ffn_hidden_size.value_or(0);
  if (!has_experts(c) || ffn % ranks != 0) return {};
  QuantizedShards shards(ranks);
  shards.mlp("experts.", ffn, c.model);
  return shards.list;
}

void require_full_blocks(
    const Config& c, const std::string& field, const char* name_of_ranks, int64_t ranks,
    const std::function<std::vector<QuantizedShard>(const Config&, int64_t)>& shards_over,
    RuleReport& report) {
  if (ranks < 2) return;
  const int64_t block = c.peft->quantization_block;
  const auto all_full = [](const std::vector<QuantizedShard>& shards, int64_t of) {
    return std::all_of(shards.begin(), shards.end(),
                       [&](const auto& shard) { return shard.elements % of == 0; });
  };
  const auto shards = shards_over(c, ranks);
  if (all_full(shards, block)) return;
  std::vector<std::string> ways;
  for (int64_t smaller = block / 2; smaller >= 32; smaller /= 2)
    if (all_full(shards, smaller)) {
      ways.push_back("peft.quantization_block=" + to_text(smaller));
      break;
    }
  for (int64_t fewer = ranks - 1; fewer > 0; --fewer)
    if (ranks % fewer == 0 && (fewer == 1 || all_full(shards_over(c, fewer), block))) {
      ways.push_back(field + "=" + to_text(fewer));
      break;
    }
  for (const QuantizedShard& shard : shards)
    if (shard.elements % block != 0)
      report
          .error("`" + shard.layer + ".weight`: each of " + to_text(ranks) + name_of_ranks + " ranks holds " +
                 shard.part + ", runs of " + to_text(shard.elements) +
                 " elements: no multiple of `peft.quantization_block` " + to_text(block) +
                 ", whose elements share a scale")
          .help("set " + join(ways, " or "));
}

RULE("R0915", tensor_shards_hold_full_quantized_blocks,
     "tensor parallelism shards quantized weights at the boundaries of quantization blocks",
     "peft.quantization_block", "dist.tensor_model_parallel_size", "?dist.expert_tensor_parallel_size") {
  if (!c.peft || c.peft->base_quantization == BaseQuantization::none) return;
  require_full_blocks(c, "dist.tensor_model_parallel_size", " tensor-parallel",
                      c.dist.tensor_model_parallel_size, quantized_shards, report);
  require_full_blocks(c, "dist.expert_tensor_parallel_size", " expert tensor-parallel",
                      c.dist.expert_tensor_parallel_size.value_or(1), quantized_expert_shards, report);
}

RULE("R0916", quantized_weights_are_unsharded, "quantized weights are not sharded over data-parallel ranks",
     "ddp.data_parallel_sharding_strategy", "peft.base_quantization") {
  if (!c.peft || c.peft->base_quantization == BaseQuantization::none ||
      c.ddp.data_parallel_sharding_strategy != ShardingStrategy::optim_grads_params)
    return;
  report
      .error(
          "`peft.base_quantization` nf4 and `ddp.data_parallel_sharding_strategy` optim_grads_params "
          "exclude each other: every data-parallel rank holds the weights in 4 bits")
      .help("set ddp.data_parallel_sharding_strategy=optim_grads");
}

RULE("R0906", tokenizer_has_files, "a tokenizer has the files of its type, unless the data are random tokens",
     "tokenizer.tokenizer_type") {
  const auto& t = c.tokenizer;
  // Random tokens need no tokenizer.
  if (c.dataset.kind == DatasetKind::mock) return;
  if (t.tokenizer_type == TokenizerKind::huggingface && !t.tokenizer_model)
    report.error("`tokenizer.tokenizer_type` huggingface needs `tokenizer.tokenizer_model`")
        .help("set tokenizer.tokenizer_model=tokenizer.json, or the directory of a model of Transformers");
  if (t.tokenizer_type == TokenizerKind::sentencepiece && !t.tokenizer_model)
    report.error("`tokenizer.tokenizer_type` sentencepiece needs `tokenizer.tokenizer_model`")
        .help("set tokenizer.tokenizer_model=tokenizer.model");
  if (t.tokenizer_type == TokenizerKind::gpt2_bpe && (!t.vocab_file || !t.merge_file))
    report
        .error("`tokenizer.tokenizer_type` gpt2_bpe needs `tokenizer.vocab_file` and `tokenizer.merge_file`")
        .help("set tokenizer.vocab_file=vocab.json tokenizer.merge_file=merges.txt");
}

RULE("R0907", bytes_fit_vocabulary, "vocab_size covers the ids of the byte tokenizer", "model.vocab_size",
     "tokenizer.tokenizer_type") {
  if (c.tokenizer.tokenizer_type != TokenizerKind::byte || c.model.vocab_size >= kByteVocabulary) return;
  report
      .error("`model.vocab_size` " + to_text(c.model.vocab_size) + " is less than the " +
             to_text(kByteVocabulary) + " ids of `tokenizer.tokenizer_type` byte")
      .help("set model.vocab_size=" + to_text(kByteVocabulary));
}

RULE("R0908", trace_has_steps, "a trace has at least one step", "profiling.profile_step_start",
     "profiling.profile_step_end") {
  const auto& p = c.profiling;
  if (!p.trace || p.profile_step_start < p.profile_step_end) return;
  report
      .error("`profiling.profile_step_start` " + to_text(p.profile_step_start) +
             " is not below `profiling.profile_step_end` " + to_text(p.profile_step_end))
      .help("set profiling.profile_step_end=" + to_text(p.profile_step_start + 2));
}

RULE("R0918", traced_steps_exist, "the traced steps are steps of the run", "profiling.profile_step_start",
     "train.train_iters") {
  const int64_t start = c.profiling.profile_step_start;
  if (!c.profiling.trace || !c.train.train_iters || start < *c.train.train_iters) return;
  report
      .warning("`profiling.profile_step_start` " + to_text(start) + " is not below `train.train_iters` " +
               to_text(*c.train.train_iters) + ": no step is traced")
      .help("for example, set profiling.profile_step_start=0");
}

RULE("R0909", traced_ranks_exist, "traced ranks are ranks of the world", "profiling.profile_ranks",
     "dist.world_size") {
  if (!c.profiling.trace) return;
  for (const int64_t rank : c.profiling.profile_ranks)
    if (rank < 0 || rank >= c.dist.world_size)
      report
          .error("`profiling.profile_ranks` names rank " + to_text(rank) + " of a world of " +
                 to_text(c.dist.world_size))
          .help("name ranks from 0 to " + to_text(c.dist.world_size - 1));
}

RULE("R0910", rewind_needs_checkpoints, "rewinding needs checkpoints with optimizer state",
     "resilience.loss_spike_action", "resilience.grad_norm_spike_action", "checkpoint.save_interval") {
  const bool rewinds = c.resilience.loss_spike_action == SpikeAction::rewind ||
                       c.resilience.grad_norm_spike_action == SpikeAction::rewind;
  if (!rewinds || (c.checkpoint.save_interval && c.checkpoint.save_optim)) return;
  report.error("rewinding after a spike needs checkpoints with optimizer state")
      .help("set checkpoint.save_interval, and checkpoint.save_optim=true");
}

RULE("R0911", checkpoints_can_resume, "a run continues only from checkpoints with optimizer state",
     "checkpoint.save_optim", "checkpoint.save_interval") {
  if (!c.checkpoint.load_optim || c.checkpoint.save_optim || !c.checkpoint.save_interval) return;
  report.warning("`checkpoint.save_optim` is false: a run that stops cannot continue from its checkpoints")
      .help("set checkpoint.save_optim=true, unless weights are all that is wanted");
}

}  // namespace

}  // namespace capstan::config
