// The runner of a sweep with a program that only pretends to train: how trials end, retries, slots.
#include "sweep/runner.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "sweep/plan.hpp"
#include "sweep/store.hpp"
#include "tiny_sweep.hpp"

using namespace capstan;
using namespace capstan::sweep;
using namespace capstan::sweep::test;
namespace fs = std::filesystem;

namespace {

class Listener final : public RunnerListener {
 public:
  void started(const TrialPlan&, int64_t, int slot) override {
    ++starts;
    most_slots = std::max(most_slots, slot + 1);
  }
  void ended(const TrialPlan& trial, const StateChange& how, int) override { ends[trial.id].push_back(how); }
  void failure(const TrialPlan&, const StateChange&, const std::string& tail) override { tails += tail; }
  void progress(int, const TrialPlan&, std::optional<int64_t>, std::optional<int64_t>,
                std::optional<double>) override {}
  void note(const std::string&) override {}

  int starts = 0, most_slots = 0;
  std::map<std::string, std::vector<StateChange>> ends;
  std::string tails;
};

}  // namespace

TEST_CASE("trials on two slots: done, failed for good, retried") {
  const Scratch scratch;
  const fs::path directory = scratch.path / "sweep";
  write_plan(directory, make_plan(tiny_definition("seeds: [1, 2, 3, 4, 5]\nlimits: {retries: 2}\n")));
  Store store(directory);
  const auto& trials = store.plan().trials;
  REQUIRE(trials.size() == 5);

  // Its run directory says which trial it is: the first is wrong, the second fails once, the third always.
  const fs::path program = scratch.path / "program";
  std::ofstream(program)
      << "#!/bin/sh\n[ \"$1\" = train ] && [ \"$3\" = --run-dir ] || exit 70\necho \"trial $4\"\n"
      << "case $4 in\n*" << trials[0].id << "*) exit 2 ;;\n*" << trials[1].id
      << "*) [ -e \"$4.again\" ] || { touch \"$4.again\"; exit 1; } ;;\n*" << trials[2].id
      << "*) kill -9 $$ ;;\nesac\nsleep 0.05\n";
  fs::permissions(program, fs::perms::owner_all);

  Listener listener;
  const RunnerResult result = run_trials(store, {.program = program.string(), .slots = 2}, listener);
  CHECK(result.done == 3);
  CHECK(result.failed == 2);
  CHECK(result.pending == 0);
  CHECK(result.exit_code() == 1);
  CHECK(listener.most_slots == 2);
  CHECK(listener.starts == 1 + 2 + 3 + 1 + 1);
  const auto ended = [&](size_t i) {
    std::string text;
    for (const StateChange& how : listener.ends.at(trials[i].id))
      text += (text.empty() ? "" : "; ") + std::string(name_of(how.state)) + " " + how.reason;
    return text;
  };
  CHECK(ended(0) == "failed configuration: exit code 2");
  CHECK(ended(1) == "pending exit code 1, retry 1 of 2; done ");
  CHECK(ended(2) ==
        "pending ended by signal 9, retry 1 of 2; pending ended by signal 9, retry 2 of 2; failed ended by "
        "signal 9");
  CHECK(ended(3) == "done ");
  CHECK(store.state(trials[4].id) == State::done);
  CHECK(listener.tails.find("trial ") != std::string::npos);

  // Nothing is left to do.
  Listener second;
  CHECK(run_trials(store, {.program = program.string(), .slots = 2}, second).done == 3);
  CHECK(second.starts == 0);
}
