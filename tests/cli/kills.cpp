// kill -9 at random moments: the run resumes each time, and in the end its losses are those of the run that
// was not killed. CAPSTAN_KILLS says how many (80), CAPSTAN_SEED from which seed (1).
#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <sstream>
#include <thread>

#include "base/json.hpp"
#include "process.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

std::vector<std::string> arguments_of(const std::string& run, bool async, int steps = 300) {
  return train_tiny({"train.train_iters=" + std::to_string(steps), "checkpoint.save_interval=2",
                     "checkpoint.most_recent_k=2",
                     std::string("checkpoint.async_save=") + (async ? "true" : "false"), "--run-dir", run,
                     "--resume=auto"});
}

// "step loss grad_norm" of each logged step, as written; and the steps reported as saved.
std::string losses_of(const std::string& run) {
  std::string all;
  std::istringstream text(read_text(run + "/metrics.jsonl"));
  for (std::string line; std::getline(text, line);) {
    // Fails if a line is torn.
    const json row = capstan::json_of(line);
    if (row.contains("event")) continue;
    all += capstan::dump_json(row["step"]) + " " + capstan::dump_json(row["loss"]) + " " +
           capstan::dump_json(row["grad_norm"]) + "\n";
  }
  return all;
}

// The last step that a start reported as saved ("step 12 | saved …"); 0: none.
int64_t last_saved(const std::string& text) {
  const size_t at = text.rfind(" | saved ");
  const size_t word = at == std::string::npos ? at : text.rfind("step ", at);
  return word == std::string::npos ? 0 : std::atoll(text.c_str() + word + 5);
}

int64_t number_from(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::atoll(text) : otherwise;
}

}  // namespace

TEST_CASE("kill -9 at random moments loses nothing" * doctest::test_suite("one_process")) {
  const int64_t wanted = number_from("CAPSTAN_KILLS", 80);
  std::mt19937 random(static_cast<unsigned>(number_from("CAPSTAN_SEED", 1)));
  // In memory where that is possible: a process dies the same there, and thousands of files are synced.
  if (::access("/dev/shm", W_OK) == 0) ::setenv("TMPDIR", "/dev/shm", 1);
  const ScratchDirectory scratch;
  const auto launch_in = [&](const std::string& run, bool async) {
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = arguments_of(run, async);
    return launch;
  };
  const auto begun = std::chrono::steady_clock::now();
  const Finished uninterrupted = run(launch_in("uninterrupted", false));
  REQUIRE_MESSAGE(uninterrupted.code == 0, uninterrupted.err);
  const std::string expected = losses_of(scratch.file("uninterrupted"));
  REQUIRE(count_lines(expected) == 300);

  int64_t kills = 0, starts = 0, laps = 0, before_first_step = 0, leftovers = 0, again = 0;
  for (; kills < wanted; ++laps) {
    const std::string name = "lap" + std::to_string(laps);
    // The last step that was reported as saved, or from which the run resumed.
    int64_t reached = 0;
    for (bool finished = false; !finished;) {
      // A quarter of the kills fall anywhere after the first word, most while steps and saves go on.
      const bool early = random() % 4 == 0;
      const bool kill = kills < wanted;
      const auto delay = std::chrono::microseconds(random() % (early ? 400'000 : 150'000));
      LateKill killer;
      Launch launch = launch_in(name, random() % 2 == 0);
      launch.on_error_text = [&](const std::string& text, int process) {
        if (kill && !killer.started() && (early || contains(text, "| loss"))) killer.start(process, delay);
        return 0;
      };
      const Finished ended = run(launch);
      ++starts;
      REQUIRE_MESSAGE((ended.code == 0 || ended.code == 128 + SIGKILL), ended.err);
      REQUIRE_MESSAGE(!contains(ended.err, "not resumed from"), ended.err);
      REQUIRE_MESSAGE(!contains(ended.err, "warning: "), ended.err);
      if (contains(
              ended.err,
              "| loss")) {  // it had looked for checkpoints: never back behind what was reported as saved
        const size_t at = ended.err.find(" at step ");
        const int64_t step = at == std::string::npos ? 0 : std::atoll(ended.err.c_str() + at + 9);
        REQUIRE(step >= reached);
        reached = step;
      }
      reached = std::max(reached, last_saved(ended.err));
      finished = ended.code == 0;
      if (finished) break;
      ++kills;
      before_first_step += !contains(ended.err, "| loss");
      bool left = false;
      if (fs::exists(scratch.file(name) + "/checkpoints"))
        for (const auto& entry : fs::directory_iterator(scratch.file(name) + "/checkpoints"))
          left |= entry.path().filename().string().starts_with(".");
      leftovers += left;  // the kill fell into a save
      again += contains(ended.err, "resumed from");
    }
    REQUIRE(losses_of(scratch.file(name)) == expected);
    int64_t checkpoints = 0;
    for (const auto& entry : fs::directory_iterator(scratch.file(name) + "/checkpoints")) {
      REQUIRE_MESSAGE(entry.path().filename().string().starts_with("step-"), entry.path().string());
      ++checkpoints;
    }
    REQUIRE(checkpoints >= 2);  // one more where the last kill fell into the deletion of an old one
    fs::remove_all(scratch.file(name));
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  MESSAGE(kills << " kills (" << leftovers << " within a save, " << before_first_step
                << " before a start's first step, " << again << " of a resumed process) in " << starts
                << " starts of " << laps << " runs, " << static_cast<int64_t>(seconds)
                << " s: every run ended with the losses of the one that was not killed, bit for bit");
  CHECK(leftovers > wanted / 20);  // else the kills miss what they are for
}

TEST_CASE("kill -9 with optimizer state in a file: the next start resumes, with a file or without" *
          doctest::test_suite("one_process")) {
  constexpr int kKills = 12;
  std::mt19937 random(static_cast<unsigned>(number_from("CAPSTAN_SEED", 1)));
  const ScratchDirectory scratch;
  fs::create_directory(scratch.file("state"));
  const auto launch_in = [&](const std::string& run, bool in_file) {
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = arguments_of(run, false);
    if (in_file)
      for (const char* field :
           {"optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_path=state",
            "optimizer.optimizer_offload_chunk_size=4096"})
        launch.arguments.emplace_back(field);
    return launch;
  };
  const Finished uninterrupted = run(launch_in("uninterrupted", false));
  REQUIRE_MESSAGE(uninterrupted.code == 0, uninterrupted.err);
  const std::string expected = losses_of(scratch.file("uninterrupted"));
  int kills = 0, in_files = 0;
  for (int laps = 0; kills < kKills; ++laps) {
    const std::string name = "lap" + std::to_string(laps);
    for (bool finished = false; !finished;) {
      const bool kill = kills < kKills, in_file = random() % 4 != 0;
      const auto delay = std::chrono::microseconds(random() % 100'000);
      LateKill killer;
      Launch launch = launch_in(name, in_file);
      launch.on_error_text = [&](const std::string& text, int process) {
        if (kill && !killer.started() && contains(text, "| loss")) killer.start(process, delay);
        return 0;
      };
      const Finished ended = run(launch);
      REQUIRE_MESSAGE((ended.code == 0 || ended.code == 128 + SIGKILL), ended.err);
      REQUIRE_MESSAGE(!contains(ended.err, "warning: "), ended.err);
      REQUIRE(contains(ended.err, " of optimizer state in a file without a name in ") == in_file);
      // The file of a killed run is gone.
      REQUIRE(fs::is_empty(scratch.file("state")));
      finished = ended.code == 0;
      kills += !finished, in_files += !finished && in_file;
    }
    REQUIRE(losses_of(scratch.file(name)) == expected);
  }
  CHECK(in_files > 0);
}

// The processes below one: mpirun and the ranks that it has started.
static std::vector<int> descendants_of(int process) {
  std::vector<int> all;
  for (const int child : children_of(process)) {
    all.push_back(child);
    for (const int below : descendants_of(child)) all.push_back(below);
  }
  return all;
}

// Kills the launcher of a run or one of the processes below it, `wanted` times in all. The last of `more` is
// the number of ranks.
static void check_kills(int64_t wanted, int steps, const std::vector<std::string>& more) {
  std::mt19937 random(static_cast<unsigned>(number_from("CAPSTAN_SEED", 1)));
  if (::access("/dev/shm", W_OK) == 0) ::setenv("TMPDIR", "/dev/shm", 1);
  const ScratchDirectory scratch;
  const auto launch_in = [&](const std::string& run, bool async) {
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = arguments_of(run, async, steps);
    launch.arguments.insert(launch.arguments.end(), more.begin(), more.end());
    // Files that Open MPI leaves after killed ranks are deleted with the directory.
    launch.environment = {"OMPI_MCA_btl_vader_backing_directory=" + scratch.path()};
    return launch;
  };
  const Finished uninterrupted = run(launch_in("uninterrupted", false));
  REQUIRE_MESSAGE(uninterrupted.code == 0, uninterrupted.err);
  const std::string expected = losses_of(scratch.file("uninterrupted"));

  int64_t kills = 0, of_launcher = 0, laps = 0;
  for (; kills < wanted; ++laps) {
    const std::string name = "lap" + std::to_string(laps);
    int64_t reached = 0;
    for (bool finished = false; !finished;) {
      const bool kill = kills < wanted;
      const auto delay = std::chrono::microseconds(random() % 300'000);
      const uint32_t which = random();
      bool launcher = false;
      LateKill killer;
      Launch launch = launch_in(name, random() % 2 == 0);
      launch.on_error_text = [&](const std::string& text, int process) {
        const auto victim = [&launcher, which, process] {
          std::vector<int> processes = descendants_of(process);
          processes.push_back(process);
          const int chosen = processes[which % processes.size()];
          launcher = chosen == process;
          return chosen;
        };
        if (kill && !killer.started() && contains(text, "| loss")) killer.start(victim, delay);
        return 0;
      };
      const Finished ended = run(launch);
      const bool killed = killer.started();
      killer.cancel();
      REQUIRE_MESSAGE(!contains(ended.err, "not resumed from"), ended.err);
      if (contains(ended.err, "| loss")) {
        const size_t at = ended.err.find(" at step ");
        REQUIRE((at == std::string::npos ? 0 : std::atoll(ended.err.c_str() + at + 9)) >= reached);
      }
      reached = std::max(reached, last_saved(ended.err));
      finished = ended.code == 0;
      if (finished) break;
      REQUIRE_MESSAGE(killed, ended.err);
      ++kills;
      of_launcher += launcher;
      // Processes that survive the kill end by themselves soon. Until then no other process can take the run.
      for (int tries = 0; tries < 100; ++tries) {
        Launch look = launch_in(name, false);
        look.arguments.push_back("train.exit_interval=1");
        const Finished next = run(look);
        if (next.code == 75 || next.code == 0) break;
        REQUIRE_MESSAGE(contains(next.err, "is in use by"), next.err);
        REQUIRE(tries < 99);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
    }
    REQUIRE(losses_of(scratch.file(name)) == expected);
    fs::remove_all(scratch.file(name));
  }
  MESSAGE(kills << " kills, " << of_launcher << " of the launcher itself, in " << laps << " runs with "
                << more.back() << " ranks");
}

TEST_CASE("kill -9 of any process of a run on two ranks loses nothing, and ends the others") {
  check_kills(std::max<int64_t>(8, number_from("CAPSTAN_KILLS", 80) / 20), 300, {"--nproc", "2"});
}
TEST_CASE("kill -9 of any of eight processes under tensor and pipeline parallelism and ZeRO loses nothing") {
  check_kills(std::max<int64_t>(3, number_from("CAPSTAN_KILLS", 80) / 60), 30,
              {"model.num_layers=2", "dist.tp=2", "dist.pp=2", "train.global_batch_size=4",
               "ddp.data_parallel_sharding_strategy=optim_grads", "--nproc", "8"});
}
