// From a definition to trials: names by meaning, what is invalid, a directory that is the same each time.
#include "sweep/plan.hpp"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/file.hpp"
#include "config/resolve/resolve.hpp"
#include "sweep/pruning.hpp"
#include "sweep/store.hpp"
#include "sweep/values.hpp"
#include "tiny_sweep.hpp"
#include "train/records/run_list.hpp"

using namespace capstan;
using namespace capstan::sweep;
using namespace capstan::sweep::test;
namespace fs = std::filesystem;

namespace {

std::map<std::string, std::string> files_of(const fs::path& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    if (entry.is_regular_file())
      files[fs::relative(entry.path(), directory).string()] = read_file(entry.path());
  return files;
}
std::set<std::string> ids_of(const Plan& plan) {
  std::set<std::string> ids;
  for (const TrialPlan& trial : plan.trials) ids.insert(trial.id);
  return ids;
}

}  // namespace

TEST_CASE("two plans of the same thing are equal byte for byte, and what is planned reads back") {
  const Scratch scratch;
  const Definition d = tiny_definition(
      "axes: {optimizer.lr: {log: [1e-3, 1e-1], n: 3}, model.hidden_dropout: [0, 0.1]}\nseeds: [1, 2]\n");
  const ComposedPlan planned = make_plan(d);
  REQUIRE(planned.plan.trials.size() == 12);
  CHECK(planned.plan.varying == std::vector<std::string>{"optimizer.lr", "model.hidden_dropout"});
  write_plan(scratch.path / "a", planned);
  write_plan(scratch.path / "b/c/", make_plan(d));
  CHECK(files_of(scratch.path / "a") == files_of(scratch.path / "b/c"));
  CHECK_THROWS_AS(write_plan(scratch.path / "a", planned), Error);

  const Plan read = read_plan(scratch.path / "a");
  REQUIRE(read.trials.size() == 12);
  for (size_t i = 0; i < 12; ++i) {
    const TrialPlan &a = planned.plan.trials[i], &b = read.trials[i];
    CHECK(a.id == b.id);
    CHECK(a.id.size() == 8);
    CHECK(a.label == b.label);
    CHECK(a.values == b.values);
    CHECK(a.seed == b.seed);
    CHECK(a.estimate.tokens == 8 * 2 * 16);
    CHECK(b.estimate.flops > 0);
    CHECK(b.estimate.memory_bytes > 0);
    CHECK(read.find(b.id.substr(0, 7)) == &read.trials[i]);
    // Complete, and by itself the same trial.
    config::Request request;
    request.recipe = (scratch.path / "a/trials" / b.id / "recipe.yaml").string();
    const config::Resolution resolution = config::resolve(request);
    INFO(config::render(resolution.diagnostics, resolution.sources));
    CHECK(resolution.ok());
    CHECK(resolution.config.rng.seed == *b.seed);
    CHECK(std::to_string(resolution.config.model.hidden_dropout) ==
          std::to_string(std::stod(value_of(b.values, "model.hidden_dropout"))));
  }
  // Replicates are one configuration.
  CHECK(read.trials[0].configuration == read.trials[1].configuration);
  CHECK(read.trials[0].configuration != read.trials[2].configuration);
  CHECK(read.trials[0].label == "lr=0.001,hidden_dropout=0,seed=1");
}

TEST_CASE("a trial that is asked for may have keys that others lack, and nothing else than keys") {
  const Scratch scratch;
  const fs::path place = scratch.path / "s";
  write_plan(place, make_plan(tiny_definition("axes: {optimizer.lr: [1e-3, 1e-2]}")));
  CHECK(add_trial(place, {{"optimizer.lr", "1e-3"}, {"optimizer.weight_decay", "0.2"}}, {}).label ==
        "lr=0.001,weight_decay=0.2");
  CHECK(read_plan(place).varying == std::vector<std::string>{"optimizer.lr", "optimizer.weight_decay"});
  const auto wrong = [&](const char* path, const char* value, std::optional<int64_t> seed,
                         const char* message) {
    CAPTURE(path);
    try {
      add_trial(place, {{path, value}}, seed);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.message() == message);
    }
  };
  wrong("@x.yaml", "1", {}, "unknown key `@x.yaml`");
  wrong("~optimizer.lr", "1", {}, "unknown key `~optimizer.lr`");
  wrong("optimizer.lrr", "1", {}, "unknown key `optimizer.lrr`");
  wrong("rng.seed", "x", {}, "`x` is not a seed");
  wrong("rng.seed", "2", 1, "two seeds are given, 1 and 2");
  CHECK(add_trial(place, {{"rng.seed", "2"}}, {}).seed == 2);
}

TEST_CASE("fields of the base that replace an axis are noted") {
  const auto notes = [](const std::string& rest) {
    const ComposedPlan planned = make_plan(tiny_definition(rest));
    std::string all;
    for (const std::string& note : planned.notes) all += note + "\n";
    return all;
  };
  CHECK(notes("axes: {model: [llama3-8b, gpt2-1.5b]}").find("preset model/llama3-8b does not set ") !=
        std::string::npos);
  CHECK(notes("axes: {optimizer.lr: [1e-3, 1e-2], validation.eval_interval: [null]}\nmetric: val/loss")
            .find("no trial runs validation") != std::string::npos);
  CHECK(notes("axes: {optimizer.lr: [1e-3, 1e-2]}\ntrials: 5")
            .find("there are only 2 different points, not 5") != std::string::npos);
}

TEST_CASE("a trial is named by what it means") {
  const auto id = [](const std::string& rest) {
    return make_plan(tiny_definition(rest)).plan.trials.at(0).id;
  };
  const std::string plain = id("axes: {optimizer.lr: [1e-3]}");
  CHECK(id("axes: {optimizer.lr: [0.001]}") == plain);
  // Output, logging and placement do not count; what changes the numbers or the speed does.
  for (const char* same : {"logger.log_interval: [1]", "checkpoint.save_interval: [3]", "train.threads: [1]",
                           "validation.eval_iters: [2]"})
    CHECK(id("axes: {optimizer.lr: [1e-3], " + std::string(same) + "}") == plain);
  for (const char* other : {"rng.seed: [99]", "dataset.random_seed: [99]", "train.train_iters: [9]",
                            "model.recompute_granularity: [full]"}) {
    std::string text = kTiny + "axes: {optimizer.lr: [1e-3], " + other + "}";
    if (const size_t at = text.find("train.train_iters=8, ");
        std::string(other).starts_with("train") && at != std::string::npos)
      text.erase(at, 21);
    if (std::string(other).find("recompute") != std::string::npos)
      text.insert(text.size() - 1, ", model.recompute_method: [uniform], model.recompute_num_layers: [1]");
    CHECK(make_plan(read_definition_text(text, "/tmp", "x.yaml").definition).plan.trials.at(0).id != plain);
  }
}

TEST_CASE("duplicates collapse, and invalid trials are listed with the reason") {
  const Plan plan =
      make_plan(tiny_definition("axes: {optimizer.lr: [1e-3, -1], logger.log_interval: [1, 2]}")).plan;
  CHECK(plan.trials.size() == 1);
  CHECK(plan.duplicates == 1);
  REQUIRE(plan.invalid.size() == 2);
  REQUIRE(!plan.invalid[0].reasons.empty());
  CHECK(plan.invalid[0].reasons[0].find("error[") == 0);
  try {
    make_plan(tiny_definition("axes: {optimizer.lr: [-1, -2]}"));
    FAIL("a trial is valid");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::config);
    CHECK(error.message().find("every trial of this sweep is invalid") == 0);
    CHECK(error.message().find("optimizer.lr") != std::string::npos);
  }
  // A trial that `train` refuses for its memory.
  try {
    make_plan(tiny_definition("axes: {optimizer.lr: [1e-3, 2e-3], resilience.memory_limit: [1KiB]}"));
    FAIL("a trial is valid");
  } catch (const Error& error) {
    CHECK(error.message().find("every trial of this sweep is invalid") == 0);
    CHECK(error.message().find("resilience.memory_limit") != std::string::npos);
  }
  CHECK_THROWS_AS(
      make_plan(tiny_definition("axes: {optimizer.lr: [1e-3]}\nexclude: [{optimizer.lr: \"<1\"}]")), Error);
  CHECK_THROWS_AS(make_plan(tiny_definition("axes: {optimizer.lr: {linear: [1e-3, 1], n: 999}, "
                                            "model.hidden_dropout: {linear: [0, 0.9], n: 999}}")),
                  Error);
}

TEST_CASE("an axis value more keeps the trials that are there, in their states") {
  const Scratch scratch;
  const fs::path place = scratch.path / "s";
  const Definition before = tiny_definition("axes: {optimizer.lr: [1e-3, 1e-2]}");
  write_plan(place, make_plan(before));
  const Plan first = read_plan(place);
  {
    const Store store(place);
    store.change(first.trials[0].id, {State::done, 1, "", 0});
  }
  SweepOverrides more;
  more.overrides = {config::Override::token("optimizer.lr=3e-3"),
                    config::Override::token("model.hidden_dropout=0,0.1")};
  const Definition after = extended(read_plan(place).definition, more, true).definition;
  CHECK(extend_plan(place, make_plan(after)) == 4);
  CHECK(extend_plan(place, make_plan(after)) == 0);
  const Store store(place);
  CHECK(store.plan().trials.size() == 6);
  const auto now = ids_of(store.plan());
  for (const TrialPlan& trial : first.trials) CHECK(now.contains(trial.id));
  CHECK(store.state(first.trials[0].id) == State::done);
  CHECK(store.state(first.trials[1].id) == State::pending);
  CHECK(fs::exists(place / "sweep.1.yaml"));
  CHECK(store.plan().trials[0].label == "lr=0.001,hidden_dropout=0");
  more.overrides = {config::Override::token("optimizer.lr=-1")};
  const Definition wrong = extended(read_plan(place).definition, more, true).definition;
  CHECK_THROWS_WITH_AS(extend_plan(place, make_plan(wrong)),
                       doctest::Contains("no added trial is valid; optimizer.lr=-1"), Error);
  CHECK(read_plan(place).definition.text == store.plan().definition.text);

  const TrialPlan asked = add_trial(place, {{"optimizer.lr", "5e-3"}}, 4);
  CHECK(asked.seed == 4);
  CHECK(add_trial(place, {{"optimizer.lr", "0.005"}, {"rng.seed", "4"}}, {}).id == asked.id);
  CHECK(read_plan(place).trials.size() == 7);
  CHECK_THROWS_AS(add_trial(place, {{"optimizer.lr", "-1"}}, {}), Error);
  CHECK_THROWS_AS(add_trial(place, {{"checkpoint.save", "x"}}, {}), Error);
  // Another base, another sweep.
  Definition other = after;
  other.set.push_back("model.init_method_std=0.5");
  CHECK_THROWS_AS(extend_plan(place, make_plan(other)), Error);
}

TEST_CASE("states change by rename and one line; a missing line is recorded later, a torn one again") {
  const Scratch scratch;
  write_plan(scratch.path / "s", make_plan(tiny_definition("axes: {optimizer.lr: [1e-3, 1e-2, 1e-1]}")));
  const Store store(scratch.path / "s");
  const auto& trials = store.plan().trials;
  const auto lines = [&] {
    std::vector<std::string> out;
    std::ifstream in(scratch.path / "s/journal.jsonl");
    for (std::string line; std::getline(in, line);) out.push_back(line);
    return out;
  };
  store.change(trials[0].id, {State::done, 1, "", 0});
  CHECK(lines().size() == 1);
  store.repair_journal();
  CHECK(lines().size() == 1);
  // Killed between the two.
  write_file_durably(store.trial(trials[1].id) / "state", "done\n");
  std::ofstream(scratch.path / "s/journal.jsonl", std::ios::app)
      << "{\"trial\": \"" << trials[1].id << "\", \"sta";
  store.repair_journal();
  store.repair_journal();
  REQUIRE(lines().size() == 2);
  CHECK(lines()[1].find("\"state\":\"done\"") != std::string::npos);
  CHECK(lines()[1].find(trials[1].id) != std::string::npos);

  SUBCASE("running without an owner is lost") {
    store.change(trials[2].id, {State::running, 1, "", {}});
    CHECK(store.state(trials[2].id) == State::lost);
    const auto lock = TrialLock::try_take(store.trial(trials[2].id));
    REQUIRE(lock);
    CHECK(store.state(trials[2].id) == State::running);
    CHECK(!TrialLock::try_take(store.trial(trials[2].id)));
    const auto holder = holder_of(store.trial(trials[2].id));
    REQUIRE(holder);
    CHECK(holder->here);
    CHECK(!holder->gone);
    CHECK(holder->text.find("process " + std::to_string(::getpid())) != std::string::npos);
  }
  SUBCASE("another host's claim holds while it gives a sign of life") {
    const fs::path lock = store.trial(trials[2].id) / "lock";
    std::ofstream(lock) << R"({"host":"elsewhere.example","pid":1,"since":"2026-01-01T00:00:00Z"})";
    CHECK(!TrialLock::try_take(store.trial(trials[2].id)));
    const auto holder = holder_of(store.trial(trials[2].id));
    REQUIRE(holder);
    CHECK(!holder->here);
    CHECK(holder->seconds_left > 100);
    CHECK(holder->text.find("elsewhere.example, process 1") == 0);
    fs::last_write_time(lock, fs::file_time_type::clock::now() - std::chrono::minutes(10));
    CHECK(TrialLock::try_take(store.trial(trials[2].id)));
  }
  SUBCASE("a Slurm job that was put back into the queue takes what it had itself") {
    const fs::path lock = store.trial(trials[2].id) / "lock";
    const auto claim = [&](const char* job, int restarts) {
      std::ofstream(lock) << R"({"host":"elsewhere.example","pid":1,"since":"2026-01-01T00:00:00Z","job":")"
                          << job << R"(","restarts":)" << restarts << "}";
      return static_cast<bool>(TrialLock::try_take(store.trial(trials[2].id)));
    };
    ::setenv("SLURM_JOB_ID", "77", 1);
    ::setenv("SLURM_RESTART_COUNT", "1", 1);
    CHECK(!claim("78", 0));
    CHECK(!claim("77", 1));  // another process of this start
    CHECK(claim("77", 0));
    ::unsetenv("SLURM_RESTART_COUNT");
    CHECK(!claim("77", 0));
    ::unsetenv("SLURM_JOB_ID");
    CHECK(!claim("77", 0));
  }
  SUBCASE("damage is reported") {
    write_file_durably(store.trial(trials[2].id) / "state", "dome\n");
    CHECK(store.state(trials[2].id) == State::failed);
    CHECK(store.status(trials[2]).reason.find("its state file is missing; `capstan sweep retry`") == 0);
    fs::remove_all(store.trial(trials[0].id));
    CHECK(store.state(trials[0].id) == State::failed);
    CHECK(store.status(trials[0]).reason.find("its directory is missing; `capstan sweep add`") == 0);
    CHECK(store.statuses().size() == trials.size());
    store.repair_journal();
    CHECK(lines().size() == 2);  // nothing is known of them
    CHECK(extend_plan(scratch.path / "s", make_plan(store.plan().definition)) == 1);
    CHECK(store.damage(trials[0].id).empty());
    CHECK(store.state(trials[0].id) == State::pending);
    CHECK(read_file(store.trial(trials[0].id) / "recipe.yaml").find("# trial " + trials[0].id) == 0);
    std::string plan = read_file(scratch.path / "s/plan.json");
    plan.replace(plan.find(trials[0].id), 8, "../../..");
    write_file_durably(scratch.path / "s/plan.json", plan);
    CHECK_THROWS_AS(read_plan(scratch.path / "s"), Error);
  }
}

TEST_CASE("curves, their one number, and when a trial is not worth going on with") {
  const Scratch scratch;
  write_plan(scratch.path / "s",
             make_plan(tiny_definition(
                 "axes: {optimizer.lr: [1e-3, 2e-3, 3e-3, 4e-3]}\nmetric: loss\nstop: {asha: {steps: "
                 "[2, 4, 8], keep: 1/2}, worse_than: 9}\n")));
  const Store store(scratch.path / "s");
  const auto write = [&](size_t trial, const std::string& rows) {
    fs::create_directories(store.run(store.plan().trials[trial].id));
    std::ofstream(store.run(store.plan().trials[trial].id) / "metrics.jsonl") << rows;
  };
  write(0,
        "{\"step\": 1, \"loss\": 5, \"tokens_per_second\": 10, \"memory_bytes\": 7}\n{\"step\": 2, \"loss\": "
        "4}\n{\"step\": 2, \"event\": \"validation\", \"loss\": 4.5}\n"
        "{\"step\": 3, \"loss\": 6}\n{\"step\": 3, \"loss\": 3}\n{\"step\": 4, \"lo");
  const std::string id = store.plan().trials[0].id;
  const auto curve = store.read_curve(id, "loss");
  REQUIRE(curve.size() == 3);
  CHECK(curve[2].value == 3);
  CHECK(store.read_curve(id, "val/loss").size() == 1);
  CHECK(store.read_curve(id, "validation/loss")[0].value == 4.5);
  CHECK(store.read_curve(id, "nothing").empty());
  Metric metric;
  CHECK(summarized(curve, metric) == 3);
  REQUIRE(metric.set_at("best"));
  metric.goal = Metric::Goal::max;
  CHECK(summarized(curve, metric) == 5);
  REQUIRE(metric.set_at("mean(last 2)"));
  CHECK(summarized(curve, metric) == 3.5);
  CHECK(!summarized({}, metric));
  CHECK(!summarized({{1, NAN}}, Metric{}));

  CHECK(point_at_rung(curve, 2)->value == 4);
  CHECK(!point_at_rung(curve, 4));
  CHECK(point_at_rung(curve, 4, 4)->value ==
        3);  // the run has come there, its metric has no row of that step
  CHECK(rank_among(3, {1, 5, NAN}, Metric{}) == 1);
  CHECK(rank_among(NAN, {1, 5, NAN}, Metric{}) == 2);

  Pruning pruning(store);
  const auto decision = [&](size_t trial, size_t& examined) {
    const TrialPlan& planned = store.plan().trials[trial];
    return pruning.decide(planned, store.read_curve(planned.id, "loss"), 0, examined).reason;
  };
  size_t first = 0, second = 0, third = 0, fourth = 0;
  CHECK(decision(0, first).empty());  // the first to come goes on
  CHECK(first == 1);
  CHECK(store.measured(id).memory_bytes == std::nullopt);  // of the last logged step
  write(1, "{\"step\": 2, \"loss\": 7, \"memory_bytes\": 7, \"kernel_scratch_bytes\": 5}\n");
  CHECK(store.measured(store.plan().trials[1].id).memory_bytes == 12);  // as the log and `runs show` count it
  CHECK(decision(1, second) == "loss at step 2 is 7: place 2 of 2 so far, of which 1 go on");
  write(2, "{\"step\": 2, \"loss\": 3.5}\n{\"step\": 4, \"loss\": 3.25}\n{\"step\": 8, \"loss\": 3}\n");
  CHECK(decision(2, third).empty());
  CHECK(third == 3);
  write(3, "{\"step\": 1, \"loss\": null}\n");
  CHECK(decision(3, fourth) == "loss at step 1 is not finite");
  write(3, "{\"step\": 1, \"loss\": 9.5}\n");
  CHECK(decision(3, fourth) == "loss at step 1 is 9.5, worse than 9");
}

// Only the rows decide at a rung. Each history is checked after every row, and once at its end.
TEST_CASE("a trial that ends between two looks is decided at its rung, from its rows") {
  const std::string text =
      "axes: {optimizer.lr: [1e-3, 2e-3, 3e-3, 4e-3]}\nmetric: loss\n"
      "stop: {asha: {steps: [2, 4], keep: 1/2}, worse_than: 9}\n";
  const std::vector<std::vector<double>> losses{{5, 4, 3, 3, 3},     // the first goes on
                                                {5, 4.5, 2, 1, 1},   // behind at step 2, though best later
                                                {5, 3.5, 3, 2, 2},   // goes on, and on
                                                {5, 3, 9.5, 1, 1}};  // hopeless at step 3
  const auto run = [&](bool at_every_row) {
    const Scratch scratch;
    write_plan(scratch.path / "s", make_plan(tiny_definition(text)));
    const Store store(scratch.path / "s");
    Pruning pruning(store);
    std::string decisions;
    for (size_t i = 0; i < losses.size(); ++i) {
      const TrialPlan& trial = store.plan().trials[i];
      fs::create_directories(store.run(trial.id));
      std::ofstream rows(store.run(trial.id) / "metrics.jsonl");
      size_t examined = 0;
      PruningDecision decision;
      for (size_t step = 1; step <= losses[i].size(); ++step) {
        rows << "{\"step\": " << step << ", \"loss\": " << losses[i][step - 1] << "}" << std::endl;
        const bool last = step == losses[i].size();
        if ((at_every_row || last) && decision.reason.empty())
          decision = pruning.decide(trial, store.read_curve(trial.id, "loss"),
                                    static_cast<int64_t>(step) - (last ? 0 : 1), examined);
      }
      decisions += std::to_string(decision.step) + " " + decision.reason + "\n";
      store.change(trial.id, {decision.reason.empty() ? State::done : State::pruned, 1, decision.reason, 0});
    }
    return decisions;
  };
  const std::string expected =
      "0 \n"
      "2 loss at step 2 is 4.5: place 2 of 2 so far, of which 1 go on\n"
      "0 \n"  // at step 4 against the first alone
      "3 loss at step 3 is 9.5, worse than 9\n";
  CHECK(run(true) == expected);
  CHECK(run(false) == expected);
}

TEST_CASE("seeds of one configuration do not stop each other, and a late first value names its step") {
  const Scratch scratch;
  write_plan(scratch.path / "s",
             make_plan(tiny_definition("axes: {optimizer.lr: [1e-3, 2e-3]}\nseeds: [1, 2]\nmetric: loss\n"
                                       "stop: {asha: {steps: [2], keep: 1/2}}\n")));
  const Store store(scratch.path / "s");
  Pruning pruning(store);
  const auto decide = [&](size_t i, const std::string& rows) {
    const TrialPlan& trial = store.plan().trials[i];
    fs::create_directories(store.run(trial.id));
    std::ofstream(store.run(trial.id) / "metrics.jsonl") << rows;
    size_t rungs = 0;
    return pruning.decide(trial, store.read_curve(trial.id, "loss"), 0, rungs).reason;
  };
  REQUIRE(store.plan().trials[0].configuration == store.plan().trials[1].configuration);
  CHECK(decide(0, "{\"step\": 2, \"loss\": 4}\n").empty());
  CHECK(decide(1, "{\"step\": 2, \"loss\": 5}\n").empty());
  CHECK(decide(2, "{\"step\": 3, \"loss\": 6}\n") ==
        "loss at step 3 is 6 (the first one, for the rung at step 2): place 3 of 3 so far, of which 2 go on");
}

TEST_CASE("points that differ in validation alone are trials, as the metric depends on it") {
  const Plan plan = make_plan(tiny_definition("axes: {validation.eval_iters: [1, 2]}")).plan;
  CHECK(plan.trials.size() == 2);
  CHECK(plan.duplicates == 0);
}

TEST_CASE("the step at which a trial was pruned is kept for the runners after this one") {
  const Scratch scratch;
  write_plan(scratch.path / "s",
             make_plan(tiny_definition("axes: {optimizer.lr: [1e-3, 2e-3]}\nmetric: loss\n"
                                       "stop: {asha: {steps: [2, 4], keep: 1/2}}\n")));
  const Store store(scratch.path / "s");
  const TrialPlan &first = store.plan().trials[0], &second = store.plan().trials[1];
  for (const TrialPlan* trial : {&first, &second}) {
    fs::create_directories(store.run(trial->id));
    std::ofstream(store.run(trial->id) / "metrics.jsonl")
        << "{\"step\": 2, \"loss\": 4}\n{\"step\": 5, \"loss\": " << (trial == &first ? 1 : 2) << "}\n";
  }
  store.begin_attempt(first.id);
  write_file_durably(store.attempt(first.id, 1) / "result.json",
                     "{\"state\": \"pruned\", \"pruned_at\": 2, \"rungs\": 1}\n");
  store.change(first.id, {State::pruned, 1, "", 0});
  CHECK(store.status(first).rungs == 1);
  CHECK(store.progress(first).pruned_at == 2);
  CHECK(store.progress(first).reached == 5);
  // At step 4 it does not count although its rows go on.
  size_t examined = 0;
  CHECK(Pruning(store).decide(second, store.read_curve(second.id, "loss"), 5, examined).reason.empty());
  CHECK(examined == 2);
}

TEST_CASE("a sweep that names no metric is ranked by the validation loss where every trial has one") {
  const auto metric = [](const std::string& rest, std::string& notes) {
    const ComposedPlan planned = make_plan(tiny_definition(rest));
    for (const std::string& note : planned.notes) notes += note + "\n";
    const Scratch scratch;
    write_plan(scratch.path / "s", planned);
    CHECK(read_plan(scratch.path / "s").definition.metric.name == planned.plan.definition.metric.name);
    return planned.plan.definition.metric.name;
  };
  std::string notes;
  CHECK(metric("axes: {optimizer.lr: [1e-3, 1e-2]}", notes) == "val/loss");
  CHECK(metric("axes: {optimizer.lr: [1e-3, 1e-2]}\nmetric: {at: best}", notes) == "val/loss");
  CHECK(metric("axes: {optimizer.lr: [1e-3, 1e-2]}\nmetric: loss", notes) == "loss");
  CHECK(notes.empty());
  CHECK(metric("axes: {optimizer.lr: [1e-3, 1e-2], validation.eval_interval: [null]}", notes) == "loss");
  CHECK(notes.find("no trial runs validation: the sweep is ranked by `loss`, the training loss") == 0);
  notes.clear();
  CHECK(metric("link: [{optimizer.lr: 1e-3, validation.eval_interval: null}, {optimizer.lr: 2e-3, "
               "validation.eval_interval: 4}]",
               notes) == "loss");
  CHECK(notes.find("1 of 2 trials do not run validation: the sweep is ranked by `loss`") == 0);
  notes.clear();
  CHECK(metric("axes: {optimizer.lr: [1e-3]}\nstop: {asha: {steps: [2], keep: 1/2}}", notes) == "val/loss");
  CHECK(notes.find("the first rung of stop.asha, step 2, comes before the first validation") == 0);
  notes.clear();
  metric("axes: {optimizer.lr: [1e-3]}\nstop: {asha: {steps: [4, 8, 12], keep: 1/2}}", notes);
  CHECK(notes.find("stop.asha stops no trial at step 8, 12: the longest trial has 8 steps\n") !=
        std::string::npos);
  CHECK(ranking_text(Metric{.name = "loss"}) == "`loss` (last), the training loss, the lowest first");
}

TEST_CASE("more trials keep the metric that planning chose") {
  const Scratch scratch;
  const fs::path place = scratch.path / "s";
  write_plan(place, make_plan(tiny_definition("axes: {optimizer.lr: [1e-3, 1e-2]}")));
  const Plan before = read_plan(place);
  CHECK(before.definition.metric.name == "val/loss");
  SweepOverrides more;
  more.overrides = {config::Override::token("validation.eval_interval=null,4")};
  const ParsedDefinition reading = extended(before.definition, more, true);
  REQUIRE(reading.ok());
  extend_plan(place, make_plan(reading.definition));
  CHECK(read_plan(place).definition.metric.name == "val/loss");
}

TEST_CASE("seeds on an axis are replicates of one configuration") {
  const Scratch scratch;
  const ComposedPlan planned =
      make_plan(tiny_definition("axes: {optimizer.lr: [1e-3, 1e-2], rng.seed: [1, 2]}"));
  CHECK(planned.plan.varying == std::vector<std::string>{"optimizer.lr"});
  REQUIRE(planned.plan.trials.size() == 4);
  CHECK(planned.plan.trials[0].configuration == planned.plan.trials[1].configuration);
  CHECK(planned.plan.trials[1].seed == 2);
  CHECK(planned.plan.trials[1].label == "lr=0.001,seed=2");
  CHECK(ids_of(planned.plan) ==
        ids_of(make_plan(tiny_definition("axes: {optimizer.lr: [1e-3, 1e-2]}\nseeds: [1, 2]")).plan));
  // In rows with other values they are one, too.
  const Plan listed =
      make_plan(
          tiny_definition("link: [{optimizer.lr: 1e-3, rng.seed: 1}, {optimizer.lr: 1e-3, rng.seed: 5}]"))
          .plan;
  CHECK(listed.varying.empty());
  CHECK(listed.trials[0].configuration == listed.trials[1].configuration);
}

TEST_CASE("a directory of an earlier build reads as it was") {
  const Scratch scratch;
  const fs::path place = scratch.path / "s";
  write_plan(place,
             make_plan(tiny_definition("axes: {optimizer.lr: [1e-3, -1]}\nmetric: {name: loss, goal: min, "
                                       "at: last}")));
  const Plan now = read_plan(place);
  REQUIRE(now.invalid.size() == 1);
  std::string plan = read_file(place / "plan.json");
  const size_t at = plan.find("\"invalid\"");
  REQUIRE(at != std::string::npos);
  plan.replace(at, 9, "\"impossible\"");
  write_file_durably(place / "plan.json", plan);
  const Plan old = read_plan(place);
  CHECK(old.invalid == now.invalid);
  CHECK(old.definition.metric.name == "loss");
  CHECK(old.trials.size() == 1);
}

// A version without some field hashes the same recipes otherwise: other names, another hash of the base, no
// line of that field.
static void as_planned_without(const fs::path& place, const std::string& field) {
  std::string plan = read_file(place / "plan.json");
  const Plan now = read_plan(place);
  const auto replace = [&](const std::string& from, const std::string& to) {
    for (size_t at = plan.find(from); at != std::string::npos; at = plan.find(from, at + to.size()))
      plan.replace(at, from.size(), to);
  };
  replace(now.base_hash, std::string(32, '0'));
  int count = 0;
  for (const TrialPlan& trial : now.trials) {
    replace("\"" + trial.hash + "\"", "\"\"");  // earlier plans have ids alone
    replace("\"" + trial.configuration_hash + "\"", "\"\"");
    const std::string id = "0000000" + std::to_string(++count);
    replace("\"id\": \"" + trial.id, "\"id\": \"" + id);
    fs::rename(place / "trials" / trial.id, place / "trials" / id);
    const fs::path file = place / "trials" / id / "recipe.yaml";
    std::string recipe = read_file(file);
    const size_t at = recipe.find("  " + field + ": ");
    REQUIRE(at != std::string::npos);
    recipe.erase(at, recipe.find('\n', at) + 1 - at);
    write_file_durably(file, recipe);
  }
  write_file_durably(place / "plan.json", plan);
}

TEST_CASE("a version with more fields extends a sweep whose recipes mean the same") {
  const Scratch scratch;
  const fs::path place = scratch.path / "s";
  const std::string axes = "axes: {optimizer.lr: [1e-3, 1e-2]}\nseeds: [1, 2]\n";
  write_plan(place, make_plan(tiny_definition(axes)));
  as_planned_without(place, "decoupled_min_lr");
  const Plan before = read_plan(place);
  Store(place).change(before.trials[1].id, {State::done, 1, "", 0});

  const Definition more = tiny_definition("axes: {optimizer.lr: [1e-3, 1e-2, 2e-2]}\nseeds: [1, 2, 3]\n");
  CHECK(extend_plan(place, make_plan(more)) == 5);
  CHECK(extend_plan(place, make_plan(more)) == 0);
  const Store store(place);
  const Plan& after = store.plan();
  REQUIRE(after.trials.size() == 9);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(after.trials[i].id == before.trials[i].id);
    CHECK(after.trials[i].configuration == before.trials[i].configuration);
  }
  CHECK(store.state(before.trials[1].id) == State::done);
  std::map<std::string, int> replicates;
  for (const TrialPlan& trial : after.trials) ++replicates[trial.configuration];
  CHECK(replicates.size() == 3);
  for (const auto& [configuration, count] : replicates) CHECK(count == 3);
  CHECK(add_trial(place, {{"optimizer.lr", "1e-3"}}, 2).id == before.trials[1].id);

  // Asking is no other than adding.
  write_plan(scratch.path / "asked", make_plan(tiny_definition(axes)));
  as_planned_without(scratch.path / "asked", "decoupled_min_lr");
  CHECK(add_trial(scratch.path / "asked", {{"optimizer.lr", "1e-2"}}, 1).id == "00000003");
  CHECK(add_trial(scratch.path / "asked", {{"optimizer.lr", "1e-2"}}, 3).configuration ==
        read_plan(scratch.path / "asked").trials[2].configuration);
}

TEST_CASE("a base that means something else is refused by the field that differs") {
  const Scratch scratch;
  const fs::path place = scratch.path / "s";
  const Definition tiny = tiny_definition("axes: {optimizer.lr: [1e-3, 1e-2]}\n");
  const auto refusal = [&](const std::string& field) {
    fs::remove_all(place);
    write_plan(place, make_plan(tiny));
    as_planned_without(place, field);  // here the recipe gave it another value than the default
    try {
      extend_plan(place, make_plan(tiny));
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::failed);
      return error.message();
    }
    return std::string();
  };
  CHECK(refusal("min_lr_ratio") ==
        "the recipe `quickstart` has changed since this sweep was planned: trial 00000001 has "
        "optimizer.min_lr = 0, and now it would have 0.0001");
  CHECK(read_plan(place).trials.size() == 2);
  Definition other = tiny;
  other.set.push_back("optimizer.adam_beta1=0.5");
  fs::remove_all(place);
  write_plan(place, make_plan(tiny));
  try {
    extend_plan(place, make_plan(other));
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.message().find(" has optimizer.adam_beta1 = ") != std::string::npos);
    CHECK(error.message().find(", and now it would have 0.5") != std::string::npos);
  }
}

TEST_CASE("a sweep is extended from any directory") {
  const Scratch scratch, elsewhere;
  const fs::path here = fs::current_path(), place = scratch.path / "s";
  std::ofstream(scratch.path / "mine.yaml") << "extends: quickstart\ntrain: {train_iters: 4}\n";
  for (const std::string base : {"quickstart", "./mine.yaml"}) {  // with data at relative paths
    CAPTURE(base);
    fs::remove_all(place);
    fs::current_path(scratch.path);
    SweepOverrides given;
    given.recipe = base;
    given.overrides = {config::Override::token("optimizer.lr=1e-3,2e-3")};
    const ParsedDefinition reading = definition_from_overrides(given);
    REQUIRE(reading.ok());
    write_plan(place, make_plan(reading.definition));
    fs::current_path(elsewhere.path);
    SweepOverrides more;
    more.overrides = {config::Override::token("optimizer.lr=3e-3")};
    const ParsedDefinition again = extended(read_plan(place).definition, more, true);
    REQUIRE(again.ok());
    const auto added = [&] { return extend_plan(place, make_plan(again.definition)); };
    CHECK(added() == 1);
    CHECK(add_trial(place, {{"optimizer.lr", "4e-3"}}, {}).label == "lr=0.004");
    fs::current_path(here);
    const Plan plan = read_plan(place);
    REQUIRE(plan.trials.size() == 4);
    for (const TrialPlan& trial : plan.trials)
      CHECK(read_file(place / "trials" / trial.id / "recipe.yaml")
                .find((scratch.path / "build/quickstart/fortunes_text_document").string()) !=
            std::string::npos);
  }
}

// A recipe of a few samples for fine-tuning, whose length is a number of passes.
static std::string recipe_of_passes(const fs::path& directory, int samples) {
  std::ofstream lines(directory / "samples.jsonl");
  for (int i = 0; i < samples; ++i)
    lines << R"({"prompt": ")" << std::string(static_cast<size_t>(1 + i % 5), 'a')
          << R"(", "completion": "b"})"
          << "\n";
  std::ofstream(directory / "passes.yaml")
      << "model: {num_layers: 1, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, seq_length: "
         "16,\n"
         "        vocab_size: 257, normalization: RMSNorm, activation_func: silu, gated_linear_unit: true,\n"
         "        add_bias_linear: false, position_embedding_type: rope, hidden_dropout: 0.0,\n"
         "        attention_dropout: 0.0}\n"
         "tokenizer: {tokenizer_type: byte}\n"
         "dataset: {kind: sft, train_files: [samples.jsonl], split: \"1,0,0\", packing: false}\n"
         "train: {epochs: 1, micro_batch_size: 1, global_batch_size: 4, threads: 1, device: cpu}\n"
         "optimizer: {lr: 1e-3, min_lr: 0}\n"
         "validation: {eval_interval: null}\n";
  return "schema: capstan-sweep/1\nname: passes\nbase: ./passes.yaml\nmetric: loss\n";
}

TEST_CASE("trials whose length is a number of passes have the steps that their runs make") {
  const Scratch scratch;
  const std::string text = recipe_of_passes(scratch.path, 22) +
                           "axes: {train.epochs: [1, 2.5], train.global_batch_size: [4, 8]}\n";
  ParsedDefinition reading = read_definition_text(text, scratch.path.string(), "passes.yaml");
  REQUIRE_MESSAGE(reading.ok(), config::render(reading.diagnostics, reading.sources));
  const ComposedPlan planned = make_plan(reading.definition);
  INFO((planned.plan.invalid.empty() ? "" : planned.plan.invalid[0].reasons[0]));
  REQUIRE(planned.plan.trials.size() == 4);
  const int64_t expected[] = {6, 3, 14, 7};  // 22 and 55 samples in batches of 4 and 8, rounded up
  for (size_t i = 0; i < 4; ++i) {
    const TrialEstimate& estimate = planned.plan.trials[i].estimate;
    CAPTURE(i);
    CHECK(estimate.steps == expected[i]);
    CHECK(estimate.tokens == expected[i] * (i % 2 ? 8 : 4) * 16);
    CHECK(estimate.flops > 0);
  }
  write_plan(scratch.path / "s", planned);
  CHECK(read_plan(scratch.path / "s").trials[2].estimate.steps == 14);
  // The samples are in the memory of each trial: a block of tokens, as large as four MiB.
  for (const TrialPlan& trial : planned.plan.trials) CHECK(trial.estimate.memory_bytes > 4 << 20);
}

TEST_CASE("where the data is not there, the steps of a trial are not known until its run says them") {
  const Scratch scratch;
  const std::string text = recipe_of_passes(scratch.path, 22) +
                           "axes: {optimizer.lr: [1e-3, 2e-3]}\n"
                           "stop: {asha: {steps: [2, 6], keep: 1/2}}\n";
  fs::remove(scratch.path / "samples.jsonl");
  ParsedDefinition reading = read_definition_text(text, scratch.path.string(), "passes.yaml");
  REQUIRE_MESSAGE(reading.ok(), config::render(reading.diagnostics, reading.sources));
  const ComposedPlan planned = make_plan(reading.definition);
  REQUIRE(planned.plan.trials.size() == 2);
  CHECK(!planned.plan.trials[0].estimate.steps);
  CHECK(planned.plan.trials[0].estimate.tokens + planned.plan.trials[1].estimate.tokens == 0);
  std::string notes;
  for (const std::string& note : planned.notes) notes += note + "\n";
  CHECK(notes.find("the steps of 2 trials are not counted") != std::string::npos);
  CHECK(notes.find("not found: dataset.train_files") != std::string::npos);

  write_plan(scratch.path / "s", planned);
  const Store store(scratch.path / "s");
  const TrialPlan &first = store.plan().trials[0], &second = store.plan().trials[1];
  CHECK(!first.estimate.steps);
  CHECK(!store.status(first).total_steps);
  const auto rows = [&](const TrialPlan& trial, const char* loss) {
    fs::create_directories(store.run(trial.id));
    std::ofstream out(store.run(trial.id) / "metrics.jsonl");
    for (int step = 1; step <= 6; ++step) out << "{\"step\": " << step << ", \"loss\": " << loss << "}\n";
  };
  // Halving goes on without the length: the second is behind at step 2 already.
  rows(first, "3");
  rows(second, "4");
  size_t examined = 0;
  CHECK(Pruning(store).decide(first, store.read_curve(first.id, "loss"), 6, examined).reason.empty());
  examined = 0;
  CHECK(Pruning(store).decide(second, store.read_curve(second.id, "loss"), 6, examined).step == 2);
  // A run says how long it is; at its last step nothing would be saved.
  records::RunFile file;
  file.state = "finished", file.steps = 6;
  write_file_durably(store.run(second.id) / "run.json", records::run_file_text(file));
  CHECK(store.total_steps(second) == 6);
  CHECK(store.status(second).total_steps == 6);
  examined = 1;
  CHECK(Pruning(store).decide(second, store.read_curve(second.id, "loss"), 6, examined).reason.empty());
  CHECK(examined == 2);
}

TEST_CASE("samples that fill no batch make no step, in the plan as in the run") {
  std::string text = kTiny + "axes: {optimizer.lr: [1e-3]}";
  const std::string iterations = "train.train_iters=8";
  text.replace(text.find(iterations), iterations.size(), "train.train_iters=null, train.train_samples=17");
  const Plan plan = make_plan(read_definition_text(text, "/tmp", "x.yaml").definition).plan;
  CHECK(plan.trials.at(0).estimate.steps == 8);
}
