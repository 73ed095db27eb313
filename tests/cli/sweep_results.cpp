// sweep ask, tell, table, plot and slurm on a sweep without a runner: results are reported by hand.
// No Python, no Slurm.
#include <doctest/doctest.h>
#include <sys/stat.h>

#include <filesystem>
#include <set>

#include "base/json.hpp"
#include "process.hpp"
#include "support/paths.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

static std::string planned(const ScratchDirectory& scratch) {
  const std::string directory = scratch.file("sweep");
  const Finished plan = run({"sweep", "plan", "quickstart", "dataset=mock", "tokenizer=none",
                             "optimizer.lr=1e-3,1e-2", "rng.seed=1,2", "--out", directory});
  REQUIRE_MESSAGE(plan.code == 0, plan.err);
  return directory;
}

static std::vector<json> lines_of(const std::string& text) {
  std::vector<json> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    lines.push_back(capstan::json_of(text.substr(at, end - at)));
    at = end + 1;
  }
  return lines;
}
static std::vector<json> converse(const std::string& command, const std::string& directory,
                                  const std::string& input, int code = 0) {
  const Finished said = run({.arguments = {"sweep", command, directory, "-"}, .input = input});
  CHECK_MESSAGE(said.code == code, said.err);
  return lines_of(said.out);
}

TEST_CASE("ask hands out what is pending, tell takes results, table and page show them") {
  const ScratchDirectory scratch;
  const std::string directory = planned(scratch);

  // Each pending trial once in a conversation; then there is none.
  const auto asked = converse("ask", directory, "{}\n{}\n\n{}\n{}\n{}\n");
  REQUIRE(asked.size() == 5);
  CHECK(asked[4] == json{{"trial", nullptr}});
  std::set<std::string> ids;
  for (size_t i = 0; i < 4; ++i) {
    ids.insert(asked[i]["trial"].get<std::string>());
    CHECK(asked[i]["state"] == "pending");
    CHECK(asked[i]["command"][1] == "run");
    CHECK(run({"check", asked[i]["recipe"].get<std::string>()}).code == 0);
  }
  CHECK(ids.size() == 4);

  // Reported in one conversation: 2.0 and 3.0 for one learning rate, 4.0 and a failure for the other.
  std::string reported;
  for (size_t i = 0; i < 4; ++i) {
    const bool high = std::stod(asked[i]["values"]["optimizer.lr"].get<std::string>()) > 5e-3;
    const int seed = asked[i]["seed"];
    json line{{"trial", asked[i]["trial"]}};
    if (high && seed == 2)
      line["state"] = "failed", line["reason"] = "</script>, \"quoted\"";
    else
      line["value"] = high ? 4.0 : 1.0 + seed;
    reported += capstan::dump_json(line) + "\n";
  }
  for (const json& answer : converse("tell", directory, reported))
    CHECK((answer["state"] == "done" ? answer["value"].is_number()
                                     : answer["reason"] == "</script>, \"quoted\""));
  CHECK(converse("ask", directory, "{}\n")[0]["trial"].is_null());

  const Finished csv = run({"sweep", "table", directory, "--csv"});
  CHECK(csv.code == 0);
  CHECK(count_lines(csv.out) == 3);
  CHECK(csv.out.starts_with("optimizer.lr,val/loss,val/loss_sd,n,"));
  CHECK(contains(csv.out, "\n0.001,2.5,0.7071067811865476,2,2,"));
  CHECK(contains(csv.out, "\n0.01,4,,1,4,"));
  CHECK(contains(csv.out, "\"</script>, \"\"quoted\"\"\""));
  const json table = capstan::json_of(run({"sweep", "table", directory, "--json", "--top", "1"}).out);
  CHECK(table["rows"].size() == 1);
  CHECK(table["hidden"] == 1);
  CHECK(contains(run({"sweep", "table", directory}).out, "2.50 ± 0.71"));
  CHECK(contains(run({"sweep", "table", directory, "--md"}).out, "| # | lr | val/loss | n |"));
  CHECK(contains(run({"sweep", "table", directory, "--where", "lr<0.005", "--csv"}).out, "\n0.001,"));
  CHECK(run({"sweep", "table", directory, "--where", "lr"}).code == 2);
  CHECK(run({"sweep", "table", directory, "--csv", "--json"}).code == 2);
  const Finished misspelled = run({"sweep", "table", directory, "--metric", "val/los"});
  CHECK(misspelled.code == 2);
  CHECK_MESSAGE(contains(misspelled.err, "no trial has the metric `val/los`"), misspelled.err);
  CHECK_MESSAGE(contains(misspelled.err, "`val/loss`"), misspelled.err);
  CHECK(run({"sweep", "table", scratch.file("none")}).code == 2);

  const Finished plot = run({"sweep", "plot", directory});
  CHECK(plot.out == directory + "/report.html\n");
  const std::string page = read_text(directory + "/report.html");
  CHECK(contains(page, "# "));  // the recipe's comments
  CHECK(page.find("</script>, ") == std::string::npos);
  CHECK(run({"sweep", "plot", directory, "-o", scratch.file("a.html"), "--metric", "loss:worst"}).code == 2);
}

TEST_CASE("ask makes trials from values, checked like any other") {
  const ScratchDirectory scratch;
  const std::string directory = planned(scratch);
  const json first =
      capstan::json_of(run({"sweep", "ask", directory, "--values", R"({"optimizer.lr": 0.005})"}).out);
  CHECK(first["new"] == true);
  CHECK(first["values"]["optimizer.lr"] == "0.005");
  const auto again = converse(
      "ask", directory,
      "{\"values\": {\"optimizer.lr\": 5e-3}}\n{\"values\": {\"optimizer.lr\": 5e-3}, \"seed\": 7}\n");
  CHECK(again[0]["trial"] == first["trial"]);
  CHECK(again[0]["new"] == false);
  CHECK(again[1]["trial"] != first["trial"]);
  CHECK(again[1]["seed"] == 7);
  CHECK(fs::exists(directory + "/trials/" + again[1]["trial"].get<std::string>() + "/recipe.yaml"));

  const auto wrong =
      converse("ask", directory,
               "{\"values\": {\"optimizer.lr\": -1}}\n{\"values\": {\"optimizer.lrr\": 1}}\n[]\nno\n"
               "{\"value\": {}}\n{\"seed\": 3}\n{\"values\": {\"optimizer.lr\": [1]}}\n",
               2);
  REQUIRE(wrong.size() == 7);
  for (const json& answer : wrong) CHECK(answer.contains("error"));
  CHECK(contains(wrong[4]["help"].get<std::string>(), "`values`"));
  CHECK(run({"sweep", "ask", directory, "--values", "{"}).code == 2);
  CHECK(run({"sweep", "ask", directory, "-", "--seed", "1"}).code == 2);
}

TEST_CASE("tell refuses what cannot be") {
  const ScratchDirectory scratch;
  const std::string directory = planned(scratch);
  const std::string id = capstan::json_of(run({"sweep", "ask", directory}).out)["trial"];
  CHECK(capstan::json_of(run({"sweep", "tell", directory, id}).out) ==
        json{{"trial", id}, {"state", "pending"}, {"value", nullptr}, {"step", nullptr}});
  CHECK(run({"sweep", "tell", directory, id, "--state", "done"}).code == 2);
  CHECK(run({"sweep", "tell", directory, id, "--state", "lost"}).code == 2);
  CHECK(run({"sweep", "tell", directory, id, "--step", "5"}).code == 2);
  CHECK(run({"sweep", "tell", directory, "ffffffff", "--value", "1"}).code == 2);
  CHECK(run({"sweep", "tell", directory, id, "--value", "1.25", "--step", "40"}).code == 0);
  CHECK(capstan::json_of(run({"sweep", "tell", directory, id}).out) ==
        json{{"trial", id}, {"state", "done"}, {"value", 1.25}, {"step", 40}});
  const Finished twice = run({"sweep", "tell", directory, id, "--value", "1"});
  CHECK(twice.code == 1);
  CHECK(contains(twice.err, "done already"));
}

TEST_CASE("slurm writes scripts for what is still to do") {
  const ScratchDirectory scratch;
  const std::string directory = planned(scratch);
  const Launch launch{.arguments = {"sweep", "slurm", directory, "--array-max", "3"},
                      .environment = {"PATH=/usr/bin:/bin"}};
  const Finished written = run(launch);
  CHECK_MESSAGE(written.code == 0, written.err);
  CHECK(written.out == "sbatch --array=1-3 " + directory + "/slurm/array-0.sh\nsbatch --array=1 " +
                           directory + "/slurm/array-1.sh\n");
  CHECK(contains(written.err, "4 trials in 2 arrays of at most 3 (--array-max)"));
  CHECK(count_lines(read_text(directory + "/slurm/array-0.map")) == 3);
  CHECK(contains(read_text(directory + "/slurm/array-0.sh"), "#SBATCH --array=1-3\n"));

  // Trials that are done are left out of the tasks; their lines in the map stay.
  const std::string map = read_text(directory + "/slurm/array-0.map");
  CHECK(run({"sweep", "tell", directory, map.substr(map.find('\n') + 1, map.find('\n')), "--value", "2"})
            .code == 0);
  const json again =
      capstan::json_of(run({"sweep", "slurm", directory, "--json", "--max-parallel", "2"}).out);
  CHECK(again["arrays"][0]["tasks"] == json{1, 3});
  CHECK(again["arrays"][0]["job"].is_null());
  CHECK(read_text(directory + "/slurm/array-0.map") == map);
  CHECK(contains(read_text(directory + "/slurm/array-0.sh"), "#SBATCH --array=1,3%2\n"));

  const std::string cluster = scratch.write("cluster.yaml", "# of a test\npartion: cpu\n");
  const Finished wrong = run({"sweep", "slurm", directory, "--cluster", cluster});
  CHECK(wrong.code == 2);
  CHECK(contains(wrong.err, "cluster.yaml:2:1"));
}

TEST_CASE("output that cannot be written is an error, and a device is never replaced") {
  const ScratchDirectory scratch;
  const std::string directory = planned(scratch);
  const std::vector<std::vector<std::string>> commands = {
      {"sweep", "plan", "quickstart", "optimizer.lr=1e-3,1e-2", "--dry-run"},
      {"sweep", "status", directory},
      {"sweep", "slurm", directory},
      {"recipe", "import",
       std::string(capstan::test::kSourceDirectory) + "/tests/importers/golden/gpt_small.sh"}};
  for (const auto& command : commands) {
    CAPTURE(command[1]);
    Launch launch;
    launch.arguments = command;
    launch.out_file = "/dev/full";
    const Finished lost = run(launch);
    CHECK(lost.code == 1);
    CHECK(contains(lost.err, "cannot write to standard output: No space left on device"));
  }
  ::mkfifo(scratch.file("pipe").c_str(), 0600);
  const Finished plot = run({"sweep", "plot", directory, "-o", scratch.file("pipe")});
  CHECK(plot.code == 2);
  CHECK(contains(plot.err, "pipe` is a named pipe, not a file"));
  CHECK(fs::is_fifo(scratch.file("pipe")));
}
