// The records of a run: means of an interval, rows of a run in several parts, the answer to a signal, and the
// states of ended runs.
#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>

#include "base/json.hpp"
#include "process.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

std::vector<json> logged_rows(const std::string& run) {
  std::vector<json> rows;
  std::istringstream text(read_text(run + "/metrics.jsonl"));
  for (std::string line; std::getline(text, line);)
    if (json row = capstan::json_of(line); !row.contains("event")) rows.push_back(std::move(row));
  return rows;
}

std::string state_of(const ScratchDirectory& scratch, const std::string& run) {
  return capstan::json_of(run_in(scratch, {"runs", "show", run, "--json"}).out)["run"]["state"];
}

int times(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("a row holds means over its interval, the step's own values beside them, and one throughput") {
  const ScratchDirectory scratch;
  REQUIRE(train_in(scratch, {"train.train_iters=10", "logger.log_interval=1", "--run-dir", "each"}).code ==
          0);
  const Finished fourth =
      train_in(scratch, {"train.train_iters=10", "logger.log_interval=4", "--run-dir", "fourth"});
  REQUIRE_MESSAGE(fourth.code == 0, fourth.err);
  const auto each = logged_rows(scratch.file("each")), rows = logged_rows(scratch.file("fourth"));
  REQUIRE(each.size() == 10);
  REQUIRE(rows.size() == 4);
  int64_t before = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t step = rows[i]["step"];
    CHECK(step == std::vector<int64_t>{1, 4, 8, 10}[i]);
    double loss = 0, norm = 0;
    for (int64_t s = before; s < step; ++s) {
      const json& own = each[static_cast<size_t>(s)];
      CHECK(own["loss"] == own["step_loss"]);
      CHECK(own["grad_norm"] == own["step_grad_norm"]);
      loss += own["loss"].get<double>(), norm += own["grad_norm"].get<double>();
    }
    const auto count = static_cast<double>(step - before);
    CHECK(rows[i]["loss"].get<double>() == doctest::Approx(loss / count).epsilon(1e-12));
    CHECK(rows[i]["grad_norm"].get<double>() == doctest::Approx(norm / count).epsilon(1e-12));
    CHECK(rows[i]["step_loss"] == each[static_cast<size_t>(step) - 1]["loss"]);
    CHECK(rows[i]["step_grad_norm"] == each[static_cast<size_t>(step) - 1]["grad_norm"]);
    const double tokens = each[0]["consumed_tokens"], seconds = rows[i]["step_seconds"];
    CHECK(rows[i]["tokens_per_second"].get<double>() * seconds == doctest::Approx(tokens).epsilon(1e-12));
    CHECK(rows[i]["tokens_per_second_per_rank"] == rows[i]["tokens_per_second"]);
    double phases = 0;
    for (const auto& [name, value] : rows[i].items())
      if (name.starts_with("seconds_")) phases += value.get<double>();
    CHECK(phases == doctest::Approx(seconds).epsilon(1e-9));
    // The same FLOPs in every row, and the header's.
    const double flops = rows[i]["tflops_per_rank"].get<double>() * 1e12 * seconds;
    CHECK(flops == doctest::Approx(rows[0]["tflops_per_rank"].get<double>() * 1e12 *
                                   rows[0]["step_seconds"].get<double>())
                       .epsilon(1e-9));
    CHECK(rows[i]["mfu"].get<double>() > 0);
    CHECK(rows[i]["mfu"].get<double>() <= 1);
    CHECK(rows[i]["mfu"].get<double>() * rows[i]["gemm_tflops_per_rank"].get<double>() ==
          doctest::Approx(rows[i]["tflops_per_rank"].get<double>()).epsilon(1e-9));
    before = step;
  }
  CHECK_MESSAGE(contains(fourth.err, "estimated time: about "), fourth.err);
  CHECK_MESSAGE(contains(fourth.err,
                         "at the measured GEMM throughput, other operations add to it; the progress line has "
                         "the measured time)"),
                fourth.err);
  std::string events;
  for (const auto& entry : fs::directory_iterator(scratch.file("fourth")))
    if (entry.path().filename().string().starts_with("events.out"))
      events += read_text(entry.path().string());
  for (const char* tag : {"train/loss", "train/grad_norm", "train/tokens_per_second", "train/mfu",
                          "train/tokens_per_second_per_rank", "train/tflops_per_rank"})
    CHECK_MESSAGE(times(events, tag) >= 10, tag);
  // Runs that were logged in other intervals are compared by the steps that both have.
  const Finished same = run_in(scratch, {"diff", "each", "fourth"});
  CHECK_MESSAGE(same.code == 0, same.out);
}

TEST_CASE("a run records the version and commit of the program") {
  const ScratchDirectory scratch;
  REQUIRE(train_in(scratch, {"train.train_iters=1", "--run-dir", "a"}).code == 0);
  const json run = capstan::json_of(read_text(scratch.file("a/version.json"))),
             program = capstan::json_of(run_in(scratch, {"version", "--json"}).out);
  CHECK(run["version"] == program["version"]);
  CHECK(run["commit"] == program["commit"]);
  CHECK(run["world"] == 1);
}

namespace {
void check_rows_of_parts(const std::vector<std::string>& base) {
  const ScratchDirectory scratch;
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), base.begin(), base.end());
    return train_in(scratch, more);
  };
  REQUIRE(with({"--run-dir", "uninterrupted"}).code == 0);
  for (const char* stop : {"train.exit_interval=6", "train.exit_interval=5"}) {
    CAPTURE(stop);
    const std::string name = std::string("parts-") + stop[std::string(stop).size() - 1];
    Finished part = with({"--run-dir", name, stop});
    for (int starts = 1; part.code == 75 && starts < 5; ++starts)
      part = with({"--run-dir", name, stop, "--resume"});
    REQUIRE_MESSAGE(part.code == 0, part.err);
    CHECK(contains(part.err, "as measured before the resume"));
    const auto uninterrupted = logged_rows(scratch.file("uninterrupted")),
               parts = logged_rows(scratch.file(name));
    REQUIRE(parts.size() == uninterrupted.size());
    for (size_t i = 0; i < uninterrupted.size(); ++i)
      for (const char* key : {"step", "loss", "grad_norm", "step_loss", "step_grad_norm", "consumed_tokens"})
        CHECK_MESSAGE(parts[i][key] == uninterrupted[i][key], key);
  }
}
}  // namespace

TEST_CASE("a run in parts has the rows of an uninterrupted one: the same steps, the same means to the bit") {
  check_rows_of_parts({"train.train_iters=14", "logger.log_interval=4"});
  // The first steps overflow.
  check_rows_of_parts({"train.train_iters=14", "logger.log_interval=4", "mixed_precision=fp16_mixed",
                       "mixed_precision.initial_loss_scale=16777216"});
}

TEST_CASE("fp16: an overflow is a warning with both scales, and the mean gradient norm leaves it out") {
  const ScratchDirectory scratch;
  const Finished trained =
      train_in(scratch, {"--run-dir", "r", "train.train_iters=16", "logger.log_interval=16",
                         "mixed_precision=fp16_mixed", "mixed_precision.initial_loss_scale=16777216"});
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  CHECK_MESSAGE(contains(trained.err,
                         "step 1: the gradients overflow at the loss scale 16777216; update skipped, loss "
                         "scale now 16777216"),
                trained.err);
  CHECK(contains(trained.err,
                 "step 2: the gradients overflow at the loss scale 16777216; update skipped, loss scale now "
                 "8388608"));
  const auto rows = logged_rows(scratch.file("r"));
  REQUIRE(rows.size() == 2);  // the first step and the last
  CHECK(rows[0]["grad_norm"].is_null());
  CHECK(rows[1]["step"] == 16);
  CHECK(rows[1]["loss_scale"].get<double>() < 16777216);
  CHECK(rows[1]["grad_norm"].get<double>() > 0);
}

TEST_CASE("resuming a finished run adds no point") {
  const ScratchDirectory scratch;
  for (const char* interval : {"3", "5", "2"}) {  // beyond, at and before the last step
    CAPTURE(interval);
    const std::string name = std::string("r") + interval;
    const std::vector<std::string> words{"train.train_iters=5",
                                         "checkpoint.save_interval=5",
                                         "validation.eval_iters=1",
                                         "--run-dir",
                                         name,
                                         std::string("validation.eval_interval=") + interval};
    REQUIRE(train_in(scratch, words).code == 0);
    const std::string before = read_text(scratch.file(name) + "/metrics.jsonl");
    std::vector<int> validated;
    std::istringstream text(before);
    for (std::string line; std::getline(text, line);)
      if (const json row = capstan::json_of(line); row.value("event", "") == "validation")
        validated.push_back(row["step"]);
    CHECK(validated == (std::string(interval) == "3"   ? std::vector<int>{3, 5}
                        : std::string(interval) == "5" ? std::vector<int>{5}
                                                       : std::vector<int>{2, 4, 5}));
    std::vector<std::string> again = words;
    again.push_back("--resume");
    const Finished resumed = train_in(scratch, again);
    CHECK_MESSAGE(resumed.code == 0, resumed.err);
    CHECK(read_text(scratch.file(name) + "/metrics.jsonl") == before);
    CHECK(!contains(resumed.err, "validation loss"));
  }
}

TEST_CASE(
    "ctrl-C is answered at once and once; the hint repeats --nproc; nothing stays in the temporary "
    "directory") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const ScratchDirectory scratch;
    fs::create_directory(scratch.file("tmp"));
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = train_tiny({"train.train_iters=1000000", "--run-dir", "r"});
    if (ranks > 1) launch.arguments.insert(launch.arguments.end(), {"--nproc", "2"});
    launch.environment = {"TMPDIR=" + scratch.file("tmp")};
    launch.on_error_text = signal_at("step 2", SIGINT);
    const Finished stopped = run(launch);
    CHECK_MESSAGE(stopped.code == 75, stopped.err);
    CHECK_MESSAGE(times(stopped.err, "stopping after this s") == 1, stopped.err);  // step or save
    CHECK_MESSAGE(times(stopped.err, "; a second signal stops at once\n") == 1, stopped.err);
    CHECK_MESSAGE(contains(stopped.err, "--nproc 2") == (ranks == 2), stopped.err);
    CHECK(state_of(scratch, "r") == "stopped");
    CHECK(fs::is_empty(scratch.file("tmp")));
  }
}

TEST_CASE("ctrl-C in the first step says that it is not timed, or its estimate; later a measured time") {
  const ScratchDirectory scratch;
  // Interrupts a run of long steps, this time after it has printed the text.
  const auto interrupt_at = [&](const std::string& text, const std::string& run_directory, int milliseconds) {
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = train_tiny({"train.train_iters=1000000", "train.micro_batch_size=1",
                                   "train.global_batch_size=3000", "--run-dir", run_directory});
    launch.on_error_text = signal_at(text, SIGINT, milliseconds);
    const Finished stopped = run(launch);
    CHECK_MESSAGE(stopped.code == 75, stopped.err);
    return stopped.err;
  };
  // On a busy machine the step may be over before the signal comes.
  std::string first;
  for (int attempt = 0; attempt < 6 && !contains(first, "stopped at step 1"); ++attempt)
    first = interrupt_at("estimated time: about", "first" + std::to_string(attempt), 0);
  CHECK_MESSAGE(contains(first, "stopped at step 1"), first);
  const bool is_told =
      contains(first, " step, the first to be timed; a second signal stops at once\n") ||
      contains(first, " by the estimate; a second signal stops at once\n") ||
      contains(first, "after the first step, which has not begun; a second signal stops at once\n");
  CHECK_MESSAGE(is_told, first);
  // Between the line of a step and the beginning of the next one the step is over, and nothing is left to
  // wait for: the signal comes later at each attempt.
  std::string later;
  for (int attempt = 0; attempt < 6 && !contains(later, "stopping after this step, about "); ++attempt)
    later = interrupt_at("step 2/", "later" + std::to_string(attempt), 40 * attempt);
  CHECK_MESSAGE(contains(later, "stopping after this step, about "), later);
}

namespace {

// Steps of the complete checkpoints of a run, and whether an incomplete one lies beside them.
std::pair<std::vector<int>, bool> checkpoints_of(const std::string& run) {
  std::vector<int> steps;
  bool incomplete = false;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(run + "/checkpoints", none)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("step-")) steps.push_back(std::stoi(name.substr(5)));
    incomplete = incomplete || name.starts_with(".tmp-step-");
  }
  std::sort(steps.begin(), steps.end());
  return {steps, incomplete};
}

}  // namespace

TEST_CASE("a second ctrl-C within a save abandons it and names the checkpoint from which the run goes on") {
  const ScratchDirectory scratch;
  // Large enough that a save takes a while.
  const std::vector<std::string> model = {"model.hidden_size=512", "model.num_attention_heads=8",
                                          "model.num_layers=12"};
  int abandoned = 0;
  for (int attempt = 0; attempt < 8 && abandoned == 0; ++attempt) {
    CAPTURE(attempt);
    const std::string name = "r" + std::to_string(attempt), run = scratch.file(name);
    std::vector<std::string> words = {"train.train_iters=1000000",
                                      "train.global_batch_size=1",
                                      "train.micro_batch_size=1",
                                      "checkpoint.save_interval=2",
                                      "--run-dir",
                                      name};
    words.insert(words.end(), model.begin(), model.end());
    int sent = 0;
    // The first signal after a step that is not saved, the second one as soon as the next save has begun.
    const Finished stopped = train_in(scratch, words, [&](const std::string& text, int) {
      if (sent == 0 && contains(text, "step 3/")) return ++sent, SIGINT;
      if (sent != 1 || !contains(text, "a second signal stops at once")) return 0;
      ++sent;
      for (int wait = 0; wait < 20'000; ++wait) {
        const auto [steps, incomplete] = checkpoints_of(run);
        if (incomplete || steps.size() > 1) break;
        ::usleep(500);
      }
      return SIGINT;
    });
    if (sent < 2 || stopped.code == 75) continue;  // the save was over before the second signal
    CHECK_MESSAGE(stopped.code == 130, stopped.err);
    const auto [steps, incomplete] = checkpoints_of(run);
    REQUIRE_FALSE(steps.empty());
    const std::string newest = "; the newest checkpoint is of step " + std::to_string(steps.back()) + "\n";
    CHECK_MESSAGE(contains(stopped.err, newest), stopped.err);
    CHECK_MESSAGE(contains(stopped.err, "stopped now, the save of step ") == incomplete, stopped.err);
    abandoned += incomplete;
    CHECK(state_of(scratch, name) == "killed");
    words.insert(words.end(), {"train.exit_interval=1", "--resume"});
    const Finished resumed = train_in(scratch, words);
    CHECK_MESSAGE(resumed.code == 75, resumed.err);
    CHECK_MESSAGE(contains(resumed.err, "stopped at step " + std::to_string(steps.back() + 1) + ":"),
                  resumed.err);
    CHECK_FALSE(checkpoints_of(run).second);
  }
  CHECK(abandoned == 1);
}

TEST_CASE("a second ctrl-C before the first checkpoint says that there is none; with --nproc as well") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const ScratchDirectory scratch;
    std::vector<std::string> words = {"train.train_iters=1000000", "train.micro_batch_size=1",
                                      "train.global_batch_size=200000", "--run-dir", "r"};
    if (ranks > 1) words.insert(words.end(), {"--nproc", "2"});
    int sent = 0;
    const Finished stopped = train_in(scratch, words, [&](const std::string& text, int) {
      if (sent == 0 && contains(text, "estimated time: about")) return ++sent, SIGINT;
      if (sent == 1 && contains(text, "a second signal stops at once")) return ++sent, SIGINT;
      return 0;
    });
    CHECK_MESSAGE(stopped.code == 130, stopped.err);
    CHECK_MESSAGE(times(stopped.err, "a second signal stops at once\n") == 1, stopped.err);
    CHECK_MESSAGE(times(stopped.err, "stopped now; the run has no checkpoint\n") == 1, stopped.err);
    if (ranks > 1)
      CHECK(contains(run_in(scratch, {"runs", "show", "r"}).out, "killed: ended at once by a second signal"));
  }
}

TEST_CASE(
    "ended runs have distinct states; a killed rank or parent leaves nothing in the temporary directory") {
  const ScratchDirectory scratch;
  REQUIRE(train_in(scratch, {"train.train_iters=2", "--run-dir", "finished"}).code == 0);
  CHECK(state_of(scratch, "finished") == "finished");
  const Finished failed = train_in(
      scratch, {"train.train_iters=200", "optimizer.lr=100", "optimizer.clip_grad=0",
                "scheduler.lr_warmup_fraction=0.5", "resilience.loss_spike_factor=1.5",
                "resilience.spike_window=8", "resilience.loss_spike_action=skip", "--run-dir", "failed"});
  CHECK_MESSAGE(failed.code == 1, failed.err);
  CHECK(state_of(scratch, "failed") == "failed");
  const auto kill_once = signal_at("step 2", SIGKILL);
  const Finished killed = train_in(scratch, {"train.train_iters=1000000", "--run-dir", "killed"}, kill_once);
  CHECK(killed.code == 128 + SIGKILL);
  CHECK(state_of(scratch, "killed") == "killed");
  CHECK(contains(run_in(scratch, {"runs", "show", "killed"}).out,
                 "killed: no reason recorded; for example SIG"));
  const std::string listed = run_in(scratch, {"runs", "ls", "."}).out;
  for (const char* state : {"finished", "failed", "killed"}) CHECK(contains(listed, state));
  CHECK(train_in(scratch, {"train.train_iters=1000000", "train.exit_duration_in_mins=0.001", "--run-dir",
                           "killed", "--resume"})
            .code == 75);
  CHECK(state_of(scratch, "killed") == "stopped");
  CHECK(contains(read_text(scratch.file("killed/log.txt")), "was killed"));

  fs::create_directory(scratch.file("tmp"));
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = train_tiny({"train.train_iters=1000000", "--run-dir", "rank", "--nproc", "2"});
  launch.environment = {"TMPDIR=" + scratch.file("tmp")};
  bool sent = false;
  launch.on_error_text = [&](const std::string& text, int parent) {
    const auto launcher = children_of(parent);
    const auto ranks = launcher.empty() ? std::vector<int>{} : children_of(launcher.front());
    if (sent || !contains(text, "step 2") || ranks.size() != 2) return 0;
    sent = true;
    ::kill(ranks[1], SIGKILL);
    return 0;
  };
  CHECK(run(launch).code == 4);
  CHECK(state_of(scratch, "rank") == "killed");
  const std::string shown = run_in(scratch, {"runs", "show", "rank"}).out;
  CHECK_MESSAGE(contains(shown, "killed: rank 1"), shown);
  CHECK_MESSAGE(contains(shown, "ended by signal 9"), shown);
  CHECK(fs::is_empty(scratch.file("tmp")));

  launch.arguments = train_tiny({"train.train_iters=1000000", "--run-dir", "parent", "--nproc", "2"});
  launch.on_error_text = kill_once;
  CHECK(run(launch).code == 128 + SIGKILL);
  for (int wait = 0; wait < 200 && !fs::is_empty(scratch.file("tmp")); ++wait) ::usleep(100'000);
  CHECK(fs::is_empty(scratch.file("tmp")));
}

TEST_CASE("a signal within an evaluation is answered at once, and the run stops after it") {
  const ScratchDirectory scratch;
  // Once the evaluation has begun, which takes some time on a busy machine.
  const auto interrupt_after = [&](int milliseconds) {
    return train_in(scratch,
                    {"train.train_iters=1000000", "validation.eval_interval=2", "validation.eval_iters=3000",
                     "--run-dir", "r" + std::to_string(milliseconds)},
                    signal_at("step 2/", SIGINT, milliseconds));
  };
  // A signal that comes before the evaluation of step 2, or after it, says nothing here.
  const auto was_within = [](const Finished& run) {
    return contains(run.err, "stopping after this evaluation") && contains(run.err, "stopped at step 2: ");
  };
  Finished stopped = interrupt_after(100);
  for (const int wait : {50, 200, 25, 400, 0, 800})
    if (!was_within(stopped)) stopped = interrupt_after(wait);
  CHECK_MESSAGE(stopped.code == 75, stopped.err);
  const size_t answer = stopped.err.find("stopping after this evaluation; a second signal stops at once\n");
  REQUIRE_MESSAGE(answer != std::string::npos, stopped.err);
  CHECK_MESSAGE(stopped.err.find("validation loss") > answer, stopped.err);
  CHECK_MESSAGE(contains(stopped.err, "stopped at step 2: "), stopped.err);
}

TEST_CASE("runs show says what the log says: validation, data, seed, layout, tokens, memory") {
  const ScratchDirectory scratch;
  const Finished trained = train_in(scratch, {"train.train_iters=3", "validation.eval_interval=2",
                                              "validation.eval_iters=1", "rng.seed=77", "--run-dir", "r"});
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  const std::string shown = run_in(scratch, {"runs", "show", "r"}).out;
  const Finished no_run = run_in(scratch, {"runs", "show", "."});
  CHECK(no_run.code == 2);
  CHECK_MESSAGE(contains(no_run.err, "`.` is a directory of runs, not a run"), no_run.err);
  std::filesystem::create_directory(scratch.file("empty"));
  const std::string empty = run_in(scratch, {"runs", "show", "empty"}).err;
  CHECK_MESSAGE(contains(empty, "`empty` is no run directory: it has no run.json"), empty);
  const auto rows = logged_rows(scratch.file("r"));
  for (const char* text : {"mock data", "77", "dp1, 1 rank"}) CHECK_MESSAGE(contains(shown, text), shown);
  // "step 3 | validation loss 4.1234 | perplexity 61.77" and "| 1.2 MiB |" of the last step.
  const size_t at = trained.err.rfind("validation loss ");
  REQUIRE(at != std::string::npos);
  CHECK_MESSAGE(contains(shown, "loss " + trained.err.substr(at + 16, 6)), shown);
  const size_t memory = shown.find("memory");
  REQUIRE(memory != std::string::npos);
  std::string size = shown.substr(memory + 6, shown.find(',', memory) - memory - 6);
  size.erase(0, size.find_first_not_of(' '));
  CHECK_MESSAGE(contains(trained.err, "| " + size + " |"), shown);
  const json run = capstan::json_of(run_in(scratch, {"runs", "show", "r", "--json"}).out)["run"];
  CHECK(run["seed"] == 77);
  CHECK(run["tokens"] == rows.back()["consumed_tokens"]);
  CHECK(run["validation_step"] == 3);
  CHECK(run["layout"] == "dp1");
  CHECK(run["test_loss"].is_null());  // mock data have no test part
  // The estimates, beside what the first steps took.
  CHECK_MESSAGE(contains(trained.err, "\nmemory: " + size + " measured, "), trained.err);
  CHECK(run["memory_estimated_bytes"].get<double>() ==
        doctest::Approx(run["memory_bytes"].get<double>()).epsilon(0.02));
  CHECK(run["first_steps_seconds"].get<double>() > 0);
  CHECK(run["step_estimated_seconds"].is_null());
}

// A cluster file of CPUs with this memory.
static std::string cluster_of(const std::string& memory) {
  return "gpu: mine\ndevice: cpu\nmemory: 1GiB\nusable_memory: " + memory +
         "\nbf16_tflops: 0.1\nfp32_tflops: 0.1\nmemory_bandwidth: 10\nmultiprocessors: 1\n"
         "gpus_per_node: 1\nintra_bandwidth: 5\ninter_bandwidth: 5\n";
}

TEST_CASE("a run that its cluster does not fit is refused with overrides that fit it, or forced") {
  const ScratchDirectory scratch;
  // The memory of kernels depends on the processor: the limit is taken from the error for a micro-batch of 1.
  const std::vector<std::string> large = {"train.micro_batch_size=4", "train.global_batch_size=4",
                                          "train.train_iters=1", "--cluster", "./mine.yaml"};
  const auto with = [&](std::vector<std::string> words, const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  scratch.write("mine.yaml", cluster_of("1KiB"));
  const Finished least = train_in(scratch, with(large, {"train.micro_batch_size=1"}));
  CHECK(least.code == 3);
  const size_t at = least.err.find("a step needs ");
  REQUIRE_MESSAGE(at != std::string::npos, least.err);
  CHECK_MESSAGE(contains(least.err, " and the cluster ./mine.yaml allows 1.00 KiB"), least.err);
  CHECK_MESSAGE(contains(least.err, "no overrides that were tried fit"), least.err);
  const double kib = std::stod(least.err.substr(at + 13));
  scratch.write("mine.yaml", cluster_of(std::to_string(static_cast<int64_t>(kib) + 2) + "KiB"));
  for (const std::vector<std::string>& ranks :
       {std::vector<std::string>{"--run-dir", "one"},
        {"--run-dir", "two", "--nproc", "2", "dist.pp=2", "model.num_layers=2"}}) {
    const Finished refused = train_in(scratch, with(large, ranks));
    CHECK(refused.code == 3);
    CHECK_MESSAGE(contains(refused.err, "train.micro_batch_size=1"), refused.err);
    CHECK_MESSAGE(contains(refused.err, "`capstan train --force` starts the run all the same"), refused.err);
    CHECK(refused.err.find("error: ") == refused.err.rfind("error: "));
    CHECK_FALSE(fs::exists(scratch.file(ranks[1])));
    const Finished forced = train_in(scratch, with(with(large, ranks), {"--force"}));
    CHECK_MESSAGE(forced.code == 0, forced.err);
    CHECK_MESSAGE(contains(forced.err, "; started all the same"), forced.err);
  }
  // The plan says the same of the cluster.
  std::vector<std::string> plan =
      train_tiny({"train.micro_batch_size=4", "train.global_batch_size=4", "--cluster", "./mine.yaml"});
  plan[0] = "plan";
  CHECK(run_in(scratch, plan).code == 3);
  const Finished fits = train_in(scratch, with(large, {"train.micro_batch_size=1"}));
  CHECK_MESSAGE(fits.code == 0, fits.err);
}

TEST_CASE("a run that does not fit is refused, or forced; the estimated time is that of a plan") {
  const ScratchDirectory scratch;
  scratch.write("mine.yaml", cluster_of("1GiB"));
  const std::vector<std::string> small = {"train.train_iters=3", "resilience.memory_limit=100KiB",
                                          "--run-dir", "r"};
  const Finished refused = train_in(scratch, small);
  CHECK(refused.code == 3);
  CHECK_MESSAGE(contains(refused.err, "`capstan train --force` starts the run all the same"), refused.err);
  CHECK_FALSE(fs::exists(scratch.file("r")));
  std::vector<std::string> forced = small;
  forced.insert(forced.end(), {"--force", "--cluster", "./mine.yaml"});
  const Finished trained = train_in(scratch, forced);
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  CHECK_MESSAGE(contains(trained.err, "resilience.memory_limit allows 100.0 KiB; started all the same"),
                trained.err);
  CHECK_MESSAGE(contains(trained.err, " s estimated for ./mine.yaml\n"), trained.err);
  CHECK_MESSAGE(contains(trained.err, " s a step by the formula of `capstan plan` for ./mine.yaml; "),
                trained.err);
  const json run = capstan::json_of(run_in(scratch, {"runs", "show", "r", "--json"}).out)["run"];
  std::vector<std::string> words = train_tiny({"--cluster", "./mine.yaml", "--json"});
  words[0] = "plan";
  const json plan = capstan::json_of(run_in(scratch, words).out);
  CHECK(run["step_estimated_seconds"].get<double>() ==
        doctest::Approx(plan["step_seconds"].get<double>()).epsilon(1e-6));
  CHECK(run["cluster"] == "./mine.yaml");
  // The plan of a cluster of CPUs has the memory of the CPU's kernels.
  CHECK(plan["memory_bytes"]["total"] == run["memory_estimated_bytes"]);
  CHECK(train_in(scratch, {"--cluster", "h10", "--run-dir", "s"}).code == 2);
}

TEST_CASE("runs show says how far a run came that stopped between two logged steps") {
  const ScratchDirectory scratch;
  const Finished trained = train_in(
      scratch, {"train.train_iters=9", "train.exit_interval=7", "logger.log_interval=5", "--run-dir", "r"});
  REQUIRE_MESSAGE(trained.code == 75, trained.err);
  const json run = capstan::json_of(run_in(scratch, {"runs", "show", "r", "--json"}).out)["run"];
  CHECK(run["step"] == 7);
  CHECK(run["logged_step"] == 5);
  const std::string shown = run_in(scratch, {"runs", "show", "r"}).out;
  CHECK_MESSAGE(contains(shown, "step         7\n"), shown);
  CHECK_MESSAGE(contains(shown, ", step 5\n"), shown);
  const std::string listed = run_in(scratch, {"runs", "ls", "."}).out;
  CHECK_MESSAGE(contains(listed, ", step 5 "), listed);
  for (const char* command : {"show", "plot"}) {
    const Finished directory = run_in(scratch, {"runs", command, "."});
    CHECK(directory.code != 0);
    CHECK_MESSAGE(contains(directory.err, "`.` is a directory of runs"), directory.err);
  }
}
