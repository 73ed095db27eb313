// The bubble of a pipeline, as measured and as its schedule has it: bench, trace and the log of a run.
#include <doctest/doctest.h>

#include <sstream>

#include "base/json.hpp"
#include "process.hpp"

using namespace capstan::test;
using nlohmann::json;

namespace {

// Two stages of two layers each.
std::vector<std::string> two_stages(const std::vector<std::string>& command, int64_t micro_batches,
                                    const std::vector<std::string>& more = {}) {
  std::vector<std::string> words = command;
  words.insert(words.end(), {"--nproc", "2", "dist.pp=2", "train.micro_batch_size=1", "train.threads=1",
                             "train.global_batch_size=" + std::to_string(micro_batches)});
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

json bench_step(const std::vector<std::string>& words) {
  const Finished done = run(words);
  REQUIRE_MESSAGE(done.code == 0, done.err);
  return capstan::json_of(done.out)["step"];
}

}  // namespace

TEST_CASE("bench step: with fewer micro-batches the bubble of 1F1B is larger, measured and simulated") {
  const std::vector<std::string> command = {"bench", "step", "-r", "quickstart", "--json"};
  double few = 0;
  for (const int64_t micro_batches : {2, 16}) {
    CAPTURE(micro_batches);
    const json step = bench_step(two_stages(command, micro_batches));
    CHECK(step["micro_batches"] == micro_batches);
    const double measured = step["pipeline_bubble"]["measured"];
    // Of the work (P - 1)/M, which is (P - 1)/(M + P - 1) of the time.
    const double simulated = step["pipeline_bubble"]["simulated"], m = static_cast<double>(micro_batches);
    CHECK(simulated == doctest::Approx(1 / m));
    CHECK(simulated / (1 + simulated) == doctest::Approx(1 / (m + 1)));
    // Stages whose times differ, and transfers, add to the bubble and never shorten it; the margin is for
    // passes that other work on the machine makes longer.
    CHECK(measured > 0.5 * simulated);
    if (micro_batches == 2) few = measured;
    CHECK((micro_batches == 2 || measured < few));
  }
  CHECK_FALSE(bench_step({"bench", "step", "--json", "-r", "quickstart", "train.global_batch_size=2",
                          "train.micro_batch_size=1"})
                  .contains("pipeline_bubble"));
}

TEST_CASE("bench, trace and the log of a run report the bubble in the same words") {
  const ScratchDirectory scratch;
  const Finished bench = run(two_stages({"bench", "step", "-r", "quickstart"}, 4));
  REQUIRE_MESSAGE(bench.code == 0, bench.err);
  CHECK_MESSAGE(contains(bench.out, "training step of quickstart on 2 ranks: "), bench.out);
  const Finished trace = run_in(scratch, two_stages({"trace", "quickstart"}, 4));
  REQUIRE_MESSAGE(trace.code == 0, trace.err);
  const Finished train =
      train_in(scratch, {"--nproc", "2", "dist.pp=2", "model.num_layers=2", "train.micro_batch_size=1",
                         "train.global_batch_size=4", "train.train_iters=3", "--run-dir", "pipeline"});
  REQUIRE_MESSAGE(train.code == 0, train.err);
  for (const std::string& text : {bench.out, trace.out, train.err}) {
    CHECK_MESSAGE(contains(text, "pipeline bubble "), text);
    CHECK_MESSAGE(contains(text, "% measured, 25.0% simulated"), text);
  }

  // What the log says stands in metrics.jsonl and in `runs show`.
  const Finished shown = run_in(scratch, {"runs", "show", "pipeline", "--json"});
  REQUIRE_MESSAGE(shown.code == 0, shown.err);
  const json run_shown = capstan::json_of(shown.out)["run"];
  CHECK(run_shown["pipeline_bubble_simulated"] == 0.25);
  CHECK(run_shown["pipeline_bubble"].get<double>() > 0);
  CHECK(contains(run_in(scratch, {"runs", "show", "pipeline"}).out, "% measured, 25.0% simulated"));
  REQUIRE(train_in(scratch, {"train.train_iters=3", "--run-dir", "alone"}).code == 0);
  const Finished alone = run_in(scratch, {"runs", "show", "alone", "--json"});
  CHECK(capstan::json_of(alone.out)["run"]["pipeline_bubble"].is_null());
}

TEST_CASE("bench measures kernels in one process") {
  const Finished several = run({"bench", "--nproc", "2", "--seconds", "0.01"});
  CHECK(several.code == 2);
  CHECK_MESSAGE(contains(several.err, "capstan bench step"), several.err);
}
