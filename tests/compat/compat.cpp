// Runs and checkpoints of earlier versions still load, and continue with the same numbers (make_fixtures.sh).
#include <doctest/doctest.h>

#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "cli/process.hpp"
#include "support/paths.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

// The instruction set that made the fixtures. Libraries differ by processor all the same.
constexpr double kTolerance = 1e-5;

struct Earlier : ScratchDirectory {
  Earlier() {
    fs::copy(std::string(kSourceDirectory) + "/tests/compat", path(),
             fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  }
  std::string good(std::vector<std::string> arguments) const {
    Launch launch;
    launch.directory = path();
    launch.environment = {"CAPSTAN_CPU=avx2"};
    launch.arguments = std::move(arguments);
    const Finished done = run(launch);
    REQUIRE_MESSAGE(done.code == 0, done.err);
    return done.out;
  }
  std::vector<json> rows(const std::string& name) const {
    std::vector<json> found;
    std::istringstream text(read_text(file(name)));
    for (std::string line; std::getline(text, line);)
      if (json row = capstan::json_of(line); !row.contains("event")) found.push_back(std::move(row));
    return found;
  }
  json shown(const std::string& name) const {
    return capstan::json_of(good({"runs", "show", name, "--json"}))["run"];
  }
};

void check_close(const json& now, const json& then, const char* key) {
  CAPTURE(key);
  CHECK(now[key].get<double>() == doctest::Approx(then[key].get<double>()).epsilon(kTolerance));
}

}  // namespace

TEST_CASE("runs of an earlier version are listed and continue with its losses") {
  const Earlier home;
  // `checked` says train.device=guard, the device's earlier name; `sharded` has two tensor-parallel ranks.
  for (const std::string name : {"checked", "sharded"}) {
    CAPTURE(name);
    CHECK(home.shown(name)["state"] == "stopped");
    std::vector<std::string> resume{
        "train", name + "/recipe.yaml", "train.exit_interval=null", "--run-dir", name, "--resume"};
    if (name == "sharded") resume.insert(resume.end(), {"--nproc", "2"});
    home.good(resume);
    const auto now = home.rows(name + "/metrics.jsonl"), then = home.rows("expected/" + name + ".jsonl");
    REQUIRE(now.size() == 8);
    REQUIRE(then.size() == 8);
    for (size_t i = 0; i < now.size(); ++i) {
      CAPTURE(i);
      CHECK(now[i]["step"] == then[i]["step"]);
      for (const char* key : {"loss", "grad_norm", "learning_rate"}) check_close(now[i], then[i], key);
    }
    CHECK(home.shown(name)["state"] == "finished");
    home.good({"runs", "plot", name, "--output", name + ".html"});
    CHECK(contains(read_text(home.file(name + ".html")), "<html"));
  }
}

TEST_CASE("adapters of an earlier version are evaluated with its loss") {
  const Earlier home;
  const json now = capstan::json_of(
                 home.good({"eval", "adapter", "checkpoint.pretrained_checkpoint=" + home.file("base"),
                            "--text", "text.txt", "--json"})),
             then = capstan::json_of(read_text(home.file("expected/adapter.json")));
  check_close(now, then, "loss");
  CHECK(now["tokens"] == then["tokens"]);
}

TEST_CASE("a sweep that an earlier version began is finished, with its results") {
  const Earlier home;
  const json before = capstan::json_of(home.good({"sweep", "status", "sweep", "--json"}));
  std::vector<std::string> states;
  for (const json& trial : before["trials"]) states.push_back(trial["state"]);
  CHECK(states == std::vector<std::string>{"pending", "done"});
  home.good({"sweep", "run", "sweep"});
  const json now = capstan::json_of(home.good({"sweep", "table", "sweep", "--json"})),
             then = capstan::json_of(read_text(home.file("expected/sweep.json")));
  REQUIRE(now["rows"].size() == 2);
  for (size_t i = 0; i < 2; ++i) {
    for (const char* key : {"configuration", "values", "trials", "states"})
      CHECK(now["rows"][i][key] == then["rows"][i][key]);
    check_close(now["rows"][i], then["rows"][i], "metric");
  }
}
