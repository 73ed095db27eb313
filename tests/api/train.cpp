// A small run and what comes after it, through the public headers, on one rank and on two.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <stdexcept>

#include "capstan/generate.hpp"
#include "capstan/trainer.hpp"

using namespace capstan;

namespace {

namespace fs = std::filesystem;

// The same on all ranks, which have one parent; gone when rank 0 ends.
const fs::path& scratch() {
  struct Directory {
    World world = launched_world();
    fs::path path = fs::temp_directory_path() /
                    ("capstan-api-" + std::to_string(world.size > 1 ? ::getppid() : ::getpid()));
    ~Directory() {
      std::error_code ignored;
      if (world.rank == 0) fs::remove_all(path, ignored);
    }
  };
  static const Directory directory;
  return directory.path;
}

Config tiny(int iterations, const std::vector<std::string>& more = {}, int ranks = launched_world().size) {
  std::vector<std::string> overrides = {"dataset=mock",
                                        "tokenizer=byte",
                                        "model.vocab_size=257",
                                        "model.num_layers=1",
                                        "model.hidden_size=32",
                                        "model.ffn_hidden_size=48",
                                        "model.num_attention_heads=4",
                                        "model.seq_length=16",
                                        "train.micro_batch_size=2",
                                        "train.global_batch_size=4",
                                        "scheduler=constant",
                                        "scheduler.lr_warmup_fraction=null",
                                        "train.train_iters=" + std::to_string(iterations)};
  overrides.insert(overrides.end(), more.begin(), more.end());
  Config config = Config::resolve("quickstart", overrides, ranks);
  INFO(config.diagnostics());
  REQUIRE(config.ok());
  return config;
}

Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::internal, "nothing was thrown"};
}

}  // namespace

TEST_CASE("train, go on, generate, and the loss of a text") {
  const World world = launched_world();
  const fs::path run = scratch() / "run";
  std::string said;
  const Outcome stopped = run_training(tiny(6, {"train.exit_interval=4"}), {.run_dir = run},
                                       [&](Message, const std::string& text) { said += text + "\n"; });
  CHECK(stopped.ended == Ended::stopped);
  CHECK(stopped.step == 4);
  CHECK(stopped.reason == "train.exit_interval=4 reached");
  CHECK(stopped.run_dir == run);
  CHECK(said.empty() == (world.rank > 0));
  if (world.rank == 0) CHECK(said.find("step 1/6 | loss ") != std::string::npos);

  const Outcome finished = run_training(tiny(6), {.run_dir = run, .resume = true});
  CHECK(finished.ended == Ended::finished);
  CHECK(finished.step == 6);
  CHECK(finished.checkpoint == run / "checkpoints" / "step-00000006");
  if (world.rank > 0) return;
  CHECK(fs::exists(run / "metrics.jsonl"));
  CHECK(fs::exists(run / "recipe.yaml"));

  Model model = Model::load(run, {"train.threads=1"});
  std::string streamed;
  const Generated first = model.generate("ab", {.max_tokens = 9, .seed = 7, .stop_at_eod = false},
                                         [&](const std::string& text) { streamed += text; });
  CHECK(first.prompt_tokens == 2);
  CHECK(first.tokens == 9);
  CHECK(!first.ended);
  CHECK(!first.text.empty());
  CHECK(streamed == first.text);
  CHECK(model.generate("ab", {.max_tokens = 9, .seed = 7, .stop_at_eod = false}).text == first.text);
  CHECK(model.generate("ab", {.max_tokens = 9, .seed = 8, .stop_at_eod = false}).text != first.text);
  // The only token left to choose from is the likeliest.
  CHECK(model.generate("ab", {.max_tokens = 9, .top_k = 1}).text ==
        model.generate("ab", {.max_tokens = 9, .temperature = 0}).text);
  CHECK_THROWS_AS(
      model.generate("ab", {.max_tokens = 9}, [](const std::string&) { throw std::runtime_error("enough"); }),
      std::runtime_error);

  const TextLoss loss = model.loss("the quick brown fox jumps");
  CHECK(loss.tokens == 24);
  CHECK(loss.loss == doctest::Approx(std::log(257.0)).epsilon(0.1));  // it has learnt next to nothing
  CHECK(loss.perplexity == doctest::Approx(std::exp(loss.loss)));
  CHECK(loss.bits_per_byte == doctest::Approx(loss.loss / std::log(2.0) * 24 / 25));
  CHECK(Model::load(finished.checkpoint).loss("the quick brown fox jumps").loss == loss.loss);

  CHECK(error_of([&] { model.generate("ab", {.top_p = 2}); }).code() == ErrorCode::usage);
  CHECK(error_of([&] { model.loss("a"); }).code() == ErrorCode::usage);
  CHECK(error_of([&] { model.loss("abc", -1); }).code() == ErrorCode::usage);
  CHECK(error_of([&] { Model::load(run, {"model.no_such=1"}); }).code() == ErrorCode::config);
  CHECK(error_of([&] { Model::load(scratch() / "none"); }).code() == ErrorCode::not_found);
  CHECK(error_of([&] { Model::load("hf:some/model"); }).code() == ErrorCode::not_found);
}

TEST_CASE("what train refuses") {
  const int ranks = launched_world().size;
  // Before the world is joined: these leave the ranks in step.
  CHECK(error_of([&] {
          run_training(Config::resolve("quickstart", {"optimizer.lr=fast"}), {.run_dir = scratch() / "a"});
        }).code() == ErrorCode::config);
  const Error other_world = error_of(
      [&] { run_training(tiny(1, {"train.micro_batch_size=1"}, 3 - ranks), {.run_dir = scratch() / "a"}); });
  CHECK(other_world.code() == ErrorCode::usage);
  CHECK(other_world.help().find("launched_world") != std::string::npos);
  CHECK(!fs::exists(scratch() / "a"));

  if (ranks > 1) return;  // an error inside a run ends a world of several ranks
  run_training(tiny(1), {.run_dir = scratch() / "b"});
  CHECK(error_of([&] { run_training(tiny(1), {.run_dir = scratch() / "b"}); }).code() == ErrorCode::failed);
  const Error altered = error_of(
      [&] { run_training(tiny(1, {"optimizer.lr=0.5"}), {.run_dir = scratch() / "b", .resume = true}); });
  CHECK(altered.code() == ErrorCode::failed);
  CHECK(altered.message().find("optimizer.lr") != std::string::npos);
  CHECK_THROWS_AS(run_training(tiny(1), {.run_dir = scratch() / "c"},
                               [](Message, const std::string&) { throw std::runtime_error("enough"); }),
                  std::runtime_error);
  CHECK(run_training(tiny(2), {.run_dir = scratch() / "b", .resume = true}).step == 2);
}
