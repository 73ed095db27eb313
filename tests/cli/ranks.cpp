// --nproc: the parent of mpirun.
#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <limits>
#include <map>
#include <thread>
#include <vector>

#include "base/json.hpp"
#include "process.hpp"

using namespace capstan::test;

TEST_CASE("two ranks under one parent; its exit code is theirs") {
  ScratchDirectory scratch;
  const Finished done = train_in(scratch, {"--nproc", "2", "train.train_iters=3", "--run-dir", "a"});
  CHECK_MESSAGE(done.code == 0, done.err);
  CHECK(contains(done.err, "2 ranks"));
  const Finished stopped =
      train_in(scratch, {"--nproc=2", "train.train_iters=9", "train.exit_interval=4", "--run-dir", "b"});
  CHECK_MESSAGE(stopped.code == 75, stopped.err);
  // One error and its exit code, however many ranks hit it, and whichever ends first.
  for (int i = 0; i < 12; ++i) {
    const Finished exists = train_in(scratch, {"--nproc", "2", "train.train_iters=3", "--run-dir", "a"});
    CHECK(exists.code == 1);
    size_t times = 0;
    for (size_t at = exists.err.find("error"); at != std::string::npos; at = exists.err.find("error", at + 1))
      ++times;
    CHECK_MESSAGE(times == 1, exists.err);
  }
  CHECK(train_in(scratch, {"--nproc", "2", "train.global_batch_size=3", "--run-dir", "c"}).code == 2);
  CHECK(train_in(scratch, {"--nproc", "0"}).code == 2);
}

namespace {

// An event of a trace; microseconds.
struct Span {
  double begin, end;
  std::string name;
};
using Spans = std::vector<Span>;
// The events by rank and lane; those that wait are in the lane `waits`.
std::map<int, std::map<std::string, Spans>> lanes_of(const std::string& file) {
  const auto trace = capstan::json_of(read_text(file));
  std::map<std::pair<int, int>, std::string> names;
  for (const auto& event : trace["traceEvents"])
    if (event["name"] == "thread_name") names[{event["pid"], event["tid"]}] = event["args"]["name"];
  std::map<int, std::map<std::string, Spans>> lanes;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const double begin = event["ts"].get<double>(), end = begin + event["dur"].get<double>();
    const std::string name = event["name"];
    lanes[event["pid"]][name.starts_with("wait ") ? "waits" : names.at({event["pid"], event["tid"]})]
        .push_back({begin, end, name});
  }
  return lanes;
}
// Microseconds in which an event of both lanes runs.
double overlap_of(const Spans& a, const Spans& b) {
  double both = 0;
  for (const Span& x : a)
    for (const Span& y : b) both += std::max(0.0, std::min(x.end, y.end) - std::max(x.begin, y.begin));
  return both;
}
// The operations that the compute queue runs after it has started a gather of parameters, and before it waits
// for it. On the compute queue, events follow each other.
Spans during_gathers(const Spans& operations, const Spans& starts, const Spans& waits) {
  Spans during;
  for (const Span& start : starts) {
    if (!start.name.starts_with("start gather ")) continue;
    const std::string wait = "wait" + start.name.substr(std::string("start").size());
    double until = std::numeric_limits<double>::infinity();
    for (const Span& one : waits)
      if (one.name == wait && one.begin >= start.end) until = std::min(until, one.begin);
    for (const Span& operation : operations)
      if (operation.begin >= start.end && operation.end <= until) during.push_back(operation);
  }
  return during;
}
// The spans without the parts in which one of `others` runs.
Spans without(Spans spans, const Spans& others) {
  for (const Span& other : others) {
    Spans left;
    for (const Span& span : spans) {
      if (span.begin < std::min(span.end, other.begin))
        left.push_back({span.begin, std::min(span.end, other.begin), span.name});
      if (std::max(span.begin, other.end) < span.end)
        left.push_back({std::max(span.begin, other.end), span.end, span.name});
    }
    spans = std::move(left);
  }
  return spans;
}

// Enough transfers that some lie beside operations, however the system schedules the threads of two ranks.
constexpr const char* kManyTransfers[] = {"model.num_layers=6", "model.seq_length=128"};

}  // namespace

TEST_CASE("a trace of two ranks shows transfers of gradients beside weight gradients") {
  ScratchDirectory scratch;
  const Finished done = train_in(
      scratch, {"--nproc", "2", "train.train_iters=4", "--run-dir", "a", "profiling.trace=true",
                "profiling.profile_step_start=1", "profiling.profile_step_end=4", "train.device=checked",
                "dist.distributed_backend=nccl_stand_in", "ddp.data_parallel_sharding_strategy=optim",
                "ddp.overlap_grad_reduce=true", "ddp.bucket_size=5000", kManyTransfers[0], kManyTransfers[1],
                "profiling.profile_ranks=[0,1]"});
  REQUIRE_MESSAGE(done.code == 0, done.err);
  double both = 0;
  for (const int rank : {0, 1}) {
    auto lanes = lanes_of(scratch.path() + "/a/trace/rank-" + std::to_string(rank) + ".json")[rank];
    const Spans &weights = lanes["weight gradients"], &transfers = lanes["transfers of `shard`"];
    CHECK(weights.size() > 10);
    CHECK(transfers.size() > 10);
    both += overlap_of(weights, transfers);
  }
  CHECK(both > 0);
}

TEST_CASE("capstan trace with two ranks: their queues in one file, transfers beside operations") {
  ScratchDirectory scratch;
  const auto trace = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = tiny_recipe({"train.threads=1", "--nproc", "2"});
    arguments.insert(arguments.begin(), "trace");
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_in(scratch, arguments);
  };
  // Microseconds of gathers beside operations of the forward pass that follow their start and do not wait for
  // them, and of sums beside weight gradients.
  const auto overlaps = [&](const std::string& overlap) {
    const Finished done =
        trace({"train.device=checked", "dist.distributed_backend=nccl_stand_in",
               "ddp.data_parallel_sharding_strategy=optim_grads_params", "ddp.overlap_grad_reduce=" + overlap,
               "ddp.overlap_param_gather=" + overlap, "ddp.bucket_size=5000", kManyTransfers[0],
               kManyTransfers[1], "-o", overlap + ".json"});
    REQUIRE_MESSAGE(done.code == 0, done.err);
    CHECK_MESSAGE(contains(done.out, "on each of 2 ranks"), done.out);
    auto ranks = lanes_of(scratch.file(overlap + ".json"));
    REQUIRE(ranks.size() == 2);
    std::pair<double, double> both;
    for (auto& [rank, lanes] : ranks) {
      CAPTURE(rank);
      const Spans& transfers = lanes["transfers of `shard`"];
      CHECK(transfers.size() > 20);
      CHECK(lanes["host to device"].size() > 0);
      for (const char* name : {"forward", "backward", "weight gradients"}) CHECK(lanes[name].size() > 20);
      both.first +=
          overlap_of(during_gathers(lanes["forward"], lanes["transfers"], lanes["waits"]), transfers);
      both.second += overlap_of(without(lanes["weight gradients"], lanes["waits"]), transfers);
      // Both clocks begin before the first traced step.
      for (const Span& one : lanes["forward"]) CHECK((one.begin >= 0 && one.end >= one.begin));
    }
    return both;
  };
  const auto [gathers, sums] = overlaps("true");
  const auto [gathers_alone, sums_alone] = overlaps("false");
  MESSAGE("beside operations: gathers ", gathers, " us, sums ", sums, " us; without overlap ", gathers_alone,
          " and ", sums_alone);
  CHECK(gathers > 0);
  CHECK(gathers_alone == 0);
  CHECK(sums > 10 * sums_alone);
  // A pipeline has as many micro-batches as its stages need.
  const Finished piped = trace({"dist.pp=2", "model.num_layers=2", "-o", "pp.json"});
  REQUIRE_MESSAGE(piped.code == 0, piped.err);
  CHECK(lanes_of(scratch.file("pp.json")).size() == 2);
  // One error, whoever finds it.
  const Finished refused = trace({"-o", "pp.json/a.json"});
  CHECK_MESSAGE(refused.code == 2, refused.err);
  CHECK(contains(refused.err, "cannot create `pp.json/a.json`"));
}

TEST_CASE("SIGINT and SIGTERM to the parent: both ranks save, 75") {
  ScratchDirectory scratch;
  for (const int signal : {SIGINT, SIGTERM}) {
    const std::string name = "run" + std::to_string(signal);
    const Finished stopped =
        train_in(scratch, {"--nproc", "2", "train.train_iters=1000000", "--run-dir", name},
                 signal_at("step 2", signal));
    CHECK_MESSAGE(stopped.code == 75, stopped.err);
    CHECK(contains(stopped.err, "continue with"));
    const Finished on = train_in(scratch, {"train.train_iters=1000000", "train.exit_duration_in_mins=0.001",
                                           "--run-dir", name, "--resume"});
    CHECK_MESSAGE(on.code == 75, on.err);  // on one rank: the layout may change
  }
}

TEST_CASE("without train.exit_signal_handler the first signal to the parent ends both ranks, unsaved") {
  ScratchDirectory scratch;
  for (const int signal : {SIGINT, SIGTERM}) {
    const std::string name = "run" + std::to_string(signal);
    const Finished stopped =
        train_in(scratch,
                 {"--nproc", "2", "train.train_iters=1000000", "train.exit_signal_handler=false",
                  "checkpoint.save_interval=null", "--run-dir", name},
                 signal_at("step 2", signal));
    CHECK_MESSAGE(stopped.code == 128 + signal, stopped.err);
    CHECK_FALSE(contains(stopped.err, "continue with"));
    const std::filesystem::path checkpoints = scratch.file(name) + "/checkpoints";
    CHECK((!std::filesystem::exists(checkpoints) || std::filesystem::is_empty(checkpoints)));
  }
}

TEST_CASE("a signal while the ranks start is not lost") {
  ScratchDirectory scratch;
  for (const int delay_ms : {20, 60, 150, 300, 600}) {
    bool sent = false;
    const std::string name = "run" + std::to_string(delay_ms);
    const Finished stopped =
        train_in(scratch, {"--nproc", "2", "train.train_iters=1000000", "--run-dir", name},
                 [&](const std::string&, int) {  // the parent's notes come before it starts the ranks
                   if (sent) return 0;
                   sent = true;
                   ::usleep(static_cast<useconds_t>(delay_ms) * 1000);
                   return SIGTERM;
                 });
    CAPTURE(delay_ms);
    CHECK(sent);
    // 143: the parent had not yet begun.
    const bool begun = std::filesystem::exists(scratch.file(name) + "/run.json");
    CHECK_MESSAGE(stopped.code == (begun ? 75 : 143), stopped.err);
  }
}

static std::vector<int> ranks_of(int parent) {
  const auto launcher = children_of(parent);
  return launcher.empty() ? std::vector<int>{} : children_of(launcher.front());
}

// How often a text says something.
static int times(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Runs one function for each of two worlds, at the same time: they wait for time limits.
static std::array<Finished, 2> two_worlds(const std::function<Finished(size_t)>& run) {
  auto second = std::async(std::launch::async, run, 1);
  std::array<Finished, 2> ended;
  ended[0] = run(0);
  ended[1] = second.get();
  return ended;
}

TEST_CASE("a rank that dies or is stopped is named once, with what the others wait for: code 4") {
  ScratchDirectory scratch;
  for (const int signal : {SIGKILL, SIGSTOP}) {
    std::array<int, 2> victims{};
    const auto ended_with_victim = two_worlds([&](size_t which) {
      return train_in(scratch,
                      {"--nproc", "2", "train.train_iters=1000000", "resilience.timeout=2s", "--run-dir",
                       "run" + std::to_string(signal) + "-" + std::to_string(which)},
                      [&, which](const std::string& text, int parent) {
                        const auto ranks = ranks_of(parent);
                        if (victims[which] != 0 || !contains(text, "step 2") || ranks.size() != 2) return 0;
                        victims[which] = ranks[which];
                        ::kill(victims[which], signal);
                        return 0;
                      });
    });
    for (const size_t which : {0, 1}) {
      CAPTURE(signal);
      CAPTURE(which);
      const Finished& ended = ended_with_victim[which];
      CHECK(victims[which] != 0);
      CHECK_MESSAGE(ended.code == 4, ended.err);
      CHECK_MESSAGE(times(ended.err, "error: ") == 1, ended.err);
      CHECK_MESSAGE(contains(ended.err, signal == SIGKILL ? " is gone at step " : " is stopped at step "),
                    ended.err);
      CHECK_MESSAGE(contains(ended.err, "(process " + std::to_string(victims[which]) + ")"), ended.err);
      CHECK_MESSAGE(contains(ended.err, "of group `"), ended.err);
      if (signal == SIGKILL) CHECK_MESSAGE(contains(ended.err, "signal 9"), ended.err);
      CHECK(ended.seconds < 20);
    }
  }
}

// The same pause: longer than one time limit, shorter than the other.
TEST_CASE("resilience.timeout decides whether the others wait for a rank that pauses") {
  ScratchDirectory scratch;
  const std::array<std::string, 2> limits = {"1s", "60s"};
  std::array<int, 2> victims{};
  const auto ended = two_worlds([&](size_t world) {
    return train_in(scratch,
                    {"--nproc", "2", "train.train_iters=40", "train.exit_interval=20",
                     "resilience.timeout=" + limits[world], "--run-dir", "run" + limits[world]},
                    [&, world](const std::string& text, int parent) {
                      const auto ranks = ranks_of(parent);
                      int& victim = victims[world];
                      if (victim != 0 || !contains(text, "step 2") || ranks.size() != 2) return 0;
                      victim = ranks[1];
                      ::kill(victim, SIGSTOP);
                      ::usleep(6'000'000);
                      ::kill(victim, SIGCONT);
                      return 0;
                    });
  });
  CHECK(victims[0] != 0);
  CHECK(victims[1] != 0);
  CHECK_MESSAGE(ended[0].code == 4, ended[0].err);
  CHECK_MESSAGE(contains(ended[0].err, "(resilience.timeout 1.0 s)"), ended[0].err);
  CHECK_MESSAGE(ended[1].code == 75, ended[1].err);  // it goes on to its exit interval
  CHECK_MESSAGE(!contains(ended[1].err, "error: "), ended[1].err);
}

TEST_CASE("ranks of different recipes are refused before the first step: code 4, once") {
  ScratchDirectory scratch;
  scratch.write("own.yaml", "extends: quickstart\nrng: {seed: \"${env:OMPI_COMM_WORLD_NODE_RANK}\"}\n");
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = train_tiny({"--nproc", "2", "train.train_iters=3", "--run-dir", "a"});
  launch.arguments[1] = "./own.yaml";
  // For the parent; mpirun gives each rank its own.
  launch.environment = {"OMPI_COMM_WORLD_NODE_RANK=0"};
  const Finished ended = run(launch);
  CHECK_MESSAGE(ended.code == 4, ended.err);
  CHECK_MESSAGE(times(ended.err, "error: ") == 1, ended.err);
  CHECK_MESSAGE(contains(ended.err, "disagrees with rank 0 on host `"), ended.err);
  CHECK_MESSAGE(contains(ended.err, "about the recipe: `rng.seed = "), ended.err);
  CHECK_FALSE(std::filesystem::exists(scratch.file("a") + "/run.json"));
}

TEST_CASE("`mpirun … --nproc` is refused by rank 0 alone") {
  for (const char* rank : {"0", "1"}) {
    Launch launch;
    launch.arguments = train_tiny({"--nproc", "2"});
    launch.environment = {"OMPI_COMM_WORLD_SIZE=2", std::string("OMPI_COMM_WORLD_RANK=") + rank};
    const Finished ended = run(launch);
    CHECK(ended.code == 2);
    CHECK_MESSAGE(times(ended.err, "error: `--nproc` inside a world") == (*rank == '0' ? 1 : 0), ended.err);
  }
}

TEST_CASE("a second SIGTERM ends ranks that do not answer: code 143") {
  ScratchDirectory scratch;
  bool sent = false;
  const Finished ended = train_in(scratch, {"--nproc", "2", "train.train_iters=1000000", "--run-dir", "a"},
                                  [&](const std::string& text, int parent) {
                                    const auto ranks = ranks_of(parent);
                                    if (sent || !contains(text, "step 2") || ranks.size() != 2) return 0;
                                    sent = true;
                                    ::kill(ranks.back(), SIGSTOP);
                                    ::kill(parent, SIGTERM);
                                    ::usleep(300'000);
                                    return SIGTERM;
                                  });
  CHECK(sent);
  CHECK_MESSAGE(ended.code == 143, ended.err);
}

TEST_CASE("generate and eval share a model between ranks: the text and losses of one rank, printed once") {
  ScratchDirectory scratch;
  scratch.write("text.txt", "a text of more than the sixteen tokens of a window");
  const Finished trained =
      train_in(scratch, {"tokenizer.tokenizer_type=byte", "model.vocab_size=257", "train.train_iters=4",
                         "--nproc", "2", "dist.tp=2", "--run-dir", "r"});
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  const auto answer = [&](std::vector<std::string> arguments) {
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = std::move(arguments);
    return run(launch);
  };
  const std::vector<std::string> kGenerate = {"generate",      "r", "--prompt",    "ab", "--max-tokens", "13",
                                              "--temperature", "0", "--ignore-eod"};
  const std::vector<std::string> kEval = {"eval", "r", "--text", "text.txt", "--stride", "5"};
  for (const auto& command : {kGenerate, kEval}) {
    const Finished one = answer(command);
    CHECK_MESSAGE(one.code == 0, one.err);
    CHECK_FALSE(one.out.empty());
    for (const std::vector<std::string>& more :
         {std::vector<std::string>{"--nproc", "2"}, {"--nproc=2", "dist.tp=1", "train.threads=1"}}) {
      auto arguments = command;
      arguments.insert(arguments.end(), more.begin(), more.end());
      const Finished two = answer(arguments);
      if (more.size() > 2) {  // data parallelism is no way to share a model
        CHECK(two.code == 2);
        CHECK_MESSAGE(contains(two.err, "dist.tp=2 dist.pp=1"), two.err);
        CHECK_MESSAGE(times(two.err, "error: ") == 1, two.err);
      } else {
        CHECK_MESSAGE(two.code == 0, two.err);
        CHECK(two.out == one.out);
        CHECK_MESSAGE(two.err == one.err, two.err);
      }
    }
  }
  // There are no steps to end: the first signal ends the ranks.
  scratch.write("long.txt", std::string(4'000'000, 'x'));
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = {"eval", "r", "--text", "long.txt", "--stride", "1", "--nproc", "2", "--verbose"};
  std::thread interrupt;
  launch.on_error_text = [&](const std::string&, int process) {
    if (!interrupt.joinable())
      interrupt = std::thread([process] {
        std::this_thread::sleep_for(std::chrono::seconds(3));
        ::kill(process, SIGINT);
      });
    return 0;
  };
  const Finished interrupted = run(launch);
  CHECK_MESSAGE(interrupted.code == 130, interrupted.err);
  REQUIRE(interrupt.joinable());
  interrupt.join();

  const Finished piped = answer({"eval", "r", "--text", "-", "--nproc", "2"});
  CHECK(piped.code == 2);
  CHECK_MESSAGE(contains(piped.err, "standard input"), piped.err);
  // Found by the ranks, reported once.
  const Finished full =
      answer({"generate", "r", "--prompt", "more than the sixteen positions", "--nproc", "2"});
  CHECK(full.code == 2);
  CHECK_MESSAGE(times(full.err, "error: ") == 1, full.err);
}
