// The recipes and presets that come with the binary resolve and check for their real world size.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <set>

#include "base/file.hpp"
#include "base/text.hpp"
#include "config/core/emit.hpp"
#include "config/core/hash.hpp"
#include "config/sections/adapter_targets.hpp"
#include "config/tools/show.hpp"
#include "request.hpp"
#include "support/paths.hpp"
#include "support/sanitized.hpp"
#include "support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::config;
using testing::request_of;

namespace {

Resolution resolved(const std::string& recipe, const std::vector<std::string>& overrides = {},
                    std::optional<int64_t> ranks = {}) {
  return resolve(request_of(recipe, overrides, ranks));
}

std::string problems(const Resolution& r) {
  return render(r.diagnostics, r.sources);
}

// The recipes that have ever been listed as files of their own.
std::vector<std::string> golden_names() {
  const std::string file = std::string(test::kSourceDirectory) + "/tests/config/golden/recipes.txt";
  std::vector<std::string> names;
  const std::string text = read_file(file, 1 << 20);
  for (const auto line : split(text, '\n'))
    if (!line.empty()) names.emplace_back(line.substr(0, line.find(' ')));
  return names;
}

const char* const kRecipes[] = {"quickstart", "gpt2-124m",     "llama3-8b",
                                "llama3-70b", "llama3.1-405b", "gpt3-175b"};

}  // namespace

TEST_CASE("every shipped recipe checks without errors or warnings, and is described") {
  const auto entries = Library::standard().recipes();
  CHECK(entries.size() >= 170);
  for (const auto& entry : entries) {
    CAPTURE(entry.name);
    CHECK_FALSE(entry.description.empty());
    const auto r = resolved(entry.name);
    CHECK_MESSAGE(r.ok(), problems(r));
    CHECK(count(r.diagnostics, Level::warning) == 0);
    CHECK(r.config.name == entry.name);
    CHECK_FALSE(r.config.description.empty());
  }
  for (const char* name : kRecipes)
    CHECK(std::any_of(entries.begin(), entries.end(), [&](const auto& entry) { return entry.name == name; }));
}

TEST_CASE("every named recipe resolves to the values that it had when each was a file of its own") {
  const std::string file = std::string(test::kSourceDirectory) + "/tests/config/golden/recipes.txt";
  const Config defaults;
  std::string text;
  for (const std::string& name : golden_names()) {
    CAPTURE(name);
    const auto values = [&](const std::string& recipe, const std::vector<std::string>& overrides) {
      Request request = request_of(recipe, overrides);
      request.directory = "/recipes";
      const Resolution r = resolve(request);
      CHECK_MESSAGE(r.ok(), problems(r));
      CHECK(r.config.name == name);
      std::string out;  // a new field with its default changes nothing
      const std::string by_default = canonical_form(schema(), &defaults);
      const std::string all = canonical_form(schema(), &r.config);
      for (const auto line : split(all, '\n'))
        // The architecture follows from fields that are there.
        if (by_default.find(line) == std::string::npos && !line.starts_with("model.architecture = "))
          out += std::string(line) + "\n";
      return out;
    };
    const std::string now = values(name, {});
    text += name + " " + hash_of(now) + "\n";
    for (const auto& entry : Library::standard().recipes())
      if (entry.name == name && !entry.method.empty())
        CHECK(values(entry.method, {"model=" + name.substr(0, name.size() - entry.method.size() - 1)}) ==
              now);
  }
  if (std::getenv("CAPSTAN_WRITE_GOLDEN")) std::ofstream(file, std::ios::binary) << text;
  CHECK(text == read_file(file, 1 << 20));
}

TEST_CASE("a minimal recipe extends the name that was given, and has its values in another directory") {
  test::TemporaryDirectory directory;
  struct Case {
    std::string recipe;
    std::vector<std::string> overrides;
    std::string text;
  };
  std::vector<Case> cases = {
      {"lora", {"model=llama3-8b"}, "extends: lora\nmodel: llama3-8b\n"},
      {"qlora", {"model=llama3.1-405b"}, "extends: qlora\nmodel: llama3.1-405b\n"},
      {"dora", {"model=gemma2-27b"}, "extends: dora\nmodel: gemma2-27b\n"},
      {"sft", {"model=llama3-70b"}, "extends: sft\nmodel: llama3-70b\n"},
      {"llama3-70b-sft", {}, "extends: llama3-70b-sft\n"},
      {"lora",
       {"model=llama3-8b", "train.train_iters=50", "peft.dim=4"},
       "extends: lora\nmodel: llama3-8b\ntrain:\n  train_iters: 50\npeft:\n  dim: 4\n"},
      {"llama3-8b", {"ddp=zero3"}, "extends: llama3-8b\nddp: zero3\n"},
      {"sft",
       {"model=llama3-8b", "peft=lora", "optimizer.lr=1e-4"},
       "extends: sft\nmodel: llama3-8b\noptimizer:\n  lr: 0.0001\npeft: lora\n"},
  };
  for (const auto& entry : test::sampled(Library::standard().recipes()))
    cases.push_back({entry.name, {}, "extends: " + entry.name + "\n"});
  for (const auto& one : cases) {
    CAPTURE(one.recipe);
    const Resolution given = resolved(one.recipe, one.overrides);
    REQUIRE_MESSAGE(given.ok(), problems(given));
    const std::string text = show(given, {ShowFormat::minimal, ""});
    CHECK(text == "schema: capstan/1\n" + one.text);
    // The run is named after the file where the recipe names none.
    const auto file = directory.path() / (given.config.name + ".yaml");
    std::ofstream(file, std::ios::binary) << text;
    Request request = request_of(file.string());
    const Resolution stored = resolve(request);
    CHECK_MESSAGE(stored.ok(), problems(stored));
    CHECK(show(stored, {ShowFormat::minimal, ""}) == text);
    for (const Change& change : diff(given, stored)) {
      // Paths are relative to the recipe: those of the library to the current directory.
      const FieldInfo* field = schema().find_field(change.path);
      CHECK_MESSAGE((field->type->kind == Type::Kind::path || change.path == "dataset.train_files" ||
                     change.path == "dataset.data_path"),
                    change.path);
    }
  }
}

TEST_CASE("a method takes a model on the command line, in a recipe that extends it, and by its short name") {
  const Resolution none = resolved("lora");
  CHECK_FALSE(none.ok());
  CHECK(count(none.diagnostics, Level::error) == 1);
  CHECK(problems(none).find("write `model=NAME`; there are settings for deepseek-v2, ") != std::string::npos);

  // The entry of the model overrides the method, and a recipe that extends it overrides the entry.
  const Resolution large = resolved("sft", {"model=llama3-70b"});
  CHECK(large.config.dist.tensor_model_parallel_size == 8);
  CHECK(large.presets.at("ddp") == "zero1");
  CHECK(resolved("sft", {"model=llama3-8b"}).presets.at("ddp") == "zero2");
  Request mine;
  mine.recipe = "./mine.yaml";
  for (const char* base : {"extends: sft\nmodel: llama3-70b\n", "extends: llama3-70b-sft\n"}) {
    const Resolution r = resolve_text(std::string(base) + "dist: {world_size: 64}\n", mine);
    CHECK_MESSAGE(r.ok(), problems(r));
    CHECK(r.config.name == (std::string(base).starts_with("extends: sft") ? "mine" : "llama3-70b-sft"));
    CHECK(r.config.dist.world_size == 64);
    CHECK(r.config.dist.pipeline_model_parallel_size == 4);
    // A run stores what differs from the recipe that it extends.
    CHECK(resolve_text(show(r, {ShowFormat::minimal, ""}), mine).config.dist.world_size == 64);
  }
  // The entry stays when the model itself is read from a directory.
  const Resolution directory = resolved("llama3-70b-lora", {"model=gpt2-355m"});
  CHECK(directory.config.name == "llama3-70b-lora");
  CHECK(directory.config.dist.tensor_model_parallel_size == 8);
  // Without an entry, the method alone.
  const Resolution other =
      resolved("lora", {"model=gpt2-355m", "checkpoint.pretrained_checkpoint=hf:gpt2-medium",
                        "tokenizer.chat_template=chatml"});
  CHECK_MESSAGE(other.ok(), problems(other));
  CHECK(other.config.name == "gpt2-355m-lora");
  CHECK(other.config.dist.world_size == 1);
  CHECK_THROWS_AS(resolved("gpt2-355m-lora"), Error);
}

TEST_CASE("`models` of a recipe: presets of `model` with the keys that hold for each") {
  Request mine;
  mine.recipe = "./mine.yaml";
  const auto with = [&](const std::string& models) {
    return resolve_text("extends: gpt2-124m\nmodel: gpt2-355m\n" + models, mine);
  };
  const Resolution r = with("optimizer: {lr: 1e-3}\nmodels: {gpt2-355m: {optimizer.lr: 2e-3}, other: {}}\n");
  CHECK_MESSAGE(r.ok(), problems(r));
  CHECK(r.config.optimizer.lr == 2e-3);
  CHECK(problems(with("models: {gpt2-355m: {optimizer.lrr: 2e-3}}\n")).find("optimizer.lr") !=
        std::string::npos);
  // A value for one model is no surprise beside its preset, a value for all of them is one.
  const auto chosen = [&](const std::string& models) {
    Request other = mine;
    other.overrides = {Override::token("model=gpt2-355m")};
    return problems(resolve_text("extends: gpt2-124m\n" + models, other));
  };
  CHECK(chosen("models: {gpt2-355m: {model.vocab_size: 50000}}\n").find("C0702") == std::string::npos);
  CHECK(chosen("model.vocab_size: 50000\n").find("C0702") != std::string::npos);
  for (const char* wrong : {"models: [gpt2-355m]\n", "models: {gpt2-355m: zero1}\n",
                            "models: {gpt2-355m: {extends: quickstart}}\n",
                            "models: {gpt2-355m: {model: gpt2-124m}, gpt2-124m: {}}\n"})
    CHECK_MESSAGE(problems(with(wrong)).find("`models` ") != std::string::npos, wrong);
}

TEST_CASE("shared parts of recipes are found by name and not listed") {
  for (const char* name : {"_pretrain", "_sft", "_lora"}) {
    CHECK(Library::standard().recipe(name));
    for (const auto& entry : Library::standard().recipes()) CHECK(entry.name != name);
  }
  // A name, not a way around one.
  CHECK_FALSE(Library::standard().recipe("_none"));
}

TEST_CASE("fine-tuning takes weights and tokenizer from one place, that of the family's chat model") {
  size_t tuned = 0;
  for (const auto& entry : Library::standard().recipes()) {
    CAPTURE(entry.name);
    const auto r = resolved(entry.name);
    if (r.config.dataset.kind != DatasetKind::sft) continue;
    ++tuned;
    REQUIRE(r.config.checkpoint.pretrained_checkpoint);
    CHECK(r.config.tokenizer.tokenizer_model->resolved ==
          r.config.checkpoint.pretrained_checkpoint->resolved);
    CHECK(r.config.peft.has_value() == !entry.name.ends_with("-sft"));
    const auto moved = resolved(entry.name, {"checkpoint.pretrained_checkpoint=hf:elsewhere"});
    CHECK(moved.config.tokenizer.tokenizer_model->resolved.ends_with("/elsewhere"));
    // The model is that of the pre-training recipe, where there is one.
    const std::string model = r.presets.at("model");
    CHECK(entry.name.starts_with(model));
    const bool four_bits = r.config.peft && r.config.peft->base_quantization == BaseQuantization::nf4;
    CHECK(four_bits == entry.name.ends_with("-qlora"));
  }
  CHECK(tuned >= 60);
}

TEST_CASE("sizes and layouts are those of the published models") {
  struct Truth {
    const char* recipe;
    int64_t layers, hidden, ffn, heads, groups, head_width, vocab, padded, seq;
    int64_t world, tp, pp, vpp, cp, dp;
    int64_t mbs, gbs, microbatches, iters, warmup;
    double lr, min_lr;
    Precision params;
    bool reduce_fp32, tied, bias;
  };
  const Truth truths[] = {
      {"quickstart",
       4,
       256,
       704,
       8,
       4,
       32,
       4096,
       4096,
       256,
       1,
       1,
       1,
       1,
       1,
       1,
       2,
       4,
       2,
       800,
       40,
       2e-3,
       2e-4,
       Precision::fp32,
       true,
       true,
       false},
      {"gpt2-124m", 12, 768, 3072, 12,     12,   64,   50257, 50304,           1024, 1,    1,   1, 1, 1,
       1,           4,  512, 128,  600000, 2000, 6e-4, 6e-5,  Precision::bf16, true, true, true},
      {"llama3-8b", 32, 4096, 14336, 32,      8,    128,  128256, 128256,          8192, 8,     1,    1, 1, 2,
       4,           1,  512,  128,   1168251, 2000, 3e-4, 3e-5,   Precision::bf16, true, false, false},
      {"llama3-70b",
       80,
       8192,
       28672,
       64,
       8,
       128,
       128256,
       128256,
       8192,
       64,
       4,
       4,
       5,
       2,
       2,
       1,
       512,
       256,
       1168251,
       2000,
       3e-4,
       3e-5,
       Precision::bf16,
       true,
       false,
       false},
      {"llama3.1-405b",
       126,
       16384,
       53248,
       128,
       8,
       128,
       128256,
       128256,
       8192,
       1024,
       8,
       8,
       8,
       4,
       4,
       1,
       512,
       128,
       1168251,
       2000,
       3e-4,
       3e-5,
       Precision::bf16,
       true,
       false,
       false},
      {"gpt3-175b", 96, 12288, 49152, 96,      96,   128,  50257, 50304,           2048,  128,  4,   8, 6, 1,
       4,           1,  2048,  512,   1168251, 2000, 9e-5, 9e-6,  Precision::bf16, false, true, true},
  };
  for (const auto& t : truths) {
    CAPTURE(t.recipe);
    const auto r = resolved(t.recipe);
    REQUIRE_MESSAGE(r.ok(), problems(r));
    const Config& c = r.config;
    CHECK(c.model.num_layers == t.layers);
    CHECK(c.model.hidden_size == t.hidden);
    CHECK(c.model.ffn_hidden_size == t.ffn);
    CHECK(c.model.num_attention_heads == t.heads);
    CHECK(c.model.num_query_groups == t.groups);
    CHECK(c.model.kv_channels == t.head_width);
    CHECK(c.model.vocab_size == t.vocab);
    CHECK(c.model.padded_vocab_size == t.padded);
    CHECK(c.model.seq_length == t.seq);
    CHECK(c.dist.world_size == t.world);
    CHECK(c.dist.tensor_model_parallel_size == t.tp);
    CHECK(c.dist.pipeline_model_parallel_size == t.pp);
    CHECK(c.dist.virtual_pipeline_model_parallel_size.value_or(1) == t.vpp);
    CHECK(c.dist.context_parallel_size == t.cp);
    CHECK(c.dist.data_parallel_size == t.dp);
    CHECK(c.dist.sequence_parallel == (t.tp > 1));
    CHECK(c.train.micro_batch_size == t.mbs);
    CHECK(c.train.global_batch_size == t.gbs);
    CHECK(c.train.num_microbatches == t.microbatches);
    CHECK(c.train.train_iters == t.iters);
    CHECK(c.scheduler.lr_warmup_iters == t.warmup);
    CHECK(c.optimizer.lr == doctest::Approx(t.lr));
    CHECK(c.optimizer.min_lr.value() == doctest::Approx(t.min_lr));
    CHECK(c.mixed_precision.params_dtype == t.params);
    CHECK(c.mixed_precision.grad_reduce_in_fp32 == t.reduce_fp32);
    CHECK(c.model.share_embeddings_and_output_weights == t.tied);
    CHECK(c.model.add_bias_linear == t.bias);
    CHECK(c.model.hidden_dropout == 0);
    CHECK(c.train.device == DeviceKind::automatic);
  }
}

TEST_CASE("gpt3-175b fits 128, 256 and 512 ranks, and not 100") {
  for (const int64_t ranks : {128, 256, 512}) {
    const auto r = resolved("gpt3-175b", {}, ranks);
    CHECK_MESSAGE(r.ok(), problems(r));
    CHECK(r.config.dist.data_parallel_size == ranks / 32);
  }
  const auto r = resolved("gpt3-175b", {}, 100);
  CHECK_FALSE(r.ok());
  CHECK(problems(r).find("nearest legal dist.world_size: 96 or 128") != std::string::npos);
}

TEST_CASE("batches, steps and warm-up are those of Megatron-Bridge's recipes") {
  struct Truth {
    std::vector<const char*> recipes;
    int64_t batch, iterations, warmup;
  };
  const Truth truths[] = {
      {{"llama2-7b", "llama3-8b", "llama3-70b", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "llama3.2-1b",
        "llama3.2-3b"},
       512,
       1'168'251,
       2000},
      {{"qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen3-0.6b", "qwen3-8b", "qwen3-32b",
        "gemma2-2b", "gemma2-9b", "gemma2-27b"},
       32,
       300'000,
       500},
      {{"qwen3-30b-a3b"}, 1024, 300'000, 500},
      {{"deepseek-v2", "deepseek-v2-lite", "gpt-oss-20b", "gpt-oss-120b"}, 512, 1'000'000, 2000},
      {{"deepseek-v3", "kimi-k2"}, 4096, 1'000'000, 2000},
      {{"moonlight-16b-a3b"}, 1024, 500'000, 2000},
      {{"olmoe-1b-7b"}, 2048, 500'000, 2000},
  };
  for (const Truth& truth : truths)
    for (const char* recipe : truth.recipes) {
      CAPTURE(recipe);
      const Config config = resolved(recipe).config;
      CHECK(config.train.global_batch_size == truth.batch);
      CHECK(config.train.train_iters == truth.iterations);
      CHECK(std::llround(*config.scheduler.lr_warmup_fraction * static_cast<double>(truth.iterations)) ==
            truth.warmup);
      CHECK(config.optimizer.lr == 3e-4);
    }
  CHECK(resolved("kimi-k2").config.optimizer.optimizer == OptimizerKind::muon);
}

TEST_CASE("train_iters alone is legal in every shipped recipe and schedule") {
  for (const std::string& name : test::sampled(golden_names()))
    for (const char* iters : {"1", "2", "3", "100"})
      for (const char* schedule : {"", "constant", "linear", "inverse_square_root", "wsd"}) {
        std::vector<std::string> overrides = {std::string("train.train_iters=") + iters};
        if (*schedule) overrides.push_back(std::string("scheduler=") + schedule);
        const auto r = resolved(name, overrides);
        CHECK_MESSAGE(r.ok(), name << " " << iters << " " << schedule << "\n" << problems(r));
      }
}

TEST_CASE("the learning rate alone can be changed in every shipped recipe") {
  for (const std::string& name : test::sampled(golden_names()))
    for (const double factor : {0.1, 10.0}) {
      const double lr = resolved(name).config.optimizer.lr * factor;
      const auto r = resolved(name, {"optimizer.lr=" + std::to_string(lr)});
      CHECK_MESSAGE(r.ok(), name << " times " << factor << "\n" << problems(r));
    }
}

TEST_CASE("the usual overrides are legal on every shipped recipe") {
  for (const char* name : kRecipes)
    for (const auto& overrides : std::vector<std::vector<std::string>>{
             {"dataset=mock"},
             {"mixed_precision=fp32"},
             {"mixed_precision=bf16_mixed"},
             {"tokenizer=none"},
             {"dataset=mock", "tokenizer=none", "train.train_iters=5"},
             {"dataset.data_path=mine_text_document", "tokenizer.tokenizer_model=mine.json"},
             {"dataset.data_path=[0.3, a, 0.7, b]"},
             {"checkpoint.save=out", "checkpoint.load=in", "checkpoint.save_interval=7"},
             {"checkpoint.pretrained_checkpoint=in"},
             {"model.seq_length=1024", "train.micro_batch_size=1"},
             {"validation.eval_interval=null"},
             {"train.exit_interval=3", "rng.seed=7"},
             {"model.recompute_granularity=full"}}) {
      const auto r = resolved(name, overrides);
      CHECK_MESSAGE(r.ok(), name << " " << overrides[0] << "\n" << problems(r));
    }
}

TEST_CASE("fewer layers are legal on every shipped recipe whose pipeline they divide") {
  size_t alone = 0;
  for (const std::string& name : golden_names()) {
    const int64_t stages = resolved(name).config.dist.pipeline_model_parallel_size;
    for (const char* layers : {"1", "4"}) {
      const auto r = resolved(name, {std::string("model.num_layers=") + layers});
      CAPTURE(name);
      if (stages == 1) {
        CHECK_MESSAGE(r.ok(), problems(r));
        ++alone;
      } else if (!r.ok()) {
        CHECK_MESSAGE(problems(r).find(" stages") != std::string::npos, problems(r));
      }
    }
  }
  CHECK(alone >= 200);
  // The recipe was written for 32 layers, and is used here with two.
  const auto r = resolved("llama3-8b", {"model.num_layers=2"});
  CHECK(problems(r).find("4 is more than the layers of a stage, 2: all of them are recomputed") !=
        std::string::npos);
}

TEST_CASE("every preset resolves") {
  const auto library = Library::standard();
  size_t seen = 0;
  for (const auto& section : schema().sections()) {
    if (section.name.empty()) continue;
    for (const auto& preset : library.presets(section.name)) {
      CAPTURE(section.name);
      CAPTURE(preset.name);
      CHECK_FALSE(preset.description.empty());
      std::vector<std::string> overrides = {section.name + "=" + preset.name};
      if (section.name == "peft") overrides.push_back("checkpoint.pretrained_checkpoint=runs/base");
      if (preset.name == "sft") overrides.push_back("dataset.train_files=chats.jsonl");
      if (preset.name == "gpt2_bpe") {
        overrides.push_back("tokenizer.vocab_file=vocab.json");
        overrides.push_back("tokenizer.merge_file=merges.txt");
      }
      // A recipe that shards parameters takes every number format.
      if (section.name == "mixed_precision") {
        const auto sharded = resolved("llama3-8b", overrides);
        CHECK(sharded.config.ddp.data_parallel_sharding_strategy != ShardingStrategy::no_shard);
        CHECK_MESSAGE(sharded.ok(), problems(sharded));
      }
      // Fourteen layers of a model with 88 stay in bf16.
      if (preset.name.starts_with("nemotron_3_super")) overrides.push_back("model.num_layers=88");
      // The canonical ones name the gate and up projections, which GPT-2 does not have; nor has it latent
      // attention or experts.
      const auto r = resolved(preset.name.starts_with("canonical_") ? "quickstart"
                              : preset.name.starts_with("latent_")  ? "latent-155m"
                              : preset.name == "lora_experts"       ? "olmoe-1b-7b"
                                                                    : "gpt2-124m",
                              overrides);
      CHECK_MESSAGE(r.ok(), problems(r));
      ++seen;
    }
  }
  CHECK(seen >= 50);
}

TEST_CASE("lora_attention and lora_experts adapt these layers of every model with experts, and no others") {
  int families = 0;
  for (const auto& entry : Library::standard().recipes()) {
    const std::string& name = entry.name;
    if (!name.ends_with("-lora") || !resolved(name).config.model.num_moe_experts) continue;
    CAPTURE(name);
    ++families;
    for (const auto& [adapters, part] :
         {std::pair("lora_attention", ".self_attention."), std::pair("lora_experts", ".mlp.experts.")}) {
      CAPTURE(adapters);
      const auto r = resolved(name, {std::string("peft=") + adapters});
      REQUIRE_MESSAGE(r.ok(), problems(r));
      CHECK(r.config.peft->dim == 32);
      int64_t adapted = 0;
      for (const std::string& layer : adaptable_layers(r.config.model, r.config.peft->scheme)) {
        CHECK_MESSAGE(adapts(*r.config.peft, layer) == (layer.find(part) != std::string::npos), layer);
        adapted += static_cast<int64_t>(adapts(*r.config.peft, layer));
      }
      CHECK(adapted >= 2 * (r.config.model.num_layers - r.config.model.moe_first_dense_layers));
    }
  }
  CHECK(families >= 11);
  // A dense model has no experts to adapt.
  CHECK(problems(resolved("llama3.1-8b-lora", {"peft=lora_experts"})).find("R0912") != std::string::npos);
  CHECK(resolved("llama3.1-8b-lora", {"peft=lora_attention"}).ok());
}

TEST_CASE("targets of adapters are not looked for in a model without layers") {
  const auto r = resolved("quickstart-lora", {"model.num_layers=0", "peft.target_modules=[linear_q]"});
  CHECK_FALSE(r.ok());
  CHECK(problems(r).find("C0202") != std::string::npos);
  CHECK(problems(r).find("R0912") == std::string::npos);
}

TEST_CASE("recipes choose presets and do not spell what a preset owns") {
  for (const std::string& name : golden_names()) {
    if (name == "quickstart-lora") continue;  // smaller than the preset, to learn in a minute
    const auto r = resolved(name);
    std::set<std::string> of_preset;
    for (const auto& write : r.history)
      if (write.origin.kind == Origin::Kind::preset) of_preset.insert(write.path);
    for (const auto& write : r.history)
      if (write.origin.kind == Origin::Kind::file)
        CHECK_MESSAGE(of_preset.count(write.path) == 0, name << " spells " << write.path);
  }
}

TEST_CASE("adapters of separate projections fit models with and without a gated MLP") {
  for (const char* recipe : {"gpt2-124m-lora", "llama3.2-1b-lora"})
    for (const char* preset : {"peft=canonical_lora", "peft=canonical_dora"}) {
      const Resolution r = resolved(recipe, {preset});
      CHECK_MESSAGE(r.ok(), recipe << " " << preset << "\n" << problems(r));
    }
}

TEST_CASE("LoRA reaches the experts of a model; DoRA of experts is refused") {
  const Resolution r = resolved("mixtral-8x7b-lora");
  CHECK_MESSAGE(r.ok(), problems(r));
  CHECK(r.config.dist.expert_model_parallel_size == 8);
  REQUIRE(r.config.peft);
  for (const char* layer : {"experts.linear_fc1", "experts.linear_fc2"})
    CHECK(adapts(*r.config.peft, std::string("decoder.layers.31.mlp.") + layer));
  for (const char* change :
       {"peft=canonical_lora", "peft=lora_plus", "peft.target_modules=[linear_qkv,linear_proj]",
        "peft.exclude_modules=['*.mlp.experts.*']"}) {
    const Resolution other = resolved("mixtral-8x7b-lora", {change});
    CHECK_MESSAGE(other.ok(), change << "\n" << problems(other));
  }
  CHECK(problems(resolved("mixtral-8x7b-lora", {"peft=dora"})).find("R0912") != std::string::npos);
}

TEST_CASE("LoRA reaches every linear layer of models with latent attention and experts") {
  for (const char* model :
       {"deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "kimi-k2", "moonlight-16b-a3b"}) {
    const Resolution r = resolved(std::string(model) + "-lora");
    CHECK_MESSAGE(r.ok(), problems(r));
    REQUIRE(r.config.peft);
    for (const std::string& layer : adaptable_layers(r.config.model, r.config.peft->scheme))
      CHECK_MESSAGE(adapts(*r.config.peft, layer), layer);
  }
}

TEST_CASE("Mixtral 8x22B is fine-tuned with the vocabulary of its published weights") {
  for (const char* method : {"mixtral-8x22b-sft", "mixtral-8x22b-lora"})
    CHECK(resolved(method).config.model.vocab_size == 32768);
  CHECK(resolved("mixtral-8x7b-sft").config.model.vocab_size == 32000);
}

TEST_CASE("with adapters the experts' biases stay, and a rate for their updates is refused") {
  const Resolution r = resolved("mixtral-8x7b-lora", {"model.moe_router_score_function=sigmoid",
                                                      "model.moe_router_enable_expert_bias=true",
                                                      "model.moe_router_bias_update_rate=0.01"});
  CHECK_MESSAGE(problems(r).find("read only when `peft` is null") != std::string::npos, problems(r));
  // The rate of a model's preset is not the user's.
  const std::string text = problems(resolved("mixtral-8x7b-lora", {"model=moonlight-16b-a3b"}));
  CHECK_MESSAGE(text.find("moe_router_bias_update_rate") == std::string::npos, text);
}

TEST_CASE("a chat template needs a tokenizer") {
  const std::vector<std::string> none{"dataset=mock", "tokenizer=none"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), none.begin(), none.end());
    return resolved("gpt2-124m-sft", more);
  };
  CHECK_MESSAGE(with({}).ok(), problems(with({})));  // the recipe's own is dropped
  CHECK_FALSE(with({}).config.tokenizer.chat_template);
  CHECK(with({"tokenizer.chat_template=null"}).ok());  // as recipes of earlier runs have it
  const Resolution refused = with({"tokenizer.chat_template=chatml"});
  CHECK_FALSE(refused.ok());
  CHECK(problems(refused).find("`tokenizer.chat_template` is not a field of `tokenizer` of kind `none`") !=
        std::string::npos);
}

TEST_CASE("a directory that is given as a recipe is named for what it is") {
  const std::string root = std::string(capstan::test::kSourceDirectory) + "/";
  const auto says = [&](const std::string& name, const std::string& help) {
    try {
      (void)resolved(name);
      FAIL(name);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::not_found);
      CHECK_MESSAGE(error.help().find(help) != std::string::npos, error.help());
    }
  };
  says(root + "tests/formats/families/llama", "a recipe takes it as model=hf:" + root);
  says(root + "tests/compat", "that is a directory; a recipe is a file in it");
  says("hf:some/model", "begin a recipe from hf:some/model");
}

TEST_CASE("a value that means something else says what to write") {
  const auto says = [](const std::string& override, const std::string& help) {
    const auto r = resolved("quickstart", {override});
    CHECK_FALSE(r.ok());
    CHECK_MESSAGE(problems(r).find(help) != std::string::npos, problems(r));
  };
  says("optimizer.lr=0,001", "write 0.001");
  says("train.global_batch_size=1,024", "write 1024");
  says("train.global_batch_size=1,024,000", "write 1024000");
  for (const char* irregular : {"1,24", "0,024", "1,0245,67", "1024,000"}) {
    const auto r = resolved("quickstart", {std::string("train.global_batch_size=") + irregular});
    CHECK_MESSAGE(problems(r).find("write 1") == std::string::npos, problems(r));
  }
  says("optimizer.lr=-1,5e-3", "write -1.5e-3");
  says("optimizer.weight_decay=1,000", "write 1.000 or 1000");
  says("optimizer.lr=1,2,3", "for a trial of each value");
  // Of a file, where a comma may also begin another entry.
  const auto file_says = [](const std::string& text, const std::string& help) {
    Request request;
    request.recipe = "./mine.yaml";
    const auto r = resolve_text("extends: quickstart\n" + text, request);
    CHECK_FALSE(r.ok());
    CHECK_MESSAGE(problems(r).find(help) != std::string::npos, problems(r));
  };
  file_says("optimizer: {lr: \"0,001\"}\n", "remove the quotes: 0.001");
  file_says("optimizer:\n  lr: \"0.001\"\n", "remove the quotes: 0.001");
  file_says("optimizer: {lr: 0,001}\n", "numbers have a decimal point");
  says("validation.eval_iters=0", "for no validation: validation.eval_interval=null");
  says("validation.eval_interval=0", "for no validation: validation.eval_interval=null");
}

TEST_CASE("a field of one value or more writes one without brackets, as before it took several") {
  const std::string path = "model.moe_aux_loss_coeff";
  const FieldInfo& field = *schema().find_field(path);
  const auto with = [](const std::vector<std::string>& overrides) {
    return resolved("quickstart-moe", overrides);
  };
  const auto text_of = [&](const Resolution& r) {
    return yaml_inline(*field.type, schema().load(&r.config, field));
  };
  const Resolution one = with({path + "=0.01"}), list_of_one = with({path + "=[0.01]"});
  CHECK(text_of(one) == "0.01");
  CHECK(text_of(list_of_one) == "0.01");
  CHECK(canonical_form(schema(), &one.config).find(path + " = 0.01\n") != std::string::npos);
  CHECK(config_hash(schema(), &one.config) == config_hash(schema(), &list_of_one.config));
  const Resolution both =
      with({"model.moe_router_load_balancing_type=[aux_loss, seq_aux_loss]", path + "+=1e-3"});
  CHECK(both.ok());
  CHECK(text_of(both) == "[0.01, 0.001]");
  CHECK(config_hash(schema(), &one.config) != config_hash(schema(), &both.config));
  // What a run stores is read as the same.
  CHECK(text_of(resolve_text(show(both, {ShowFormat::yaml, ""}), request_of("stored.yaml"))) ==
        "[0.01, 0.001]");
  const std::pair<const char*, const char*> refused[] = {
      {"=[]", "is an empty list"}, {"=[0.01, -1]", "it must be at least 0"}, {"=[0.01, [1]]", "not a list"}};
  for (const auto& [value, problem] : refused) {
    const Resolution bad = with({path + value});
    REQUIRE(bad.diagnostics.size() == 1);
    CHECK(bad.diagnostics[0].message.find(problem) != std::string::npos);
  }
}
