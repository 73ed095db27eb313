// Training in fp16, on any number of ranks: it learns as fp32 does, a dynamic loss scale falls until
// gradients fit, layouts of data parallelism change nothing, and runs resume bitwise with their scale.
#include <doctest/doctest.h>

#include <cmath>

#include "support/errors.hpp"
#include "support/preset_recipe.hpp"
#include "support/running.hpp"
#include "support/sanitized.hpp"

using namespace capstan;
using namespace capstan::train;

namespace {

using test::resolve_preset;
using test::run;
using test::run_until;
using test::Running;
using test::world;

const std::string kScale = "mixed_precision.initial_loss_scale=";

// The mean of the last ten losses of a trace of losses and norms.
double last_losses(const std::vector<double>& trace) {
  double sum = 0;
  for (size_t i = trace.size() - 20; i < trace.size(); i += 2) sum += trace[i] / 10;
  return sum;
}
double largest_difference(const std::vector<double>& a, const std::vector<double>& b, size_t first) {
  REQUIRE(a.size() == b.size());
  double apart = 0;
  for (size_t i = first; i < a.size(); i += 2)
    apart = std::max(apart, std::abs(a[i] - b[i]) / std::abs(b[i]));
  return apart;
}

}  // namespace

TEST_CASE("fp16 learns as fp32 does, with FP8 GEMMs too") {
  // last_losses needs at least ten steps.
  constexpr int64_t kSteps = test::kSanitized ? 10 : 60;
  const std::vector<std::string> wide = {"model.hidden_size=64", "model.ffn_hidden_size=160",
                                         "model.kv_channels=16", "train.train_iters=60", kScale + "4096"};
  const auto expected =
      run(resolve_preset<test::Cpu>("fp32", std::vector<std::string>(wide.begin(), wide.end() - 1)), kSteps);
  CHECK((test::kSanitized || last_losses(expected) < 0.9 * expected[0]));
  const auto trace = run(resolve_preset<test::Cpu>("fp16_mixed", wide), kSteps);
  // One step begins with the same parameters but for their rounding to 11 bits.
  CHECK(trace[0] == doctest::Approx(expected[0]).epsilon(2e-4));
  CHECK(trace[1] == doctest::Approx(expected[1]).epsilon(2e-3));
  CHECK(trace[0] != expected[0]);
  double apart = 0;
  for (size_t i = 0; i < trace.size(); i += 2) apart += std::abs(trace[i] - expected[i]) / kSteps;
  MESSAGE("fp16: losses ", apart, " nats apart on average; the last ", last_losses(trace), " and ",
          last_losses(expected));
  CHECK(apart < 4e-3);
  CHECK(std::abs(last_losses(trace) - last_losses(expected)) < 2e-3);
  for (const std::string preset :
       {"fp16_with_fp8_delayed_scaling_mixed", "fp16_with_fp8_current_scaling_mixed",
        "fp16_with_fp8_subchannel_scaling_mixed", "fp16_with_mxfp8_mixed"}) {
    const auto rounded = run(resolve_preset<test::Cpu>(preset, wide), kSteps);
    // Roundings grow while the losses fall fast, and vanish where they have fallen.
    for (size_t i = 0; i < 8; i += 2)
      CHECK_MESSAGE(std::abs(rounded[i] - expected[i]) < 0.02, preset, ": step ", i / 2, ": ", rounded[i]);
    if (!test::kSanitized)
      CHECK_MESSAGE(std::abs(last_losses(rounded) - last_losses(expected)) < 0.01, preset, ": ",
                    last_losses(rounded));
  }
}

TEST_CASE_TEMPLATE("the loss scale falls until fp16 gradients fit; skipped steps change nothing else", D,
                   FAST_DEVICES) {
  const config::Config config =
      resolve_preset<D>("fp16_mixed", {"scheduler.lr_warmup_iters=0"});  // begins with 2^32
  Running r(config);
  const auto before = r.parameters();
  double scale = 4294967296.0;
  int overflows = 0;
  StepResult result = r.step();
  for (; result.overflow; result = r.step()) {
    ++overflows;
    REQUIRE(overflows < 40);
    CHECK(result.skipped);
    CHECK(std::isfinite(result.loss));
    CHECK(!std::isfinite(result.gradient_norm));
    CHECK(result.loss_scale == scale);
    // The first overflow uses up the hysteresis of 2.
    if (overflows >= 2) scale /= 2;
    CHECK(r.runner.state().loss_scale->scale == scale);
    CHECK(r.runner.state().schedule_samples == 0);
    CHECK(r.runner.optimizer().steps() == 0);
    CHECK(r.parameters() == before);
  }
  // The logits' gradients are up to scale / 512, with 288 tokens, and 65504 is the largest value of fp16.
  CHECK(overflows > 5);
  CHECK(scale > 1);
  CHECK(result.loss_scale == scale);
  CHECK(std::isfinite(result.gradient_norm));
  CHECK(r.parameters() != before);
  CHECK(r.runner.state().schedule_samples == *config.train.global_batch_size);
  const double first = result.loss;
  for (int i = 0; i < 12; ++i) result = r.step();
  CHECK(result.loss < first);
  CHECK(r.runner.state().step == overflows + 13);
}

TEST_CASE_TEMPLATE("a loss that is not finite ends a run in fp16: another scale would not change it", D,
                   EVERY_DEVICE) {
  const std::vector<std::string> far = {kScale + "1", "scheduler.lr_warmup_iters=0", "optimizer.lr=100",
                                        "optimizer.weight_decay=1e6", "optimizer.min_lr=0"};
  const auto steps = [](const config::Config& config) {
    Running r(config);
    StepResult result;
    for (int i = 0; i < 3; ++i) result = r.step();
    return result;
  };
  const std::string error = test::error_of([&] { steps(resolve_preset<D>("fp16_mixed", far)); });
  CHECK_MESSAGE(error.find("the loss is ") != std::string::npos, error);
  std::vector<std::string> regardless = far;
  regardless.push_back("resilience.check_for_nan=false");
  const StepResult result = steps(resolve_preset<D>("fp16_mixed", regardless));
  CHECK(!std::isfinite(result.loss));
  CHECK(result.skipped);
}

TEST_CASE("a static loss scale gives the update of scale 1 but for rounding") {
  const auto trained = [](const char* loss_scale, std::vector<double>& trace) {
    Running r(resolve_preset<test::Cpu>(
        "fp16_mixed", {std::string("mixed_precision.loss_scale=") + loss_scale, "~optimizer.adam_eps",
                       "optimizer.optimizer=sgd", "optimizer.lr=0.05", "optimizer.min_lr=0.005"}));
    for (int i = 0; i < 4; ++i) {
      const StepResult result = r.step();
      REQUIRE(!result.skipped);
      CHECK(result.loss_scale == std::stod(loss_scale));
      trace.insert(trace.end(), {result.loss, result.gradient_norm});
    }
    return r.parameters();
  };
  std::vector<double> one, trace;
  const auto expected = trained("1", one);
  for (const char* scale : {"64", "1000"}) {  // the second is no power of two
    trace.clear();
    const auto values = trained(scale, trace);
    CHECK(largest_difference(trace, one, 0) < 1e-4);
    CHECK(largest_difference(trace, one, 1) < 5e-3);
    double apart = 0;
    for (size_t i = 0; i < values.size(); ++i)
      apart = std::max(apart, static_cast<double>(std::abs(values[i] - expected[i])));
    // Four updates of up to 0.05 times a gradient of norm 1.
    CHECK(apart < 1e-4);
    CHECK(values != expected);
  }
}

TEST_CASE_TEMPLATE("sharding, recomputation, threads and the checked device keep the bits in fp16", D,
                   FAST_DEVICES) {
  const std::vector<std::string> base = {kScale + "1024"};
  const auto expected = run(resolve_preset<test::Reference<D>>("fp16_mixed", base), 4);
  const auto check = [&](const std::vector<std::string>& more, double allowed) {
    std::vector<std::string> overrides = base;
    overrides.insert(overrides.end(), more.begin(), more.end());
    const auto got = run(resolve_preset<D>("fp16_mixed", overrides), 4);
    CHECK(largest_difference(got, expected, 0) <= allowed);
    CHECK(largest_difference(got, expected, 1) <= allowed);
  };
  // On several ranks, sharded gradients are rounded to fp16 and summed after each micro-batch.
  const double several = world().size() > 1 ? 1e-3 : 0;
  check({}, 0);
  check({"ddp.data_parallel_sharding_strategy=optim"}, several);
  check({"ddp.data_parallel_sharding_strategy=optim_grads"}, several);
  check({"ddp.data_parallel_sharding_strategy=optim_grads_params"}, several);
  check(
      {"model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"},
      0);
  config::Config threads = resolve_preset<D>("fp16_mixed", base);
  threads.train.threads = 3;
  CHECK(run(threads, 4) == expected);
}

TEST_CASE_TEMPLATE("a run in fp16 resumes bitwise, amid overflows and after them", D, FAST_DEVICES) {
  const config::Config config = resolve_preset<D>("fp16_mixed", {kScale + "16777216"});
  constexpr int64_t kSteps = test::kSanitized ? 6 : 30;
  const auto full = run(config, kSteps);
  for (const int64_t saved : {3, 20}) {
    if (saved >= kSteps) continue;
    CAPTURE(saved);
    const test::SharedDirectory root;
    StepRunner runner(config, world());
    runner.initialize();
    run_until(runner, config, saved);
    const auto directory = test::save_in(root.path(), runner);
    StepRunner resumed(config, world());
    resumed.initialize();
    test::load_into(resumed, directory);
    REQUIRE(resumed.state().loss_scale);
    CHECK(*resumed.state().loss_scale == *runner.state().loss_scale);
    CHECK((resumed.optimizer().steps() < saved) == (resumed.state().loss_scale->scale < 16777216.0));
    const auto rest = run_until(resumed, config, kSteps);
    const std::vector<double> same(full.begin() + 2 * saved, full.end());
    REQUIRE(rest.size() == same.size());
    for (size_t i = 0; i < rest.size(); ++i)
      CHECK((rest[i] == same[i] || (std::isnan(rest[i]) && std::isnan(same[i]))));
  }
}
