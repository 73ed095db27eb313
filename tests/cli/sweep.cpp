// Sweeps as a user runs them: planned, run in slots, stopped, killed, and in the end complete.
#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include "base/json.hpp"
#include "process.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

// Runs that take a moment, and many checkpoints.
std::vector<std::string> tiny(int64_t steps) {
  return tiny_recipe({"train.train_iters=" + std::to_string(steps), "checkpoint.save_interval=2"});
}

Finished plan(const ScratchDirectory& scratch, const std::string& name, int64_t steps,
              const std::vector<std::string>& axes) {
  std::vector<std::string> arguments{"sweep", "plan"};
  for (const std::string& word : tiny(steps)) arguments.push_back(word);
  arguments.insert(arguments.end(), axes.begin(), axes.end());
  arguments.insert(arguments.end(), {"--out", name});
  return run_in(scratch, arguments);
}

// Trial → metric and state.
std::map<std::string, std::pair<std::string, std::string>> results_of(const ScratchDirectory& scratch,
                                                                      const std::string& name) {
  const Finished status = run_in(scratch, {"sweep", "status", name, "--json"});
  REQUIRE_MESSAGE(status.code == 0, status.err);
  std::map<std::string, std::pair<std::string, std::string>> results;
  const json all = capstan::json_of(status.out);
  for (const auto& trial : all["trials"])
    results[trial["id"]] = {capstan::dump_json(trial["metric"]), trial["state"]};
  return results;
}

// Trial → how often the journal calls it done.
std::map<std::string, int> done_of(const ScratchDirectory& scratch, const std::string& name) {
  std::map<std::string, int> done;
  std::istringstream text(read_text(scratch.file(name) + "/journal.jsonl"));
  for (std::string line; std::getline(text, line);) {
    // Fails if a line is torn.
    const json row = capstan::json_of(line);
    if (row["state"] == "done") ++done[row["trial"]];
  }
  return done;
}

// Processes whose command line names something in the directory.
int alive_in(const std::string& directory) {
  int count = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    std::ifstream in(entry.path() / "cmdline", std::ios::binary);
    // Reading fails for a process that has ended since: getline then sets a bit, an iterator would throw.
    std::string command;
    std::getline(in, command, '\n');
    count += contains(command, directory);
  }
  return count;
}
bool all_gone(const std::string& directory, double seconds) {
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
       std::chrono::steady_clock::now() < end;) {
    if (alive_in(directory) == 0) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

// Runs the sweep until it is complete, and kills its runner with SIGKILL at random moments until that has
// happened `kills` times.
void run_with_kills(const ScratchDirectory& scratch, const std::string& name, int kills,
                    int longest_milliseconds) {
  const char* const seed = std::getenv("CAPSTAN_SEED");
  std::mt19937 random(seed ? static_cast<unsigned>(std::atoi(seed)) : 7);
  int killed = 0;
  for (int start = 0; start < kills + 20; ++start) {
    LateKill killer;
    // The kill waits for a number of started trials and not only for a time, so that ten kills happen before
    // the sweep ends, however fast the machine is.
    const int begun = 2 + static_cast<int>(random() % 2);
    const auto delay = std::chrono::milliseconds(random() % static_cast<unsigned>(longest_milliseconds));
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = {"sweep", "run", name, "--slots", "2"};
    launch.time_limit = 300;
    launch.on_error_text = [&](const std::string& text, int process) {
      int lines = 0;
      for (size_t at = text.find("started "); at != std::string::npos; at = text.find("started ", at + 1))
        ++lines;
      if (killed < kills && !killer.started() && lines >= begun) killer.start(process, delay);
      return 0;
    };
    const Finished ended = run(launch);
    REQUIRE_MESSAGE((ended.code == 0 || ended.code == 128 + SIGKILL), ended.err);
    if (ended.code == 0) break;
    ++killed;
    // The next runner does not wait for what is left of this one: its locks say so.
  }
  CHECK(killed == kills);
  CHECK(all_gone(scratch.file(name) + "/trials", 10));
}

void same_as_uninterrupted(const std::vector<std::string>& axes, size_t trials, int64_t steps, int kills) {
  if (::access("/dev/shm", W_OK) == 0) ::setenv("TMPDIR", "/dev/shm", 1);
  const ScratchDirectory scratch;
  for (const char* name : {"uninterrupted", "killed"}) {
    const Finished planned = plan(scratch, name, steps, axes);
    REQUIRE_MESSAGE(planned.code == 0, planned.err);
  }
  const Finished uninterrupted = run_in(scratch, {"sweep", "run", "uninterrupted", "--slots", "2"});
  REQUIRE_MESSAGE(uninterrupted.code == 0, uninterrupted.err);
  run_with_kills(scratch, "killed", kills,
                 1 + static_cast<int>(1000 * uninterrupted.seconds / static_cast<double>(trials)));
  const auto expected = results_of(scratch, "uninterrupted"), found = results_of(scratch, "killed");
  CHECK(expected.size() == trials);
  CHECK(found == expected);  // bit for bit: the digits read back as the same number
  const auto done = done_of(scratch, "killed");
  CHECK(done.size() == trials);
  for (const auto& [trial, result] : found) {
    CHECK(result.second == "done");
    CHECK(result.first != "null");
    CHECK(done.at(trial) == 1);
  }
  const Finished again = run_in(scratch, {"sweep", "run", "killed"});
  CHECK(again.code == 0);
  CHECK(!contains(again.err, "started"));  // what is done is never run again
}

}  // namespace

#ifdef CAPSTAN_MANY_KILLS

TEST_CASE("24 trials on two slots, the runner killed ten times") {
  same_as_uninterrupted({"optimizer.lr=5e-4,1e-3,3e-3,1e-2", "model.hidden_dropout=0,0.1", "rng.seed=1,2,3"},
                        24, 30, 10);
}

#else

TEST_CASE("4 trials on two slots, the runner killed once") {
  same_as_uninterrupted({"optimizer.lr=1e-3,1e-2", "rng.seed=1,2"}, 4, 10, 1);
}

TEST_CASE("a sweep is planned, run and inspected; an added value keeps completed trials") {
  const ScratchDirectory scratch;
  const Finished dry =
      run_in(scratch, {"sweep", "plan", "quickstart", "optimizer.lr=1e-3,3e-3", "--dry-run"});
  CHECK(dry.code == 0);
  CHECK(contains(dry.out, "2 trials"));
  CHECK(!fs::exists(scratch.file("sweeps")));

  const Finished planned = plan(scratch, "s", 4, {"optimizer.lr=1e-3,1e-2"});
  REQUIRE_MESSAGE(planned.code == 0, planned.err);
  CHECK(contains(planned.err, "capstan sweep run s"));
  const Finished ran = run_in(scratch, {"sweep", "run", "s"});
  REQUIRE_MESSAGE(ran.code == 0, ran.err);
  CHECK(contains(ran.err, "2 done"));
  const auto before = results_of(scratch, "s");
  for (const auto& [id, result] : before) {
    const std::string place = scratch.file("s") + "/trials/" + id;
    CHECK(read_text(place + "/state") == "done\n");
    CHECK(capstan::json_of(read_text(place + "/attempts/1/result.json"))["state"] == "done");
    CHECK(capstan::json_of(read_text(place + "/attempts/1/env.json")).contains("command"));
    CHECK(contains(read_text(place + "/attempts/1/metrics.jsonl"), "\"loss\""));
    CHECK(contains(read_text(place + "/attempts/1/log.txt"), "step 4/4"));
    CHECK(contains(read_text(place + "/overrides.txt"), "optimizer.lr="));
    CHECK(fs::exists(place + "/checkpoints/step-00000004"));
  }
  // A trial that is not there, or is not clear, is named before anything runs or is written.
  std::string other = before.begin()->first;
  other.back() = other.back() == '0' ? '1' : '0';
  const auto refused = [&](const std::vector<std::string>& words, const std::string& why) {
    const Finished done = run_in(scratch, words);
    CHECK(done.code == 2);
    CHECK_MESSAGE(contains(done.err, why), done.err);
  };
  refused({"sweep", "run", "s", "--trial", other},
          "not found: trial = " + other + "\n  = help: did you mean `");
  refused({"sweep", "run", "s", "--trial", "zzzzzzzzzzzz"}, "`capstan sweep status` lists them");
  refused({"sweep", "add", "s", "optimizer.lr=-1"}, "no added trial is valid; optimizer.lr=-1:\n    error[");
  const Finished added = run_in(scratch, {"sweep", "add", "s", "optimizer.lr=3e-3"});
  REQUIRE_MESSAGE(added.code == 0, added.err);
  CHECK(contains(added.err, "1 trial is new"));
  const Finished more = run_in(scratch, {"sweep", "run", "s"});
  CHECK(more.code == 0);
  CHECK(contains(more.err, "3 done"));
  auto after = results_of(scratch, "s");
  CHECK(after.size() == 3);
  for (const auto& [id, result] : before) CHECK(after.at(id) == result);
  CHECK(done_of(scratch, "s").size() == 3);
}

TEST_CASE("invalid trials are listed with their reason, which is said once") {
  const ScratchDirectory scratch;
  const Finished planned =
      plan(scratch, "s", 4, {"optimizer.lr=1e-5,1e-3", "optimizer.min_lr=1e-4", "rng.seed=1,2,3,4,5,6,7"});
  REQUIRE_MESSAGE(planned.code == 0, planned.err);
  CHECK(contains(planned.out, "invalid: optimizer.lr=1e-5 rng.seed=1\n"));
  CHECK(contains(planned.out, "rng.seed=4\ninvalid: 3 more for the same reason\n    error[R0604]: "));
  CHECK(planned.out.find("R0604") == planned.out.rfind("R0604"));
  CHECK(contains(planned.out, "\n7 trials, 7 invalid; "));
  // Names that are near.
  std::filesystem::create_directories(scratch.file("sweeps/lr/trials"));
  CHECK_FALSE(contains(run_in(scratch, {"sweep", "status", "lr"}).err, "did you mean"));
  std::filesystem::copy(scratch.file("s/plan.json"), scratch.file("sweeps/lr/plan.json"));
  CHECK(contains(run_in(scratch, {"sweep", "status", "lr"}).err, "did you mean `sweeps/lr`?"));
  CHECK(contains(plan(scratch, "t", 4, {"optimzer.lr=1e-5,1e-3"}).err,
                 "a field with that name exists: `optimizer.lr`"));
  const Finished status = run_in(scratch, {"sweep", "status", "s"});
  CHECK(contains(status.out, "7 pending, 7 invalid\ninvalid: optimizer.lr=1e-5 rng.seed=1\n"));
  const json all = capstan::json_of(run_in(scratch, {"sweep", "status", "s", "--json"}).out);
  CHECK(all["invalid"].size() == 7);
  CHECK(contains(all["invalid"][0]["reasons"][0].get<std::string>(), "error[R0604]"));
}

TEST_CASE("the learning rate of the quickstart is swept by itself, and ranked by the validation loss") {
  const ScratchDirectory scratch;
  const Finished planned =
      run_in(scratch, {"sweep", "plan", "quickstart", "optimizer.lr=1e-4,2e-4,1e-3,2e-2", "--out", "s"});
  REQUIRE_MESSAGE(planned.code == 0, planned.err);
  CHECK(contains(planned.out, "\n4 trials; "));
  CHECK(contains(planned.out, "\nranked by `val/loss` (last), the validation loss, the lowest first\n"));
  CHECK(contains(run_in(scratch, {"sweep", "status", "s"}).out, "ranked by `val/loss` (last)"));
  CHECK(capstan::json_of(run_in(scratch, {"sweep", "status", "s", "--json"}).out)["metric"]["name"] ==
        "val/loss");
  // From another directory, too: the data's relative paths count from where the sweep was planned.
  const ScratchDirectory elsewhere;
  const Finished added = run_in(elsewhere, {"sweep", "add", scratch.file("s"), "optimizer.lr=5e-3"});
  CHECK_MESSAGE(added.code == 0, added.err);
  CHECK(contains(added.err, "1 trial is new"));
  const Finished asked =
      run_in(elsewhere, {"sweep", "ask", scratch.file("s"), "--values", R"({"optimizer.lr": 7e-3})"});
  CHECK_MESSAGE(asked.code == 0, asked.err);
}

// The trials end between two reads of the runner, and their states follow from their rows only.
TEST_CASE("successive halving decides on trials that end between two looks of the runner") {
  const ScratchDirectory scratch;
  const std::string base = "base: quickstart\nset: [";
  std::string set;
  for (const std::string& word : tiny(6))
    if (word != "quickstart") set += (set.empty() ? "'" : ", '") + word + "'";
  scratch.write("h.yaml", "schema: capstan-sweep/1\n" + base + set +
                              "]\naxes: {optimizer.lr: [1e-5, 1e-2, 1e-4, 3e-2]}\n"
                              "stop: {asha: {steps: [4], keep: 1/3}}\n");
  const Finished planned = run_in(scratch, {"sweep", "plan", "./h.yaml", "--out", "s"});
  REQUIRE_MESSAGE(planned.code == 0, planned.err);
  CHECK(contains(planned.err, "no trial runs validation: the sweep is ranked by `loss`, the training loss"));
  const Finished ran = run_in(scratch, {"sweep", "run", "s"});
  REQUIRE_MESSAGE(ran.code == 0, ran.err);
  const json status = capstan::json_of(run_in(scratch, {"sweep", "status", "s", "--json"}).out);
  std::vector<double> before;
  for (const auto& trial : status["trials"]) {
    double at_rung = 0;
    std::istringstream rows(
        read_text(scratch.file("s") + "/trials/" + trial["id"].get<std::string>() + "/run/metrics.jsonl"));
    for (std::string line; std::getline(rows, line);)
      if (const json row = capstan::json_of(line); row.value("step", 0) == 4 && !row.contains("event"))
        at_rung = row["loss"];
    REQUIRE(at_rung > 0);
    const auto better = std::count_if(before.begin(), before.end(), [&](double v) { return v < at_rung; });
    before.push_back(at_rung);
    const auto kept = static_cast<std::ptrdiff_t>((before.size() + 2) / 3);
    CAPTURE(capstan::dump_json(trial));
    CHECK(trial["state"] == (better < kept ? "done" : "pruned"));
  }
}

TEST_CASE("a sweep over passes plans the steps that its runs make") {
  const ScratchDirectory scratch;
  std::string lines;
  for (int i = 0; i < 23; ++i)
    lines += R"({"prompt": ")" + std::string(static_cast<size_t>(1 + i % 5), 'a') +
             R"(", "completion": "b"})" + "\n";
  scratch.write("samples.jsonl", lines);
  const std::vector<std::string> words{"dataset=sft",           "dataset.train_files=[samples.jsonl]",
                                       "dataset.split='1,0,0'", "tokenizer=byte",
                                       "model.vocab_size=257",  "train.train_iters=null"};
  std::vector<std::string> arguments{"sweep", "plan"};
  for (const std::string& word : tiny_recipe(words)) {
    const std::string name = word.substr(0, word.find('='));
    if ((name == "dataset" && word != "dataset=sft") || (name == "tokenizer" && word != "tokenizer=byte") ||
        word == "model.vocab_size=256")
      continue;
    arguments.push_back(word);
  }
  arguments.insert(arguments.end(),
                   {"train.epochs=0.5,2", "dataset.packing=true,false", "--out", "s", "--json"});
  const Finished planned = run_in(scratch, arguments);
  REQUIRE_MESSAGE(planned.code == 0, planned.err);
  std::map<std::string, int64_t> steps;
  const json plan = capstan::json_of(planned.out);
  for (const json& trial : plan["trials"]) steps[trial["id"]] = trial["steps"];
  REQUIRE(steps.size() == 4);
  REQUIRE(run_in(scratch, {"sweep", "run", "s"}).code == 0);
  const json status = capstan::json_of(run_in(scratch, {"sweep", "status", "s", "--json"}).out);
  for (const json& trial : status["trials"]) {
    CAPTURE(capstan::dump_json(trial));
    CHECK(trial["state"] == "done");
    CHECK(trial["step"] == steps.at(trial["id"]));
    CHECK(trial["steps"] == steps.at(trial["id"]));
    CHECK(trial["step"].get<int64_t>() > 1);
  }
}

TEST_CASE("a trial that fails is shown at once, and can be retried") {
  const ScratchDirectory scratch;
  const Finished planned = plan(scratch, "s", 4, {"optimizer.lr=1e-3,1e-2", "checkpoint.load=nowhere"});
  REQUIRE_MESSAGE(planned.code == 0, planned.err);
  const Finished ran = run_in(scratch, {"sweep", "run", "s", "--on-failure", "stop"});
  CHECK(ran.code == 1);
  CHECK(contains(ran.err, "failed: "));
  CHECK(contains(ran.err, "log.txt:"));
  CHECK(contains(ran.err, "nowhere"));
  CHECK(contains(ran.err, "1 failed, 1 pending"));
  CHECK(run_in(scratch, {"sweep", "run", "s"}).code == 1);
  const Finished retried = run_in(scratch, {"sweep", "retry", "s"});
  CHECK(contains(retried.out, "2 trials are pending again"));
  const Finished wrong = run_in(scratch, {"sweep", "retry", "s", "zzz"});
  CHECK(wrong.code == 2);
  CHECK(run_in(scratch, {"sweep", "status", "nothing"}).code == 2);
}

TEST_CASE("interrupted once, trials save and go on later; what is hopeless is pruned") {
  const ScratchDirectory scratch;
  const Finished planned = plan(scratch, "s", 100'000, {"optimizer.lr=1e-3,1e-2"});
  REQUIRE_MESSAGE(planned.code == 0, planned.err);
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = {"sweep", "run", "s", "--slots", "2"};
  launch.on_error_text = signal_at("started", SIGINT, 1500);
  const Finished stopped = run(launch);
  CHECK(stopped.code == 75);
  CHECK(contains(stopped.err, "2 pending; continue with: capstan sweep run s"));
  CHECK(alive_in(scratch.file("s") + "/trials") == 0);
  for (const auto& [id, result] : results_of(scratch, "s")) CHECK(result.second == "pending");

  scratch.write("p.yaml",
                "schema: capstan-sweep/1\nbase: s/trials/" + results_of(scratch, "s").begin()->first +
                    "/recipe.yaml\naxes: {optimizer.lr: [1e-3, 2e-3]}\nstop: {worse_than: 0.001}\n");
  REQUIRE(run_in(scratch, {"sweep", "plan", "./p.yaml"}).code == 0);
  const Finished pruned = run_in(scratch, {"sweep", "run", "sweeps/p", "--slots", "2"});
  CHECK(pruned.code == 0);
  CHECK(contains(pruned.err, "2 pruned"));
  CHECK(contains(pruned.err, "worse than 0.001"));
}

TEST_CASE("two runners share the work and never a trial") {
  const ScratchDirectory scratch;
  REQUIRE(plan(scratch, "s", 6, {"optimizer.lr=1e-3,2e-3,3e-3,4e-3,5e-3,6e-3"}).code == 0);
  Finished other;
  std::thread second([&] { other = run_in(scratch, {"sweep", "run", "s"}); });
  const Finished first = run_in(scratch, {"sweep", "run", "s"});
  second.join();
  CHECK(first.code == 0);
  CHECK(other.code == 0);
  const auto done = done_of(scratch, "s");
  CHECK(done.size() == 6);
  for (const auto& [id, times] : done) CHECK(times == 1);
  for (const auto& [id, result] : results_of(scratch, "s")) {
    CHECK(result.second == "done");
    CHECK(!fs::exists(scratch.file("s") + "/trials/" + id + "/attempts/2"));
  }
}

TEST_CASE("a trial that a dead host holds is waited for; one that lives is left to it") {
  const ScratchDirectory scratch;
  REQUIRE(plan(scratch, "s", 4, {"optimizer.lr=1e-3,2e-3"}).code == 0);
  const std::string id = results_of(scratch, "s").begin()->first, place = scratch.file("s") + "/trials/" + id;
  scratch.write("s/trials/" + id + "/state", "running\n");
  const auto claim = [&](int seconds_ago) {
    scratch.write("s/trials/" + id + "/lock",
                  R"({"host":"elsewhere.example","pid":1,"since":"2026-01-01T00:00:00Z"})");
    fs::last_write_time(place + "/lock",
                        fs::file_time_type::clock::now() - std::chrono::seconds(seconds_ago));
  };
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = {"sweep", "run", "s", "--trial", id};
  bool beaten = false;
  launch.on_error_text = [&](const std::string& text, int) {
    if (!beaten && contains(text, "waiting up to ")) claim(0);
    beaten |= contains(text, "waiting");
    return 0;
  };
  claim(60);
  const Finished left = run(launch);
  CHECK(left.code == 0);
  CHECK(contains(left.err, "is held by elsewhere.example, process 1 since 2026-01-01T00:00:00Z: waiting"));
  CHECK(contains(left.err, "0 done, 1 running elsewhere"));
  claim(60);
  launch.on_error_text = signal_at("waiting", SIGUSR1);
  const Finished stopped = run(launch);
  CHECK(stopped.code == 75);  // so that a batch script puts its task back
  CHECK(contains(stopped.err, "1 pending"));
  claim(117);
  launch.on_error_text = {};
  const Finished taken = run(launch);
  CHECK(taken.code == 0);
  CHECK(contains(taken.err, "started " + id));
  CHECK(contains(taken.err, "1 done"));
}

TEST_CASE("a damaged directory of one trial does not stop the others") {
  const ScratchDirectory scratch;
  REQUIRE(plan(scratch, "s", 4, {"optimizer.lr=1e-3,2e-3,3e-3"}).code == 0);
  const auto trials = results_of(scratch, "s");
  const std::string gone = trials.begin()->first, torn = std::next(trials.begin())->first;
  fs::remove_all(scratch.file("s") + "/trials/" + gone);
  scratch.write("s/trials/" + torn + "/state", "");
  const Finished ran = run_in(scratch, {"sweep", "run", "s"});
  CHECK(ran.code == 1);
  CHECK(contains(ran.err, "cannot run: its directory is missing; `capstan sweep add` writes it again"));
  CHECK(contains(ran.err,
                 "cannot run: its state file is missing; `capstan sweep retry` makes it pending again"));
  CHECK(contains(ran.err, "1 done, 2 failed"));
  for (const char* command : {"status", "table", "plot", "slurm"})
    CHECK(run_in(scratch, {"sweep", command, "s"}).code == 0);
  CHECK(run_in(scratch, {"sweep", "retry", "s", gone}).code == 2);
  CHECK(contains(run_in(scratch, {"sweep", "retry", "s", torn}).out, "1 trial is pending again"));
  CHECK(contains(run_in(scratch, {"sweep", "add", "s"}).err, "1 trial is new"));
  CHECK(contains(run_in(scratch, {"sweep", "run", "s"}).err, "3 done"));
}

TEST_CASE("ranks die with the runner") {
  const ScratchDirectory scratch;
  scratch.write("r.yaml", [] {
    std::string text =
        "schema: capstan-sweep/1\nbase: quickstart\nresources: {ranks: 2}\naxes: {optimizer.lr: "
        "[1e-3]}\nset:\n";
    const auto words = tiny(100'000);
    for (size_t i = 1; i < words.size(); ++i) text += "  - " + words[i] + "\n";
    return text;
  }());
  const Finished planned = run_in(scratch, {"sweep", "plan", "./r.yaml", "--out", "s"});
  REQUIRE_MESSAGE(planned.code == 0, planned.err);
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = {"sweep", "run", "s"};
  bool sent = false;
  launch.on_error_text = [&](const std::string& text, int) {
    if (sent || !contains(text, "started")) return 0;
    sent = true;
    // Until the ranks are there: the parent, mpirun and both ranks name the recipe.
    for (int wait = 0; wait < 400 && alive_in(scratch.file("s") + "/trials") < 4; ++wait)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(alive_in(scratch.file("s") + "/trials") >= 4);
    return SIGKILL;
  };
  run(launch);
  CHECK(all_gone(scratch.file("s") + "/trials", 20));
}

#endif
