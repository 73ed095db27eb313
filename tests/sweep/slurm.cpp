// Job arrays: what is in which, the scripts byte for byte, and what a script does when it is signaled. No
// Slurm is needed.
#include "sweep/slurm.hpp"

#include <doctest/doctest.h>

#include <cstdlib>

#include "base/error.hpp"
#include "base/file.hpp"
#include "support/paths.hpp"
#include "sweep/process.hpp"
#include "tests/train/records_helpers.hpp"

using namespace capstan;
using namespace capstan::sweep;
using capstan::records::test::error_of;
using capstan::records::test::holds;
using capstan::records::test::slurp;
using capstan::records::test::spill;
using capstan::records::test::TemporaryDirectory;
namespace fs = std::filesystem;

static Plan plan_of(const std::vector<int64_t>& ranks) {
  Plan plan;
  plan.name = "made";
  for (size_t i = 0; i < ranks.size(); ++i) {
    TrialPlan trial;
    trial.id = "trial" + std::to_string(i);
    trial.ranks = ranks[i];
    plan.trials.push_back(trial);
  }
  return plan;
}

TEST_CASE("tasks as Slurm lists them") {
  CHECK(task_list({}).empty());
  CHECK(task_list({3}) == "3");
  CHECK(task_list({1, 2}) == "1,2");
  CHECK(task_list({1, 2, 3, 4, 9, 11, 12, 14}) == "1-4,9,11,12,14");
}

TEST_CASE("an array for each set of resources, split at the limit") {
  Plan plan = plan_of({1, 2, 1, 2, 1, 1, 1});
  plan.trials[6].threads = 4;
  const auto arrays = slurm_arrays(plan, {}, 3);
  REQUIRE(arrays.size() == 4);
  CHECK(arrays[0].trials == std::vector<std::string>{"trial0", "trial2", "trial4"});
  CHECK(arrays[1].trials == std::vector<std::string>{"trial5"});
  CHECK(arrays[2].trials == std::vector<std::string>{"trial1", "trial3"});
  CHECK(arrays[2].ranks == 2);
  CHECK(arrays[3].threads == 4);
  for (size_t i = 0; i < 4; ++i) CHECK(arrays[i].number == static_cast<int64_t>(i));
  CHECK(slurm_arrays(plan, {}, 1000).size() == 3);
}

TEST_CASE("maps that are written keep their lines; what is new gets new arrays") {
  const Plan plan = plan_of({1, 1, 2, 1});
  const auto arrays =
      slurm_arrays(plan, {{0, {"trial1", "trial0"}}, {4, {"trial2"}}, {7, {"of another plan"}}}, 10);
  REQUIRE(arrays.size() == 3);
  CHECK(arrays[0].trials == std::vector<std::string>{"trial1", "trial0"});
  CHECK(arrays[1].number == 4);
  CHECK(arrays[1].ranks == 2);
  CHECK(arrays[2].number == 8);
  CHECK(arrays[2].trials == std::vector<std::string>{"trial3"});
}

static SlurmScript plain_script() {
  SlurmScript script;
  script.sweep = "/scratch/sweeps/lr";
  script.program = "/opt/capstan/bin/capstan";
  script.name = "lr";
  return script;
}

TEST_CASE("the scripts, byte for byte") {
  const std::string golden = std::string(capstan::test::kSourceDirectory) + "/tests/sweep/golden/";
  const bool rewrite = std::getenv("CAPSTAN_WRITE_GOLDEN") != nullptr;
  const auto compare = [&](const std::string& name, const std::string& text) {
    CAPTURE(name);
    if (rewrite) spill(golden + name, text);
    CHECK(text == slurp(golden + name));
    const auto syntax = run_process({"bash", "-n", golden + name}, 10);
    REQUIRE(syntax);
    CHECK_MESSAGE(syntax->code == 0, syntax->err);
  };
  SlurmArray array{0, 1, std::nullopt, {"a", "b", "c"}, {1, 2, 3}};
  compare("array-plain.sh", slurm_script(array, plain_script()));

  SlurmScript full = plain_script();
  full.sweep = "/scratch/it's 100% \"mine\"";
  full.name = "lr & batch";
  full.seconds = 7201;
  full.max_parallel = 2;
  full.cluster.partition = "cpu";
  full.cluster.account = "language";
  full.cluster.qos = "long";
  full.cluster.constraint = "avx512";
  full.cluster.reservation = "night";
  full.cluster.memory = "64G";
  full.cluster.mpi = "pmix";
  full.cluster.ranks_per_node = 8;
  full.cluster.gpus_per_rank = 1;
  full.cluster.signal_seconds = 60;
  full.cluster.max_requeues = 7;
  full.cluster.sbatch = {"--mail-type=FAIL", "--exclusive"};
  full.cluster.setup = {"module load openmpi", "ulimit -c 0"};
  array.number = 3;
  array.ranks = 16;
  array.threads = 4;
  array.tasks = {1, 3};
  compare("array-full.sh", slurm_script(array, full));
}

// Runs a script with task 2, the program and scontrol replaced; `orders` is shell between start and end.
static std::string played(const std::string& program, const std::string& orders) {
  const TemporaryDirectory directory;
  const std::string at = directory.path().string();
  fs::create_directories(directory.path() / "slurm");
  spill(directory.path() / "slurm/array-0.map", "first\nsecond\nthird\n");
  SlurmScript script = plain_script();
  script.sweep = at;
  script.program = at + "/capstan";
  script.cluster.max_requeues = 5;
  spill(script.program, "#!/bin/bash\necho \"called $*\" | sed \"s|" + at + "|DIR|\"\n" + program);
  spill(at + "/scontrol", "#!/bin/bash\necho \"scontrol $*\"\n");
  spill(at + "/array.sh", slurm_script({0, 1, std::nullopt, {}, {2}}, script));
  for (const char* name : {"/capstan", "/scontrol"}) fs::permissions(at + name, fs::perms::owner_all);
  const auto answer =
      run_process({"bash", "-c",
                   "cd '" + at +
                       "'; export PATH=\"$PWD:$PATH\" SLURM_ARRAY_TASK_ID=${TASK:-2} SLURM_ARRAY_JOB_ID=40\n"
                       "bash array.sh & job=$!\n"
                       "begun() { for i in {1..500}; do [ -e begun ] && return; sleep 0.02; done; }\n" +
                       orders + "\nwait $job; echo code $?"},
                  60);
  REQUIRE(answer);
  return answer->out + answer->err;
}

TEST_CASE("a task runs its trial and ends with its code") {
  CHECK(played("exit 0", "") == "called sweep run DIR --trial second --slots 1 --launcher srun\ncode 0\n");
  CHECK(holds(played("exit 1", ""), "\ncode 1\n"));
  CHECK(holds(played("exit 130", ""), "\ncode 130\n"));
}

TEST_CASE("before its time is over a task saves and goes back to the queue") {
  // The trial takes a moment to save after the signal, and must not be left before.
  const std::string saves =
      "trap 'sleep 0.3; echo saved; exit 75' USR1\ntouch begun\nfor i in {1..500}; do sleep 0.02; done";
  CHECK(played(saves, "begun; kill -USR1 $job") ==
        "called sweep run DIR --trial second --slots 1 --launcher srun\nsaved\nscontrol requeue 40_2\ncode "
        "75\n");
  // Twice is no other than once.
  CHECK(holds(played(saves, "begun; kill -USR1 $job; sleep 0.1; kill -USR1 $job"),
              "scontrol requeue 40_2\ncode 75\n"));
  // A trial that is done before it could save has no need of the queue.
  CHECK(!holds(played("trap 'exit 0' USR1\ntouch begun\nfor i in {1..500}; do sleep 0.02; done",
                      "begun; kill -USR1 $job"),
               "scontrol"));
}

TEST_CASE("a canceled task saves and does not come back") {
  const std::string saves =
      "trap 'echo saved; exit 75' TERM\ntouch begun\nfor i in {1..500}; do sleep 0.02; done";
  const std::string said = played(saves, "begun; kill -TERM $job");
  CHECK(holds(said, "saved\ncode 75\n"));
  CHECK(!holds(said, "scontrol"));
}

TEST_CASE("a task does not come back forever") {
  ::setenv("SLURM_RESTART_COUNT", "5", 1);
  CHECK(!holds(played("exit 75", ""), "scontrol"));
  ::setenv("SLURM_RESTART_COUNT", "4", 1);
  CHECK(holds(played("exit 75", ""), "scontrol requeue 40_2"));
  ::unsetenv("SLURM_RESTART_COUNT");
}

TEST_CASE("a task without a line in the map says so") {
  ::setenv("TASK", "9", 1);
  const std::string said = played("exit 0", "");
  ::unsetenv("TASK");
  CHECK(holds(said, "the map has no line 9"));
  CHECK(holds(said, "code 2"));
}

TEST_CASE("a cluster's file") {
  const TemporaryDirectory directory;
  const std::string file = (directory.path() / "cluster.yaml").string();
  const auto read = [&](const std::string& text) {
    spill(file, text);
    return read_cluster(file);
  };
  const Cluster cluster = read(
      "partition: cpu\ntime: 1h30m\nranks_per_node: 8\nmpi: pmix\nsbatch: "
      "[--exclusive]\n"
      "setup:\n  - module load openmpi\n  - export A=\"b c\"\n");
  CHECK(*cluster.partition == "cpu");
  CHECK(cluster.time->seconds == 5400);
  CHECK(*cluster.ranks_per_node == 8);
  CHECK(cluster.setup.size() == 2);
  CHECK(cluster.signal_seconds == 180);
  const auto error = [&](const std::string& text) { return error_of([&] { read(text); }); };
  CHECK(holds(error("partion: cpu\n"), "`partition`"));
  CHECK(holds(error("account: \"a b\"\n"), "one line without blanks and quotes"));
  CHECK(holds(error("sbatch: [exclusive]\n"), "--name"));
  CHECK(holds(error("setup: [\"a\\nb\"]\n"), "more than one line"));
  CHECK(holds(error("signal_seconds: 0\narray_max: none\n"), "array_max"));
  CHECK(holds(error_of([&] { read_cluster((directory.path() / "none.yaml").string()); }), "none.yaml"));
}

TEST_CASE("another program, run to its end") {
  const auto said = run_process({"sh", "-c", "echo out; echo err >&2; exit 3"}, 10);
  REQUIRE(said);
  CHECK(said->code == 3);
  CHECK(said->out == "out\n");
  CHECK(said->err == "err\n");
  CHECK(!run_process({"no-such-program-anywhere"}, 10));
  CHECK(!run_process({"sleep", "30"}, 0.1));
  CHECK(run_process({"sh", "-c", "kill -TERM $$"}, 10)->code == 143);
  // More than a pipe holds, on both ends.
  CHECK(run_process({"sh", "-c", "head -c 300000 /dev/zero; head -c 300000 /dev/zero >&2"}, 20)->err.size() ==
        300000);
}
