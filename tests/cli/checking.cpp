// check: that its "ok" says what it should, for shipped and imported recipes; files that a recipe names;
// show's short forms.
#include <doctest/doctest.h>

#include <filesystem>

#include "base/json.hpp"
#include "process.hpp"
#include "support/paths.hpp"
#include "support/sanitized.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

TEST_CASE("check says ok and nothing else of every shipped recipe") {
  const ScratchDirectory scratch;
  const auto names = every_recipe();
  CHECK(names.size() >= 100);
  for (const auto& name : sampled(names)) {
    const Finished result = run_in(scratch, {"check", name});
    CAPTURE(name);
    CHECK(result.code == 0);
    CHECK(result.out.starts_with(name + ": ok ("));
    CHECK_MESSAGE(result.err.empty(), result.err);
  }
}

TEST_CASE(
    "a recipe just imported causes no notes or warnings but for files and features that are not there") {
  const std::string golden = std::string(kSourceDirectory) + "/tests/importers/golden/";
  const ScratchDirectory scratch;
  size_t seen = 0, trained = 0;
  for (const auto& entry : fs::directory_iterator(golden)) {
    const std::string file = entry.path().filename().string();
    if (file.ends_with(".recipe.yaml") || file.ends_with(".lists.txt")) continue;
    if (file == "run_config_gpt.yaml") continue;  // has to be filled in
    CAPTURE(file);
    const std::string recipe = file + ".recipe.yaml";
    fs::copy_file(golden + recipe, scratch.file(recipe));
    const Finished result = run_in(scratch, {"check", recipe});
    const bool refused = contains(result.err, "this version cannot train it:");
    CHECK_MESSAGE(result.code == (refused ? 1 : 0), result.err);
    CHECK_MESSAGE(contains(result.out, ": ok (") == !refused, result.out);
    trained += refused ? 0 : 1;
    const json object = capstan::json_of(run_in(scratch, {"check", recipe, "--json"}).out);
    for (const auto& diagnostic : object["diagnostics"])
      CHECK_MESSAGE(diagnostic["code"] == "C0801", capstan::dump_json(diagnostic));
    ++seen;
  }
  CHECK(seen >= 14);
  CHECK(trained >= 10);
}

TEST_CASE("check looks at the files of a recipe: notes, or errors with --files") {
  const ScratchDirectory scratch;
  std::string texts = "One text.\n\nAnother text.\n";
  for (int i = 0; i < 400; ++i) texts += "\nText number " + std::to_string(i) + " of many.\n";
  scratch.write("text.txt", texts);
  for (const std::string tokenizer : {"tokenizer.json", "other.json"})
    REQUIRE(run_in(scratch,
                   {"tokenizer", "train", "text.txt", "--vocab-size",
                    tokenizer == "other.json" ? "258" : "259", "--min-frequency", "1", "--output", tokenizer})
                .code == 0);
  REQUIRE(
      run_in(scratch, {"data", "prepare", "text.txt", "--tokenizer", "tokenizer.json", "--output", "corpus"})
          .code == 0);
  const std::string recipe = scratch.write(
      "my.yaml",
      "extends: quickstart\nname: my\ndataset:\n  data_path: corpus\ntokenizer:\n  tokenizer_model: "
      "tokenizer.json\n");
  const Finished note = run_in(scratch, {"check", "my.yaml"});
  CHECK(note.code == 0);
  CHECK(note.out ==
        "my: ok (1 rank). Files that cannot be read here are notes; with `--files` they are errors.\n");
  CHECK_MESSAGE(contains(note.err, "note[C0801]: not found: dataset.data_path = corpus\n"), note.err);
  CHECK_MESSAGE(contains(note.err, "corpus_text_document"), note.err);  // the near name
  CHECK(run_in(scratch, {"check", "my.yaml", "-q"}).err.empty());

  const Finished error = run_in(scratch, {"check", "my.yaml", "--files"});
  CHECK(error.code == 1);
  CHECK(error.out.empty());
  CHECK_MESSAGE(contains(error.err, "error[C0801]: not found: dataset.data_path = corpus\n"), error.err);
  const std::string there = "dataset.data_path=corpus_text_document";
  const Finished complete = run_in(scratch, {"check", "my.yaml", there, "--files", "train.train_iters=20"});
  CHECK(complete.code == 0);
  CHECK_MESSAGE(complete.err.empty(), complete.err);

  // Files that are there and cannot be used.
  scratch.write("plain.json", "hello\n");
  scratch.write("pointer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n");
  scratch.write("damaged.bin", "");
  scratch.write("damaged.idx", "");
  for (const auto& [change, expected] :
       {std::pair("tokenizer.tokenizer_model=plain.json", "is not a tokenizer"),
        {"tokenizer.tokenizer_model=pointer.json", "is a Git LFS pointer"},
        {"tokenizer.tokenizer_model=other.json", "was prepared with the tokenizer"},
        {"dataset.data_path=damaged", "damaged.idx"}}) {
    CAPTURE(change);
    const Finished noted = run_in(scratch, {"check", "my.yaml", there, change});
    CHECK(noted.code == 0);
    CHECK_MESSAGE(contains(noted.err, "note[C0802]: "), noted.err);
    const Finished unusable = run_in(scratch, {"check", "my.yaml", there, change, "--files"});
    CHECK(unusable.code == 1);
    CHECK(unusable.out.empty());
    CHECK_MESSAGE(contains(unusable.err, "error[C0802]: "), unusable.err);
    CHECK_MESSAGE(contains(unusable.err, expected), unusable.err);
    CHECK(run_in(scratch, {"train", "my.yaml", there, change, "--run-dir", "never"}).code != 0);
  }

  for (const bool strict : {false, true}) {
    std::vector<std::string> words = {"check", "my.yaml", "--json"};
    if (strict) words.emplace_back("--files");
    const Finished asked = run_in(scratch, words);
    CHECK(asked.code == (strict ? 1 : 0));
    const json object = capstan::json_of(asked.out);
    CHECK(object["ok"] == !strict);
    REQUIRE(object["missing_files"].size() == 1);
    CHECK(object["missing_files"][0]["path"] == "dataset.data_path");
    CHECK(asked.err.empty());
  }

  // The data of a shipped recipe are a place to put them: no note, but --files asks for all that `train`
  // needs.
  CHECK(run_in(scratch, {"check", "llama3-8b"}).err.empty());
  const Finished shipped = run_in(scratch, {"check", "llama3-8b", "--files"});
  CHECK(shipped.code == 1);
  CHECK(contains(shipped.err, "dataset.data_path = data/llama3_text_document"));
  CHECK(contains(shipped.err, "tokenizer.tokenizer_model = data/llama3/tokenizer.json"));
  CHECK(run_in(scratch, {"check", "llama3-8b", "--files", "dataset=mock"}).code == 0);
  CHECK(run_in(scratch, {"check", "llama3-8b", "--files", "--shrink"}).code == 0);
}

TEST_CASE("check --files finds what train would find when it opens data and weights, all at once") {
  const ScratchDirectory scratch;
  REQUIRE(train_in(scratch, {"train.train_iters=1", "--run-dir", "base"}).code == 0);
  scratch.write("bad.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\nno JSON\n");
  scratch.write("large.json", "no tokenizer");
  const auto both = [&](std::vector<std::string> more, const std::string& expected) {
    CAPTURE(expected);
    std::vector<std::string> check = tiny_recipe(more);
    check.insert(check.begin(), "check");
    more.insert(more.end(), {"--run-dir", "never"});
    CHECK(run_in(scratch, check).code == 0);
    CHECK(train_in(scratch, more).code != 0);
    check.emplace_back("--files");
    const Finished files = run_in(scratch, check);
    CHECK(files.code == 1);
    CHECK_MESSAGE(contains(files.err, "error[C0802]: "), files.err);
    CHECK_MESSAGE(contains(files.err, expected), files.err);
  };
  const std::string base = "checkpoint.pretrained_checkpoint=base";
  both({base, "model.hidden_size=64"}, "does not fit the recipe's model");
  both({base, "peft=lora", "model.num_layers=4"}, "is missing in the checkpoint");
  both({base, "model.vocab_size=512"}, "word_embeddings.weight");
  both({"checkpoint.load=base", "checkpoint.ckpt_step=5"}, "not found: checkpoint.ckpt_step = 5");
  const std::vector<std::string> sft = {"dataset=sft", "dataset.format=prompt_completion",
                                        "tokenizer.tokenizer_type=byte", "model.vocab_size=257",
                                        "dataset.train_files=[bad.jsonl]"};
  both(sft, "bad.jsonl:2");

  // A missing file does not hide errors that can be found without it.
  const Finished two = run_in(scratch, {"check", "quickstart", "--files", "dataset.data_path=gone",
                                        "tokenizer.tokenizer_model=large.json"});
  CHECK(two.code == 1);
  CHECK_MESSAGE(contains(two.err, "error[C0801]: not found: dataset.data_path = gone"), two.err);
  CHECK_MESSAGE(contains(two.err, "error[C0802]: "), two.err);
}

TEST_CASE("check --files compares a recipe with the checkpoint that it continues, as train does") {
  const ScratchDirectory scratch;
  REQUIRE(train_in(scratch, {"train.train_iters=2", "--run-dir", "base"}).code == 0);
  REQUIRE(
      train_in(scratch, {"train.train_iters=2", "checkpoint.save_optim=false", "--run-dir", "bare"}).code ==
      0);
  const std::vector<std::string> lora = {"peft=lora", "checkpoint.pretrained_checkpoint=base"},
                                 other_base = {"peft=lora", "checkpoint.pretrained_checkpoint=bare"};
  const auto with = [](std::vector<std::string> words, const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  REQUIRE(train_in(scratch, with(lora, {"train.train_iters=2", "--run-dir", "adapters"})).code == 0);
  const auto check_files = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = tiny_recipe(with({"train.train_iters=4", "--files"}, more));
    words.insert(words.begin(), "check");
    return run_in(scratch, words);
  };
  int runs = 0;
  const auto train = [&](const std::vector<std::string>& more) {
    return train_in(scratch,
                    with({"train.train_iters=4", "--run-dir", "run" + std::to_string(runs++)}, more));
  };
  const auto both = [&](const std::vector<std::string>& more, const std::string& expected) {
    CAPTURE(expected);
    const Finished trained = train(more), checked = check_files(more);
    CHECK(trained.code != 0);
    CHECK_MESSAGE(contains(trained.err, expected), trained.err);
    CHECK(checked.code == 1);
    CHECK_MESSAGE(contains(checked.err, "error[C0802]: "), checked.err);
    CHECK_MESSAGE(contains(checked.err, expected), checked.err);
  };
  const auto accepted = [&](const std::vector<std::string>& more) {
    const Finished checked = check_files(more), trained = train(more);
    CHECK_MESSAGE(checked.code == 0, checked.err);
    CHECK_MESSAGE(trained.code == 0, trained.err);
  };
  const std::string load = "checkpoint.load=base";
  const std::string changed = "the recipe differs from the run's in fields that change the results:\n    ";
  accepted({load, "logger.tensorboard=false"});
  both({load, "model.hidden_size=64"}, changed + "model.hidden_size: 32 -> 64");
  both({load, "model.num_layers=2"}, changed + "model.num_layers: 1 -> 2");
  both({load, "optimizer.lr=0.007"}, changed + "optimizer.lr: ");
  both({load, "dataset.random_seed=5"}, changed + "dataset.random_seed: 1234 -> 5");
  both({"checkpoint.load=bare"}, "was saved without optimizer state");
  accepted({"checkpoint.load=bare", "checkpoint.load_optim=false"});
  // Adapters: those that continue, and those with which a new run begins.
  accepted(with(lora, {"checkpoint.load=adapters"}));
  both(with(other_base, {"checkpoint.load=adapters"}), "is not the base model of these adapters");
  accepted(with(lora, {"peft.adapter=adapters"}));
  both(with(lora, {"peft.adapter=adapters", "peft.dim=4"}), "peft.dim is 4 in the recipe, and ");
  both(with(other_base, {"peft.adapter=adapters"}), "is not the base model of the adapters in ");

  // Data that are missing do not hide a model of other shapes.
  const Finished shapes = run_in(scratch, {"check", "quickstart", "--files", "dataset.data_path=gone", load});
  CHECK(shapes.code == 1);
  CHECK_MESSAGE(contains(shapes.err, "not found: dataset.data_path = gone"), shapes.err);
  CHECK_MESSAGE(contains(shapes.err, "does not fit the recipe's model"), shapes.err);
  // The output says which files --files would open in addition.
  std::vector<std::string> words = tiny_recipe({load});
  words.insert(words.begin(), "check");
  CHECK_MESSAGE(contains(run_in(scratch, words).out, ". Weights were not checked; `--files` checks them."),
                run_in(scratch, words).out);
}

TEST_CASE("check --files and train refuse directories that cannot be written") {
  const ScratchDirectory scratch;
  scratch.write("file", "x");
  const auto words = [](const char* command, const std::vector<std::string>& more) {
    std::vector<std::string> all = tiny_recipe({"train.train_iters=1"});
    all.insert(all.begin(), command);
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const auto both = [&](std::vector<std::string> more, const std::string& expected) {
    CAPTURE(expected);
    const Finished trained = run_in(scratch, words("train", more));
    CHECK(trained.code == 1);
    CHECK_MESSAGE(contains(trained.err, expected), trained.err);
    more.emplace_back("--files");
    const Finished checked = run_in(scratch, words("check", more));
    CHECK(checked.code == 1);
    CHECK_MESSAGE(contains(checked.err, "error[C0803]: " + expected), checked.err);
  };
  const std::string at_file = "`" + scratch.file("file") + "` is a file, not a directory";
  both({"checkpoint.save=file/kept"}, "not writable: checkpoint.save = file/kept: " + at_file);
  both({"logger.tensorboard_dir=file"}, "not writable: logger.tensorboard_dir = file: " + at_file);
  both({"profiling.trace=true", "profiling.trace_dir=file/a/b"},
       "not writable: profiling.trace_dir = file/a/b: " + at_file);
  both({"--run-dir", "file/a"}, "not writable: run directory = file/a: `file` is a file");
  scratch.write("runs", "x");
  both({}, "not writable: run directory = runs/quickstart: `runs` is a file, not a directory");
  CHECK(run_in(scratch, words("check", {})).code == 0);  // without --files nothing is looked at
  CHECK(run_in(scratch, words("check", {"--files", "--run-dir", "elsewhere"})).code == 0);
  CHECK_FALSE(fs::exists(scratch.file("elsewhere")));
  // A run that exists is reported and may be resumed; checkpoints of another run are refused, as by `train`.
  REQUIRE(run_in(scratch, words("train", {"--run-dir", "first", "checkpoint.save=kept"})).code == 0);
  const Finished same =
      run_in(scratch, words("check", {"--files", "--run-dir", "first", "checkpoint.save=kept"}));
  CHECK(same.code == 0);
  CHECK_MESSAGE(contains(same.err, "note[C0804]: run `first` exists already (finished at step 1)"), same.err);
  const std::vector<std::string> other{"--run-dir", "second", "checkpoint.save=kept"};
  const std::string held = "checkpoint.save `" + scratch.file("kept") + "` holds checkpoints of another run";
  const Finished refused = run_in(scratch, words("train", other));
  CHECK(refused.code == 1);
  CHECK_MESSAGE(contains(refused.err, held), refused.err);
  const Finished reported =
      run_in(scratch, words("check", {"--files", "--run-dir", "second", "checkpoint.save=kept"}));
  CHECK(reported.code == 1);
  CHECK_MESSAGE(contains(reported.err, "error[C0804]: " + held), reported.err);
  fs::remove_all(scratch.file("first")), fs::remove_all(scratch.file("second"));
  fs::remove_all(scratch.file("kept"));
  CHECK(run_in(scratch, words("check", {"--run-dir", "elsewhere"})).code == 2);

  // All at once, and nothing is left behind.
  const Finished two = run_in(scratch, words("train", {"checkpoint.save=file"}));
  CHECK(two.code == 1);
  CHECK_MESSAGE(contains(two.err, "2 directories of the run cannot be written:"), two.err);
  CHECK(std::distance(fs::directory_iterator(scratch.path()), fs::directory_iterator()) == 2);
}

TEST_CASE("check refuses a run directory in which train would not begin") {
  const ScratchDirectory scratch;
  fs::create_directories(scratch.file("data"));
  scratch.write("data/a.txt", "x");
  const auto both = [&](const std::vector<std::string>& more, bool files, const std::string& expected) {
    std::vector<std::string> words = tiny_recipe(more);
    words.insert(words.begin(), "train");
    const Finished trained = run_in(scratch, words);
    CHECK(trained.code != 0);
    CHECK_MESSAGE(contains(trained.err, expected), trained.err);
    words[0] = "check";
    if (files) words.emplace_back("--files");
    const Finished checked = run_in(scratch, words);
    CHECK(checked.code == 1);
    CHECK(checked.out.empty());
    CHECK_MESSAGE(contains(checked.err, expected), checked.err);
    CHECK_MESSAGE(contains(checked.err, "with --run-dir DIR"), checked.err);
  };
  const std::string external = "`data` exists and is not a run directory (it has no run.json)";
  both({"--run-dir", "data"}, true, external);
  both({"name=a/b"}, false, "the recipe's name `a/b` cannot name a directory in runs/");
  both({"name=a/b"}, true, "the recipe's name `a/b` cannot name a directory in runs/");
  both({"--run-dir", "data/a.txt"}, true, "run directory = data/a.txt: `data/a.txt` is a file");
  // A name that is not used is not checked.
  std::vector<std::string> words = tiny_recipe({"name=a/b", "--files", "--run-dir", "r"});
  words.insert(words.begin(), "check");
  CHECK(run_in(scratch, words).code == 0);
}

TEST_CASE("check --files shows the warnings with which train would begin") {
  const ScratchDirectory scratch;
  std::string lines;
  for (int i = 0; i < 6; ++i) lines += "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n{\"prompt\": 1}\n";
  scratch.write("a.jsonl", lines + "{\"prompt\": \"ab\", \"completion\": \"\"}\n");
  const std::vector<std::string> sft = {
      "dataset=sft",          "dataset.format=prompt_completion", "tokenizer.tokenizer_type=byte",
      "model.vocab_size=257", "dataset.train_files=[a.jsonl]",    "dataset.split=1,0,0",
      "train.train_iters=100"};
  const auto words = [&](const char* command, std::vector<std::string> more) {
    std::vector<std::string> all = tiny_recipe(sft);
    all.insert(all.begin(), command);
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  // Every bad line, not only the first.
  const Finished bad = run_in(scratch, words("check", {"--files"}));
  CHECK(bad.code == 1);
  for (int line = 2; line <= 12; line += 2)
    CHECK_MESSAGE(contains(bad.err, "a.jsonl:" + std::to_string(line) + ":"), bad.err);

  const std::string skip = "dataset.on_bad_line=skip";
  const Finished checked = run_in(scratch, words("check", {"--files", skip}));
  CHECK(checked.code == 0);
  CHECK_MESSAGE(contains(checked.out, "no errors, 4 warnings"),
                checked.out);  // model.vocab_size is given twice
  for (const char* expected :
       {"training data: 6 lines are not valid samples and were skipped:\n",
        "training data: 1 sample has an empty answer:\n", "the run makes 100.0 passes over"})
    CHECK_MESSAGE(contains(checked.err, std::string("warning[C0806]: ") + expected), checked.err);
  CHECK(contains(run_in(scratch, words("check", {skip})).out, "no errors, 1 warning"));
  const Finished trained = run_in(scratch, words("train", {skip, "train.exit_interval=1"}));
  CHECK(trained.code == 75);
  CHECK_MESSAGE(contains(trained.err, "warning: the run makes 100.0 passes over"), trained.err);

  // Weights that were trained with other data.
  std::vector<std::string> base = words("train", {skip, "--run-dir", "base", "train.train_iters=1"});
  REQUIRE(run_in(scratch, base).code == 0);
  scratch.write("text.txt", "one two three four five six seven eight nine ten\n");
  REQUIRE(run_in(scratch, {"tokenizer", "train", "text.txt", "--vocab-size", "257", "--min-frequency", "1",
                           "--output", "other.json"})
              .code == 0);
  const std::vector<std::string> other = {skip, "tokenizer.tokenizer_type=huggingface",
                                          "tokenizer.tokenizer_model=other.json",
                                          "checkpoint.pretrained_checkpoint=base"};
  std::vector<std::string> files = words("check", other);
  files.emplace_back("--files");
  const Finished weights = run_in(scratch, files);
  CHECK(weights.code == 0);
  CHECK_MESSAGE(contains(weights.err, "warning[C0806]: the weights of "), weights.err);
  CHECK_MESSAGE(contains(weights.err, "another tokenizer"), weights.err);
}

TEST_CASE("a misspelled directory is named with what is near, component by component") {
  const ScratchDirectory scratch;
  fs::create_directories(scratch.file("data"));
  fs::create_directories(scratch.file("recipes/team"));
  scratch.write("data/corpus_text_document.bin", "");
  scratch.write("data/corpus_text_document.idx", "");
  scratch.write("recipes/team/im.yaml", "extends: quickstart\n");
  const auto near = [&](const std::vector<std::string>& words, const std::string& name) {
    CAPTURE(name);
    const Finished missing = run_in(scratch, words);
    CHECK(missing.code == 2);
    CHECK_MESSAGE(contains(missing.err, "did you mean `" + name + "`?"), missing.err);
  };
  near({"check", "recipe/team/im.yaml"}, "recipes/team/im.yaml");
  near({"check", "recipes/zz/im.yaml"}, "recipes/team/im.yaml");
  near({"check", "recipe/taem/im.yml"}, "recipes/team/im.yaml");
  near({"data", "inspect", "dat/corpus"}, "data/corpus_text_document");
  const Finished files = run_in(scratch, {"check", "quickstart", "--files", "dataset.data_path=dat/corpus"});
  CHECK_MESSAGE(contains(files.err, "did you mean `data/corpus_text_document`?"), files.err);
}

TEST_CASE("check refuses a device that cannot train, and accepts one that is not here") {
  const Finished refused = run({"check", "quickstart", "train.device=meta"});
  CHECK(refused.code == 1);
  CHECK_MESSAGE(contains(refused.err, "this version cannot train it:\n    train.device: "), refused.err);
  CHECK(run({"check", "quickstart", "train.device=cuda"}).code == 0);
}

TEST_CASE("train says where the launch has other ranks than the recipe or the command line asks for") {
  const ScratchDirectory scratch;
  scratch.write("two.yaml", "extends: quickstart\ndist: {world_size: 2}\n");
  const auto said = [&](const char* recipe, const std::vector<std::string>& more) {
    std::vector<std::string> words = tiny_recipe({"train.train_iters=1"});
    words[0] = recipe;
    words.insert(words.begin(), "train");
    words.insert(words.end(), more.begin(), more.end());
    const Finished done = run_in(scratch, words);
    CHECK_MESSAGE(done.code == 0, done.err);
    return done.err;
  };
  CHECK(contains(said("./two.yaml", {"--run-dir", "a"}),
                 "the recipe asks for 2 ranks (./two.yaml:2:8), this run has 1: the launch decides"));
  CHECK(
      contains(said("./two.yaml", {"dist.world_size=3", "--run-dir", "b"}),
               "the command line asks for 3 ranks (dist.world_size=3), this run has 1: the launch decides"));
  CHECK_FALSE(contains(said("quickstart", {"--run-dir", "c"}), "asks for"));
  CHECK_FALSE(contains(said("./two.yaml", {"dist.world_size=1", "--run-dir", "d"}), "asks for"));
  CHECK(contains(run_in(scratch, {"explain", "dist.world_size", "./two.yaml", "--ranks", "1"}).out,
                 "./two.yaml:2:8: 2  (replaced)"));
}

TEST_CASE("a wrong preset hides no other mistake") {
  const Finished both =
      run({"check", "quickstart", "model=no-such", "train.global_batch_size=3", "optimizer.lr=abc"});
  CHECK(both.code == 1);
  CHECK_MESSAGE(contains(both.err, "`model` has no preset named `no-such`"), both.err);
  CHECK_MESSAGE(contains(both.err, "`train.global_batch_size` 3"), both.err);
  CHECK_MESSAGE(contains(both.err, "`abc` is not a number"), both.err);
  CHECK_MESSAGE(contains(both.err, "3 errors"), both.err);
  CHECK_MESSAGE(contains(run({"check", "quickstart", "model=no-such"}).err, "1 error"),
                run({"check", "quickstart", "model=no-such"}).err);
  // The dense grid does not depend on the model.
  const Finished grid = run({"check", "llama3-8b", "model=no-such", "dist.tp=3"});
  CHECK_MESSAGE(contains(grid.err, "R0101"), grid.err);
}

TEST_CASE("a directory without weights is not called missing") {
  const ScratchDirectory scratch;
  fs::create_directory(scratch.file("sub"));
  fs::copy_file(std::string(kSourceDirectory) + "/tests/formats/families/llama/config.json",
                scratch.file("sub/config.json"));
  const Finished checked = run_in(scratch, {"check", "quickstart", "model=hf:sub"});
  CHECK(checked.code == 2);
  CHECK_MESSAGE(contains(checked.err, "has neither model.safetensors nor"), checked.err);
  CHECK_MESSAGE(!contains(checked.err, "not found"), checked.err);
  CHECK_MESSAGE(
      contains(run_in(scratch, {"check", "quickstart", "model=hf:sup"}).err, "not found: model = hf:sup"),
      "a directory that is not there");
}

TEST_CASE("show --minimal: what a recipe extends, what it changes, and the world of --ranks") {
  const ScratchDirectory scratch;
  const std::string four =
      "schema: capstan/1\nextends: quickstart\nname: mine\nmodel:\n  num_layers: 2\ntrain:\n  train_iters: "
      "100\n"
      "dataset:\n  data_path: here/corpus\n";
  scratch.write("mine.yaml", four);
  CHECK(run_in(scratch, {"show", "mine.yaml", "--minimal"}).out == four);
  CHECK(run_in(scratch, {"show", "first.yaml", "--minimal"}).code == 2);
  const std::string ranks = run_in(scratch, {"show", "mine.yaml", "--minimal", "--ranks", "2"}).out;
  CHECK_MESSAGE(contains(ranks, "dist:\n  world_size: 2\n"), ranks);
  scratch.write("again.yaml", ranks);
  CHECK(run_in(scratch, {"check", "again.yaml", "-q"}).out.empty());
  CHECK(run_in(scratch, {"show", "again.yaml", "dist.world_size"}).out == "2\n");
  CHECK(run_in(scratch, {"show", "again.yaml", "--minimal"}).out == ranks);
  // A model's directory and data given on the command line, from another directory than the recipe's.
  fs::create_directory(scratch.file("sub"));
  fs::copy_file(scratch.file("mine.yaml"), scratch.file("sub/mine.yaml"));
  fs::copy(std::string(kSourceDirectory) + "/tests/formats/families/smollm2", scratch.file("models"));
  const std::string moved =
      run_in(scratch, {"show", "sub/mine.yaml", "--minimal", "checkpoint.pretrained_checkpoint=hf:models",
                       "dataset.data_path=data/corpus"})
          .out;
  CHECK_MESSAGE(!contains(moved, scratch.path()), moved);
  CHECK_MESSAGE(contains(moved, "pretrained_checkpoint: hf:../models\n"), moved);
  CHECK_MESSAGE(contains(moved, "data_path: ../data/corpus\n"), moved);
  scratch.write("sub/moved.yaml", moved);
  CHECK(run_in(scratch, {"show", "sub/moved.yaml", "model.num_layers"}).code == 0);
  // Paths of a recipe that is extended lie beside that one, in what is printed of the other too.
  scratch.write("sub/base.yaml", "extends: quickstart\ntokenizer.tokenizer_model: own.json\n");
  scratch.write("kid.yaml", "extends: sub/base.yaml\n");
  for (const std::vector<std::string>& form : {std::vector<std::string>{}, {"--minimal"}}) {
    std::vector<std::string> words = {"show", "kid.yaml"};
    words.insert(words.end(), form.begin(), form.end());
    const std::string shown = run_in(scratch, words).out;
    CHECK_MESSAGE(
        (contains(shown, "tokenizer_model: sub/own.json\n") || contains(shown, "extends: sub/base.yaml")),
        shown);
    CHECK_MESSAGE(!contains(shown, "tokenizer_model: own.json"), shown);
  }
}

TEST_CASE("show --grid, --schedule and --step in one call") {
  const std::vector<std::string> layout = {"show", "quickstart", "dataset=mock", "dist.pp=2", "--ranks", "4"};
  const auto shown = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), layout.begin(), layout.end());
    const Finished done = run(flags);
    CHECK_MESSAGE(done.code == 0, done.err);
    return done.out;
  };
  const std::string grid = shown({"--grid"}), schedule = shown({"--schedule"}), step = shown({"--step"});
  CHECK(contains(shown({"--step", "train.device=cpu"}), "\ndevice: cpu; train.device=cuda shows "));
  CHECK(contains(shown({"--step", "train.device=cuda"}), "\ndevice: cuda\n"));
  CHECK(shown({"--step", "--grid", "--schedule"}) == grid + "\n" + schedule + "\n" + step);
  CHECK(shown({"--step", "--grid"}) == grid + "\n" + step);
  CHECK(shown({"--schedule", "--grid", "--step", "--rank", "3"}) ==
        shown({"--grid", "--rank", "3"}) + "\n" + schedule + "\n" + shown({"--step", "--rank", "3"}));
  CHECK(run({"show", "quickstart", "--schedule", "--json"}).code == 2);
  CHECK(run({"show", "quickstart", "model", "--grid"}).code == 2);
}

TEST_CASE("no note for values of a shipped recipe that another choice drops") {
  const ScratchDirectory scratch;
  scratch.write("my.yaml", "extends: quickstart\ndataset: mock\ntokenizer: none\n");
  for (const std::string recipe : {"quickstart", "llama3-8b-sft", "llama3-8b-lora", "my.yaml"}) {
    CAPTURE(recipe);
    const Finished result = run_in(scratch, {"check", recipe, "dataset=mock", "tokenizer=none"});
    CHECK(result.code == 0);
    CHECK_MESSAGE(result.err.empty(), result.err);
  }
  // A recipe's own value is one.
  scratch.write("own.yaml", "extends: quickstart\ndataset: {data_path: corpus}\n");
  const Finished own = run_in(scratch, {"check", "own.yaml", "dataset=mock", "tokenizer=none"});
  CHECK(own.code == 0);
  CHECK_MESSAGE(contains(own.err, "note[C0701]: `dataset.data_path` from own.yaml:2:11 is dropped"), own.err);
}

TEST_CASE("dataset=mock needs no data and no tokenizer") {
  // An empty directory: no file that a recipe names exists.
  const ScratchDirectory scratch;
  for (const char* recipe : {"quickstart", "gpt2-124m", "llama3.2-1b-lora", "qwen2.5-0.5b-sft"}) {
    CAPTURE(recipe);
    std::vector<std::string> words = {"train",
                                      recipe,
                                      "dataset=mock",
                                      "train.train_iters=2",
                                      "train.threads=1",
                                      "train.micro_batch_size=1",
                                      "train.global_batch_size=1",
                                      "model.num_layers=1",
                                      "model.hidden_size=64",
                                      "model.ffn_hidden_size=128",
                                      "model.num_attention_heads=4",
                                      "model.num_query_groups=2",
                                      "model.kv_channels=16",
                                      "model.seq_length=32",
                                      "model.vocab_size=512",
                                      "model.make_vocab_size_divisible_by=1",
                                      "validation.eval_interval=null",
                                      "mixed_precision=fp32",
                                      "checkpoint.save_interval=null",
                                      "checkpoint.save_optim=false"};
    if (contains(recipe, "-lora")) words.insert(words.end(), {"peft.random_base=true"});
    if (contains(recipe, "-lora") || contains(recipe, "-sft"))
      words.emplace_back("checkpoint.pretrained_checkpoint=null");
    const Finished done = run_in(scratch, words);
    CHECK_MESSAGE(done.code == 0, done.err);
  }
  for (const auto& name : sampled(every_recipe())) {
    const Finished result =
        run_in(scratch, {"check", name, "dataset=mock", "checkpoint.pretrained_checkpoint=null", "~peft"});
    CAPTURE(name);
    CHECK_MESSAGE(!contains(result.err, "tokenizer"), result.err);
  }
}

TEST_CASE("a model of another program that is named without its scheme is recognized") {
  const ScratchDirectory scratch;
  std::filesystem::create_directories(scratch.file("smol"));
  scratch.write("smol/config.json", "{}");
  const auto help = [&](std::vector<std::string> words, const std::string& expected) {
    const Finished refused = run_in(scratch, std::move(words));
    CHECK(refused.code != 0);
    CHECK_MESSAGE(contains(refused.err, expected), refused.err);
  };
  help({"check", "quickstart", "model=smol"},
       "a Hugging Face model is in the directory of that name: model=hf:smol");
  help({"check", "quickstart", "model=./smol"}, "a Hugging Face model is in it: model=hf:./smol");
  help({"check", "smol"}, "a recipe takes it as model=hf:smol");
  help({"check", "hf:smol"}, "this names a model: a recipe takes it as model=hf:smol");
  help({"check", "quickstart", "model=hf:gone"}, "not found: model = hf:gone");

  scratch.write("m.gguf", "GGUF");
  help({"check", "quickstart", "model=m.gguf"}, "the file of that name is a model: model=gguf:m.gguf");
  help({"check", "quickstart", "model=./m.gguf"}, "as a model: model=gguf:./m.gguf");
  for (const std::string name : {"m.gguf", "./m.gguf"}) {
    help({"check", name}, "that file is a model: a recipe takes it as model=gguf:" + name);
    scratch.write("my.yaml", "extends: " + name + "\n");
    help({"check", "my.yaml"},
         "that file is a model: write `model: gguf:" + name + "` in place of `extends`");
  }
}
