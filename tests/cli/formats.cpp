// Models of other programs with the program alone: convert there and back, evaluate, generate, train from
// them.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "base/json.hpp"
#include "process.hpp"
#include "support/paths.hpp"
#include "support/tools.hpp"

using namespace capstan::test;
using nlohmann::json;

static const std::string kHere = std::string(capstan::test::kSourceDirectory) + "/tests/formats/";
static const std::string kSmolModel = "hf:" + kHere + "families/smollm2";

static double loss_of(const std::string& model, const std::string& text) {
  const auto done = run({"eval", model, "--text", text, "--json", "model.seq_length=24", "train.threads=1"});
  CAPTURE(done.err);
  REQUIRE(done.code == 0);
  return capstan::json_of(done.out)["loss"].get<double>();
}

TEST_CASE("hf: to a checkpoint, back, and to GGUF: the same text has the same loss in each") {
  ScratchDirectory home;
  const std::string text =
      home.write("text.txt", "the thin cat sat in the inn on the hat\nthe hat in the inn\n");
  const std::string checkpoint = home.file("smol"), back = home.file("back"), gguf = home.file("smol.gguf");
  auto done = run({"convert", kSmolModel, checkpoint, "--json"});
  CAPTURE(done.err);
  REQUIRE(done.code == 0);
  CHECK(capstan::json_of(done.out)["model"] == "llama in safetensors");
  REQUIRE(run({"convert", checkpoint, "hf:" + back}).code == 0);
  CHECK(read_text(back + "/model.safetensors") == read_text(kHere + "families/smollm2/model.safetensors"));
  CHECK(read_text(back + "/config.json") == read_text(kHere + "families/smollm2/config.json"));
  CHECK(read_text(back + "/tokenizer.json") == read_text(kHere + "families/smollm2/tokenizer.json"));
  CHECK(read_text(back + "/chat_template.jinja") ==
        read_text(kHere + "families/smollm2/chat_template.jinja"));
  REQUIRE(run({"convert", checkpoint, "gguf:" + gguf, "--type", "f32"}).code == 0);

  const double loss = loss_of(kSmolModel, text);
  CHECK(loss_of(checkpoint, text) == loss);
  CHECK(loss_of("hf:" + back, text) == loss);
  CHECK(std::abs(loss_of("gguf:" + gguf, text) - loss) < 1e-6);
  CHECK(std::abs(loss_of("gguf:" + kHere + "gguf/smollm2.gguf", text) - loss) < 1e-6);

  const auto said = run({"generate", kSmolModel, "--prompt", "the thin", "--max-tokens", "8", "--temperature",
                         "0", "train.threads=1"});
  CHECK(said.code == 0);
  CHECK(said.out == run({"generate", checkpoint, "--prompt", "the thin", "--max-tokens", "8", "--temperature",
                         "0", "train.threads=1"})
                        .out);
}

TEST_CASE("converting and evaluating an external model starts no program and opens no shared object") {
  if (!require_tool("strace")) return;
  ScratchDirectory home;
  const std::string text = home.write("text.txt", "the thin cat sat on the hat\n"), log = home.file("trace");
  const std::string program = std::string(capstan::test::kBinaryDirectory) + "/capstan";
  for (const std::string& words :
       {"convert " + kSmolModel + " " + home.file("traced"), "eval " + kSmolModel + " --text " + text}) {
    CAPTURE(words);
    // The leak check traces its own process, which only one may do.
    const std::string command =
        "ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 strace -f -e trace=execve,openat,open -o " + log + " " +
        program + " " + words + " -q >/dev/null 2>&1";
    REQUIRE(std::system(command.c_str()) == 0);
    std::istringstream lines(read_text(log));
    bool reading = false;
    for (std::string line; std::getline(lines, line);) {
      reading = reading || contains(line, "smollm2/config.json");
      if (!reading || contains(line, "ENOENT")) continue;
      CHECK_FALSE_MESSAGE(contains(line, "execve("), line);
      CHECK_FALSE_MESSAGE((contains(line, ".so\"") || contains(line, ".so.")), line);
    }
    CHECK(reading);
  }
}

TEST_CASE("a run starts from hf: weights, and its checkpoint goes back to Transformers") {
  ScratchDirectory home;
  const std::string recipe = home.write(
      "tune.yaml", "model: {preset: \"" + kSmolModel +
                       "\", seq_length: 16}\n"
                       "mixed_precision: fp32\n"
                       "train: {micro_batch_size: 1, global_batch_size: 2, train_iters: 2, threads: 1}\n"
                       "optimizer: {preset: adamw, lr: 1e-3}\n"
                       "dataset: mock\n"
                       "tokenizer: {preset: huggingface, tokenizer_model: \"" +
                       kHere + "families/smollm2\"}\n" + "checkpoint: {pretrained_checkpoint: \"" +
                       kSmolModel + "\"}\n");
  const auto shown = run({"show", recipe, "model.hidden_size"});
  CAPTURE(shown.err);
  CHECK(shown.out == "24\n");
  const auto done = run({"train", recipe, "--run-dir", home.file("run")});
  CAPTURE(done.err);
  REQUIRE(done.code == 0);
  CHECK(contains(done.err + done.out, "weights from " + kSmolModel));
  REQUIRE(run({"convert", home.file("run"), "hf:" + home.file("tuned"), "--dtype", "bf16"}).code == 0);
  const json before = capstan::json_of(read_text(kHere + "families/smollm2/config.json")),
             after = capstan::json_of(read_text(home.file("tuned") + "/config.json"));
  CHECK(after["torch_dtype"] == "bfloat16");
  CHECK(after["head_dim"] == before["head_dim"]);
  CHECK(read_text(home.file("tuned") + "/generation_config.json") ==
        read_text(kHere + "families/smollm2/generation_config.json"));
}

TEST_CASE("inputs that convert refuses") {
  ScratchDirectory home;
  CHECK(run({"convert", "a", "b"}).code == 2);
  CHECK(run({"convert", kSmolModel, home.path()}).code == 2);
  CHECK(run({"convert", kSmolModel, home.file("none/there")}).code != 0);
  CHECK(run({"convert", kSmolModel, "hf:" + home.file("x"), "--type", "f16"}).code == 2);
  CHECK(run({"convert", kSmolModel, "gguf:" + home.file("x"), "--type", "q2_k"}).code == 2);
  CHECK(run({"convert", kSmolModel, "hf:" + home.file("x"), "--shard-size", "big"}).code == 2);
  home.write("pytorch_model.bin", "x");
  const auto pickle = run({"convert", "hf:" + home.path(), home.file("out")});
  CHECK(pickle.code != 0);
  CHECK(contains(pickle.err, "none is ever run"));
  const auto missing = run({"check", "quickstart", "model=hf:" + home.file("nothing")});
  CHECK(missing.code == 2);
  CHECK(contains(missing.err, "not found: "));
}
