// From text to a dataset with the program alone: tokenizer, data prepare, data inspect, fine-tuning samples.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <sstream>

#include "prepared.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

TEST_CASE("tokenizer: encode gives a JSON line for each line, decode the very text") {
  const Prepared& p = prepared();
  p.write("lines.txt", "the cat  sees\n\n  a rope\t.\nK\xc3\xb6nig \xe2\x82\xac\r\nlast");
  const Finished encoded = p.in({"tokenizer", "encode", "lines.txt", "--tokenizer", "tokenizer.json"});
  REQUIRE(encoded.code == 0);
  CHECK(count_lines(encoded.out) == 5);
  std::istringstream lines(encoded.out);
  for (std::string line; std::getline(lines, line);) CHECK(capstan::json_of(line)["ids"].is_array());
  p.write("ids.jsonl", encoded.out);
  CHECK(p.in({"tokenizer", "decode", "ids.jsonl", "--tokenizer", "tokenizer.json"}).out ==
        read_text(p.file("lines.txt")));
  // A recipe names the same tokenizer.
  CHECK(p.in({"tokenizer", "encode", "lines.txt", "-r", "./tiny.yaml"}).out == encoded.out);
  CHECK(p.in({"tokenizer", "encode", "lines.txt", "-r", "./tiny.yaml", "tokenizer=byte"}).out != encoded.out);
  const Finished located = p.in({"tokenizer", "encode", "lines.txt", "-r", "./tiny.yaml", "--offsets"});
  CHECK(contains(located.out, "],\"offsets\":[["));
  CHECK(p.in({"tokenizer", "encode", "lines.txt"}).code == 2);
  CHECK(p.in({"tokenizer", "encode", "missing.txt", "--tokenizer", "tokenizer.json"}).code == 2);
  const Finished unknown = p.in({"tokenizer", "encode", "lines.txt", "--tokenizer", "nope"});
  CHECK(unknown.code == 2);
  CHECK_MESSAGE(contains(unknown.err, "not found: tokenizer = nope\n  = help: name a tokenizer.json"),
                unknown.err);
}

TEST_CASE("data inspect takes the prefix that data prepare was given") {
  const Prepared& p = prepared();
  const Finished shown = p.in({"data", "inspect", "corpus", "--json"});
  REQUIRE_MESSAGE(shown.code == 0, shown.err);
  CHECK(capstan::json_of(shown.out)["prefix"] == "corpus_text_document");
  CHECK(capstan::json_of(shown.out)["schema"] == "capstan.dataset/1");
}

TEST_CASE("data inspect needs no tokenizer") {
  const Prepared& p = prepared();
  const Finished report = p.in({"data", "inspect", "corpus_text_document", "--json"});
  REQUIRE(report.code == 0);
  CHECK(capstan::json_of(report.out)["documents"] == 300);
  CHECK(contains(p.in({"data", "inspect", "corpus_text_document", "-t", "tokenizer.json"}).out, "capstan"));
  CHECK(p.in({"data", "inspect", "nothing"}).code == 2);
}

TEST_CASE("the bytes of a text are a tokenizer, by its word or the name of its preset") {
  const Prepared& p = prepared();
  for (const char* name : {"bytes", "byte"}) {
    const Finished encoded = p.in({"tokenizer", "encode", "heldout.txt", "-t", name});
    CHECK_MESSAGE(encoded.code == 0, encoded.err);
    CHECK(contains(encoded.out, "116,104,101,32"));
  }
}

TEST_CASE("data of another tokenizer: refused by train and data inspect, and a run keeps its own") {
  const Prepared& p = prepared();
  REQUIRE(p.in({"tokenizer", "train", "corpus.txt", "--separator", "%", "--vocab-size", "300", "--output",
                "other.json"})
              .code == 0);
  const std::vector<std::string> other = {"tokenizer.tokenizer_model=other.json"};
  const Finished trained = p.in({"train", "./tiny.yaml", other[0], "--run-dir", "wrong"});
  CHECK(trained.code == 2);
  for (const char* named :
       {"corpus_text_document", "\"tokenizer.json\" (320 tokens", "\"other.json\" (300 tokens"})
    CHECK_MESSAGE(contains(trained.err, named), trained.err);
  CHECK(!fs::exists(p.file("wrong")));
  const Finished shown = p.in({"data", "inspect", "corpus", "-t", "other.json"});
  CHECK(shown.code == 2);
  CHECK(contains(shown.err, "\"tokenizer.json\" (320 tokens"));
  // The same tokenizer as bytes of another name and by a directory is no other one.
  fs::create_directories(p.file("copy"));
  fs::copy_file(p.file("tokenizer.json"), p.file("copy/tokenizer.json"));
  CHECK(p.in({"data", "inspect", "corpus", "-t", "copy"}).code == 0);
  // Without the record, ids that the tokenizer lacks are found before the run begins.
  for (const char* ending : {".bin", ".idx"})
    fs::copy_file(p.file(std::string("corpus_text_document") + ending), p.file(std::string("bare") + ending));
  const Finished bare =
      p.in({"train", "./tiny.yaml", other[0], "dataset.data_path=bare", "--run-dir", "wrong"});
  CHECK(bare.code == 2);
  CHECK(contains(bare.err, "is not below the vocabulary size 300"));
  // A run that goes on keeps the tokenizer of its checkpoints.
  REQUIRE(p.in({"train", "./tiny.yaml", "train.exit_interval=2", "--run-dir", "keeps"}).code == 75);
  // Also where they hold no copy of it, but its record.
  REQUIRE(p.in({"train", "./tiny.yaml", "train.exit_interval=2", "checkpoint.save_tokenizer_assets=false",
                "--run-dir", "records"})
              .code == 75);
  // A text comes from a file or through a pipe.
  p.write("short.txt", "A short text.\n");
  Launch piped;
  piped.directory = p.path();
  piped.arguments = {"eval", "keeps", "--text", "-"};
  piped.input = read_text(p.file("short.txt"));
  const Finished through_pipe = run(piped);
  CHECK_MESSAGE(through_pipe.code == 0, through_pipe.err);
  CHECK(through_pipe.out == p.in({"eval", "keeps", "--text", "short.txt"}).out);
  fs::remove(p.file("corpus_text_document.meta.json"));
  fs::rename(p.file("tokenizer.json"), p.file("away.json"));
  fs::copy_file(p.file("copy/tokenizer.json"), p.file("tokenizer.json"));
  std::string text = read_text(p.file("tokenizer.json"));
  text.replace(text.find("\"<|endoftext|>\""), 15, "\"<|changedtok|>\"");
  text.replace(text.rfind("\"<|endoftext|>\""), 15, "\"<|changedtok|>\"");
  p.write("tokenizer.json", text);
  const Finished resumed = p.in({"train", "./tiny.yaml", "--resume", "--run-dir", "keeps"});
  CHECK(resumed.code == 1);
  CHECK_MESSAGE(contains(resumed.err, "the run was trained with the tokenizer"), resumed.err);
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"train", "./tiny.yaml", "checkpoint.save_tokenizer_assets=false", "--resume",
                                 "--run-dir", "records"},
        {"eval", "records", "--text", "corpus.txt"},
        {"generate", "records", "--prompt", "a", "--max-tokens", "2"}}) {
    const Finished refused = p.in(words);
    CHECK(refused.code == 1);
    CHECK_MESSAGE(contains(refused.err, "the run was trained with the tokenizer \"tokenizer.json\""),
                  refused.err);
  }
  fs::remove(p.file("tokenizer.json"));
  fs::rename(p.file("away.json"), p.file("tokenizer.json"));
}

TEST_CASE("data prepare and tokenizer train replace files with --overwrite only") {
  const Prepared& p = prepared();
  std::vector<std::string> train = {"tokenizer",    "train", "corpus.txt", "--separator",   "%",
                                    "--vocab-size", "320",   "--output",   "tokenizer.json"};
  const Finished kept = p.in(train);
  CHECK(kept.code == 2);
  CHECK(contains(kept.err, "`tokenizer.json` exists already"));
  CHECK(contains(kept.err, "--overwrite"));
  train.emplace_back("--overwrite");
  CHECK(p.in(train).code == 0);
  const std::vector<std::string> words = {"data",     "prepare",     "corpus.txt",     "--separator",
                                          "%",        "--tokenizer", "tokenizer.json", "--append-eod",
                                          "--output", "corpus"};
  const Finished refused = p.in(words);
  CHECK(refused.code == 2);
  CHECK(contains(refused.err, "corpus_text_document.bin` exists already"));
  CHECK(contains(refused.err, "--overwrite"));
  auto again = words;
  again.push_back("--overwrite");
  CHECK(p.in(again).code == 0);
  // The name of the dataset means its prefix.
  auto named = words;
  named.back() = "corpus_text_document";
  CHECK(contains(p.in(named).err, "`corpus_text_document.bin` exists already"));
}

TEST_CASE("an HTML page among the texts is a warning, and a note where its name says so") {
  const ScratchDirectory scratch;
  const std::string page = "<!DOCTYPE html>\n<html><body>404 not found</body></html>\n";
  for (const char* name : {"a.txt", "b.html"}) scratch.write(name, page);
  scratch.write("c.txt", "A text with <html> in it.\n");
  const auto of = [&](std::vector<std::string> words) {
    const Finished done = run_in(scratch, std::move(words));
    CHECK_MESSAGE(done.code == 0, done.err);
    return done.err;
  };
  for (const bool trains : {false, true}) {
    const auto with = [&](std::vector<std::string> files) {
      std::vector<std::string> words = trains ? std::vector<std::string>{"tokenizer", "train"}
                                              : std::vector<std::string>{"data", "prepare"};
      words.insert(words.end(), files.begin(), files.end());
      const std::vector<std::string> more =
          trains ? std::vector<std::string>{"--vocab-size", "257", "--output", "t.json", "--overwrite"}
                 : std::vector<std::string>{"--tokenizer", "bytes", "--output", "o", "--overwrite"};
      words.insert(words.end(), more.begin(), more.end());
      return of(words);
    };
    const std::string both = with({"a.txt", "b.html", "c.txt"});
    CHECK_MESSAGE(contains(both, "warning: `a.txt` is an HTML page: perhaps a failed download"), both);
    CHECK_MESSAGE(contains(both, "note: `b.html` is an HTML page; its markup is part of the text"), both);
    CHECK(!contains(with({"c.txt"}), "HTML"));
  }
}

TEST_CASE("data prepare takes the tokenizer of a recipe, with overrides") {
  const Prepared& p = prepared();
  const auto words = [](std::vector<std::string> more, const std::string& output) {
    std::vector<std::string> all = {"data", "prepare",      "corpus.txt", "--separator",
                                    "%",    "--append-eod", "--output",   output};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const auto ids = [&](std::vector<std::string> more, const std::string& output) {
    const Finished done = p.in(words(std::move(more), output));
    REQUIRE_MESSAGE(done.code == 0, done.err);
    return read_text(p.file(output + "_text_document.bin"));
  };
  CHECK(ids({"-r", "./tiny.yaml"}, "by-recipe") == read_text(p.file("corpus_text_document.bin")));
  CHECK(ids({"-r", "./tiny.yaml", "tokenizer=byte"}, "as-bytes") == ids({"--tokenizer", "bytes"}, "bytes"));
  // The record beside the data names the tokenizer as the recipe does: train takes the data, and those alone.
  const json record = capstan::json_of(read_text(p.file("by-recipe_text_document.meta.json")));
  CHECK_MESSAGE(contains(capstan::dump_json(record), "tokenizer.json"), capstan::dump_json(record));
  const auto trained = [&](const std::string& data) {
    return p.in({"train", "tiny.yaml", "dataset.data_path=" + data + "_text_document", "train.train_iters=1",
                 "--run-dir", data + "-run"});
  };
  CHECK(trained("by-recipe").code == 0);
  CHECK(trained("as-bytes").code != 0);
  const auto refused = [&](std::vector<std::string> more, const std::string& why) {
    const Finished done = p.in(words(std::move(more), "refused"));
    CHECK(done.code != 0);
    CHECK_MESSAGE(contains(done.err, why), done.err);
    CHECK_FALSE(fs::exists(p.file("refused_text_document.bin")));
  };
  refused({"-r", "./tiny.yaml", "tokenizer=none"}, "names no tokenizer");
  refused({"-r", "./tiny.yaml", "--tokenizer", "tokenizer.json"}, "exclude each other");
  refused({"--tokenizer", "tokenizer.json", "tokenizer=byte"}, "changes a recipe, and none is given");
  refused({"-r", "./tiny.yaml", "tokenizer.tokenizer_model=gone.json"}, "gone.json");
  refused({"-r", "quickstrat"}, "not found: recipe = quickstrat");
}

namespace {

// Forty samples: chats.jsonl, and mixed.jsonl with a line more that is not a sample.
std::string write_chats(const Prepared& p) {
  std::string lines;
  for (int i = 0; i < 40; ++i)
    lines += R"({"messages": [{"role": "user", "content": "who is )" + std::to_string(i % 5) +
             R"(?"}, {"role": "assistant", "content": "the cat sees a rope"}]})"
             "\n";
  p.write("chats.jsonl", lines);
  p.write("mixed.jsonl", lines + "{\"a\": 1}\n");
  return lines;
}

// Runs a command with a recipe that trains on chats.jsonl.
Finished on_chats(const Prepared& p, std::vector<std::string> words,
                  const std::vector<std::string>& more = {}) {
  const std::vector<std::string> recipe = {"./tiny.yaml",
                                           "dataset=sft",
                                           "dataset.train_files=chats.jsonl",
                                           "dataset.split=\"90,10,0\"",
                                           "tokenizer.chat_template=chatml",
                                           "model.seq_length=160"};
  words.insert(words.end(), recipe.begin(), recipe.end());
  words.insert(words.end(), more.begin(), more.end());
  return p.in(words);
}

}  // namespace

TEST_CASE("fine-tuning samples: inspected") {
  const Prepared& p = prepared();
  write_chats(p);
  const Finished shown = on_chats(p, {"data", "inspect"});
  REQUIRE_MESSAGE(shown.code == 0, shown.err);
  CHECK(contains(shown.out, "36 samples, "));
  CHECK(contains(shown.out, "assistant\n⟦the cat sees a rope<|im_end|>⟧\n"));
  const Finished file =
      p.in({"data", "inspect", "mixed.jsonl", "-t", "tokenizer.json", "--chat-template", "chatml", "--json"});
  REQUIRE_MESSAGE(file.code == 0, file.err);
  const json report = capstan::json_of(file.out);
  CHECK(report["samples"] == 40);
  CHECK(report["bad"] == 1);
  CHECK(contains(report["reports"][0], "mixed.jsonl:41:1: `messages` is missing, not a list"));
  CHECK(contains(p.in({"data", "inspect", "chats.jsonl", "-t", "tokenizer.json"}).err,
                 "--chat-template chatml, another known template"));
  const Finished field =
      p.in({"data", "inspect", "chats.jsonl", "-t", "tokenizer.json", "tokenizer.chat_template=chatml"});
  CHECK_MESSAGE(contains(field.err, "--chat-template"), field.err);

  // Options that would have no effect are refused.
  const auto refused = [&](const Finished& done, const std::string& why) {
    CHECK(done.code == 2);
    CHECK_MESSAGE(contains(done.err, why), done.err);
  };
  for (const std::vector<std::string>& option : {std::vector<std::string>{"--format", "text"},
                                                 {"--loss-mode", "all"},
                                                 {"--chat-template", "chatml"},
                                                 {"--seq-length", "9"},
                                                 {"-t", "tokenizer.json"}}) {
    std::vector<std::string> words = {"data", "inspect", "chats.jsonl", "--recipe", "./tiny.yaml"};
    words.insert(words.end(), option.begin(), option.end());
    refused(p.in(words), "is set by the recipe");
  }
  refused(on_chats(p, {"data", "inspect"}, {"-t", "tokenizer.json"}), "is set by the recipe");
  refused(on_chats(p, {"data", "inspect"}, {"--scan"}), "`--scan` applies to a PREFIX");
  refused(p.in({"data", "inspect", "chats.jsonl", "-t", "tokenizer.json", "--scan"}),
          "`--scan` applies to a PREFIX");
  refused(p.in({"data", "inspect", "chats.jsonl", "-t", "tokenizer.json", "dataset.packing=false"}),
          "changes a recipe, and none is given");
}

TEST_CASE("fine-tuning samples: trained on, counted") {
  const Prepared& p = prepared();
  write_chats(p);
  const Finished trained = on_chats(p, {"train"}, {"train.train_iters=12", "--run-dir", "runs/sft"});
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  CHECK(contains(trained.err, "training data: 36 samples, "));
  CHECK(contains(trained.err, "validation data: 4 samples, "));
  const auto losses = losses_of(p.file("runs/sft"));
  CHECK(losses.size() == 12);
  CHECK(losses.back() < losses.front());
  CHECK(contains(trained.err, " passes over the training data ("));
  // One row again and again: more passes than anybody wants.
  const Finished often = on_chats(
      p, {"train"}, {"dataset.max_train_samples=2", "train.train_iters=6", "--run-dir", "runs/often"});
  REQUIRE_MESSAGE(often.code == 0, often.err);
  CHECK(contains(often.err, "the run makes 24.0 passes over the training data: "));
  // Two passes are the rows of two epochs.
  const Finished epochs = on_chats(
      p, {"train"},
      {"train.train_iters=null", "train.epochs=2", "dataset.packing=false", "--run-dir", "runs/epochs"});
  REQUIRE_MESSAGE(epochs.code == 0, epochs.err);
  CHECK(contains(epochs.err,
                 "18 steps of 4 samples make 2.00 passes over the training data (36 samples of 160 tokens)"));
  CHECK(losses_of(p.file("runs/epochs")).size() == 18);
  const Finished single =
      on_chats(p, {"train"},
               {"train.train_iters=1", "train.micro_batch_size=1", "train.global_batch_size=1",
                "dataset.packing=false", "--run-dir", "runs/single"});
  REQUIRE_MESSAGE(single.code == 0, single.err);
  CHECK(contains(single.err, "1 step of 1 sample makes 0.03 passes over the training data (36 samples of "));
  CHECK(!contains(epochs.err, "warning: the run makes"));
}

TEST_CASE("fine-tuning samples: bad lines and empty answers") {
  const Prepared& p = prepared();
  const std::string lines = write_chats(p);
  // Bad lines are left out where the recipe says so; they, and empty answers, are named.
  p.write("holes.jsonl",
          lines + "{\"a\": 1}\n" +
              R"({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": " "}]})" +
              "\n");
  const Finished skipped = on_chats(p, {"train"},
                                    {"dataset.train_files=holes.jsonl", "dataset.on_bad_line=skip",
                                     "train.train_iters=1", "--run-dir", "runs/skipped"});
  REQUIRE_MESSAGE(skipped.code == 0, skipped.err);
  CHECK(contains(skipped.err, "1 line is not a valid sample and was skipped:\n"));
  CHECK(contains(skipped.err, "holes.jsonl:41:1: `messages` is missing"));
  CHECK(contains(skipped.err, "1 sample has an empty answer:\n"));
  CHECK(contains(skipped.err, "holes.jsonl:42"));
  // A line that is not a sample ends the run before anything is made.
  const Finished bad = on_chats(p, {"train"}, {"dataset.train_files=mixed.jsonl", "--run-dir", "runs/bad"});
  CHECK(bad.code == 2);
  CHECK(contains(bad.err, "mixed.jsonl:41:1: `messages` is missing, not a list"));
  CHECK(!fs::exists(p.file("runs/bad")));
}

// docs/choosing-a-layout.md, "Uneven batches".
TEST_CASE("the last step of a pass is completed from the next one, and an evaluation begins again") {
  const ScratchDirectory scratch;
  const auto records = [](int count) {
    std::string lines;
    for (int i = 0; i < count; ++i)
      lines += R"({"messages": [{"role": "user", "content": "say )" + std::to_string(i) +
               R"("}, {"role": "assistant", "content": ")" +
               std::string(static_cast<size_t>(3 + 5 * i), 'x') + "\"}]}\n";
    return lines;
  };
  scratch.write("seven.jsonl", records(7)), scratch.write("three.jsonl", records(3));
  const auto train = [&](const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> words = {"dataset=sft",
                                      "dataset.train_files=seven.jsonl",
                                      "dataset.valid_files=three.jsonl",
                                      "dataset.split=null",
                                      "dataset.packing=false",
                                      "tokenizer=byte",
                                      "tokenizer.chat_template=chatml",
                                      "model.seq_length=128",
                                      "model.vocab_size=512",
                                      "train.global_batch_size=4",
                                      "train.train_iters=null",
                                      "train.epochs=1",
                                      "validation.eval_interval=2",
                                      "--run-dir",
                                      name};
    words.insert(words.end(), more.begin(), more.end());
    const Finished done = train_in(scratch, words);
    REQUIRE_MESSAGE(done.code == 0, done.err);
    return done.err;
  };
  const auto validation_loss = [&](const std::string& name) {
    for (const json& row : rows_of(scratch.file(name) + "/metrics.jsonl"))
      if (row.value("event", "") == "validation") return row["loss"].get<double>();
    return 0.0;
  };
  // Each of the three records counts once, and four times; then the first one counts twice.
  const std::string once = train("once", {"validation.eval_iters=3", "validation.eval_global_batch_size=1",
                                          "validation.eval_micro_batch_size=1"});
  CHECK_MESSAGE(contains(once, "2 steps of 4 samples make 1.14 passes over the training data"), once);
  train("four", {"validation.eval_iters=3"});
  CHECK(validation_loss("four") == doctest::Approx(validation_loss("once")).epsilon(1e-6));
  train("uneven", {"validation.eval_iters=1"});
  CHECK(std::abs(validation_loss("uneven") - validation_loss("once")) > 1e-5);
}
