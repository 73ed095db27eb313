// Two processes on one run directory, and a disk that is really full.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/json.hpp"
#include "process.hpp"
#include "support/sanitized.hpp"
#include "support/tools.hpp"

using namespace capstan::test;
namespace fs = std::filesystem;

static Launch tiny(const ScratchDirectory& scratch, const std::vector<std::string>& more) {
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = train_tiny(more);
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
    "a file system that is really full: steps go on, the checkpoint stays, and with space again all is "
    "written") {
  const ScratchDirectory scratch;
  const std::string place = scratch.file("small");
  fs::create_directory(place);
  if (::mount("tmpfs", place.c_str(), "tmpfs", 0, "size=1536k") != 0) {
    // Without root rights, the test runs itself once more in a user namespace, in which it is root.
    const bool again =
        std::getenv("CAPSTAN_IN_NAMESPACE") == nullptr && std::system("unshare -rm true 2>/dev/null") == 0;
    if (!require_present(again, "right to mount a file system")) return;
    const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
    CHECK(std::system(
              ("CAPSTAN_IN_NAMESPACE=1 unshare -rm '" + self + "' -tc='a file system that is really full*'")
                  .c_str()) == 0);
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
    if (filled && !cured && contains(text, "was not saved") && contains(text, "metrics rows wait")) {
      cured = true;
      fs::remove(filler);
    }
    if (stopped || !cured || !contains(text, "metrics.jsonl can be written again")) return 0;
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
    const auto row = capstan::json_of(line);
    if (row.contains("event")) continue;
    REQUIRE(row["step"].get<int64_t>() == expected++);
  }
  CHECK(expected > 10);
  CHECK(::umount(place.c_str()) == 0);
}

TEST_CASE("where no checkpoint verifies a resume is refused, and what could be repaired stays") {
  const ScratchDirectory scratch;
  const auto steps = [&](std::vector<std::string> more) {
    more.insert(more.begin(),
                {"train.train_iters=20", "checkpoint.save_interval=5", "checkpoint.most_recent_k=2"});
    return run(tiny(scratch, more));
  };
  REQUIRE(steps({"--run-dir", "uninterrupted"}).code == 0);
  REQUIRE(steps({"--run-dir", "r", "train.exit_interval=10"}).code == 75);
  std::vector<std::string> before;
  for (const char* step : {"step-00000005", "step-00000010"}) {
    const std::string file = scratch.file(std::string("r/checkpoints/") + step + "/rank-00000.safetensors");
    std::string bytes = read_text(file);
    bytes[bytes.size() / 2] ^= 1;
    std::ofstream(file, std::ios::binary) << bytes;
    before.push_back(bytes);
  }
  const std::string metrics = read_text(scratch.file("r/metrics.jsonl"));
  const Finished refused = steps({"--run-dir", "r", "--resume"});
  CHECK(refused.code == 1);
  CHECK_MESSAGE(contains(refused.err, "no checkpoint of the run is valid"), refused.err);
  CHECK(contains(refused.err, "step-00000005"));
  CHECK(contains(refused.err, "step-00000010"));
  CHECK(read_text(scratch.file("r/checkpoints/step-00000005/rank-00000.safetensors")) == before[0]);
  CHECK(read_text(scratch.file("r/checkpoints/step-00000010/rank-00000.safetensors")) == before[1]);
  CHECK(contains(read_text(scratch.file("r/metrics.jsonl")), metrics));  // not one row is lost
  // The way out that the error names.
  fs::rename(scratch.file("r/checkpoints"), scratch.file("given-up"));
  CHECK(steps({"--run-dir", "r", "--resume"}).code == 0);
}

TEST_CASE("a directory with another run's checkpoints is no place to save, unless to go on from them") {
  const ScratchDirectory scratch;
  REQUIRE(run(tiny(scratch, {"train.train_iters=10", "checkpoint.save_interval=5", "--run-dir", "b"})).code ==
          0);
  const Finished refused = run(tiny(
      scratch, {"train.train_iters=4", "rng.seed=9", "checkpoint.save=b/checkpoints", "--run-dir", "a"}));
  CHECK(refused.code == 1);
  CHECK_MESSAGE(contains(refused.err, "holds checkpoints of another run"), refused.err);
  CHECK(fs::exists(scratch.file("b/checkpoints/step-00000010")));
  CHECK(!fs::exists(scratch.file("b/checkpoints/step-00000004")));
  const Finished on = run(tiny(scratch, {"train.train_iters=14", "checkpoint.load=b/checkpoints",
                                         "checkpoint.save=b/checkpoints", "--run-dir", "c"}));
  CHECK_MESSAGE(on.code == 0, on.err);
  CHECK(fs::exists(scratch.file("b/checkpoints/step-00000014")));
}

TEST_CASE("anomalies that never end: skips end with an error, rewinds are counted over restarts") {
  const ScratchDirectory scratch;
  const auto wild = [&](const std::string& action, std::vector<std::string> more) {
    more.insert(more.begin(), {"train.train_iters=200", "optimizer.lr=100", "optimizer.clip_grad=0",
                               "scheduler.lr_warmup_fraction=0.5", "resilience.loss_spike_factor=1.5",
                               "resilience.spike_window=8", "resilience.loss_spike_action=" + action,
                               "checkpoint.save_interval=5"});
    return run(tiny(scratch, more));
  };
  const Finished skips = wild("skip", {"--run-dir", "skips"});
  CHECK_MESSAGE(skips.code == 1, skips.err);
  CHECK_MESSAGE(contains(skips.err, "times in a row"), skips.err);
  const Finished rewinds = wild("rewind", {"--run-dir", "rewinds"});
  CHECK_MESSAGE(rewinds.code == 1, rewinds.err);
  CHECK_MESSAGE(contains(rewinds.err, "another spike after 3 rewinds"), rewinds.err);
  const Finished again = wild("rewind", {"--run-dir", "rewinds", "--resume"});
  CHECK_MESSAGE(again.code == 1, again.err);
  CHECK_MESSAGE(!contains(again.err, "rewound to"), again.err);
  CHECK_MESSAGE(contains(again.err, "another spike after 3 rewinds"), again.err);
}

TEST_CASE(
    "curves whose values hardly differ are drawn, and a run that has not begun does not hide the others") {
  const ScratchDirectory scratch;
  REQUIRE(run(tiny(scratch, {"train.train_iters=100000000", "scheduler.lr_warmup_fraction=0",
                             "train.exit_interval=2", "--run-dir", "flat"}))
              .code == 75);
  Launch plot;
  plot.directory = scratch.path();
  plot.arguments = {"runs", "plot", "flat", "-o", "flat.html"};
  plot.time_limit = 20;
  CHECK(run(plot).code == 0);
  REQUIRE(run(tiny(scratch, {"train.train_iters=2", "--run-dir", "bare"})).code == 0);
  fs::remove(scratch.file("bare/metrics.jsonl"));
  plot.arguments = {"runs", "plot", "flat", "bare", "-o", "both.html"};
  const Finished both = run(plot);
  CHECK_MESSAGE(both.code == 0, both.err);
  CHECK(contains(read_text(scratch.file("both.html")), "bare"));
  CHECK(run(plot).code == 0);
  // A page is replaced, another file is not.
  scratch.write("corpus.txt", "a text");
  plot.arguments.back() = "corpus.txt";
  const Finished refused = run(plot);
  CHECK(refused.code == 2);
  CHECK_MESSAGE(contains(refused.err, "`corpus.txt` exists and is not an output of this command"),
                refused.err);
  CHECK(read_text(scratch.file("corpus.txt")) == "a text");
  // A run that cannot be read does not keep the others from the page of all runs.
  for (const char* name : {"flat", "broken"}) fs::create_directories(scratch.file("runs") + "/" + name);
  fs::copy(scratch.file("flat"), scratch.file("runs/flat"),
           fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  scratch.write("runs/broken/run.json", "{");
  plot.arguments = {"runs", "plot", "-o", "all.html"};
  const Finished all = run(plot);
  CHECK_MESSAGE(all.code == 0, all.err);
  CHECK_MESSAGE(contains(all.err, "left out: runs/broken: "), all.err);
  CHECK(contains(read_text(scratch.file("all.html")), "runs/flat"));
}

TEST_CASE("a recipe's name does not lead out of runs/") {
  const ScratchDirectory scratch;
  const Finished out = run(tiny(scratch, {"train.train_iters=2", "name=../escape"}));
  CHECK(out.code != 0);
  CHECK_MESSAGE(contains(out.err, "cannot name a directory"), out.err);
  CHECK(!fs::exists(scratch.file("escape")));
}

TEST_CASE("the overrides that a refusal for memory offers do fit, and mean the same run") {
  const ScratchDirectory scratch;
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"checkpoint.async_save=true"},
      {"model.recompute_granularity=full", "model.recompute_method=block", "model.recompute_num_layers=1"},
      {"model.recompute_granularity=selective", "model.recompute_modules=[mlp]"},
      {"validation.eval_interval=1", "validation.eval_iters=1", "validation.eval_micro_batch_size=16",
       "validation.eval_global_batch_size=16"}};
  int number = 0;
  for (const auto& more : capstan::test::sampled(cases)) {
    std::vector<std::string> words = {"model.num_layers=3",       "model.seq_length=64",
                                      "train.micro_batch_size=4", "train.global_batch_size=4",
                                      "train.train_iters=2",      "checkpoint.save_interval=1"};
    words.insert(words.end(), more.begin(), more.end());
    const auto with = [&](const std::string& limit, std::vector<std::string> offered) {
      std::vector<std::string> all = words;
      all.push_back("resilience.memory_limit=" + limit);
      all.insert(all.end(), offered.begin(), offered.end());
      all.insert(all.end(), {"--run-dir", "r" + std::to_string(++number)});
      return run(tiny(scratch, all));
    };
    // A little less than it needs, found by halving.
    int64_t refused = 1000, fits = int64_t{16} << 20;
    while (fits - refused > 32768) {
      const int64_t middle = (refused + fits) / 2;
      (with(std::to_string(middle), {}).code == 3 ? refused : fits) = middle;
    }
    const Finished answer = with(std::to_string(refused), {});
    CAPTURE(answer.err);
    REQUIRE(answer.code == 3);
    const size_t begin = answer.err.rfind("help: ") + 6, end = answer.err.find(" (", begin);
    std::istringstream offer(answer.err.substr(begin, end - begin));
    std::vector<std::string> offered;
    for (std::string word; offer >> word;) offered.push_back(word);
    const Finished taken = with(std::to_string(refused), offered);
    CHECK_MESSAGE(taken.code == 0, taken.err);
    CHECK(contains(read_text(scratch.file("r" + std::to_string(number)) + "/recipe.yaml"),
                   "global_batch_size: 4"));
  }
}
