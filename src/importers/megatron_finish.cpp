// Settings that follow from several options of a Megatron command line, and Megatron's defaults that differ
// from Capstan's.
#include <algorithm>
#include <optional>

#include "base/text.hpp"
#include "importers/finetuning.hpp"
#include "importers/format_readers.hpp"
#include "importers/known_models.hpp"

namespace capstan::importers {

using config::Node;

namespace {

void activation(Reader& r) {
  Draft& draft = r.draft;
  if (r.is_true("--swiglu")) {
    r.set("model.gated_linear_unit", "true", "--swiglu");
    r.set("model.activation_func", "silu", "--swiglu");
  } else if (r.is_true("--quick-geglu")) {
    r.set("model.gated_linear_unit", "true", "--quick-geglu");
    r.set("model.activation_func", "quick_gelu", "--quick-geglu");
  } else if (r.is_true("--squared-relu")) {
    r.set("model.activation_func", "squared_relu", "--squared-relu");
  } else if (r.is_true("--openai-gelu")) {
    r.set("model.activation_func", "gelu_tanh", "--openai-gelu");
  } else if (r.is_true("--no-bias-gelu-fusion")) {
    r.set("model.activation_func", "gelu", "--no-bias-gelu-fusion", "without the fusion it is exact");
  } else if (r.given("--disable-bias-linear")) {
    r.set("model.activation_func", "gelu", "--disable-bias-linear", "exact where there is no bias to fuse");
  } else {
    draft.assume("model.activation_func", "gelu_tanh", "Megatron's fused bias and GELU is the tanh form");
  }
  if (r.is_true("--swiglu") && r.is_true("--no-bias-gelu-fusion"))
    r.omit("--no-bias-gelu-fusion", "", OmissionReason::no_effect, "the activation is SwiGLU");
}

void positions(Reader& r) {
  if (const auto type = r.text("--position-embedding-type")) {
    if (*type == "learned_absolute" || *type == "rope" || *type == "none")
      r.set("model.position_embedding_type", *type, "--position-embedding-type");
    else
      r.omit("--position-embedding-type", *type, OmissionReason::unsupported,
             "positions are learned_absolute, rope or none");
  } else if (r.is_true("--use-rotary-position-embeddings")) {
    r.set("model.position_embedding_type", "rope", "--use-rotary-position-embeddings");
  } else if (r.is_true("--no-position-embedding")) {
    r.set("model.position_embedding_type", "none", "--no-position-embedding");
  }
  r.draft.assume("model.position_embedding_type", "learned_absolute", "Megatron's default");
}

// Defaults of the options, which differ from those of Megatron's configuration class.
void latent_attention(Reader& r) {
  take_latent_rope(r, "--", 1);
  if (r.is_true("--multi-latent-attention")) r.draft.assume("model.kv_lora_rank", "32", "Megatron's default");
}

void query_groups(Reader& r) {
  if (!r.given("--num-query-groups")) {
    if (r.is_true("--group-query-attention"))
      r.set("model.num_query_groups", "1", "--group-query-attention", "Megatron's default with it");
    return;
  }
  if (r.is_true("--group-query-attention"))
    r.copy("model.num_query_groups", "--num-query-groups");
  else
    r.omit("--num-query-groups", OmissionReason::no_effect,
           "Megatron reads it only with --group-query-attention");
}

void recomputation(Reader& r) {
  const auto full = [&](std::string_view key) { r.set("model.recompute_granularity", "full", key); };
  for (const std::string_view key : {"--checkpoint-activations", "--deepspeed-activation-checkpointing"})
    if (r.is_true(key)) {
      full(key);
      r.set("model.recompute_method", "uniform", key);
    }
  if (r.is_true("--recompute-activations"))
    r.set("model.recompute_granularity", "selective", "--recompute-activations");
  if (const auto granularity = r.text("--activations-checkpoint-granularity"))
    r.set("model.recompute_granularity", *granularity, "--activations-checkpoint-granularity");
  if (const auto method = r.text("--activations-checkpoint-method")) {
    if (!r.given("--activations-checkpoint-granularity")) full("--activations-checkpoint-method");
    r.set("model.recompute_method", *method, "--activations-checkpoint-method");
  }
  for (const std::string_view key : {"--activations-checkpoint-num-layers", "--checkpoint-num-layers"})
    r.copy("model.recompute_num_layers", key);
}

void precision(Reader& r) {
  Draft& draft = r.draft;
  const bool reduce_fp32 = r.is_true("--accumulate-allreduce-grads-in-fp32");
  if (r.is_true("--fp16")) {
    r.choose("mixed_precision", "fp16_mixed", "--fp16");
    if (reduce_fp32)
      r.set("mixed_precision.grad_reduce_in_fp32", "true", "--accumulate-allreduce-grads-in-fp32");
    if (r.is_true("--bf16"))
      r.omit("--bf16", "", OmissionReason::value, "--fp16 and --bf16 exclude each other");
    return;
  }
  if (r.is_true("--bf16")) {
    const bool reduce_bf16 = r.is_true("--grad-reduce-in-bf16");
    r.choose("mixed_precision", reduce_bf16 ? "bf16_mixed_bf16_reduce" : "bf16_mixed",
             reduce_bf16 ? "--grad-reduce-in-bf16" : "--bf16");
    if (reduce_fp32)
      r.omit("--accumulate-allreduce-grads-in-fp32", "", OmissionReason::no_effect, "implied by --bf16");
    return;
  }
  // An undecided branch that gives one of them leaves the precision open.
  if (!draft.mentions("--fp16") && !draft.mentions("--bf16"))
    draft.assume_preset("mixed_precision", "fp32", "neither --fp16 nor --bf16");
  if (reduce_fp32)
    r.omit("--accumulate-allreduce-grads-in-fp32", "", OmissionReason::no_effect, "everything is fp32");
}

int64_t ranks_of(const Draft& draft, std::string_view path) {
  return parse_int(draft.text(path)).value_or(1);
}

// The fewest ranks that hold one replica of the model.
int64_t ranks_of_replica(const Draft& draft) {
  int64_t least = 1;
  for (const auto path :
       {"dist.tensor_model_parallel_size", "dist.pipeline_model_parallel_size", "dist.context_parallel_size"})
    least = std::min<int64_t>(least * std::clamp<int64_t>(ranks_of(draft, path), 1, 1 << 24), 1 << 24);
  return least;
}

// Called before world(), so that the number of ranks is the launcher's, not an assumed one.
void balance(Reader& r) {
  std::optional<int64_t> data_parallel_size;
  if (r.draft.has("dist.world_size"))
    data_parallel_size = ranks_of(r.draft, "dist.world_size") / ranks_of_replica(r.draft);
  take_balance_coefficients(r, "--moe-aux-loss-coeff", data_parallel_size);
}

void world(Reader& r, const MegatronLaunch& launch) {
  Draft& draft = r.draft;
  const int64_t least = ranks_of_replica(draft);
  if (least > 1 || launch.launched)
    draft.assume("dist.world_size", std::to_string(least),
                 least > 1 ? "the fewest ranks that hold one replica; the launcher's number is not known"
                           : "the launcher's number is not known");
  if (!r.is_true("--sequence-parallel")) return;
  if (ranks_of(draft, "dist.tensor_model_parallel_size") > 1)
    r.set("dist.sequence_parallel", "true", "--sequence-parallel");
  else
    r.omit("--sequence-parallel", "", OmissionReason::no_effect,
           "Megatron switches it off with one tensor-parallel rank");
}

void sharding(Reader& r) {
  const char* field_path = "ddp.data_parallel_sharding_strategy";
  const auto strategy = r.text("--data-parallel-sharding-strategy");
  for (const std::string_view key : {"--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"})
    if (r.is_true(key)) {
      if (key != "--use-torch-fsdp2" && strategy)
        r.set(field_path, *strategy, "--data-parallel-sharding-strategy");
      else
        r.set(field_path, key == "--use-torch-fsdp2" ? "optim_grads_params" : "no_shard", key);
      return;
    }
  if (strategy)
    r.omit("--data-parallel-sharding-strategy", *strategy, OmissionReason::no_effect,
           "Megatron reads it only with --use-megatron-fsdp");
  if (r.is_true("--use-distributed-optimizer")) r.set(field_path, "optim", "--use-distributed-optimizer");
}

// Weights and prefixes have the same form in a recipe. Blends of single splits become a mapping.
void blend(Reader& r, std::string_view key, std::string_view path) {
  const Node* value = r.find(key);
  if (!value) return;
  std::vector<Node> items = value->kind == Node::Kind::list ? value->items : std::vector<Node>{*value};
  Node map{.kind = Node::Kind::map, .location = value->location};
  const bool weighted = items.size() > 1 && parse_double(items[0].text).has_value();
  for (size_t i = weighted ? 1 : 0; i < items.size(); i += weighted ? 2 : 1)
    map.add(items[i].text, items[i].location, weighted ? items[i - 1] : Node::scalar("1", items[i].location));
  r.set(path, map, key);
}

void data(Reader& r) {
  Draft& draft = r.draft;
  if (r.is_true("--mock-data")) {
    r.choose("dataset", "mock", "--mock-data");
    return;
  }
  r.copy("dataset.data_path", "--data-path");
  blend(r, "--train-data-path", "dataset.train_blend");
  blend(r, "--valid-data-path", "dataset.valid_blend");
  blend(r, "--test-data-path", "dataset.test_blend");
  if (!draft.has("dataset.data_path") && !draft.has("dataset.train_blend")) {
    draft.assume_preset("dataset", "mock", "to fill in: no data is named, these are generated tokens");
    draft.withdraw("dataset.split", OmissionReason::no_effect, "generated tokens are not split");
  } else {
    draft.assume("dataset.sample_order", "megatron",
                 "the samples that Megatron-LM would train on, in its order");
  }
}

constexpr int64_t kGpt2Vocabulary = 50257;

void tokenizer(Reader& r) {
  Draft& draft = r.draft;
  const auto given = r.text("--tokenizer-type");
  const bool hub = given == "HuggingFaceTokenizer";
  const auto model = r.text("--tokenizer-model");
  const auto vocabulary = r.integer("--vocab-size");
  const bool gpt2 = given ? *given == "GPT2BPETokenizer" : r.given("--vocab-file");
  const SourceKey type = r.from("--tokenizer-type");
  const char* unread = "the tokenizer is not read here";
  bool null_tokenizer = false;
  if (gpt2) {
    if (given)
      draft.choose("tokenizer", "gpt2_bpe", type);
    else
      draft.assume_preset("tokenizer", "gpt2_bpe", "pretrain_gpt.py's default");
    for (const auto& [key, path] : {std::pair("--vocab-file", "tokenizer.vocab_file"),
                                    std::pair("--merge-file", "tokenizer.merge_file")})
      r.copy(path, key);
  } else if (given && (hub || *given == "PretrainedFromHF") && model &&
             (model->ends_with(".json") || model->starts_with('/') || model->starts_with('.'))) {
    draft.choose("tokenizer", "huggingface", type);
    const bool file = model->ends_with(".json");
    r.set("tokenizer.tokenizer_model", file ? *model : *model + "/tokenizer.json", "--tokenizer-model",
          file ? "" : "the directory's tokenizer.json");
  } else if (model && model->ends_with(".model")) {
    if (given)
      draft.set("tokenizer.tokenizer_type", "sentencepiece", type);
    else
      draft.assume("tokenizer.tokenizer_type", "sentencepiece", "a SentencePiece .model");
    r.set("tokenizer.tokenizer_model", *model, "--tokenizer-model");
  } else {
    null_tokenizer = given && *given == "NullTokenizer";
    if (null_tokenizer)
      draft.choose("tokenizer", "none", type);
    else
      draft.assume_preset(
          "tokenizer", "none",
          given ? "to fill in: the data's ids are taken as they are" : "no tokenizer is named");
    if (given && !null_tokenizer)
      draft.omit(type, *given, model ? OmissionReason::to_fill_in : OmissionReason::unsupported,
                 hub ? "give a tokenizer.json in tokenizer.tokenizer_model"
                     : "tokenizers here are a tokenizer.json, a SentencePiece .model, or vocab.json with "
                       "merges.txt");
    if (model)
      r.omit("--tokenizer-model", *model, hub ? OmissionReason::to_fill_in : OmissionReason::unsupported,
             hub ? "a name on a model hub; give its tokenizer.json" : unread);
    for (const char* key : {"--vocab-file", "--merge-file"})
      if (r.given(key)) r.omit(key, *r.text(key), OmissionReason::no_effect, "not files of this tokenizer");
  }
  if (vocabulary) {
    const bool one_more = null_tokenizer && *vocabulary < (1 << 30);
    r.set("model.vocab_size", std::to_string(*vocabulary + (one_more ? 1 : 0)), "--vocab-size",
          one_more ? "and NullTokenizer's end of document" : "");
  } else if (gpt2) {
    draft.assume("model.vocab_size", std::to_string(kGpt2Vocabulary),
                 "GPT-2's; another --vocab-file has another size");
  } else if (model && preset_of_model(*model)) {
    r.set("model.vocab_size", std::to_string(vocabulary_of_preset(*preset_of_model(*model))),
          "--tokenizer-model");
  } else {
    draft.omit({"model.vocab_size", {}}, "", OmissionReason::to_fill_in,
               "Megatron derives it from the tokenizer");
  }
  if (r.given("--padded-vocab-size"))
    r.omit("--padded-vocab-size", *r.text("--padded-vocab-size"), OmissionReason::no_effect,
           "follows from the vocabulary; padded rows never enter the softmax");
}

void checkpoints(Reader& r) {
  save_and_load(r, "--save", "--load");
  if (r.is_true("--finetune"))
    r.omit("--finetune", "", OmissionReason::no_effect,
           "`checkpoint.pretrained_checkpoint` starts from weights alone");
}

}  // namespace

void finish_megatron(Reader& r, const MegatronLaunch& launch) {
  activation(r);
  positions(r);
  latent_attention(r);
  query_groups(r);
  recomputation(r);
  precision(r);
  if (r.draft.text("optimizer.optimizer") == "sgd")
    r.draft.assume("optimizer.decoupled_weight_decay", "false",
                   "Megatron's SGD adds the decay to the gradient");
  balance(r);
  world(r, launch);
  sharding(r);
  data(r);
  tokenizer(r);
  checkpoints(r);
  take_seed(r, "--seed");
  r.account();
}

}  // namespace capstan::importers
