// capstan recipe import, as a user runs it.
#include <doctest/doctest.h>

#include <filesystem>

#include "base/json.hpp"
#include "process.hpp"
#include "support/paths.hpp"

using namespace capstan::test;

namespace {
const std::string kGolden = std::string(capstan::test::kSourceDirectory) + "/tests/importers/golden/";
}

TEST_CASE("recipe import: to a file that check accepts, to standard output, as JSON") {
  ScratchDirectory scratch;
  const std::string to = scratch.file("small.yaml");
  const Finished written = run({"recipe", "import", kGolden + "gpt_small.sh", "-o", to});
  CHECK(written.code == 0);
  CHECK(written.out.empty());
  CHECK(contains(written.err, "Megatron command line; "));
  CHECK(contains(written.err, "gpt_small.sh:51:9 --dataset-impl mmap"));
  CHECK(!contains(written.err, "cannot train"));
  CHECK(run({"check", to}).code == 0);
  CHECK(run({"recipe", "import", kGolden + "gpt_small.sh", "-o", to}).code == 2);  // never overwritten

  const Finished shown = run({"recipe", "import", kGolden + "gpt_small.sh", "-q"});
  CHECK(shown.out == read_text(to));

  const Finished printed = run({"recipe", "import", kGolden + "gpt_small.sh", "--json"});
  REQUIRE(nlohmann::json::accept(printed.out));
  const auto object = capstan::json_of(printed.out);
  CHECK(object["schema"] == "capstan.import/1");
  CHECK(object["format"] == "megatron");
  CHECK(object["ok"] == true);
  CHECK(object["recipe"] == shown.out);
  CHECK(object["taken"][0]["key"] == "--num-layers");
  CHECK(object["omitted"].size() >= 6);
}

TEST_CASE("recipe import: a branch is asked about, and --var chooses") {
  ScratchDirectory scratch;
  const std::string script = scratch.write(
      "run.sh",
      "if [ \"$1\" = big ]; then L=4; else L=2; fi\n"
      "python pretrain_gpt.py --num-layers $L --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
      "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
      "--vocab-size 99\n");
  const Finished asked = run({"recipe", "import", script});
  CHECK(asked.code == 1);  // the model has no layers
  CHECK(contains(asked.err, "run.sh:1:1 if [ \"$1\" = big ]"));
  CHECK(contains(asked.err, "choose with --var 1=VALUE"));
  // The open branch is also reported if the recipe has no errors without it: in the exit code, and in the
  // recipe itself.
  const std::string precision = scratch.write(
      "precision.sh",
      "if [ \"$BF16\" = 1 ]; then P=--bf16; else P=--fp16; fi\n"
      "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
      "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data "
      "--tokenizer-type NullTokenizer --vocab-size 99 $P\n");
  const Finished open = run({"recipe", "import", precision});
  CHECK_MESSAGE(open.code == 1, open.err);
  CHECK_MESSAGE(contains(open.out, "# To fill in: `if [ \"$BF16\" = 1 ]`, line 1: not decided"), open.out);
  CHECK(capstan::json_of(run({"recipe", "import", precision, "--json"}).out)["ok"] == false);
  const Finished decided = run({"recipe", "import", precision, "--var", "BF16=1"});
  CHECK_MESSAGE(decided.code == 0, decided.err);
  CHECK(contains(decided.out, "bf16_mixed"));
  CHECK(!contains(decided.out, "To fill in"));
  const Finished chosen = run({"recipe", "import", script, "--var", "1=big"});
  CHECK_MESSAGE(chosen.code == 0, chosen.err);
  CHECK(contains(chosen.out, "num_layers: 4"));
  CHECK(run({"recipe", "import", script, "--var", "big"}).code == 2);
  const std::string both = scratch.write(
      "both.sh", "if [ \"$A\" = \"$B\" ]; then L=4; else L=2; fi\npython pretrain_gpt.py --num-layers $L\n");
  CHECK(contains(run({"recipe", "import", both}).err, "choose with --var A=VALUE --var B=VALUE"));
}

TEST_CASE("recipe import: the command names the flags that the lists do not") {
  ScratchDirectory scratch;
  const Finished script = run({"recipe", "import", kGolden + "gpt_small.sh"});
  CHECK(contains(script.err, "`capstan train --nproc N` or mpirun starts the ranks"));
  CHECK(contains(script.err, "a run here continues with `capstan train … --resume`"));
  const Finished printed = run({"recipe", "import", kGolden + "gpt_small.sh", "--json"});
  CHECK(contains(printed.out, "`capstan train --nproc N` or mpirun starts the ranks"));
  const Finished without_model = run({"recipe", "import", kGolden + "ds_zero2.json"});
  CHECK(contains(without_model.err, "--base names a recipe that does"));
  CHECK(contains(without_model.out, "extend a recipe that does"));
  const Finished unknown = run({"recipe", "import", scratch.write("x.yaml", "a: 1\n")});
  CHECK(contains(unknown.err, "--from FORMAT sets its format:"));
}

TEST_CASE("recipe import: exit codes and ways out") {
  ScratchDirectory scratch;
  const Finished open = run({"recipe", "import", kGolden + "run_config_gpt.yaml"});
  CHECK(open.code == 1);
  CHECK(contains(open.err, "`optimizer.lr` is missing"));
  const Finished unknown = run({"recipe", "import", scratch.write("x.yaml", "a: 1\n")});
  CHECK(unknown.code == 2);
  CHECK(contains(unknown.err, "training-arguments"));
  CHECK(run({"recipe", "import", kGolden + "ds_zero2.json", "--from", "deepsped"}).code == 2);
  CHECK(contains(run({"recipe", "import", kGolden + "ds_zero2.json", "--base", "quickstrt"}).err,
                 "quickstart"));
  const Finished based = run({"recipe", "import", kGolden + "ds_zero2.json", "--base", "gpt2-124m", "-q"});
  CHECK(contains(based.out, "extends: gpt2-124m"));
  // A recipe of the user's own is named relative to the new one.
  const std::string mine =
      scratch.write("mine.yaml", "extends: gpt2-124m\ntrain: {train_iters: null, epochs: 3}\n");
  const std::string to = scratch.file("made.yaml");
  const Finished own = run({"recipe", "import", kGolden + "ds_zero2.json", "--base", mine, "-o", to, "-q"});
  CHECK_MESSAGE(own.code == 0, own.err);
  CHECK(contains(read_text(to), "extends: ./mine.yaml"));
  CHECK(run({"check", to, "dataset=mock", "tokenizer=none"}).code == 0);
  std::filesystem::create_directory(scratch.file("below"));
  const Finished outside = run(
      {"recipe", "import", kGolden + "ds_zero2.json", "--base", mine, "-o", scratch.file("below/x.yaml")});
  CHECK(outside.code != 0);
  CHECK_MESSAGE(contains(outside.err, "outside the directory of the recipe"), outside.err);
}

TEST_CASE("imported fine-tuning is checked, and trains shrunk") {
  ScratchDirectory scratch;
  for (const char* file : {"axolotl_lora.yaml", "axolotl_qlora.yaml", "tune_full.yaml", "tune_lora.yaml",
                           "tune_qdora.yaml", "run_config_lora.yaml"}) {
    CAPTURE(file);
    const std::string to = scratch.file(file);
    CHECK(run({"recipe", "import", kGolden + file, "-o", to, "-q"}).code == 0);
    const Finished checked = run({"check", to});
    CHECK_MESSAGE(checked.code == 0, checked.err);
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = {"train", to, "--shrink", "--run-dir", std::string(file) + "-run", "train.threads=1"};
    const Finished trained = run(launch);
    CHECK_MESSAGE(trained.code == 0, trained.err);
  }
}

TEST_CASE("the small imported model trains 20 steps, scaled down, in fp16") {
  ScratchDirectory scratch;
  const std::string to = scratch.file("small.yaml");
  REQUIRE(run({"recipe", "import", kGolden + "gpt_small.sh", "-o", to}).code == 0);
  // The layers stay 12, all else is made small enough for a test.
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = {"train",
                      to,
                      "dataset=mock",
                      "tokenizer=none",
                      "dist.world_size=1",
                      "model.hidden_size=96",
                      "model.seq_length=32",
                      "model.vocab_size=512",
                      "train.micro_batch_size=1",
                      "train.global_batch_size=2",
                      "train.train_iters=20",
                      "scheduler.lr_decay_iters=20",
                      "scheduler.lr_warmup_iters=2",
                      "logger.log_interval=1",
                      "validation.eval_interval=null",
                      "checkpoint.save=" + scratch.file("checkpoints"),
                      "logger.tensorboard=false",
                      "--run-dir",
                      scratch.file("run")};
  const Finished trained = run(launch);
  CHECK_MESSAGE(trained.code == 0, trained.err);
  const std::string metrics = read_text(scratch.file("run") + "/metrics.jsonl");
  CHECK(contains(metrics, "\"step\": 20,"));
}
