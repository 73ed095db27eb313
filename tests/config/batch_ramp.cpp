// The growing batch size against a transcription of Megatron's (make_batch_ramp.py).
#include "config/sections/batch_ramp.hpp"

#include <doctest/doctest.h>

#include <filesystem>

#include "base/file.hpp"
#include "base/json.hpp"
#include "support/paths.hpp"

using namespace capstan;
using config::BatchRamp;
using config::TrainConfig;

TEST_CASE("batch sizes grow as Megatron's, and count steps and samples") {
  const auto cases =
      json_of(read_file(std::filesystem::path(test::kSourceDirectory) / "tests/config/batch_ramp.json"));
  REQUIRE(cases.size() == 6);
  for (const auto& c : cases) {
    TrainConfig train;
    train.rampup_batch_size = c["ramp"].get<std::vector<int64_t>>();
    train.global_batch_size = c["global_batch_size"].get<int64_t>();
    CHECK(BatchRamp::problem(train) == "");
    const BatchRamp ramp(train);
    CHECK(ramp.grows());
    int64_t steps = 0;
    for (const auto& step : c["steps"]) {
      const auto consumed = step[0].get<int64_t>(), size = step[1].get<int64_t>();
      CHECK(ramp.size_at(consumed) == size);
      CHECK(ramp.samples_of(steps) == consumed);
      CHECK(ramp.steps_in(consumed) == steps);
      CHECK(ramp.steps_in(consumed + size - 1) == steps);
      ++steps;
    }
    CHECK(ramp.steps_in(c["train_samples"]) == c["iterations"].get<int64_t>());
  }
}

TEST_CASE("a constant batch size") {
  TrainConfig train;
  train.global_batch_size = 6;
  const BatchRamp ramp(train);
  CHECK(!ramp.grows());
  CHECK(ramp.size_at(0) == 6);
  CHECK(ramp.size_at(1000) == 6);
  CHECK(ramp.samples_of(7) == 42);
  CHECK(ramp.steps_in(41) == 6);
  CHECK(ramp.increments() == 0);
}
