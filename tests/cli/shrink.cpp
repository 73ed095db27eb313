// train --shrink: recipes of every family and method train and learn, from nothing and beside weights, on one
// rank and laid out on several; with CAPSTAN_EVERY_RECIPE every shipped one trains.
#include <doctest/doctest.h>

#include <cmath>
#include <numeric>
#include <set>
#include <sstream>

#include "base/json.hpp"
#include "process.hpp"

using namespace capstan::test;
using nlohmann::json;

namespace {

// The losses of a shrunk run, a step each; gradients are there at every step.
std::vector<double> losses_of(const ScratchDirectory& scratch, const std::string& recipe,
                              const std::vector<std::string>& more = {}, const std::string& ranks = "1") {
  const std::string directory = recipe + "-" + ranks;
  std::vector<std::string> words = {"train", recipe, "--shrink", "--run-dir", directory, "train.threads=1"};
  if (ranks != "1") words.insert(words.end(), {"--nproc", ranks});
  words.insert(words.end(), more.begin(), more.end());
  const Finished done = run_in(scratch, words);
  REQUIRE_MESSAGE(done.code == 0, done.err);
  CHECK_FALSE(contains(done.err, "internal error"));
  std::istringstream lines(read_text(scratch.file(directory + "/metrics.jsonl")));
  std::vector<double> losses;
  for (std::string line; std::getline(lines, line);) {
    const json row = capstan::json_of(line);
    if (row.contains("event")) continue;
    REQUIRE_MESSAGE(row["loss"].is_number(), line);
    losses.push_back(row["loss"]);
    CHECK_MESSAGE(row["grad_norm"].get<double>() > 0, line);
  }
  return losses;
}

// Two steps whose losses are those of guessing among 512 ids, since nothing is learned by then.
void check_trains(const ScratchDirectory& scratch, const std::string& recipe, const std::string& ranks = "1",
                  const std::vector<std::string>& more = {}) {
  CAPTURE(recipe);
  const std::vector<double> losses = losses_of(scratch, recipe, more, ranks);
  REQUIRE(losses.size() == 2);
  for (const double loss : losses) CHECK(std::abs(loss - std::log(512)) < 0.4);
}

}  // namespace

#if CAPSTAN_EVERY_RECIPE

// One recipe of each group that differs in nothing but name and description once it is shrunk for so many
// ranks, as the sizes of a family often do.
static std::vector<std::string> distinct_shrunk(const std::vector<std::string>& names,
                                                const std::string& ranks) {
  std::vector<std::string> distinct;
  std::set<std::string> seen;
  for (const auto& name : names) {
    CAPTURE(name);
    const Finished shown = run({"show", name, "--shrink", "--ranks", ranks, "--json"});
    REQUIRE(shown.code == 0);
    json config = capstan::json_of(shown.out)["config"];
    config.erase("name"), config.erase("description");
    if (seen.insert(capstan::dump_json(config)).second) distinct.push_back(name);
  }
  return distinct;
}

TEST_CASE("every shipped recipe trains two steps, shrunk" * doctest::test_suite("one_process")) {
  const auto names = every_recipe();
  CHECK(names.size() >= 240);
  for (const auto& name : distinct_shrunk(names, "1")) {
    const ScratchDirectory scratch;
    check_trains(scratch, name);
  }
}

TEST_CASE("shrunk layouts: published scaling runs, CodeParrot and long sequences, on eight ranks") {
  std::vector<std::string> names = every_recipe();
  std::erase_if(names, [](const std::string& name) {
    const auto begins = [&](const char* prefix) { return name.starts_with(prefix); };
    return !begins("gpt-a100-") && !begins("gpt-h100-") && !begins("codeparrot-") &&
           !(begins("llama3-") && name.ends_with("k"));
  });
  CHECK(names.size() == 26);
  for (const auto& name : distinct_shrunk(names, "8")) {
    const ScratchDirectory scratch;
    check_trains(scratch, name, "8");
  }
}

TEST_CASE("shrunk layouts: tensor, pipeline with virtual stages, context and data parallelism") {
  for (const char* ranks : {"2", "4", "8", "16"}) {
    const ScratchDirectory scratch;
    check_trains(scratch, "llama3-70b", ranks);
  }
  const ScratchDirectory scratch;
  for (const char* large : {"llama3-8b", "gpt3-175b", "llama3.1-405b"}) check_trains(scratch, large, "8");
  check_trains(scratch, "llama3.1-405b-sft", "4");
  check_trains(scratch, "llama3.1-405b-lora", "4");
  check_trains(scratch, "gemma2-27b-lora", "2");
  check_trains(scratch, "qwen2.5-7b-sft", "2");
}

static constexpr const char* kExpertFamilies[] = {
    "deepseek-v2",   "deepseek-v2-lite",  "deepseek-v3", "gpt-oss-20b",   "kimi-k2",        "mixtral-8x7b",
    "mixtral-8x22b", "moonlight-16b-a3b", "olmoe-1b-7b", "qwen3-30b-a3b", "qwen3-235b-a22b"};

TEST_CASE("shrunk layouts: models with experts, their fine-tuning and their adapters, on eight ranks") {
  for (const std::string family : kExpertFamilies) {
    for (const char* method : {"", "-sft", "-lora"}) {
      const ScratchDirectory scratch;
      check_trains(scratch, family + method, "8");
    }
    for (const char* adapters : {"peft=lora_attention", "peft=lora_experts"}) {
      CAPTURE(adapters);
      const ScratchDirectory scratch;
      check_trains(scratch, family + "-lora", "8", {adapters});
    }
  }
}

#else

TEST_CASE("one recipe of each method trains two steps, shrunk") {
  const ScratchDirectory scratch;
  for (const char* name :
       {"smollm2-135m", "gpt2-124m-sft", "qwen2.5-0.5b-lora", "gemma2-2b-lora", "olmo2-1b-sft",
        "phi3.5-mini-lora", "llama3.2-1b-dora", "mistral-7b-qlora", "llama3-70b"})
    check_trains(scratch, name);
}

// Each id of the made-up data but the first of a document follows from the one before.
TEST_CASE("with a larger rate and thirty steps every method learns, shrunk") {
  const ScratchDirectory scratch;
  for (const char* name :
       {"smollm2-135m", "gpt2-124m-sft", "qwen2.5-0.5b-lora", "llama3.2-1b-dora", "mistral-7b-qlora"}) {
    CAPTURE(name);
    const std::vector<double> losses =
        losses_of(scratch, name, {"train.train_iters=30", "optimizer.lr=3e-3"});
    REQUIRE(losses.size() == 30);
    const auto mean = [&](size_t from) {
      return std::accumulate(losses.begin() + static_cast<long>(from),
                             losses.begin() + static_cast<long>(from + 5), 0.0) /
             5;
    };
    CHECK(mean(25) < mean(0) - 0.1);
  }
}

TEST_CASE("train --shrink on two ranks keeps a layout of that many") {
  const ScratchDirectory scratch;
  check_trains(scratch, "qwen2.5-14b-lora", "2");
}

TEST_CASE("a shrunk run goes on, and is no model to ask") {
  const ScratchDirectory scratch;
  check_trains(scratch, "llama3.2-1b-lora");
  const Finished more = run_in(scratch, {"train", "llama3.2-1b-lora", "--shrink", "--run-dir",
                                         "llama3.2-1b-lora-1", "train.train_iters=4", "train.threads=1",
                                         "--resume", "scheduler.override_opt_param_scheduler=true"});
  CHECK_MESSAGE(more.code == 0, more.err);
  CHECK(contains(more.err, "resumed from"));
  scratch.write("text.txt", "nobody knows\n");
  const Finished asked = run_in(scratch, {"eval", "llama3.2-1b-lora-1", "--text", "text.txt"});
  CHECK(asked.code != 0);
  CHECK_MESSAGE(contains(asked.err, "random base model"), asked.err);
}

TEST_CASE("show --shrink reports its changes, check --shrink the values that it uses") {
  const Finished shown = run({"show", "llama3-70b", "model.num_layers", "--shrink"});
  CHECK(shown.code == 0);
  CHECK(shown.out == "4\n");
  CHECK(contains(shown.err, "  model.hidden_size: 8192 -> 256\n"));
  CHECK(contains(shown.err, "  model.num_layers: 80 -> 4\n"));
  CHECK_FALSE(contains(shown.err, "rotary_base"));
  CHECK(run({"show", "llama3-70b", "model.num_layers", "--shrink", "-q"}).err.empty());
  const Finished checked = run({"check", "llama3-70b", "--shrink"});
  CHECK(checked.code == 0);
  CHECK(contains(checked.out, "ok (16 ranks, tp 2, pp 2, cp 2, dp 2)"));
  const Finished one = run({"check", "llama3-70b", "--shrink", "--ranks", "1"});
  CHECK(contains(one.out, "ok (1 rank)"));
  CHECK_MESSAGE(contains(one.err, "its kind of layout takes 16 ranks"), one.err);
  CHECK(run({"check", "llama3-70b", "--shrink", "model.num_layer=3"}).code == 1);
  CHECK(every_recipe().size() >= 100);
}

TEST_CASE("a recipe whose model or data is not there says how to name it") {
  const ScratchDirectory scratch;
  const Finished missing = run_in(scratch, {"train", "llama3.2-1b-lora"});
  CHECK(missing.code != 0);
  for (const char* part : {"models/Llama-3.2-1B-Instruct",
                           "hf download ORG/Llama-3.2-1B-Instruct --local-dir models/Llama-3.2-1B-Instruct",
                           "not found: dataset.train_files = data/chats.jsonl", "dataset.train_files=PATH"})
    CHECK_MESSAGE(contains(missing.err, part), missing.err);
}

#endif
