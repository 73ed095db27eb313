// The growing batch size against a transcription of Megatron's (make_batch_ramp.py).
#include "config/sections/batch_ramp.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <random>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "support/paths.hpp"

using namespace capstan;
using config::BatchRamp;
using config::Config;

TEST_CASE("batch sizes grow as Megatron's, and count steps and samples") {
  const auto cases =
      json_of(read_file(std::filesystem::path(test::kSourceDirectory) / "tests/config/batch_ramp.json"));
  REQUIRE(cases.size() == 14);
  for (const auto& c : cases) {
    Config config;
    config.train.rampup_batch_size = c["ramp"].get<std::vector<int64_t>>();
    config.train.global_batch_size = c["global_batch_size"].get<int64_t>();
    config.train.decrease_batch_size_if_needed = c["unit"].get<int64_t>() > 1;
    config.dist.data_parallel_size = c["unit"].get<int64_t>();
    CHECK(BatchRamp::problem(config.train) == "");
    const BatchRamp ramp(config);
    CHECK(ramp.grows());
    int64_t steps = 0;
    for (const auto& step : c["steps"]) {
      const auto consumed = step[0].get<int64_t>(), size = step[1].get<int64_t>();
      CHECK(ramp.size_at(consumed) == size);
      CHECK(ramp.samples_of(steps) == consumed);
      CHECK(ramp.steps_in(c["train_samples"], consumed) == c["iterations"].get<int64_t>() - steps);
      CHECK(ramp.samples_of(1, consumed) == size);
      CHECK(ramp.steps_in(consumed) == steps);
      CHECK(ramp.steps_in(consumed + size - 1) == steps);
      ++steps;
    }
    CHECK(ramp.steps_in(c["train_samples"]) == c["iterations"].get<int64_t>());
  }
}

namespace {
Config growing(int64_t start, int64_t increment, int64_t samples, int64_t last) {
  Config config;
  config.train.rampup_batch_size = {start, increment, samples};
  config.train.global_batch_size = last;
  return config;
}
}  // namespace

TEST_CASE("steps are counted one size at a time, as one step at a time") {
  std::mt19937_64 random(7);
  const auto from = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int i = 0; i < 120; ++i) {
    const int64_t start = from(1, 20), increment = from(1, 20), last = start + increment * from(1, 30);
    const BatchRamp ramp(growing(start, increment, from(1, i % 2 == 0 ? 100 : 2000), last));
    CAPTURE(i);
    int64_t steps = 0, consumed = 0;
    bool agree = true;
    while (ramp.size_at(consumed) < last || steps % 3 != 0) {
      const int64_t size = ramp.size_at(consumed);
      agree = agree && ramp.samples_of(steps) == consumed && ramp.steps_in(consumed) == steps &&
              ramp.steps_in(consumed + size - 1) == steps;
      consumed += size, ++steps;
    }
    CHECK(agree);
  }
}

TEST_CASE("a ramp of any legal length is counted at once") {
  const BatchRamp slow(growing(1, 1, 1'000'000'000'000, 2));
  CHECK(slow.steps_in(1'000'000'000'000) == 1'000'000'000'000);
  CHECK(slow.steps_in(1'000'000'000'005) == 1'000'000'000'002);
  CHECK(slow.samples_of(999'999'999'999) == 999'999'999'999);
  CHECK(slow.samples_of(1'000'000'000'003) == 1'000'000'000'006);
  const int64_t longest = int64_t{1} << 60, largest = 1 << 30;
  const BatchRamp wide(growing(1, largest - 1, longest, largest));
  // A double has 53 bits: the last 64 samples count as all.
  CHECK(wide.steps_in(longest) == longest - 64);
  CHECK(wide.samples_of(int64_t{1} << 32) == int64_t{1} << 32);
  // The size is the number of samples consumed, and one more: each step doubles it.
  const BatchRamp fine(growing(1, 1, 1'000'000, 1'000'001));
  CHECK(fine.size_at(999'999) == 1'000'000);
  CHECK(fine.steps_in(1'000'000) == 19);
  CHECK(fine.samples_of(19) == 524'287);
}

TEST_CASE("invalid ramps say why") {
  CHECK(BatchRamp::problem(growing(1, 1, 10, 1'000'001).train) == "");
  CHECK(BatchRamp::problem(growing(1, 1, 10, 1'000'002).train) ==
        "grows in 1000001 increments, more than 1000000");
  CHECK(BatchRamp::problem(growing(1, 1, (int64_t{1} << 60) + 1, 2).train) ==
        "grows over 1152921504606846977 samples, more than 1152921504606846976");
  CHECK_THROWS_WITH_AS(BatchRamp(growing(4, 1, 10, 4)),
                       "train.rampup_batch_size starts with 4 samples, not below global_batch_size 4", Error);
}

TEST_CASE("a constant batch size") {
  Config config;
  config.train.global_batch_size = 6;
  const BatchRamp ramp(config);
  CHECK(!ramp.grows());
  CHECK(ramp.size_at(0) == 6);
  CHECK(ramp.size_at(1000) == 6);
  CHECK(ramp.samples_of(7) == 42);
  CHECK(ramp.steps_in(41) == 6);
  CHECK(ramp.increments() == 0);
}
