// recipe fix, recipe trim, and diff of recipes.
#include <doctest/doctest.h>

#include <filesystem>

#include "base/json.hpp"
#include "process.hpp"
#include "support/sanitized.hpp"

using namespace capstan::test;

namespace {

Finished fix(const std::string& file) {
  return run({"recipe", "fix", file});
}

// Returns the text that `fix` produces. The result must pass the check, and a second run must change nothing.
std::string corrected(const ScratchDirectory& scratch, const std::string& text) {
  const std::string file = scratch.write("r.yaml", text);
  const Finished done = fix(file);
  CHECK_MESSAGE(done.code == 0, done.out << done.err);
  CHECK(run({"check", file}).code == 0);
  const std::string once = read_text(file);
  CHECK(contains(fix(file).out, "nothing to change"));
  CHECK(read_text(file) == once);
  return once;
}

}  // namespace

TEST_CASE("fix: near names, other names, spellings of values; comments and layout stay") {
  ScratchDirectory scratch;
  CHECK(corrected(scratch,
                  "# a recipe\n"
                  "extends: quickstart   # the base\n"
                  "\n"
                  "model:\n"
                  "  num_layer: 3        # depth\n"
                  "  'hidden_size':   \"128\"\n"
                  "  # heads of one layer\n"
                  "  num_attention_heads: 04\n"
                  "ddp: {overlap_grad_reduce: no}\n") ==
        "# a recipe\n"
        "extends: quickstart   # the base\n"
        "\n"
        "model:\n"
        "  num_layers: 3        # depth\n"
        "  'hidden_size':   128\n"
        "  # heads of one layer\n"
        "  num_attention_heads: 4\n"
        "ddp: {overlap_grad_reduce: false}\n");
}

TEST_CASE("fix: a key of another section goes there") {
  ScratchDirectory scratch;
  CHECK(corrected(scratch,
                  "extends: quickstart\n"
                  "train:\n"
                  "  train_iters: 30\n"
                  "  lr: 1e-3  # peak\n"
                  "\n"
                  "# the model\n"
                  "model: {num_layers: 3, weight_decay: 0.02}\n") ==
        "extends: quickstart\n"
        "train:\n"
        "  train_iters: 30\n"
        "  # peak\n"
        "optimizer.lr: 1e-3\n"
        "\n"
        "# the model\n"
        "model: {num_layers: 3}\n"
        "optimizer.weight_decay: 0.02\n");
  CHECK(corrected(scratch, "extends: quickstart\nnum_layers: 3\n") ==
        "extends: quickstart\nmodel.num_layers: 3\n");
}

TEST_CASE("fix: syntax first, then what it hid; byte order mark and line ends stay") {
  ScratchDirectory scratch;
  CHECK(corrected(scratch,
                  "\xEF\xBB\xBF"
                  "extends: quickstart\r\nmodel:\r\n  num_layer:3\r\n") ==
        "\xEF\xBB\xBF"
        "extends: quickstart\r\nmodel:\r\n  num_layers: 3\r\n");
}

TEST_CASE("fix: what has no single remedy is shown and left") {
  ScratchDirectory scratch;
  const std::string text = "extends: quickstart\nmodel: {num_layer: 3, flux: 1}\noptimizer: {lr: fast}\n";
  const std::string file = scratch.write("r.yaml", text);
  const Finished look = run({"recipe", "fix", file, "--check"});
  CHECK(look.code == 1);
  CHECK(read_text(file) == text);
  const Finished shown = run({"recipe", "fix", file, "--diff"});
  CHECK(shown.code == 1);
  CHECK(contains(shown.out, "-model: {num_layer: 3, flux: 1}\n+model: {num_layers: 3, flux: 1}\n"));
  CHECK(read_text(file) == text);
  const Finished done = fix(file);
  CHECK(done.code == 1);
  CHECK(contains(done.out, "`num_layer` is now `num_layers`"));
  CHECK(contains(done.err, "unknown key `model.flux`"));
  CHECK(contains(done.err, "`fast`"));
  CHECK(read_text(file) == "extends: quickstart\nmodel: {num_layers: 3, flux: 1}\noptimizer: {lr: fast}\n");
  // A name that stands there already is not written a second time.
  const std::string twice =
      scratch.write("t.yaml", "extends: quickstart\nmodel: {num_layers: 2, num_layer: 3}\n");
  CHECK(fix(twice).code == 1);
  CHECK(contains(read_text(twice), "num_layer: 3"));
  CHECK(run({"recipe", "fix", "quickstart"}).code == 2);
  CHECK(run({"recipe", "fix", scratch.file("none.yaml")}).code == 2);
  const auto json = capstan::json_of(run({"recipe", "fix", file, "--json"}).out);
  CHECK(json["changed"] == false);
  CHECK(json["diagnostics"].size() == 2);
}

TEST_CASE("trim: what the base says goes with its comments, the meaning and the other comments stay") {
  ScratchDirectory scratch;
  scratch.write("base.yaml",
                "extends: quickstart\nmodel: {num_layers: 3, hidden_size: 128}\noptimizer: {lr: 1e-3}\n");
  const std::string file = scratch.write("mine.yaml",
                                         "# mine\n"
                                         "extends: base.yaml\n"
                                         "name: mine\n"
                                         "model:\n"
                                         "  # three are enough\n"
                                         "  num_layers: 3   # as in the base\n"
                                         "  num_attention_heads: 16\n"
                                         "optimizer: {lr: 0.001, weight_decay: 0.02}\n"
                                         "checkpoint:\n"
                                         "  save_interval: 7\n"
                                         "rng:\n"
                                         "  # nothing new here\n"
                                         "  seed: 1234\n");
  const std::string before = run({"show", file, "--format", "json"}).out;
  const Finished looked = run({"recipe", "trim", file, "--check"});
  CHECK(looked.code == 1);
  for (const char* place : {":6:3: `model.num_layers`", ":8:13: `optimizer.lr`", ":13:3: `rng.seed`"})
    CHECK_MESSAGE(contains(looked.out, place), looked.out);  // locations in the file as it is
  const Finished done = run({"recipe", "trim", file});
  CHECK_MESSAGE(done.code == 0, done.err);
  CHECK(run({"show", file, "--format", "json"}).out == before);
  const std::string text = read_text(file);
  CHECK(contains(text, "# mine\nextends: base.yaml\nname: mine\n"));
  CHECK(contains(text, "name: mine\nmodel:\n  num_attention_heads: 16\n"));
  CHECK(!contains(text, "three are enough"));
  CHECK(!contains(text, "nothing new here"));
  CHECK(contains(text, "optimizer: {weight_decay: 0.02}\n"));
  CHECK(contains(text, "save_interval: 7"));
  CHECK(contains(run({"recipe", "trim", file}).out, "nothing to change"));
  // Every recipe that comes with the program keeps its meaning.
  for (const auto& name : sampled(every_recipe())) {
    const std::string copy = scratch.file(name + ".yaml");
    CAPTURE(name);
    REQUIRE(run({"recipe", "cp", name, copy}).code == 0);
    CHECK(run({"recipe", "trim", copy}).code == 0);
    // From the copy's directory: the paths of a recipe in the program count from where it is used.
    Launch diff;
    diff.arguments = {"diff", name, copy};
    diff.directory = scratch.path();
    const Finished same = run(diff);
    CHECK_MESSAGE(same.code == 0, same.out);
  }
  CHECK(run({"recipe", "trim", scratch.write("bad.yaml", "model: {num_layer: 1}\n")}).code == 2);
}

TEST_CASE("trim: comments of a deleted entry go from braces over several lines too") {
  ScratchDirectory scratch;
  scratch.write("base.yaml", "extends: quickstart\ntrain: {micro_batch_size: 2, global_batch_size: 4}\n");
  const std::string head = "# mine\nextends: base.yaml\nname: mine\n";
  const auto trimmed = [&](const std::string& train) {
    const std::string file = scratch.write("mine.yaml", head + train);
    const Finished done = run({"recipe", "trim", file});
    CHECK_MESSAGE(done.code == 0, done.err);
    return read_text(file);
  };
  CHECK(trimmed("train: {\n  # batch of the base\n  micro_batch_size: 2,   # two\n  train_iters: 77\n}\n") ==
        head + "train: {\n  train_iters: 77\n}\n");
  CHECK(
      trimmed("train: {\n  train_iters: 77,  # short\n  # batch of the base\n  micro_batch_size: 2   # two\n"
              "}\n") == head + "train: {\n  train_iters: 77  # short\n}\n");
}

TEST_CASE("diff of recipes: by effect, 1 where they differ") {
  ScratchDirectory scratch;
  const std::string file = scratch.write(
      "a.yaml", "extends: quickstart\nname: quickstart\noptimizer: {lr: 1e-3}\nlogger: {log_interval: 7}\n");
  const Finished parted = run({"diff", "quickstart", file});
  CHECK(parted.code == 1);
  CHECK(parted.out.find("numerics (math)") < parted.out.find("optimizer.lr"));
  CHECK(parted.out.find("optimizer.lr") < parted.out.find("output (log)"));
  CHECK(contains(parted.out, "a.yaml:3:"));
  CHECK(run({"diff", "quickstart", "quickstart"}).code == 0);
  const auto json = capstan::json_of(run({"diff", "quickstart", file, "--json"}).out);
  CHECK(json["schema"] == "capstan.diff/1");
  CHECK(json["recipe"][0]["path"] == "optimizer.lr");
  CHECK(json["recipe"][0]["effect"] == "math");
  const Finished none = run({"diff", "quickstart", "quickstrat"});
  CHECK(none.code == 2);
  CHECK(contains(none.err, "`quickstart`"));
  CHECK(run({"diff", "quickstart", scratch.write("bad.yaml", "model: {num_layer: 1}\n")}).code == 2);
}
