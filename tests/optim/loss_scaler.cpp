// Loss scales against a transcription of Megatron's scaler (make_loss_scaler.py).
#include "optim/loss_scaler.hpp"

#include <doctest/doctest.h>

#include <filesystem>

#include "base/file.hpp"
#include "base/json.hpp"
#include "support/paths.hpp"

using namespace capstan;
using optim::LossScale;
using optim::LossScaler;

TEST_CASE("a dynamic loss scale follows Megatron's scaler") {
  const auto cases =
      json_of(read_file(std::filesystem::path(test::kSourceDirectory) / "tests/optim/loss_scaler.json"));
  REQUIRE(cases.size() == 5);
  for (const auto& c : cases) {
    config::MixedPrecisionConfig config;
    config.initial_loss_scale = c["initial"];
    config.min_loss_scale = c["minimum"];
    config.loss_scale_window = c["window"];
    config.hysteresis = c["hysteresis"];
    const LossScaler scaler(config);
    CHECK(scaler.is_dynamic());
    LossScale state = scaler.initial();
    CHECK(state.scale == config.initial_loss_scale);
    int overflows = 0;
    for (const auto& step : c["steps"]) {
      const bool overflow = step[0].get<int>() != 0;
      overflows += overflow ? 1 : 0;
      scaler.update(state, overflow);
      CHECK(state == LossScale{.scale = step[1],
                               .clean_steps = step[2].get<int64_t>(),
                               .overflows_left = step[3].get<int64_t>()});
    }
    CHECK(overflows > 5);
  }
}

TEST_CASE("a static loss scale never changes") {
  config::MixedPrecisionConfig config;
  config.loss_scale = 128.0;
  const LossScaler scaler(config);
  CHECK(!scaler.is_dynamic());
  LossScale state = scaler.initial();
  for (int step = 0; step < 5000; ++step) scaler.update(state, step % 3 == 0);
  CHECK(state == scaler.initial());
  CHECK(state.scale == 128);
}
