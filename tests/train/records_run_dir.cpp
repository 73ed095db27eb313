#include "train/records/run_dir.hpp"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "records_helpers.hpp"
#include "train/records/log_file.hpp"
#include "train/records/metrics.hpp"
#include "train/records/run_list.hpp"

using namespace capstan;
using namespace capstan::records;
using namespace capstan::records::test;

static RunRecords texts(const std::string& recipe = "model: small\n") {
  return {
      "quickstart", "extends: quickstart\n", recipe, "capstan train quickstart", "{\"version\": \"0.1.0\"}\n",
      "checkpoints"};
}

TEST_CASE("the log keeps every line with its time over all starts, and a full disk ends nothing") {
  const TemporaryDirectory root;
  const fs::path path = root.path() / "log.txt";
  {
    LogFile log(path);
    log.line("step 1 | 50% of {all}");
    log.warning("step 2 was not saved");
  }
  LogFile(path).line("resumed");
  const std::string text = slurp(path);
  const auto lines = split(text, '\n');
  REQUIRE(lines.size() == 4);
  CHECK(lines[0].size() == 20 + 22);
  CHECK(lines[0].substr(19) == "Z step 1 | 50% of {all}");
  CHECK(lines[1].substr(19) == "Z warning: step 2 was not saved");
  CHECK(lines[2].substr(19) == "Z resumed");
  CHECK_THROWS_AS(LogFile(root.path() / "log.txt" / "below"), Error);
  LogFile full("/dev/full");
  full.line("lost");
}

TEST_CASE("a new run has its records, and is refused when it is there already") {
  const TemporaryDirectory root;
  const fs::path path = root.path() / "runs/a";
  std::string id;
  {
    RunDirectory run(path, false);
    CHECK(!run.resumed());
    CHECK(run.id().size() == 16);
    run.begin(texts());
    id = run.id();
    CHECK(slurp(path / "recipe.given.yaml") == "extends: quickstart\n");
    CHECK(slurp(path / "recipe.yaml") == "model: small\n");
    CHECK(slurp(path / "command.txt") == "capstan train quickstart\n");
    CHECK(slurp(path / "version.json") == "{\"version\": \"0.1.0\"}\n");
    CHECK(fs::is_directory(run.checkpoints()));
    MetricsWriter(run.metrics()).write(MetricsRow(20).number("loss", 2.5));
    run.end(RunEnd::stopped, "SIGTERM");
  }
  const std::string text = error_of([&] { RunDirectory(path, false); });
  CHECK(holds(text, "exists already (stopped at step 20)"));
  CHECK(holds(text, "resume it, or give another run directory"));
  RunDirectory run(path, true);
  CHECK(run.resumed());
  CHECK(run.id() == id);
  run.begin(texts("model: large\n"));
  CHECK(slurp(path / "recipe.yaml") == "model: large\n");
  CHECK(slurp(path / "recipe.1.yaml") == "model: small\n");
  CHECK(!fs::exists(path / "recipe.given.1.yaml"));
  CHECK(slurp(path / "command.txt") == "capstan train quickstart\ncapstan train quickstart\n");
}

TEST_CASE("resuming automatically starts what is not there; a directory of something else is refused") {
  const TemporaryDirectory root;
  CHECK(!RunDirectory(root.path() / "fresh", true).resumed());
  fs::create_directory(root.path() / "empty");
  CHECK(!RunDirectory(root.path() / "empty", false).resumed());
  // Died before its first record: only a lock is there.
  CHECK(!RunDirectory(root.path() / "empty", false).resumed());
  fs::create_directory(root.path() / "home");
  spill(root.path() / "home/letter.txt", "dear");
  CHECK(holds(error_of([&] { RunDirectory(root.path() / "home", false); }), "is not a run directory"));
  CHECK(holds(error_of([&] { RunDirectory(root.path() / "home", true); }), "is not a run directory"));
  CHECK(holds(error_of([&] { RunDirectory(root.path() / "home/letter.txt", false); }), "is a file"));
  CHECK(fs::exists(root.path() / "home/letter.txt"));
  CHECK(!fs::exists(root.path() / "home/lock"));
}

TEST_CASE("a run that is not there is named with the runs near it") {
  const TemporaryDirectory root;
  RunDirectory(root.path() / "runs/quickstart", false).begin(texts());
  require_run(root.path() / "runs/quickstart");
  const std::string near = error_of([&] { require_run(root.path() / "runs/quickstrat"); });
  CHECK(holds(near, "there is no run `"));
  CHECK(holds(near, "quickstart`?"));
  CHECK(holds(near, "start it without resuming"));
  // Killed before its first record: a directory with a lock is no run.
  fs::create_directories(root.path() / "runs/begun");
  CHECK(holds(error_of([&] { require_run(root.path() / "runs/begun"); }), "there is no run"));
}

TEST_CASE("a second process is refused while the first lives, and not after it was killed") {
  const TemporaryDirectory root;
  const fs::path path = root.path() / "a";
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    RunDirectory run(path, false);
    run.begin(texts());
    if (::write(ready[1], "x", 1) == 1) ::pause();
    ::_exit(0);
  }
  char byte;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  const std::string text = error_of([&] { RunDirectory(path, true); });
  CHECK(holds(text, "is in use by process " + std::to_string(child) + " on "));
  CHECK(summarize(path).state == RunState::running);
  CHECK(error_of([&] { RunDirectory(path, false); }).size() > 0);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  CHECK(summarize(path).state == RunState::killed);
  CHECK(summarize(path).reason == kUnknownEnd);
  // A launcher that has seen the end records it, for its own start and once.
  record_killed(path, "9999-01-01T00:00:00Z", "another start");
  CHECK(summarize(path).reason == kUnknownEnd);
  record_killed(path, summarize(path).started, "ended by signal 9");
  record_killed(path, summarize(path).started, "later");
  CHECK(summarize(path).state == RunState::killed);
  CHECK(summarize(path).reason == "ended by signal 9");
  CHECK_NOTHROW(record_killed(root.path() / "none", "", "no run"));
  RunDirectory again(path, true);
  CHECK(again.resumed());
  CHECK(again.killed());
  again.begin(texts());
  again.end(RunEnd::stopped, "SIGTERM");
  CHECK(summarize(path).file.state == "stopped");
  CHECK(error_of([&] { record_killed(path, "", "in use"); }).size() > 0);
  CHECK(summarize(path).reason == "SIGTERM");
}

TEST_CASE("a run begins only in a directory of its own") {
  const TemporaryDirectory root;
  CHECK_NOTHROW(require_run_or_empty(root.path() / "none"));
  fs::create_directory(root.path() / "begun");
  spill(root.path() / "begun/lock", "");
  spill(root.path() / "begun/run.json.tmp.12", "");
  CHECK_NOTHROW(require_run_or_empty(root.path() / "begun"));
  spill(root.path() / "begun/notes.txt", "");
  CHECK(holds(error_of([&] { require_run_or_empty(root.path() / "begun"); }), "is not a run directory"));
  CHECK(holds(error_of([&] { require_run_or_empty(root.path() / "begun/lock"); }), "is a file"));
  CHECK(holds(error_of([&] { RunDirectory(root.path() / "begun", true); }), "is not a run directory"));
}

TEST_CASE("runs are listed with state, step, loss and checkpoints") {
  const TemporaryDirectory root;
  CHECK(list_runs(root.path() / "none").empty());
  CHECK(to_json(std::span<const RunSummary>()) == "[]\n");
  for (const std::string name : {"a", "b", "c"}) {
    RunDirectory run(root.path() / name, false);
    RunRecords records = texts();
    if (name == "b") records.checkpoints = (root.path() / "elsewhere").string();
    run.begin(records);
    MetricsWriter metrics(run.metrics());
    metrics.write(MetricsRow(10).number("loss", 2.5));
    if (name == "c") metrics.write(MetricsRow(20).number("loss", std::numeric_limits<double>::quiet_NaN()));
    fs::create_directory(run.checkpoints() / "step-00000010");
    fs::create_directory(run.checkpoints() / ".tmp-step-00000020-x");
    if (name == "a") run.end(RunEnd::finished, "");
    if (name == "b") run.end(RunEnd::failed, "loss is \"NaN\"");
  }
  fs::create_directory(root.path() / "d");
  spill(root.path() / "d/run.json", "{");
  fs::create_directory(root.path() / "not-a-run");
  const auto runs = list_runs(root.path());
  REQUIRE(runs.size() == 4);
  std::map<std::string, RunSummary> by_name;
  for (const auto& run : runs) by_name[run.name] = run;
  CHECK(by_name["a"].state == RunState::finished);
  CHECK(by_name["a"].step == 10);
  CHECK(by_name["a"].last_loss == 2.5);
  CHECK(by_name["a"].recipe == "quickstart");
  CHECK(by_name["a"].checkpoints == std::vector<int64_t>{10});
  CHECK(by_name["b"].state == RunState::failed);
  CHECK(by_name["b"].checkpoints == std::vector<int64_t>{10});
  CHECK(by_name["c"].state == RunState::killed);
  CHECK(by_name["c"].step == 20);
  CHECK(!by_name["c"].last_loss);
  CHECK(holds(by_name["d"].reason, "not a JSON object"));
  const auto json = capstan::json_of(to_json(runs));
  CHECK(json.size() == 4);
  for (const auto& run : json)
    if (run["name"] == "b") CHECK(run["reason"] == "loss is \"NaN\"");
  CHECK(summarize(root.path() / "a/").name == "a");
}
