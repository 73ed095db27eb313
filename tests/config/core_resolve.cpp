// Composition and resolution on a small schema: precedence, derived fields and references.
#include <doctest/doctest.h>

#include <cstdlib>

#include "base/error.hpp"
#include "core_support.hpp"

using namespace capstan;
using namespace capstan::config;
using namespace capstan::config::testing;

TEST_CASE("ranks: default, preset, recipe chain, files, command line") {
  const Workspace w;
  w.write("f.yaml", "train: {iters: 4}\n");
  auto out = w.resolve("base");
  REQUIRE(out.ok());
  CHECK(out.recipe_name == "base");
  CHECK(out.config.name == "base");
  CHECK(out.config.train.iters == 1000);
  CHECK(out.config.model.hidden_size == 256);
  CHECK(out.origin("train.iters").text == "recipes/base.yaml:4:3");
  CHECK(out.origin("model.hidden_size").text == "preset model/base");
  CHECK(out.origin("model.seq_length").text == "default");
  CHECK(out.origin("model.ffn_hidden_size").text == "derived: 4 * model.hidden_size");
  CHECK(out.origin("name").text == "derived: recipe name");
  CHECK(out.config.model.ffn_hidden_size == 1024);

  out = w.resolve("child");
  CHECK(out.config.train.iters == 2000);
  CHECK(out.config.train.global_batch == 16);
  out = w.resolve("child", {"@" + w.path("f.yaml")});
  CHECK(out.config.train.iters == 4);
  CHECK(out.origin("train.iters").text == w.path("f.yaml") + ":1:9");
  out = w.resolve("child", {"@" + w.path("f.yaml"), "train.iters=5"});
  CHECK(out.config.train.iters == 5);
  CHECK(out.origin("train.iters").text == "<cli>:2");
  // Every write is kept, in order.
  std::string history;
  for (const auto& entry : out.history)
    if (entry.path == "train.iters")
      history += entry.origin.text.substr(entry.origin.text.rfind('/') + 1) + " ";
  CHECK(history == "base.yaml:4:3 child.yaml:5:3 f.yaml:1:9 <cli>:2 ");
}

TEST_CASE("a preset never beats an explicit field, wherever either is written") {
  const Workspace w;
  for (const auto& out :
       {w.text("model: {num_heads: 2}\n", {"model=base"}), w.text("model: base\n", {"model.num_heads=2"}),
        w.text("name: x\n", {"model.num_heads=2", "model=base"}),
        w.text("name: x\n", {"model=base", "model.num_heads=2"}),
        w.text("model: {preset: base, num_heads: 2}\n")}) {
    REQUIRE(out.ok());
    CHECK(out.config.model.num_heads == 2);
    CHECK(out.config.model.hidden_size == 256);
  }
  // A preset that is chosen after the value may have been meant to replace it. A value beside or after the
  // preset is there to differ from it.
  for (const auto& out : {w.text("model: {num_heads: 2}\n", {"model=base"}),
                          w.text("name: x\n", {"model.num_heads=2", "model=base"})}) {
    REQUIRE(out.first("C0702"));
    CHECK(out.first("C0702")->level == Level::note);
    CHECK(out.says("preset model/base would set `model.num_heads: 8`; kept `2` from"));
  }
  for (const auto& out :
       {w.text("model: base\n", {"model.num_heads=2"}),
        w.text("name: x\n", {"model=base", "model.num_heads=2"}),
        w.text("extends: base\nmodel: {num_heads: 2}\n"), w.text("model: {preset: base, num_heads: 2}\n")})
    CHECK(out.diagnostics.empty());
  // The last choice wins; an equal value needs no note.
  CHECK(w.text("model: base\n", {"model=wide"}).config.model.hidden_size == 512);
  CHECK_FALSE(w.text("model: {preset: base, num_heads: 8}\n").first("C0702"));
}

TEST_CASE("presets extend presets, set other sections softly, and must not disagree") {
  const Workspace w;
  auto out = w.text("model: wide\n");
  REQUIRE(out.ok());
  CHECK(out.config.model.num_heads == 8);
  CHECK(out.config.optimizer.lr == 0.5);
  CHECK(out.origin("optimizer.lr").text == "preset model/wide");
  CHECK(w.text("model: wide\noptimizer: {lr: 0.9}\n").config.optimizer.lr == 0.9);
  // The section's own preset is stronger.
  out = w.text("model: wide\noptimizer: fast\n");
  CHECK(out.ok());
  CHECK(out.config.optimizer.lr == 0.1);
  CHECK(w.text("model: nope\n").codes() == "C0505");
  // An unknown preset hides no other mistake, and causes none: what it would have set counts as neither right
  // nor wrong.
  CHECK(w.text("model: nope\ntrain: {global_batch: 3, micro_batch: 2}\n").codes() == "C0505 T0002");
  CHECK(w.text("model: {preset: nope, num_heads: 7}\n").codes() == "C0505");
  CHECK(w.text("model: {preset: nope, num_heads: 7, hidden_size: 64}\n").codes() == "C0505 T0001");
  CHECK(w.text("extends: nope\nmodel: {num_heads: 7, hidden_size: 64}\n").codes() == "C0501 T0001");
  w.write("mine.yaml", "hidden_size: 32\n");
  out = w.text("model: ./mine.yaml\n");
  CHECK(out.config.model.hidden_size == 32);
  CHECK(w.text("model: {preset: ./mine.yaml, hidden_size: 16}\n").config.model.hidden_size == 16);
  CHECK(w.text("model: '@mine.yaml'\n").origin("model.hidden_size").kind == Origin::Kind::file);
  w.write("loop.yaml", "extends: ./loop.yaml\n");
  CHECK_FALSE(w.text("model: ./loop.yaml\n").ok());
}

TEST_CASE("a recipe that extends a list of others, by name and by path") {
  const Workspace w;
  w.write("sub/a.yaml", "optimizer: {lr: 0.1, beta: 0.1}\n");
  w.write("sub/b.yaml", "extends: a.yaml\noptimizer: {lr: 0.2}\n");
  auto out = w.text("extends: [base, sub/b.yaml]\ntrain: {iters: 7}\n");
  REQUIRE(out.ok());
  CHECK(out.config.optimizer.lr == 0.2);
  CHECK(out.config.optimizer.beta == 0.1);
  CHECK(out.config.train.iters == 7);
  CHECK(out.config.train.global_batch == 16);
  CHECK(out.origin("optimizer.beta").text == w.path("sub/a.yaml") + ":1:22");
  CHECK(w.text("extends: nope\n").codes() == "C0501");
  CHECK(w.text("extends: nope\n").says("`capstan recipe ls` lists the names"));
  CHECK(w.text("extends: bas\n").says("did you mean `base`?"));
  CHECK(w.text("extends: nope.yaml\n").codes() == "C0001");
  CHECK(w.text("extends: {a: 1}\n").codes() == "C0501");
  CHECK(w.text("extends: loop\n").says("extends itself"));
  CHECK(w.text("extends: r.yaml\n").says("`r.yaml` extends itself"));
  w.write("one.yaml", "extends: two.yaml\n");
  w.write("two.yaml", "extends: one.yaml\n");
  CHECK(w.text("extends: one.yaml\n").says("`one.yaml` extends itself: one.yaml → two.yaml → one.yaml"));
  CHECK(w.text("extends: [sub/a.yaml, sub/a.yaml]\n").ok());
  w.write("own.yaml", "train: '@own.yaml'\n");
  const auto own = w.resolve(w.path("own.yaml"));
  CHECK(own.codes() == "C0501");
  CHECK(own.says("own.yaml` includes itself"));
  CHECK(w.text("model: ring\n").says("the preset `model/ring` extends itself: ring → circle → ring"));
  const auto self = w.text("model: self\n");
  CHECK(self.codes() == "C0501");
  CHECK(self.says("the preset `model/self` extends itself"));
}

TEST_CASE("extends and @file stay inside the directory of the recipe") {
  const Workspace w, outside;
  outside.write("x.yaml", "train: {iters: 1}\n");
  const std::string away = std::filesystem::relative(outside.path("x.yaml"), w.path("")).string();
  CHECK(w.text("extends: " + away + "\n").codes() == "C0503");
  CHECK(w.text("extends: " + outside.path("x.yaml") + "\n").codes() == "C0503");
  CHECK(w.text("train: '@" + away + "'\n").codes() == "C0503");
  CHECK(w.text("model: " + away + "\n").codes() == "C0503");
  std::filesystem::create_symlink(outside.path("x.yaml"), w.path("link.yaml"));
  CHECK(w.text("extends: link.yaml\n").codes() == "C0503");
  w.write("d/child.yaml", "extends: ../parent.yaml\n");
  w.write("parent.yaml", "train: {iters: 3}\n");
  CHECK(w.resolve(w.path("d/child.yaml")).codes() == "C0503");  // above the file that was given
  CHECK(w.text("extends: d/child.yaml\n").config.train.iters == 3);
  // Files that the command line names may be in any directory.
  CHECK(w.text("name: x\n", {"@" + outside.path("x.yaml")}).config.train.iters == 1);
}

TEST_CASE("too many files are refused") {
  const Workspace w;
  w.write("l0.yaml", "train: {iters: 1}\n");
  for (int i = 1; i < 12; ++i) {
    const std::string before = "l" + std::to_string(i - 1) + ".yaml";
    w.write("l" + std::to_string(i) + ".yaml", "extends: [" + before + ", " + before + ", " + before + "]\n");
  }
  const auto out = w.resolve(w.path("l11.yaml"));
  CHECK(out.says("more than 100 files"));
}

TEST_CASE("schema line, unset, dotted keys, append in files") {
  const Workspace w;
  w.write("p.yaml", "train: {iters: 3, tags: [x]}\noptimizer: {lr: 0.5}\n");
  auto out = w.text(
      "schema: capstan/1\nextends: p.yaml\nunset: [train.iters]\ntrain.tags+: [y, z]\noptimizer.beta: "
      "0.1\ntrain:\n  env: {A: 1}\n");
  REQUIRE(out.ok());
  CHECK(out.config.train.iters == 100);
  CHECK(out.config.train.tags == std::vector<std::string>{"x", "y", "z"});
  CHECK(out.config.optimizer.beta == 0.1);
  CHECK(w.text("schema: capstan/9\n").codes() == "C0504");
  CHECK(w.text("extends: p.yaml\ntrain: {tags+: q}\n").config.train.tags ==
        std::vector<std::string>{"x", "q"});
  CHECK(w.text("train.env: {A: 1}\ntrain: {env: {B: 2}}\n").codes() == "C0104");
  CHECK(w.text("train: {a.b: 1}\n").says("dotted keys are allowed only at the top level of a recipe"));
  CHECK(w.text("train.iters: 1\ntrain: {iters: 2}\n").says("`train.iters` is given twice in one file"));
  CHECK(w.text("train: {iters: 1, steps: 1}\n").says("`train.iters` and `train.steps` are the same field"));
  CHECK(w.text("unset: nope.x\n").codes() == "C0102");
  CHECK(w.text("train:\n").says("the section `train` has no value"));
  CHECK(w.text("train: [1]\n").codes() == "C0206");
  CHECK(w.text("train: lr:1\n").codes() == "C0002");
  CHECK(w.text("train: iters:1\n").says("missing space after `:`"));
}

TEST_CASE("maps merge and lists replace, in files as on the command line") {
  const Workspace w;
  w.write("p.yaml", "train: {env: {A: 1, B: 2}, tags: [p]}\n");
  const auto out = w.text("extends: p.yaml\ntrain: {env: {B: 3, C: 4}, tags: [q]}\n");
  CHECK(out.config.train.env ==
        std::vector<std::pair<std::string, std::string>>{{"A", "1"}, {"B", "3"}, {"C", "4"}});
  CHECK(out.config.train.tags == std::vector<std::string>{"q"});
}

TEST_CASE("an alias is the same field: rank decides, two different values at one rank are an error") {
  const Workspace w;
  for (const char* name :
       {"dist.tp", "model.tensor_parallel_size", "parallel.tp", "dist.tensor_parallel_size"}) {
    CAPTURE(std::string(name));
    const auto out = w.text("dist: {tp: 2}\n", {std::string(name) + "=4", "dist.world_size=8"});
    REQUIRE(out.ok());
    CHECK(out.config.dist.tensor_parallel_size == 4);
    CHECK(out.config.dist.data_parallel_size == 2);
  }
  CHECK(w.text("parallel: {tp: 2}\ndist: {world_size: 8}\n").config.dist.data_parallel_size == 4);
  CHECK(w.text("name: x\n", {"dist.tp=2", "model.tensor_parallel_size=4"}).codes() == "C0105");
  CHECK(w.text("name: x\n", {"dist.tp=2", "model.tensor_parallel_size=2"}).ok());
  CHECK(w.text("dist: {tp: 2, tensor_parallel_size: 2}\n").codes() == "C0104");
  CHECK(w.text("dataset: {seq_length: 64}\n").config.model.seq_length == 64);
  CHECK(w.text("parallel: {pp: 2}\n").codes() == "C0102");
  CHECK(w.text("parallel: 2\n").codes() == "C0102");
  const auto replaced = w.text("name: x\n", {"dist.tp=2", "dist.tp=1"});
  CHECK(replaced.ok());
  REQUIRE(replaced.first("C0603"));
  CHECK(replaced.first("C0603")->name == "unused_override");
  const auto old = w.text("train: {max_steps: 5}\n");
  CHECK(old.config.train.iters == 5);
  CHECK(old.says("`train.max_steps` is now called `train.iters`"));
  CHECK(w.text("train: {verbose: true}\n").says("deprecated: use -v"));
}

TEST_CASE("unknown keys: at most three near matches, other sections and other tools included") {
  const Workspace w;
  CHECK(w.text("optimizer: {dropout: 1}\n").says("a field with that name exists: `model.dropout`"));
  CHECK(w.text("train: {per_device_train_batch_size: 1}\n").says("it is called `train.micro_batch` here"));
  CHECK(w.text("model: {hidden_sizee: 1}\n").says("`model.hidden_size`"));
  CHECK(w.text("optimizer: {learning_rte: 1}\n").says("(an alias of `optimizer.lr`)"));
  CHECK(w.text("lr: 1\n").says("a field with that name exists: `optimizer.lr`"));
  CHECK(w.text("optimiser: {lr: 1}\n").says("a section with a similar name exists: `optimizer`"));
  CHECK(w.text("zzzzzz: 1\n").says("`capstan explain` lists the sections"));
  // Lines of a file that are no fields; a name with an exact match elsewhere gets no further guesses.
  CHECK(w.text("name: x\n", {"extends=base"}).says("write `@file`"));
  CHECK(w.text("name: x\n", {"unset=train.iters"}).says("write `~section.field`"));
  CHECK(w.text("name: x\n", {"schema=capstan/1"}).codes() == "C0102");
  const auto out = w.text("optimiser.lr: 1\n");
  CHECK(out.codes() == "C0102");
  CHECK(out.first("C0102")->helps.size() <= 3);
  std::string many;
  for (int i = 0; i < 2000; ++i) many += "x" + std::to_string(i) + ": 1\n";
  CHECK(w.text(many).says("and 1700 more"));
}

TEST_CASE("all errors at once, each at its place") {
  const Workspace w;
  const auto out =
      w.text("model:\n  hidden_size: x\n  nrom: RMSNorm\ntrain: {iters: 0}\noptimizer:\n  lr: '1'\n",
             {"dist.tp=x", "a.b=1"});
  CHECK(out.codes() == "C0201 C0102 C0202 C0204 C0201 C0102");
  CHECK(location_text(out.diagnostics[0].location, out.sources) == w.path("r.yaml") + ":2:16");
  CHECK(location_text(out.diagnostics[4].location, out.sources) == "<cli>:1:9");
  CHECK_FALSE(out.malformed);
  CHECK_THROWS_AS(out.require_ok(), Error);
}

TEST_CASE("optional sections") {
  const Workspace w;
  CHECK_FALSE(w.text("name: x\n").config.peft);
  CHECK(w.text("peft: lora\n").config.peft->dim == 16);
  CHECK(w.text("peft: {}\n").config.peft->dim == 8);
  CHECK(w.text("peft: {r: 2}\n").config.peft->dim == 2);
  CHECK(w.text("peft: {preset: lora, dim: 2}\n").config.peft->targets.size() == 2);
  auto out = w.text("peft: {preset: lora, dim: 2}\n", {"peft=none"});
  CHECK(out.ok());
  CHECK_FALSE(out.config.peft);
  CHECK(out.says("`peft.dim` from " + w.path("r.yaml") +
                 ":1:22 is dropped: `peft` is switched off at <cli>:1"));
  CHECK(w.text("peft: null\n", {"peft.dim=3"}).config.peft->dim == 3);
  CHECK(w.text("name: x\n", {"peft=null", "peft.dim=3"}).codes() == "C0109");
  CHECK(w.text("peft: null\npeft.dim: 3\n").codes() == "C0109");
}

TEST_CASE("another variant drops the fields that it lacks, with a note") {
  const Workspace w;
  auto out = w.text("dataset: {path: data/x, seed: 3}\n", {"dataset=mock"});
  REQUIRE(out.ok());
  CHECK(out.config.dataset.kind == testing::Kind::mock);
  CHECK_FALSE(out.config.dataset.path);
  CHECK(out.config.dataset.seed == 3);
  CHECK(out.says("`dataset.path` from " + w.path("r.yaml") + ":1:11 is dropped"));
  CHECK(w.text("dataset: {path: x}\n", {"dataset.kind=mock"}).ok());
  CHECK(w.text("dataset: {kind: mock, path: x}\n").codes() == "C0110");
  CHECK(w.text("dataset: mock\n", {"dataset.path=x"}).codes() == "C0110");
  CHECK(w.text("dataset: mock\n", {"dataset=gpt", "dataset.path=x"}).config.dataset.path == "x");
  out = w.text("peft: {preset: lora, targets: [a]}\n", {"peft=dora"});
  CHECK(out.ok());
  CHECK(out.config.peft->scheme == Scheme::dora);
  CHECK(out.config.peft->targets == std::vector<std::string>{"linear_qkv"});
}

TEST_CASE("derived values come after all overrides and never change an explicit one") {
  const Workspace w;
  CHECK(w.text("model: {hidden_size: 32}\n", {"model.hidden_size=16"}).config.model.ffn_hidden_size == 64);
  CHECK(w.text("model: {ffn_hidden_size: 7}\n").config.model.ffn_hidden_size == 7);
  CHECK(
      w.text("model: {ffn_hidden_size: 7}\n", {"model.ffn_hidden_size=null"}).config.model.ffn_hidden_size ==
      256);
  const auto out = w.resolve(w.write("r.yaml", "dist: {world_size: 4, tp: 2}\n"), {}, 16);
  CHECK(out.config.dist.world_size == 16);
  CHECK(out.config.dist.data_parallel_size == 8);
  CHECK(out.origin("dist.world_size").text == "the number of ranks");
  CHECK(w.resolve(w.path("r.yaml"), {}, 0).says("from the number of ranks 0"));
}

TEST_CASE("rules name the operands, their values and where they were set; cascades are suppressed") {
  const Workspace w;
  auto out = w.text("model: {num_heads: 5}\n");
  CHECK(out.codes() == "T0001");
  CHECK(out.diagnostics[0].name == "heads_divide");
  CHECK(out.diagnostics[0].location.column == 20);
  CHECK(out.says("`model.num_heads` = 5 (" + w.path("r.yaml") + ":1:9)"));
  CHECK(out.says("`model.hidden_size` = 64 (default)"));
  CHECK(out.says("help: nearest legal values: 4 and 8"));
  out = w.text("train: {global_batch: 10, micro_batch: 4}\n", {"dist.world_size=2"});
  CHECK(out.codes() == "T0002");
  CHECK(out.says("micro_batch * data_parallel_size = 8"));
  CHECK(out.says("`dist.data_parallel_size` = 2 (derived: dist.world_size / dist.tensor_parallel_size)"));
  CHECK(w.text("model: {num_heads: 0}\n").codes() == "C0202");
  CHECK(w.text("dist: {tp: x}\ntrain: {global_batch: 3, micro_batch: 2}\n").codes() == "C0201");
  out = w.text("train: {global_batch: 65, micro_batch: 65}\n");
  CHECK(out.ok());
  CHECK(count(out.diagnostics, Level::warning) == 1);
}

TEST_CASE("a value without effect is an error when it changes the mathematics, else a warning") {
  const Workspace w;
  CHECK(w.text("model: {topk: 4}\n").codes() == "C0604");
  CHECK(w.text("model: {topk: 4}\n").says("read only when `model.experts` is set"));
  CHECK(w.text("model: {topk: 4, experts: 8}\n").ok());
  // The default changes no result: a warning, where the user gives it.
  const auto idle = w.text("model: {topk: 2}\n");
  CHECK(idle.ok());
  CHECK(idle.first("C0606"));
  CHECK(w.text("name: x\n", {"model.topk=2"}).first("C0606"));
  CHECK_FALSE(w.text("model: {topk: 2, experts: 8}\n").first("C0606"));
  CHECK_FALSE(w.text("model: {topk: 2}\n", {"model.experts=8"}).first("C0606"));
  const auto warning = w.text("model: {capacity_log: 4}\n");
  CHECK(warning.ok());
  REQUIRE(warning.first("C0606"));
  CHECK(warning.first("C0606")->level == Level::warning);
  // Of a recipe that comes with the program and is extended nothing has to be taken back.
  CHECK(w.text("extends: base\nmodel: {capacity_log: 4}\n").first("C0606"));
  CHECK_FALSE(w.text("extends: expert\nmodel: {experts: null}\n").first("C0606"));
}

TEST_CASE("features that are not supported are listed by path") {
  const Workspace w;
  const auto out = w.text("model: {norm: RMSNorm}\n");
  REQUIRE(out.ok());
  const auto missing = missing_features(test_schema(), &out.config);
  REQUIRE(missing.size() == 1);
  CHECK(missing[0].path == "model.norm");
  CHECK(missing[0].reason == "RMSNorm");
  const auto plain = w.text("name: x\n");
  CHECK(missing_features(test_schema(), &plain.config).empty());
}

TEST_CASE("interpolation") {
  const Workspace w;
  setenv("CAPSTAN_TEST_X", "12", 1);
  setenv("CAPSTAN_TEST_NULL", "null", 1);
  setenv("CAPSTAN_TEST_BAD", "\xFF", 1);
  unsetenv("CAPSTAN_TEST_NONE");
  struct Row {
    // expected: the value as YAML, or a code and a part of its message.
    const char *path, *text, *expected;
  };
  const Row rows[] = {
      {"model.hidden_size", "${train.global_batch}", "8"},
      {"model.ffn_hidden_size", "${.hidden_size}", "64"},
      {"model.ffn_hidden_size", "${..train.global_batch}", "8"},
      {"train.note", "${model.hidden_size}", "'64'"},
      {"train.note", "h${model.hidden_size}-${optimizer.lr}", "h64-0.001"},
      {"train.note", "${model.ffn_hidden_size}", "'256'"},  // derived
      {"train.note", "${model.n_embd}", "'64'"},            // alias
      {"train.note", "${optimizer.min_lr}", "null"},
      {"train.note", "${train.timeout}", "'10m'"},
      {"train.note", "${train.tags[0]}", "a"},
      {"train.tags", "${train.skip}", "[]"},
      {"train.tags", "[x, '${name}', '${train.tags}']", "C0403"},
      {"train.skip", "['${train.micro_batch}', 2]", "[1, 2]"},
      {"model.norm", "${env:CAPSTAN_TEST_NONE,RMSNorm}", "RMSNorm"},
      {"train.iters", "${env:CAPSTAN_TEST_X}", "12"},
      {"train.iters", "${oc.env:CAPSTAN_TEST_X}", "12"},
      {"train.iters", "${env:CAPSTAN_TEST_NONE,7k}", "7000"},
      {"train.note", "${env:CAPSTAN_TEST_NONE,}", "\"\""},
      {"train.note", "${env:CAPSTAN_TEST_NULL}", "null"},
      {"train.iters", "${env:CAPSTAN_TEST_NONE,${train.micro_batch}}", "1"},
      {"train.note", "${now:%Y-%m-%d}", "'2026-11-21'"},
      {"train.note", "${recipe.name}", "r"},
      {"train.note", "\\${model.hidden_size}", "\\${model.hidden_size}"},
      {"train.note", "a\\${b}${recipe.name}", "a\\${b}r"},
      {"train.note", "$5 {x} $", "$5 {x} $"},
      {"train.iters", "${env:CAPSTAN_TEST_NONE}", "C0404 is not set"},
      {"train.note", "${env:CAPSTAN_TEST_BAD}", "C0404 UTF-8"},
      {"train.iters", "${env:}", "C0401"},
      {"train.iters", "${train.tittle}", "C0402 names no field"},
      {"train.iters", "${train}", "C0402 names a section"},
      {"train.iters", "${train.tags[5]}", "C0402 no such item"},
      {"train.iters", "${...x}", "C0402 above the top"},
      {"train.iters", "${train.iters}", "C0403 defined by itself"},
      {"train.note", "${train.iters", "C0401 never closed"},
      {"train.note", "${}", "C0401 does not name a field"},
      {"train.note", "${= 1 + 2}", "C0401 arithmetic"},
      {"train.note", "${shell:ls}", "C0401 is not known"},
      {"train.note", "x${optimizer.min_lr}", "C0405 null"},
      {"train.note", "x${train.tags}", "C0405 a list"},
      {"train.iters", "${train.title}", "C0204"},
      {"train.iters", "${optimizer.lr}", "C0201 is not an integer"},
      {"train.iters", "${hash}", "C0405"},
      {"train.note", "${a b}", "C0103"},
  };
  for (const auto& row : rows) {
    CAPTURE(std::string(row.path));
    CAPTURE(std::string(row.text));
    const auto out = w.text("name: n\n", {std::string(row.path) + "=" + row.text});
    const std::string expected = row.expected;
    CAPTURE(out.all());
    if (expected.starts_with("C0")) {
      CHECK(out.codes() == expected.substr(0, 5));
      if (expected.size() > 6) CHECK(out.says(expected.substr(6)));
    } else {
      CHECK(out.ok());
      CHECK(out.text(row.path) == expected);
    }
  }
  CHECK(w.text("optimizer: {lr: '${env:CAPSTAN_TEST_NONE,0.5}'}\n").origin("optimizer.lr").environment);
  CHECK(w.text("optimizer: {lr: '${optimizer.beta}', beta: '${env:CAPSTAN_TEST_NONE,0.5}'}\n")
            .origin("optimizer.lr")
            .environment);
  CHECK_FALSE(w.text("optimizer: {lr: 1}\n").origin("optimizer.lr").environment);
  // Keys are taken as written, and that is said.
  const auto key = w.text("train: {env: {'${name}': 1}}\n");
  CHECK(key.ok());
  CHECK(key.config.train.env.at(0).first == "${name}");
  REQUIRE(key.first("C0605"));
  CHECK(key.first("C0605")->location.column == 15);
  CHECK_FALSE(w.text("train: {env: {'${': 1}}\n").first("C0605"));
  // A wrong source is reported once, at its own place.
  CHECK(w.text("optimizer: {lr: x, min_lr: '${.lr}'}\n").codes() == "C0201");
}

TEST_CASE("a circle prints its ring") {
  const Workspace w;
  const auto out = w.text(
      "train:\n  iters: ${train.global_batch}\n  global_batch: ${train.micro_batch}\n  micro_batch: "
      "${train.iters}\n");
  CHECK(out.codes() == "C0403");
  CHECK(out.says("`train.iters` needs `train.global_batch`"));
  CHECK(out.says("`train.global_batch` needs `train.micro_batch`"));
}

TEST_CASE("the hash can name outputs, and depends on the mathematics alone") {
  const Workspace w;
  const auto hash = [&](const std::string& recipe) {
    const auto out = w.text(recipe + "train: {save: 'runs/${hash}'}\n");
    CHECK(out.ok());
    return out.config.train.save.text;
  };
  const std::string a = hash("optimizer: {lr: 0.5}\n");
  CHECK(a.size() == 5 + 32);
  CHECK(hash("optimizer: {lr: 5e-1}\npeft: null\n") == a);
  CHECK(hash("optimizer: {lr: 0.25}\n") != a);
  CHECK(hash("optimizer: {lr: 0.5}\ntrain.note: x\n") == a);
}

TEST_CASE("a broken file stops the resolution, and says so") {
  const Workspace w;
  auto out = w.text("a: [\n");
  CHECK(out.malformed);
  CHECK_FALSE(out.ok());
  w.write("broken.yaml", "a: [\n");
  CHECK(w.text("extends: broken.yaml\n").malformed);
  CHECK_FALSE(w.text("a: 1\n").malformed);
}

TEST_CASE("a request can take back what a recipe sets; files and the command line set it again") {
  const Workspace w;
  w.write("f.yaml", "train: {iters: 4}\n");
  Request request;
  request.recipe = "child";
  request.unset = {"train.iters"};
  auto out = w.resolve(request);
  REQUIRE(out.ok());
  CHECK(out.config.train.iters == 100);
  CHECK(out.config.train.global_batch == 16);
  request.unset = {"train"};
  CHECK(w.resolve(request).config.train.global_batch == 8);
  request.overrides = {Override::file(w.path("f.yaml")), Override::token("train.global_batch=32")};
  out = w.resolve(request);
  CHECK(out.config.train.iters == 4);
  CHECK(out.config.train.global_batch == 32);
  CHECK_FALSE(out.first("C0603"));
}
