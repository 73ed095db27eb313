// check, show, explain, schema, recipe: what scripts and editors rely on.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "base/json.hpp"
#include "process.hpp"
#include "support/paths.hpp"

using namespace capstan::test;
namespace fs = std::filesystem;

TEST_CASE("check: 0 sound, 1 errors in a readable recipe, 2 unreadable") {
  ScratchDirectory scratch;
  const Finished good = run({"check", "llama3.1-405b"});
  CHECK(good.code == 0);
  CHECK(contains(good.out, "1024 ranks"));
  CHECK(run({"check", "quickstart", "model.num_attention_heads=7"}).code == 1);
  CHECK(run({"check", "quickstart", "="}).code == 2);
  CHECK(run({"check", "gpt2-124m"}).err.find("refuses") == std::string::npos);
  CHECK(run({"check", "llama3-70b", "--ranks", "100"}).code == 1);
  CHECK(run({"check", "no-such-recipe"}).code == 2);
  CHECK(run({"check", "./no-such.yaml"}).code == 2);
  CHECK(run({"check", scratch.path() + "/"}).code == 2);
  CHECK(run({"check", scratch.write("bad.yaml", "model: {num_layers: [1\n")}).code == 2);
  CHECK(run({"check", scratch.write("wrong.yaml", "extends: quickstart\nmodel: {num_layer: 3}\n")}).code ==
        1);
  // For every other command a recipe with errors is code 2.
  CHECK(run({"show", "quickstart", "model.num_attention_heads=7"}).code == 2);
  CHECK(run({"train", "quickstart", "model.num_attention_heads=7"}).code == 2);
  CHECK(run({"explain", "model.num_layers", "-r", "quickstart", "model.num_attention_heads=7"}).code == 2);
}

TEST_CASE("check refuses what train refuses") {
  for (const std::string change :
       {"model.attention_softmax_in_fp32=false", "comm_overlap.delay_wgrad_compute=true",
        "model.moe_router_load_balancing_type=sinkhorn"}) {
    CAPTURE(change);
    const std::vector<std::string> words = {"quickstart", "dataset=mock", change, "model.num_moe_experts=4"};
    const auto with = [&](const std::string& command, const std::string& more) {
      std::vector<std::string> all = words;
      if (change.find("moe") == std::string::npos) all.pop_back();
      all.insert(all.begin(), command);
      if (!more.empty()) all.push_back(more);
      return run(all);
    };
    const ScratchDirectory scratch;
    const Finished trained = with("train", "--run-dir=" + scratch.file("run"));
    CHECK(trained.code == 1);
    CHECK_MESSAGE(contains(trained.err, "this version cannot train it"), trained.err);
    const Finished checked = with("check", "");
    CHECK(checked.code == 1);
    CHECK_MESSAGE(checked.out.empty(), checked.out);
    CHECK_MESSAGE(contains(checked.err, "this version cannot train it"), checked.err);
    const Finished machine = with("check", "--json");
    CHECK(machine.code == 1);
    CHECK(capstan::json_of(machine.out)["ok"] == false);
    CHECK(capstan::json_of(machine.out)["refused_by_train"].size() >= 1);
  }
}

TEST_CASE("each change that is proposed for a recipe that does not fit makes one that fits") {
  const std::vector<std::string> asked = {"check", "llama3-8b", "resilience.memory_limit=70GiB",
                                          "train.device=cuda"};
  const Finished refused = run(asked);
  CHECK(refused.code == 3);
  const size_t begin = refused.err.find("= help: ddp.sharding=optim_grads (");
  REQUIRE_MESSAGE(begin != std::string::npos, refused.err);
  std::string help = refused.err.substr(begin + 8, refused.err.find(';', begin) - begin - 8);
  int proposals = 0;
  for (size_t at = 0; at != std::string::npos; ++proposals) {
    const size_t next = help.find(", or ", at);
    const std::string one = help.substr(at, next == std::string::npos ? next : next - at);
    std::vector<std::string> again = asked;
    std::istringstream words(one.substr(0, one.find(" (")));
    for (std::string word; words >> word;) again.push_back(word);
    CHECK_MESSAGE(run(again).code == 0, one);
    at = next == std::string::npos ? next : next + 5;
  }
  CHECK(proposals >= 2);
}

TEST_CASE("check --json") {
  const Finished good = run({"check", "llama3-8b", "--json"});
  REQUIRE(nlohmann::json::accept(good.out));
  CHECK(capstan::json_of(good.out)["ok"] == true);
  CHECK(capstan::json_of(good.out)["schema"] == "capstan.check/1");
  const Finished bad = run({"check", "llama3-8b", "model.num_layer=3", "model.hidden_size=abc", "--json"});
  CHECK(bad.code == 1);
  REQUIRE(nlohmann::json::accept(bad.out));
  CHECK(capstan::json_of(bad.out)["errors"] == 2);
  CHECK(bad.err.empty());
}

TEST_CASE("every named recipe has a description, and every example checks") {
  const auto listed = capstan::json_of(run({"recipe", "ls", "--json"}).out);
  CHECK(listed["recipes"].size() >= 6);
  for (const auto& recipe : listed["recipes"]) CHECK(!recipe["description"].get<std::string>().empty());
  size_t examples = 0;
  for (const auto& entry :
       fs::directory_iterator(std::string(capstan::test::kSourceDirectory) + "/examples")) {
    if (entry.path().extension() != ".yaml") continue;
    const Finished result = run({"check", entry.path().string()});
    CHECK_MESSAGE(result.code == 0, result.err);
    ++examples;
  }
  CHECK(examples >= 3);
}

TEST_CASE("show: a value, a section, everything, origins, JSON, minimal") {
  CHECK(run({"show", "llama3-8b", "model.num_layers"}).out == "32\n");
  CHECK(run({"show", "llama3-8b", "model.num_layers", "model.num_layers=16"}).out == "16\n");
  CHECK(run({"show", "llama3-8b", "model.num_layers", "--set", "model.num_layers=20"}).out == "20\n");
  CHECK(run({"show", "llama3-8b", "model.num_layer"}).code == 2);
  const Finished printed = run({"show", "llama3-8b", "--format", "json"});
  REQUIRE(nlohmann::json::accept(printed.out));
  CHECK(capstan::json_of(printed.out)["model"]["num_layers"] == 32);
  const Finished full = run({"show", "llama3-8b", "model.num_layers=16", "--json"});
  REQUIRE(nlohmann::json::accept(full.out));
  const auto object = capstan::json_of(full.out);
  CHECK(object["schema"] == "capstan.show/1");
  CHECK(object["config"]["model"]["num_layers"] == 16);
  CHECK(object["origins"]["model.num_layers"] == "<cli>:1");
  CHECK(contains(run({"show", "llama3-8b", "--origin"}).out, "model.num_layers"));
  CHECK(run({"show", "llama3-8b", "--origin", "--minimal"}).code == 2);

  // The output of show is a recipe that resolves to the same values.
  ScratchDirectory scratch;
  for (const char* form : {"--minimal", "--format=yaml"}) {
    const std::string copy = scratch.write("copy.yaml", run({"show", "llama3-8b", form}).out);
    CHECK(run({"show", copy, "--format", "json"}).out == printed.out);
  }
}

TEST_CASE("world size: the recipe's, or --ranks") {
  CHECK(run({"show", "llama3-70b", "dist.world_size"}).out == "64\n");
  CHECK(run({"show", "llama3-70b", "dist.world_size", "--ranks", "128"}).out == "128\n");
  CHECK(run({"check", "gpt3-175b", "--ranks", "256"}).code == 0);
  CHECK(run({"check", "gpt3-175b", "--ranks", "512"}).code == 0);
}

TEST_CASE("a recipe from standard input and from files") {
  Launch launch;
  launch.arguments = {"show", "-", "model.num_layers"};
  launch.input = "extends: quickstart\nmodel: {num_layers: 3}\n";
  CHECK(run(launch).out == "3\n");
  ScratchDirectory scratch;
  scratch.write("more.yaml", "model: {num_layers: 7}\n");
  CHECK(run({"show", "quickstart", "model.num_layers", "@" + scratch.file("more.yaml")}).out == "7\n");
  CHECK(run({"show", "quickstart", "model.num_layers", "-f", scratch.file("more.yaml")}).out == "7\n");
  CHECK(run({"-C", scratch.path(), "show", "quickstart", "model.num_layers", "@more.yaml"}).out == "7\n");
}

TEST_CASE("methods are listed with their models, and their short names are recipes") {
  const Finished listed = run({"recipe", "ls"});
  CHECK(contains(listed.out, "\nlora model=MODEL  "));
  // Those with experts have no dora, and qlora where one GPU holds them.
  CHECK(contains(listed.out, "\nmodels of lora sft: deepseek-v2 "));
  CHECK(contains(listed.out, "\nmodels of qlora: deepseek-v2-lite "));
  CHECK(contains(listed.out, "\nmodels of dora: gemma2-27b "));
  CHECK(contains(listed.out, " mixtral-8x7b "));
  CHECK_FALSE(contains(listed.out, "llama3.1-8b-lora"));
  const auto all = capstan::json_of(run({"recipe", "ls", "--json"}).out);
  CHECK(all["methods"].size() == 4);
  CHECK(all["methods"][1]["name"] == "lora");
  CHECK(all["methods"][1]["models"].size() == 47);
  CHECK(all["methods"][0]["name"] == "dora");
  CHECK(all["methods"][0]["models"].size() == 35);
  const auto values = [](const std::vector<std::string>& recipe) {
    std::vector<std::string> words = {"show", "--json"};
    words.insert(words.end(), recipe.begin(), recipe.end());
    return capstan::json_of(run(words).out)["config"];
  };
  CHECK(values({"llama3-70b-lora"}) == values({"lora", "model=llama3-70b"}));
  const Finished none = run({"train", "sft"});
  CHECK(none.code == 2);
  CHECK_MESSAGE(contains(none.err, "write `model=NAME`; there are settings for deepseek-v2, "), none.err);
}

TEST_CASE("recipe new and cp make recipes that check") {
  ScratchDirectory scratch;
  const std::string mine = scratch.file("mine.yaml"), copy = scratch.file("copy.yaml");
  CHECK(run({"recipe", "new", mine}).code == 0);
  CHECK(run({"check", mine}).code == 0);
  CHECK(run({"recipe", "new", mine}).code == 2);  // never over a file
  const std::string from_mine = scratch.file("from-mine.yaml");
  CHECK(run({"recipe", "new", from_mine, "--from", mine}).code == 0);
  CHECK(contains(read_text(from_mine), "extends: ./" + std::filesystem::path(mine).filename().string()));
  CHECK(run({"check", from_mine}).code == 0);
  CHECK(run({"recipe", "cp", "llama3-8b", copy}).code == 0);
  CHECK(run({"show", copy, "--format", "json"}).out == run({"show", "llama3-8b", "--format", "json"}).out);
  // A preset, which `plan` reads as a cluster of the user's.
  const std::string cluster = scratch.file("cluster.yaml");
  CHECK(run({"recipe", "cp", "cluster=h200", cluster}).code == 0);
  CHECK(contains(run({"plan", "llama3-8b", "--memory", "formula", "--cluster", cluster}).out,
                 "H200 SXM 141 GB"));
  CHECK(contains(run({"recipe", "cp", "cluster=h20", scratch.file("y.yaml")}).err,
                 "capstan recipe ls cluster"));
  const Finished unknown = run({"recipe", "cp", "llama3-8", scratch.file("x.yaml")});
  CHECK(unknown.code == 2);
  CHECK(contains(unknown.err, "`llama3-8b`"));
}

TEST_CASE("recipe new --from hf:DIR is a recipe that trains: model, tokenizer and weights of the directory") {
  ScratchDirectory scratch;
  const std::string model = scratch.file("models/tiny");
  fs::create_directories(model);
  const std::string source = std::string(capstan::test::kSourceDirectory) + "/tests/";
  for (const char* file : {"config.json", "model.safetensors"})
    fs::copy_file(source + "formats/families/llama/" + file, model + "/" + std::string(file));
  const auto made = [&](const std::string& name) {
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = {"recipe", "new", name, "--from", "hf:models/tiny"};
    return run(launch);
  };
  const Finished plain = made("plain.yaml");
  CHECK_MESSAGE(plain.code == 0, plain.err);
  CHECK(contains(read_text(scratch.file("plain.yaml")), "tokenizer: none\n"));  // there is none
  fs::copy_file(source + "cli/text/tokenizer.json", model + "/tokenizer.json");
  const Finished done = made("tiny.yaml");
  CHECK_MESSAGE(done.code == 0, done.err);
  const std::string text = read_text(scratch.file("tiny.yaml"));
  CHECK_MESSAGE(contains(done.out, "next: capstan train tiny.yaml\n"), done.out);
  // A word alone would be the name of a recipe.
  CHECK_MESSAGE(contains(made("word").out, "next: capstan train ./word\n"), "word");
  CHECK(contains(text, "\nmodel: hf:models/tiny\n"));
  CHECK(contains(text, "  pretrained_checkpoint: hf:models/tiny\n"));
  CHECK(contains(text, "  tokenizer_model: hf:models/tiny\n"));
  CHECK(made("tiny.yaml").code == 2);  // never over a file
  // From anywhere; the weights are those of the directory.
  const Finished trained = run({"train", scratch.file("plain.yaml"), "train.train_iters=1", "train.threads=1",
                                "train.global_batch_size=1", "--run-dir", scratch.file("run")});
  CHECK_MESSAGE(trained.code == 0, trained.err);
  CHECK(contains(trained.err, "models/tiny"));
  CHECK(run({"recipe", "new", scratch.file("x.yaml"), "--from", "hf:" + scratch.path()}).code == 2);
  CHECK(!fs::exists(scratch.file("x.yaml")));
}

TEST_CASE("explain: a word that is no path shows the fields that it means") {
  const auto shows = [](const char* word, const char* path) {
    const Finished result = run({"explain", word});
    CAPTURE(word);
    CHECK(result.code == 0);
    CHECK(contains(result.out, std::string(path) + "\n"));
  };
  shows("tp", "dist.tensor_model_parallel_size");
  shows("fsdp", "ddp.data_parallel_sharding_strategy");
  shows("lora_rank", "peft.dim");
  shows("max_steps", "train.train_iters");
  shows("zero3", "ddp.data_parallel_sharding_strategy");
  shows("batch_size", "train.global_batch_size");
  shows("gradient-accumulation-steps", "train.num_microbatches");
  shows("learning_rate", "optimizer.lr");
  shows("min_lr_rate", "optimizer.min_lr_ratio");
  shows("seq_length", "model.seq_length");
  shows("uneven_batches", "train.decrease_batch_size_if_needed");
  shows("uneven batches", "train.decrease_batch_size_if_needed");
  CHECK(run({"explain", "fdsp"}).code == 2);
  const auto all = capstan::json_of(run({"explain", "batch_size", "--json"}).out);
  CHECK(all["fields"].size() >= 2);
  CHECK(all["fields"][0]["path"].is_string());
  CHECK(capstan::json_of(run({"explain", "tp", "--json"}).out)["path"] == "dist.tensor_model_parallel_size");
}

TEST_CASE("explain: fields, sections, values") {
  CHECK(run({"explain", "model.num_layers", "quickstart", "model.num_layers=9"}).out ==
        run({"explain", "model.num_layers", "-r", "quickstart", "model.num_layers=9"}).out);
  CHECK(run({"explain", "model.num_layers", "quickstart", "-r", "llama3-8b"}).code == 2);
  // Without a path: the sections.
  const Finished sections = run({"explain"});
  CHECK(sections.code == 0);
  for (const char* section : {"model ", "optimizer ", "dist ", "`capstan explain SECTION`"})
    CHECK_MESSAGE(contains(sections.out, section), sections.out);
  CHECK(capstan::json_of(run({"explain", "--json"}).out)["sections"].size() > 10);
  CHECK(contains(run({"explain", "maxsteps"}).err, "did you mean `train.train_iters`?"));
  const Finished field = run({"explain", "optimizer.lr"});
  CHECK(field.code == 0);
  CHECK(contains(field.out, "optimizer.lr"));
  CHECK(contains(run({"explain", "model.num_layers", "-r", "quickstart", "model.num_layers=9"}).out,
                 "<cli>:1"));
  CHECK(run({"explain", "optimizer.lrr"}).code == 2);
  CHECK(nlohmann::json::accept(run({"explain", "optimizer.lr", "--json"}).out));
}

TEST_CASE("the committed schemas are those of the program") {
  ScratchDirectory scratch;
  REQUIRE(run({"schema", "--write", scratch.path()}).code == 0);
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(scratch.path())) {
    const std::string name = entry.path().filename().string();
    CAPTURE(name);
    CHECK(capstan::json_of(read_text(entry.path().string()))["$schema"] ==
          "https://json-schema.org/draft/2020-12/schema");
    // Stale? build/release/capstan schema --write schemas
    CHECK(read_text(entry.path().string()) ==
          read_text(std::string(capstan::test::kSourceDirectory) + "/schemas/" + name));
    ++files;
  }
  size_t committed = 0;
  for (const auto& entry : fs::directory_iterator(std::string(capstan::test::kSourceDirectory) + "/schemas"))
    committed += entry.path().extension() == ".json";
  CHECK(files == committed);
  CHECK(run({"schema"}).out == read_text(scratch.file("recipe.schema.json")));
  CHECK(run({"schema", "optimizr"}).code == 2);
}

#if CAPSTAN_TIMED
static double median_cpu(const std::vector<std::string>& words) {
  std::vector<double> times;
  for (int i = 0; i < 20; ++i) times.push_back(run(words).cpu_seconds);
  std::sort(times.begin(), times.end());
  return times[10];
}

TEST_CASE("a recipe for 1024 ranks is checked and shown in milliseconds" * doctest::test_suite("timed")) {
  // Processor time, so that what else the machine does hardly counts.
  const double check = median_cpu({"check", "llama3.1-405b"}), show = median_cpu({"show", "llama3.1-405b"});
  MESSAGE("check " << 1e3 * check << " ms, show " << 1e3 * show << " ms");
  CHECK(check < 0.020);
  CHECK(show < 0.030);
}
#endif

TEST_CASE("show --grid: both grids and all groups, or a rank's place") {
  const std::vector<std::string> layout = {
      "show",      "llama3-8b",    "--ranks",   "16",         "dist.tp=2",    "dist.cp=2",
      "dist.pp=2", "dist.sp=true", "dist.ep=4", "dist.etp=1", "train.gbs=64", "model.num_moe_experts=8",
      "--grid"};
  const auto with = [&](std::vector<std::string> more) {
    auto all = layout;
    all.insert(all.end(), more.begin(), more.end());
    return run(all);
  };
  const Finished full = with({});
  REQUIRE_MESSAGE(full.code == 0, full.err);
  for (const char* part : {"16 ranks, order tp-cp-ep-dp-pp", "TP 2 x CP 2 x DP 2 x PP 2 = 16",
                           "ETP 1 x EP 4 x EDP 2 x PP 2 = 16", "8 groups of 2",
                           "[0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]",
                           "[0,2,4,6] [1,3,5,7] [8,10,12,14] [9,11,13,15]", "[0-3,8-11] [4-7,12-15]"})
    CHECK_MESSAGE(contains(full.out, part), full.out);
  const Finished one = with({"--rank", "5"});
  REQUIRE(one.code == 0);
  for (const char* part : {"tp 1  cp 0  dp 1  pp 0", "etp 0  ep 1  edp 1  pp 0", "[1,3,5,7]", "2 of 4"})
    CHECK_MESSAGE(contains(one.out, part), one.out);
  CHECK(with({"--rank", "16"}).code == 2);
  CHECK(run({"show", "llama3-8b", "--rank", "0"}).code == 2);
  CHECK(run({"show", "llama3-8b", "--grid", "--minimal"}).code == 2);
  // A large world: at once, and on few lines.
  const Finished large = run({"show", "llama3-70b", "--ranks", "65536", "train.gbs=65536", "--grid"});
  REQUIRE_MESSAGE(large.code == 0, large.err);
  CHECK_MESSAGE(contains(large.out, "…"), large.out);
  CHECK(large.seconds < 5);
  CHECK(large.out.size() < 8000);
  // A world that does not divide: check's own words.
  CHECK(
      contains(run({"show", "llama3-70b", "--ranks", "12", "--grid"}).err, "nearest legal dist.world_size"));
}
