// Adapters of PEFT's with the program alone: evaluated, trained from, merged, converted there and back; and
// what is wrong with them.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/json.hpp"
#include "process.hpp"
#include "support/paths.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

const std::string kHere = std::string(capstan::test::kSourceDirectory) + "/tests/formats/";
const std::string kTexts = std::string(capstan::test::kSourceDirectory) + "/tests/cli/text/";
const std::string kBase = "hf:" + kHere + "families/llama", kAdapter = kHere + "adapters/lora";
// The settings of the fixture's adapter as overrides of a recipe.
const std::vector<std::string> kLikeIt = {"peft.scheme=canonical_lora", "peft.dim=3", "peft.alpha=6",
                                          "peft.target_modules=[linear_q,linear_k,linear_v,linear_proj,"
                                          "linear_fc1_gate,linear_fc1_up,linear_fc2]"};

struct Home {
  ScratchDirectory scratch;
  Home() { scratch.write("text.txt", "capstan\n"); }
  std::string file(const std::string& name) const { return scratch.file(name); }
  Finished in(std::vector<std::string> arguments, double seconds = 120) const {
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = std::move(arguments);
    launch.time_limit = seconds;
    return run(launch);
  }
  Finished good(std::vector<std::string> arguments) const {
    Finished done = in(std::move(arguments));
    REQUIRE_MESSAGE(done.code == 0, done.err);
    return done;
  }
  void refused(std::vector<std::string> arguments, const std::string& why) const {
    const Finished done = in(std::move(arguments));
    CHECK(done.code != 0);
    CHECK(done.code != 70);
    CHECK_MESSAGE(contains(done.err, why), done.err);
  }
  double loss(std::vector<std::string> of) const {
    of.insert(of.begin(), "eval");
    // 53 words of vocabulary: bytes below that are few, and the text is given as such.
    of.insert(of.end(), {"--text", "text.txt", "--json", "model.seq_length=12", "train.threads=1"});
    return capstan::json_of(good(std::move(of)).out)["loss"].get<double>();
  }
  std::string recipe(const std::string& base) const {
    return scratch.write(
        "tune.yaml", "model: {preset: \"" + kBase +
                         "\", seq_length: 12}\nmixed_precision: fp32\ntokenizer: none\ndataset: mock\n"
                         "train: {micro_batch_size: 1, global_batch_size: 2, train_iters: 2, threads: 1}\n"
                         "optimizer: {preset: adamw, lr: 1e-3}\ncheckpoint: {pretrained_checkpoint: \"" +
                         base + "\"}\n");
  }
  Finished train(const std::string& base, std::vector<std::string> more, bool like = true) const {
    std::vector<std::string> words = {"train", recipe(base)};
    if (like) words.insert(words.end(), kLikeIt.begin(), kLikeIt.end());
    words.insert(words.end(), more.begin(), more.end());
    return in(words, 300);
  }
  void same_files(const std::string& a, const std::string& b) const {
    for (const char* name : {"/adapter_model.safetensors", "/adapter_config.json"})
      CHECK_MESSAGE(read_text(file(a) + name) == read_text(file(b) + name), name);
  }
};

}  // namespace

TEST_CASE(
    "an adapter of PEFT's through every door: there and back, merged, trained on, and from four ranks to "
    "one") {
  const Home home;
  // There and back: the tensors of PEFT's file, and the same files a second time.
  home.good({"convert", "peft:" + kAdapter, "adapters", "--base", kBase});
  home.good({"convert", "adapters", "peft:again"});
  CHECK(read_text(home.file("again/adapter_model.safetensors")) ==
        read_text(kAdapter + "/adapter_model.safetensors"));
  const json config = capstan::json_of(read_text(home.file("again/adapter_config.json")));
  CHECK(config["base_model_name_or_path"] == kHere + "families/llama");
  CHECK(config["r"] == 3);
  CHECK(config["lora_alpha"] == 6);
  home.good({"convert", "adapters", "peft:named", "--base", "somebody/llama"});
  CHECK(capstan::json_of(read_text(home.file("named/adapter_config.json")))["base_model_name_or_path"] ==
        "somebody/llama");

  // Trained on, with four ranks; resumed with one rank, whose run is over: the same adapters.
  const Finished four = home.train(
      kBase, {"peft.adapter=" + kAdapter, "--run-dir", "four", "--nproc", "4", "dist.tp=2", "dist.pp=2"});
  REQUIRE_MESSAGE(four.code == 0, four.err);
  CHECK(contains(four.err + four.out, "adapters from " + kAdapter));
  home.good({"convert", "four", "peft:of-four"});
  const Finished one = home.train(kBase, {"peft.adapter=again", "--run-dir", "one"});
  REQUIRE_MESSAGE(one.code == 0, one.err);
  const auto numbers = [&](const std::string& run) {
    std::vector<double> losses;
    std::ifstream rows(home.file(run + "/metrics.jsonl"));
    for (std::string row; std::getline(rows, row);)
      if (const json j = capstan::json_of(row); j.contains("loss")) losses.push_back(j["loss"]);
    return losses;
  };
  const auto a = numbers("four"), b = numbers("one");
  REQUIRE(a.size() == 2);
  REQUIRE(b.size() == 2);
  for (size_t i = 0; i < 2; ++i) CHECK(a[i] == doctest::Approx(b[i]).epsilon(1e-5));
  home.good({"convert", "peft:of-four", "back", "--base", kBase});
  home.good({"convert", "back", "peft:of-back"});
  home.same_files("of-four", "of-back");
  // A run goes on from a checkpoint of adapters as from PEFT's files.
  const Finished from_run = home.train(kBase, {"peft.adapter=back", "--run-dir", "more"});
  CHECK_MESSAGE(from_run.code == 0, from_run.err);

  // Merged, and as a full model of Transformers.
  home.good({"merge", kAdapter, "merged", "--base", kBase});
  home.good({"convert", "merged", "hf:merged-hf"});
  home.refused({"merge", kAdapter, "merged", "--base", kBase}, "exists already");
  home.good({"merge", "four", "merged-run"});  // beside hf:
  home.good({"merge", "named", "merged-named", "--base", kBase});
  home.refused({"merge", "named", "x"}, "somebody/llama");
  home.good({"merge", "again", "merged-again"});  // its base lies where it says
}

TEST_CASE("eval and generate take adapters, and agree with what is merged") {
  const Home home;
  home.scratch.write("text.txt", "the thin cat sat in the inn on the hat\n");
  const std::string base = "hf:" + kHere + "families/smollm2";
  // Adapters of a run beside a model that has a tokenizer, by way of PEFT's files.
  home.scratch.write("tune.yaml",
                     "model: {preset: \"" + base +
                         "\", seq_length: 12}\nmixed_precision: fp32\ndataset: mock\n"
                         "tokenizer: {preset: huggingface, tokenizer_model: \"" +
                         base.substr(3) +
                         "\"}\ntrain: {micro_batch_size: 1, global_batch_size: 2, train_iters: 3, "
                         "threads: 1}\noptimizer: {preset: adamw, lr: 1e-2}\n"
                         "checkpoint: {pretrained_checkpoint: \"" +
                         base + "\"}\n");
  const double plain = home.loss({base});
  for (const std::string preset :
       {"lora", "rslora", "lora_plus", "dora", "canonical_lora", "canonical_dora"}) {
    CAPTURE(preset);
    const Finished trained =
        home.in({"train", "tune.yaml", "peft=" + preset, "peft.dim=3", "--run-dir", preset});
    REQUIRE_MESSAGE(trained.code == 0, trained.err);
    const double of_run = home.loss({preset});
    CHECK(of_run != plain);
    home.good({"convert", preset, "peft:" + preset + "-peft"});
    CHECK(home.loss({base, "--adapter", preset + "-peft"}) == doctest::Approx(of_run).epsilon(1e-6));
    CHECK(home.loss({base, "--adapter", preset}) == of_run);
    home.good({"merge", preset, preset + "-merged"});
    CHECK(home.loss({preset + "-merged"}) == doctest::Approx(of_run).epsilon(1e-6));
    home.good({"convert", preset + "-merged", "hf:" + preset + "-hf"});
    CHECK(home.loss({"hf:" + preset + "-hf"}) == doctest::Approx(of_run).epsilon(1e-6));
    home.good({"convert", "peft:" + preset + "-peft", preset + "-back", "--base", base});
    CHECK(home.loss({preset + "-back"}) == doctest::Approx(of_run).epsilon(1e-6));
    home.good({"convert", preset + "-back", "peft:" + preset + "-again"});
    home.same_files(preset + "-peft", preset + "-again");
  }
  // NaN among its weights is no loss and no text.
  fs::copy(home.file("lora-peft"), home.file("nan"));
  std::fstream weights(home.file("nan/adapter_model.safetensors"),
                       std::ios::in | std::ios::out | std::ios::binary);
  weights.seekp(-4, std::ios::end);
  weights.write("\x00\x00\xc0\x7f", 4);
  weights.close();
  home.refused({"eval", base, "--adapter", "nan", "--text", "text.txt", "model.seq_length=12"},
               "does not compute finite values");
  home.refused({"generate", base, "--adapter", "nan", "--prompt", "the", "--max-tokens", "2"},
               "does not compute finite values");
  // A base in bf16, as most come: the merged weights are rounded to its type.
  home.good({"convert", base, "hf:half", "--dtype", "bf16"});
  home.good({"merge", "dora-peft", "half-merged", "--base", "hf:half"});
  CHECK(home.loss({"half-merged"}) == doctest::Approx(home.loss({"dora"})).epsilon(0.01));
  const auto generated = [&](std::vector<std::string> of) {
    of.insert(of.begin(), "generate");
    of.insert(of.end(),
              {"--prompt", "the thin", "--max-tokens", "6", "--temperature", "0", "train.threads=1"});
    return home.good(std::move(of)).out;
  };
  CHECK(generated({base, "--adapter", "dora-peft"}) == generated({"dora"}));
  // A base of our own: the names are those that it would have at Hugging Face.
  home.good({"convert", base, "ours"});
  CHECK(home.loss({"ours", "--adapter", "lora-peft"}) == doctest::Approx(home.loss({"lora"})).epsilon(1e-6));
  home.refused({"eval", "ours", "--adapter", "lora", "--text", "text.txt"},
               "is not the base model of the adapters");
  home.refused({"eval", "lora", "--adapter", "dora", "--text", "text.txt"}, "already holds adapters");
  home.refused({"eval", base, "--adapter", "ours", "--text", "text.txt"}, "full model, not adapters");
  home.refused({"eval", base, "--text", "text.txt", "peft=lora", "checkpoint.pretrained_checkpoint=" + base,
                "model.seq_length=12"},
               "full model, which has no adapters");
  home.refused({"convert", "lora", "hf:x"}, "holds adapters, not a full model");
  home.refused({"convert", "ours", "peft:x"}, "full model, not adapters");
  home.refused({"convert", base, "peft:x"}, "full model, not adapters");
  home.refused({"convert", "peft:lora-peft", "hf:x"}, "merge");
  home.refused({"convert", "peft:lora-peft", "peft:x"}, "both PEFT's");
  home.refused({"convert", "peft:lora-peft", "x", "--base", "lora"}, "holds adapters itself");
  home.refused({"convert", "lora", "peft:lora-peft"}, "exists already");
  home.refused({"convert", "lora", "peft:x", "--dtype", "bf16"}, "fp32");
  home.refused({"convert", base, "x", "--base", base}, "--base");
  for (const char* to : {"gguf:x", "x"})
    home.refused({"convert", base, to, "--shard-size", "1MB"}, "`--shard-size` applies to safetensors");
  home.refused({"convert", "lora", "peft:x", "--shard-size", "1MB"}, "`--shard-size` applies to safetensors");
  home.refused({"merge", "lora", "x", "--base", base, "train.threads=1"}, "--base is taken instead");
  home.refused({"merge", "lora-peft", "x", "train.threads=1"}, "changes the recipe of a run");
  for (const std::string to : {"hf:x", "gguf:x"})
    home.refused({"merge", "lora", to}, "then `capstan convert MERGED " + to + "`");
  home.refused({"merge", "lora", "peft:x"}, "`capstan convert lora peft:x` writes the adapters alone");
}

TEST_CASE("an export of adapters says what PEFT would compute otherwise") {
  const Home home;
  const auto exported = [&](const std::string& family, const std::string& preset) {
    const std::string name = family + "-" + preset, base = "hf:" + kHere + "families/" + family;
    home.good({"train", home.recipe(base), "model=" + base, "peft=" + preset, "peft.dim=2",
               "train.train_iters=1", "--run-dir", name});
    return home.good({"convert", name, "peft:" + name + "-peft"}).err;
  };
  // Its first layer is dense.
  const std::string note = "leaves out the adapters of `model.layers.0.mlp.down_proj` and all other modules";
  CHECK(contains(exported("qwen3_moe", "lora"), note));
  CHECK_FALSE(contains(exported("qwen3_moe", "lora_attention"), "note: qwen3"));
  CHECK(contains(exported("qwen2_moe", "canonical_lora"), "mlp.shared_expert.down_proj` and all other"));
  const std::string rslora = exported("olmoe", "rslora");
  CHECK_MESSAGE(contains(rslora, "Transformers 5 scales rsLoRA of experts wrongly"), rslora);
  CHECK_FALSE(contains(exported("olmoe", "lora"), "Transformers 5"));
}

TEST_CASE("adapters of a run with another tokenizer than the base's are refused beside the base") {
  const Home home;
  std::string lines;
  for (int i = 0; i < 40; ++i) lines += "{\"prompt\": \"the cat\", \"completion\": \" sat in the inn\"}\n";
  home.scratch.write("data.jsonl", lines);
  home.scratch.write("text.txt", "the thin cat sat in the inn\n");
  const auto train = [&](std::vector<std::string> more) {
    std::vector<std::string> words = train_tiny(
        {"train.train_iters=2", "model.vocab_size=512", "dataset=sft", "dataset.train_files=data.jsonl"});
    words.insert(words.end(), more.begin(), more.end());
    home.good(words);
  };
  train({"tokenizer=byte", "--run-dir", "base"});
  train({"tokenizer=byte", "peft=lora", "checkpoint.pretrained_checkpoint=base", "--run-dir", "same"});
  train({"tokenizer=huggingface", "tokenizer.tokenizer_model=" + kTexts + "tokenizer.json", "peft=lora",
         "checkpoint.pretrained_checkpoint=base", "--run-dir", "tuned"});
  home.good({"eval", "base", "--adapter", "same", "--text", "text.txt"});
  home.good({"eval", "tuned", "--text", "text.txt"});
  home.refused({"eval", "base", "--adapter", "tuned", "--text", "text.txt"},
               "the adapters `tuned` were trained with the tokenizer ");
}

TEST_CASE("a base that is not there is named with its field and near names") {
  const Home home;
  fs::copy(kHere + "families/llama", home.file("base"), fs::copy_options::recursive);
  const auto with_base = [&](const std::string& name, const std::string& base) {
    fs::copy(kAdapter, home.file(name));
    json config = capstan::json_of(read_text(home.file(name + "/adapter_config.json")));
    config["base_model_name_or_path"] = base;
    fs::remove(home.file(name + "/adapter_config.json"));
    home.scratch.write(name + "/adapter_config.json", capstan::dump_json(config));
  };
  with_base("moved", "bas");
  home.refused({"convert", "peft:moved", "x"},
               "not found: base_model_name_or_path = bas (of `moved/adapter_config.json`)");
  home.refused({"merge", "moved", "x"}, "did you mean `base`?");
  home.refused({"merge", "moved", "x"}, "--base CHECKPOINT|RUN|hf:DIR");
  with_base("hub", "an-org/a-model");
  home.refused({"merge", "hub", "x"}, "hf download an-org/a-model");
  with_base("nothing", "");
  home.refused({"merge", "nothing", "x"}, "does not name the base model of its adapters");
  home.refused({"merge", "moved", "x", "--base", "hf:bse"}, "not found: base = hf:bse");
  home.refused({"merge", "moved", "x", "--base", "hf:bse"}, "did you mean `hf:base`?");
  // A run whose base has gone.
  const Finished trained = home.train("hf:base", {"--run-dir", "tuned"});
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  fs::rename(home.file("base"), home.file("basis"));
  home.refused({"merge", "tuned", "x"}, "not found: checkpoint.pretrained_checkpoint = hf:");
  home.refused({"merge", "tuned", "x"}, "--base CHECKPOINT|RUN|hf:DIR");
}

TEST_CASE("errors in an adapter are reported, and nothing in it is run") {
  const Home home;
  const auto copy = [&](const std::string& name) {
    fs::copy(kAdapter, home.file(name));
    return home.file(name);
  };
  const auto eval = [&](const std::string& adapter) {
    return std::vector<std::string>{"eval",   kBase,      "--adapter",      adapter,
                                    "--text", "text.txt", "train.threads=1"};
  };
  const auto edit = [&](const std::string& directory, const std::string& key, const json& value) {
    json config = capstan::json_of(read_text(directory + "/adapter_config.json"));
    config[key] = value;
    std::ofstream(directory + "/adapter_config.json") << config;
  };
  home.refused(eval("nowhere"), "nowhere");
  fs::create_directory(home.file("empty"));
  home.refused(eval("empty"), "there is no adapter_config.json");
  home.refused(eval(kBase.substr(3)), "hf:" + kBase.substr(3));
  fs::create_directory(home.file("pickle"));
  fs::copy(kAdapter + "/adapter_config.json", home.file("pickle/adapter_config.json"));
  home.scratch.write("pickle/adapter_model.bin", "\x80\x02");
  home.refused(eval("pickle"), "none is ever run");
  fs::remove(home.file("pickle/adapter_config.json"));
  home.refused(eval("pickle"), "adapter_model.bin` is a pickle");
  home.refused({"eval", "hf:" + kHere + "families/mistral", "--adapter", kHere + "adapters/gpt2", "--text",
                "text.txt"},
               "4 differences");
  home.refused({"eval", "hf:" + kHere + "families/qwen3", "--adapter", kAdapter, "--text", "text.txt"},
               "is for a layer of");
  const std::string truncated = copy("truncated");
  fs::resize_file(truncated + "/adapter_model.safetensors", 3000);
  home.refused(eval("truncated"), "adapter_model.safetensors");
  edit(copy("ia3"), "peft_type", "IA3");
  home.refused(eval("ia3"), "IA3");
  edit(copy("saved"), "modules_to_save", json::array({"lm_head"}));
  home.refused(eval("saved"), "modules_to_save");
  std::ofstream(copy("no-json") + "/adapter_config.json") << "{\"peft_type\": ";
  home.refused(eval("no-json"), "adapter_config.json");

  // A recipe that describes other adapters: everything at once, and how to go on.
  const Finished other = home.train(
      kBase, {"peft=lora", "peft.use_rslora=true", "peft.adapter=" + kAdapter, "--run-dir", "x"}, false);
  CHECK(other.code != 0);
  for (const char* part : {"peft.scheme is lora in the recipe, and canonical_lora in",
                           "peft.dim is 32 in the recipe, and 3", "peft.alpha is 32 in the recipe, and 6",
                           "peft.use_rslora is true", "peft.scheme=canonical_lora peft.dim=3 peft.alpha=6"})
    CHECK_MESSAGE(contains(other.err, part), other.err);
  const Finished fewer = home.train(
      kBase, {"peft.target_modules=[linear_q,linear_k]", "peft.adapter=" + kAdapter, "--run-dir", "y"});
  CHECK(fewer.code != 0);
  CHECK_MESSAGE(contains(fewer.err, "the recipe has no adapters, unlike"), fewer.err);
}
