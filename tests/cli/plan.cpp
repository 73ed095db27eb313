// capstan plan, as a user runs it.
#include <doctest/doctest.h>

#include <algorithm>

#include "base/json.hpp"
#include "process.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::test;

TEST_CASE("a plan says whether it fits, how fast it is, and what limits it") {
  const auto plan = run({"plan", "llama3-8b"});
  CHECK(plan.code == 0);
  CHECK(holds(plan.out, "8.03B parameters, on h100"));
  CHECK(holds(plan.out, "fits: pipeline rank 0 needs "));
  CHECK(holds(plan.out, "exact: the trainer's step on the meta device"));
  CHECK(holds(plan.out, "causal attention), MFU "));
  CHECK(holds(plan.out, "note: times are not calibrated on this cluster"));
  CHECK(holds(plan.out, "limits:\n  matrix products: "));
}

TEST_CASE("the exact memory of a plan is that of show --step for a GPU") {
  const auto plan = run({"plan", "llama3-8b", "--json"});
  REQUIRE(plan.code == 0);
  const Json object = json_of(plan.out);
  CHECK(object["schema"] == "capstan.plan/1");
  CHECK(object["fits"] == true);
  CHECK(object["memory_exact"] == true);
  const auto show = run({"show", "llama3-8b", "--step", "train.device=cuda"});
  REQUIRE(show.code == 0);
  const double gib = object["memory_bytes"]["total"].get<double>() / (1 << 30);
  const size_t at = show.out.find("largest: rank 0: ");
  REQUIRE(at != std::string::npos);
  CHECK(std::stod(show.out.substr(at + 17)) == doctest::Approx(gib).epsilon(0.002));
  // The parts add up to the step, and the ranges hold the figures.
  double sum = 0;
  for (const auto& part : object["parts"]) sum += part["seconds"].get<double>();
  const auto seconds = object["step_seconds"].get<double>();
  CHECK(sum == doctest::Approx(seconds).epsilon(1e-6));
  CHECK(object["step_seconds_range"][0] < seconds);
  CHECK(object["step_seconds_range"][1] > seconds);
  CHECK(object["mfu"].get<double>() > 0.3);
  CHECK_FALSE(object["limits"].empty());
}

TEST_CASE("a plan that does not fit ends with code 3 and overrides that fit") {
  const auto plan = run({"plan", "llama3-8b", "--cluster", "l40s"});
  CHECK(plan.code == 3);
  CHECK(holds(plan.out, "does not fit: pipeline rank 0 needs "));
  CHECK(holds(plan.out, "fits with:"));
  CHECK(holds(plan.err, "the run does not fit: memory: pipeline rank 0 needs "));
  const auto again = run({"plan", "llama3-8b", "--cluster", "l40s", "--json"});
  CHECK(again.code == 3);
  const Json object = json_of(again.out);
  CHECK(object["fits"] == false);
  REQUIRE_FALSE(object["changes"].empty());
  // The first of them does.
  std::vector<std::string> words = {"plan", "llama3-8b", "--cluster", "l40s"};
  for (const auto& one : object["changes"][0]["overrides"]) words.push_back(one.get<std::string>());
  CHECK(run(words).code == 0);
}

TEST_CASE("wrong clusters and numbers of GPUs are errors of the command line") {
  const auto unknown = run({"plan", "llama3-8b", "--cluster", "h10"});
  CHECK(unknown.code == 2);
  CHECK(holds(unknown.err, "not found: cluster = h10"));
  CHECK(holds(unknown.err, "did you mean `h100`?"));
  const auto gpus = run({"plan", "llama3-8b", "--gpus", "7"});
  CHECK(gpus.code == 2);
  CHECK(holds(gpus.err, "--gpus"));
  const TemporaryDirectory directory;
  const std::string file = (directory.path() / "mine.yaml").string();
  spill(file, "gpu: mine\nmemorry: 8GiB\n");
  const auto wrong = run({"plan", "llama3-8b", "--cluster", file});
  CHECK(wrong.code == 2);
  CHECK(holds(wrong.err, "mine.yaml:2:1: unknown key `cluster.memorry`"));
  const auto format =
      run({"plan", "llama3-8b", "--cluster", "mi300x", "mixed_precision=bf16_with_nvfp4_mixed"});
  CHECK(format.code == 2);
  CHECK(holds(format.err, "`fp4_tflops`"));
}

#if CAPSTAN_TIMED
TEST_CASE("a plan of 1024 GPUs by formula takes less than 100 ms") {
  std::vector<double> times;
  for (int i = 0; i < 9; ++i)
    times.push_back(run({"plan", "llama3.1-405b", "--memory", "formula"}).cpu_seconds);
  std::sort(times.begin(), times.end());
  MESSAGE("plan of 1024 GPUs: " << 1e3 * times[4] << " ms");
  CHECK(times[4] < 0.1);
}
#endif
