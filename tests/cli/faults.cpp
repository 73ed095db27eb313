// Two processes on one run directory, and a disk that is really full.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mount.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "process.hpp"

using namespace capstan::test;
namespace fs = std::filesystem;

static Launch tiny(const ScratchDirectory& scratch, std::vector<std::string> more) {
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = {"train",
                      "quickstart",
                      "dataset=mock",
                      "tokenizer=none",
                      "model.num_layers=1",
                      "model.hidden_size=32",
                      "model.ffn_hidden_size=64",
                      "model.num_attention_heads=4",
                      "model.num_query_groups=2",
                      "model.seq_length=16",
                      "model.vocab_size=256",
                      "train.threads=1",
                      "train.micro_batch_size=1",
                      "train.global_batch_size=2",
                      "validation.eval_interval=null",
                      "logger.log_interval=1"};
  launch.arguments.insert(launch.arguments.end(), more.begin(), more.end());
  return launch;
}

TEST_CASE(
    "a second process on a run, or on another run's checkpoint directory, is refused while the first lives") {
  const ScratchDirectory scratch;
  for (const bool killed : {false, true}) {
    const std::string name = killed ? "killed" : "stopped",
                      saves = "checkpoint.save=" + scratch.file(name + "-saves");
    bool tried = false;
    Launch first =
        tiny(scratch, {"train.train_iters=1000000", "checkpoint.save_interval=5", saves, "--run-dir", name});
    first.on_error_text = [&](const std::string& text, int process) {
      if (tried || !contains(text, "step 6/")) return 0;
      tried = true;
      const std::string holder = "is in use by process " + std::to_string(process) + " on ";
      const Finished second =
          run(tiny(scratch, {"train.train_iters=1000000", saves, "--run-dir", name, "--resume"}));
      CHECK_MESSAGE(second.code == 1, second.err);
      CHECK_MESSAGE(contains(second.err, holder), second.err);
      const Finished other = run(tiny(scratch, {"train.train_iters=9", saves, "--run-dir", name + "-other"}));
      CHECK_MESSAGE(other.code == 1, other.err);
      CHECK_MESSAGE(contains(other.err, holder), other.err);
      return killed ? SIGKILL : SIGTERM;
    };
    const Finished ended = run(first);
    CHECK(tried);
    CHECK_MESSAGE(ended.code == (killed ? 128 + SIGKILL : 75), ended.err);
    // The refused ones have touched nothing, and the dead one holds nothing.
    const Finished on = run(tiny(scratch, {"train.train_iters=1000000", "train.exit_duration_in_mins=0.001",
                                           saves, "--run-dir", name, "--resume"}));
    CHECK_MESSAGE(on.code == 75, on.err);
    CHECK_MESSAGE(contains(on.err, "resumed from"), on.err);
    CHECK(!contains(on.err, "warning: "));
  }
}

TEST_CASE(
    "a file system that is really full: steps go on, the checkpoint stays, and with room again all is "
    "written") {
  const ScratchDirectory scratch;
  const std::string place = scratch.file("small");
  fs::create_directory(place);
  if (::mount("tmpfs", place.c_str(), "tmpfs", 0, "size=1536k") != 0) {
    MESSAGE("no right to mount a file system: the full disk of tests/train/faults.cpp is the proof here");
    return;
  }
  const std::string filler = place + "/filler";
  bool filled = false, cured = false, stopped = false;
  Launch launch =
      tiny(scratch, {"train.train_iters=1000000", "checkpoint.save_interval=5", "--run-dir", place + "/run"});
  launch.on_error_text = [&](const std::string& text, int) {
    if (!filled && contains(text, "saved")) {
      filled = true;
      std::ofstream file(filler, std::ios::binary);
      for (int i = 0; i < 4096 && file; ++i) file << std::string(4096, 'x') << std::flush;
    }
    if (filled && !cured && contains(text, "was not saved") && contains(text, "rows of the metrics wait")) {
      cured = true;
      fs::remove(filler);
    }
    if (stopped || !cured || !contains(text, "metrics.jsonl is written again")) return 0;
    stopped = text.rfind("| saved") > text.rfind("was not saved");
    return stopped ? SIGTERM : 0;
  };
  const Finished ended = run(launch);
  CHECK(filled);
  CHECK(cured);
  CHECK_MESSAGE(ended.code == 75, ended.err.substr(ended.err.size() > 4000 ? ended.err.size() - 4000 : 0));
  CHECK(contains(ended.err, "No space left on device"));
  // Every step is in the metrics, once.
  std::istringstream rows(read_text(place + "/run/metrics.jsonl"));
  int64_t expected = 1;
  for (std::string line; std::getline(rows, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row.contains("event")) continue;
    REQUIRE(row["step"].get<int64_t>() == expected++);
  }
  CHECK(expected > 10);
  CHECK(::umount(place.c_str()) == 0);
}
