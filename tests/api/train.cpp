// A small run and what comes after it, through the public headers, on one rank and on two.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <vector>

#include "capstan/model.hpp"
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

  Model model = Model::load(run, {.overrides = {"train.threads=1"}});
  CHECK(model.warnings().empty());
  std::string streamed;
  std::vector<int32_t> seen;
  GenerateOptions watched{.max_tokens = 9, .seed = 7, .stop_at_eod = false};
  watched.on_token = [&](int32_t id, const std::string& text) {
    if (id >= 0) seen.push_back(id);
    streamed += text;
    return true;
  };
  const Generated first = model.generate("ab", watched);
  CHECK(first.prompt_tokens == 2);
  CHECK(first.ids.size() == 9);
  CHECK(first.ids == seen);
  CHECK(!first.ended);
  CHECK(!first.text.empty());
  CHECK(streamed == first.text);
  CHECK(model.generate("ab", {.max_tokens = 9, .seed = 7, .stop_at_eod = false}).text == first.text);
  CHECK(model.generate("ab", {.max_tokens = 9, .seed = 8, .stop_at_eod = false}).text != first.text);
  // The only token left to choose from is the likeliest.
  CHECK(model.generate("ab", {.max_tokens = 9, .top_k = 1}).text ==
        model.generate("ab", {.max_tokens = 9, .temperature = 0}).text);
  GenerateOptions throwing;
  throwing.on_token = [](int32_t, const std::string&) -> bool { throw std::runtime_error("enough"); };
  CHECK_THROWS_AS(model.generate("ab", throwing), std::runtime_error);
  watched.on_token = [count = 0](int32_t, const std::string&) mutable { return ++count < 4; };
  const Generated first_tokens = model.generate("ab", watched);
  CHECK(first_tokens.stopped);
  CHECK(first_tokens.ids == std::vector<int32_t>(first.ids.begin(), first.ids.begin() + 4));

  const std::vector<int32_t> prompt = model.encode("ab");
  CHECK(prompt == std::vector<int32_t>{'a', 'b'});
  CHECK(model.decode(prompt) == "ab");
  CHECK(model.generate(prompt, {.max_tokens = 9, .seed = 7, .stop_at_eod = false}).ids == first.ids);
  const auto batch = model.generate_batch({"ab", "the"}, {.max_tokens = 9, .seed = 7, .stop_at_eod = false});
  CHECK(batch.size() == 2);
  CHECK(batch[0].text == first.text);
  CHECK(batch[1].prompt_tokens == 3);
  const auto from_ids =
      model.generate_batch_from_ids({prompt, prompt}, {.max_tokens = 9, .seed = 7, .stop_at_eod = false});
  CHECK(from_ids.size() == 2);
  CHECK(from_ids[1].ids == first.ids);

  CHECK(model.vocab_size() == 257);
  CHECK(model.context_length() == 16);
  const std::vector<float> logits = model.logits(prompt);
  CHECK(logits.size() == 2 * 257);
  const auto likeliest = std::max_element(logits.begin() + 257, logits.end()) - logits.begin() - 257;
  CHECK(model.generate(prompt, {.max_tokens = 1, .temperature = 0}).ids[0] == likeliest);
  const auto padded = model.logits_batch({prompt, {1, 2, 3, 4, 5}});
  CHECK(padded.size() == 2);
  CHECK(padded[1].size() == 5 * 257);
  double apart = 0;
  for (size_t i = 0; i < logits.size(); ++i)
    apart = std::max(apart, std::abs(static_cast<double>(padded[0][i]) - static_cast<double>(logits[i])));
  CHECK(padded[0].size() == logits.size());
  CHECK(apart < 1e-2);

  const TextLoss loss = model.loss("the quick brown fox jumps");
  CHECK(loss.tokens == 24);
  CHECK(loss.loss == doctest::Approx(std::log(257.0)).epsilon(0.1));  // it has learned next to nothing
  CHECK(loss.perplexity == doctest::Approx(std::exp(loss.loss)));
  CHECK(loss.bits_per_byte == doctest::Approx(loss.loss / std::log(2.0) * 24 / 25));
  CHECK(Model::load(finished.checkpoint).loss("the quick brown fox jumps").loss == loss.loss);

  CHECK(error_of([&] { model.generate("ab", {.top_p = 2}); }).code() == ErrorCode::usage);
  CHECK(error_of([&] { model.loss("a"); }).code() == ErrorCode::usage);
  CHECK(error_of([&] { model.loss("abc", -1); }).code() == ErrorCode::usage);
  CHECK(error_of([&] { Model::load(run, {.overrides = {"model.no_such=1"}}); }).code() == ErrorCode::config);
  CHECK(error_of([&] { model.generate(std::vector<int32_t>{999}); }).code() == ErrorCode::usage);
  CHECK(error_of([&] { model.logits(std::vector<int32_t>(17, 1)); }).code() == ErrorCode::usage);
  CHECK(error_of([&] { Model::load(run, {.adapter = run}); }).code() == ErrorCode::usage);
  CHECK(error_of([&] { Model::load(scratch() / "none"); }).code() == ErrorCode::not_found);
  CHECK(error_of([&] { Model::load("hf:some/model"); }).code() == ErrorCode::not_found);
}

TEST_CASE("a callback after each step") {
  const World world = launched_world();
  const fs::path run = scratch() / "watched";
  std::vector<StepReport> steps;
  TrainOptions options{.run_dir = run};
  options.on_step = [&](const StepReport& step) {
    steps.push_back(step);
    return step.step < 3 || world.rank + 1 < world.size;  // the last rank alone asks to stop
  };
  const Outcome stopped = run_training(tiny(6), options);
  CHECK(stopped.ended == Ended::stopped);
  CHECK(stopped.step == 3);
  CHECK(stopped.reason == "asked to stop by the step callback");
  CHECK(stopped.checkpoint == run / "checkpoints" / "step-00000003");
  REQUIRE(steps.size() == 3);
  for (const StepReport& step : steps) {
    CHECK(step.step == &step - steps.data() + 1);
    CHECK(step.total_steps == 6);
    CHECK(step.loss == doctest::Approx(std::log(257.0)).epsilon(0.2));
    CHECK(step.grad_norm > 0);
    CHECK(step.learning_rate > 0);
    CHECK(step.step_seconds > 0);
    CHECK(step.tokens_per_second == doctest::Approx(4 * 16 / step.step_seconds));
    CHECK(step.consumed_samples == 4 * step.step);
    CHECK(step.memory_bytes > 0);
    CHECK(!step.update_skipped);
  }
  options.on_step = [&](const StepReport& step) {
    steps.push_back(step);
    return true;
  };
  options.resume = true;
  CHECK(run_training(tiny(6), options).ended == Ended::finished);
  CHECK(steps.size() == 6);
  CHECK(steps.back().step == 6);
}

TEST_CASE("signal handlers stay those of the program unless it asks otherwise") {
  static volatile std::sig_atomic_t caught = 0;
  struct sigaction action {};
  action.sa_handler = [](int) { caught = caught + 1; };
  struct sigaction before {};
  ::sigaction(SIGTERM, &action, &before);
  TrainOptions options{.run_dir = scratch() / "signals"};
  options.on_step = [](const StepReport& step) {
    if (step.step == 1) std::raise(SIGTERM);
    return true;
  };
  CHECK(run_training(tiny(2), options).ended == Ended::finished);
  CHECK(caught == 1);
  options.handle_signals = true;
  options.run_dir = scratch() / "handled";
  const Outcome outcome = run_training(tiny(2), options);
  CHECK(outcome.ended == Ended::stopped);
  CHECK(outcome.step == 1);
  CHECK(caught == 1);
  ::sigaction(SIGTERM, &before, nullptr);
}

TEST_CASE("inputs that train refuses") {
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
