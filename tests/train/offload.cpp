// Training with saved activations in host memory: the same bits, memory as estimated, transfers beside
// kernels.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "checkpoint/reader.hpp"
#include "models/registry.hpp"
#include "support/devices.hpp"
#include "support/preset_recipe.hpp"
#include "support/sanitized.hpp"
#include "support/worlds.hpp"
#include "train/setup/offload.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;
using test::world;

namespace {

struct Trained {
  // Losses and gradient norms, then the parameters.
  std::vector<double> numbers;
  std::vector<std::vector<float>> parameters;
  MemoryUse device, host;
  int64_t copied_to_host = 0;
};

std::vector<std::vector<float>> parameters_of(const StepRunner& runner) {
  std::vector<std::vector<float>> values;
  for (const auto& shard : const_cast<StepRunner&>(runner).store().parameter_shards())
    values.push_back(shard.values().to_floats());
  return values;
}

Trained run_steps(const config::Config& config, int steps) {
  StepRunner runner(config, world());
  runner.initialize();
  const auto data = open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  StepTimers timers;
  Trained trained;
  for (int i = 0; i < steps; ++i) {
    timers.start_step();
    const int64_t waits = runner.device().host_waits();
    const StepResult result = runner.train_step(loader, timers);
    CHECK(runner.device().host_waits() == waits + 1);
    trained.numbers.push_back(result.loss);
    trained.numbers.push_back(result.gradient_norm);
  }
  trained.parameters = parameters_of(runner);
  trained.device = runner.device().memory();
  trained.host = runner.device().memory(MemoryKind::host);
  trained.copied_to_host = runner.device().copied_bytes(Queue::device_to_host);
  return trained;
}

config::Config offloaded(config::Config config, int64_t layers) {
  config.model.cpu_offloading = true;
  config.model.cpu_offloading_num_layers = layers;
  return config;
}

struct Variant {
  const char* preset;
  std::vector<std::string> overrides;
};
const std::vector<Variant>& variants() {
  static const std::vector<Variant> list = {
      {"bf16_mixed", {}},
      {"fp16_mixed", {"mixed_precision.initial_loss_scale=1024"}},
      {"fp32", {"model.hidden_dropout=0.1", "model.attention_dropout=0.1"}},
      {"fp32", {"model.recompute_granularity=selective", "model.recompute_modules=[core_attn,mlp]"}},
      {"bf16_mixed",
       {"model.recompute_granularity=full", "model.recompute_method=uniform",
        "model.recompute_num_layers=2"}},
      {"fp32",
       {"model.recompute_granularity=full", "model.recompute_method=block", "model.recompute_num_layers=1"}},
      {"bf16_mixed", {"mixed_precision.fp8=hybrid", "mixed_precision.fp8_recipe=mxfp8"}},
      {"bf16_mixed", {"peft=lora", "peft.random_base=true"}},
  };
  return list;
}
// Whether D has the precision of a variant.
template <class D>
bool runs_on(const Variant& variant) {
  return std::ranges::all_of(variant.overrides, [](const std::string& text) {
    return !text.starts_with("mixed_precision.fp8_recipe=") || test::multiplies<D>(text);
  });
}

}  // namespace

TEST_CASE_TEMPLATE("a step has the same bits with offloaded activations, and less device memory", D,
                   OWN_MEMORY_DEVICES) {
  for (const Variant& variant : variants()) {
    CAPTURE(variant.preset);
    CAPTURE(variant.overrides);
    if (!runs_on<D>(variant)) continue;
    // Under sanitizers the CUDA kernels run in test_simulated alone, and few of the variants, whose code is
    // the same.
    const bool first = &variant == &variants()[0], full = &variant == &variants()[4];
    if (D::kSlow ? test::kSanitized || (!first && !full) : test::kSanitized && !first && !full) continue;
    const config::Config config = test::resolve_preset<D>(variant.preset, variant.overrides, 5);
    const int steps = D::kSlow ? 1 : 2;
    const Trained expected = run_steps(config, steps);
    for (const int64_t layers : {1, 4}) {
      CAPTURE(layers);
      const Trained found = run_steps(offloaded(config, layers), steps);
      CHECK(found.numbers == expected.numbers);
      CHECK(found.parameters == expected.parameters);
      CHECK(found.copied_to_host > expected.copied_to_host);
      // The memory that recomputation saves is small beside a layer's own backward pass.
      if (layers == 4 && !config.model.recompute_granularity) CHECK(found.device.peak < expected.device.peak);
    }
  }
}

namespace {

// The step fails in the allocator, with what is in use by category.
void check_out_of_memory(config::Config config, int64_t limit) {
  config.resilience.memory_limit = config::Bytes{limit};
  try {
    run_steps(config, 2);
    FAIL("must not fit");
  } catch (const Error& error) {
    const std::string text = error.what();
    INFO(text);
    CHECK(error.code() == ErrorCode::no_fit);
    CHECK(text.starts_with("out of memory on " + std::string(config::enum_name(config.train.device)) + ": "));
    CHECK(text.find(" in use (parameters ") != std::string::npos);
    CHECK(text.find("; resilience.memory_limit allows ") != std::string::npos);
    CHECK((text.find(" for moments ") != std::string::npos || text.find("in step 1") != std::string::npos));
    CHECK(error.help().find("model.recompute_granularity=full") != std::string::npos);
  }
}

}  // namespace

TEST_CASE_TEMPLATE(
    "under a limit of device memory an offload trains with the same losses, the plain step fails", D,
    OWN_MEMORY_DEVICES) {
  if (D::kSlow && test::kSanitized) return;
  const int steps = D::kSlow ? 1 : 2;
  for (const bool activations : {true, false}) {
    CAPTURE(activations);
    config::Config config, smaller;
    // Memory grows by up to 2 MiB: as many layers as make a difference.
    for (int64_t layers = 5; layers < 20; ++layers) {
      config = smaller = test::resolve_preset<D>("fp32", {}, layers);
      if (activations)
        smaller = offloaded(config, layers - 1);
      else
        smaller.optimizer.optimizer_cpu_offload = true;
      if (estimate_step(smaller).memory.reserved < estimate_step(config).memory.reserved) break;
    }
    CAPTURE(config.model.num_layers);
    const Trained plain = run_steps(config, steps);
    const int64_t limit = run_steps(smaller, steps).device.reserved;
    REQUIRE(limit < plain.device.reserved);
    smaller.resilience.memory_limit = config::Bytes{limit};
    const Trained limited = run_steps(smaller, steps);
    CHECK(limited.numbers == plain.numbers);
    CHECK(limited.parameters == plain.parameters);
    CHECK(limited.device.reserved <= limit);
    check_out_of_memory(config, limit);
  }
}

TEST_CASE("the CPU's memory has a limit, and that of the host on other devices") {
  config::Config config = test::resolve_preset<test::Cpu>("fp32", {"train.device=cpu"}, 5);
  const Trained plain = run_steps(config, 2);
  config.resilience.memory_limit = config::Bytes{plain.device.reserved};
  CHECK(run_steps(config, 2).numbers == plain.numbers);
  check_out_of_memory(config, plain.device.reserved - (64 << 10));

  config::Config checked = offloaded(test::resolve_preset<test::Checked>("fp32", {}, 5), 4);
  const int64_t host = run_steps(checked, 2).host.reserved;
  checked.resilience.memory_limit_host = config::Bytes{host};
  CHECK(run_steps(checked, 2).numbers == plain.numbers);
  checked.resilience.memory_limit_host = config::Bytes{host - 1};
  CHECK_THROWS_WITH_AS(run_steps(checked, 2), doctest::Contains("resilience.memory_limit_host allows"),
                       Error);
}

TEST_CASE_TEMPLATE("device and pinned memory of an offload are estimated within 2 %", D, OWN_MEMORY_DEVICES) {
  for (const Variant& variant : variants()) {
    if (!runs_on<D>(variant)) continue;
    if (test::kSanitized && (D::kSlow || &variant != &variants()[0])) continue;
    if (D::kSlow && &variant != &variants()[0] && &variant != &variants()[4]) continue;
    CAPTURE(variant.preset);
    CAPTURE(variant.overrides);
    for (const int64_t layers : {1, 3, 4}) {
      if (D::kSlow && layers == 3) continue;
      const config::Config config =
          offloaded(test::resolve_preset<D>(variant.preset, variant.overrides, 5), layers);
      const StepEstimate estimate = estimate_step(config);
      const Trained used = run_steps(config, D::kSlow ? 2 : 3);
      INFO("estimated: ", memory_text(estimate.memory));
      INFO("used: ", memory_text(used.device));
      CHECK(used.device.peak == doctest::Approx(estimate.memory.peak).epsilon(0.02));
      CHECK(used.device.reserved == doctest::Approx(estimate.memory.reserved).epsilon(0.02));
      constexpr auto kActivations = static_cast<size_t>(MemoryCategory::activations);
      CHECK(used.device.peak_by_category[kActivations] ==
            doctest::Approx(estimate.memory.peak_by_category[kActivations]).epsilon(0.02));
      CHECK(used.host.peak_by_category[kActivations] == estimate.host_memory.peak_by_category[kActivations]);
      CHECK(used.host.peak_by_category[kActivations] > 0);
    }
  }
}

TEST_CASE("the transfers of an offload run beside kernels") {
  const config::Config config = offloaded(test::resolve_preset<test::Checked>("fp32", {}, 5), 4);
  class Collector final : public TapeObserver {
   public:
    bool waits() const override { return false; }
    void observe(const TapeEvent& event) override {
      kernels.push_back({"compute", event.name, event.before, event.after});
    }
    void queue_span(const QueueSpan& span) override {
      if (span.name.starts_with("offload of layer ") || span.name.starts_with("fetch of layer "))
        transfers.push_back(span);
    }
    std::vector<QueueSpan> kernels, transfers;
  } spans;
  StepRunner runner(config, world());
  runner.initialize();
  runner.observe(&spans);
  const auto data = open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  StepTimers timers;
  for (int i = 0; i < 3; ++i) {
    timers.start_step();
    runner.train_step(loader, timers);
  }
  runner.observe(nullptr);
  runner.device().synchronize();
  const auto overlap_on = [&](const char* queue) {
    int64_t overlaps = 0;
    for (const QueueSpan& transfer : spans.transfers)
      if (transfer.queue == queue)
        overlaps += std::ranges::count_if(spans.kernels, [&](const QueueSpan& kernel) {
          return kernel.before && std::max(kernel.before->time(), transfer.before->time()) <
                                      std::min(kernel.after->time(), transfer.after->time());
        });
    return overlaps;
  };
  const int64_t micro_batches = 3 * runner.micro_batches();
  CHECK(std::ssize(spans.transfers) == 2 * 4 * micro_batches);
  CHECK(overlap_on("device to host") > 0);
  CHECK(overlap_on("host to device") > 0);
}

TEST_CASE("on the CPU nothing is offloaded, and the log says so") {
  const config::Config config = test::resolve_preset<test::Cpu>("fp32", {});
  CHECK(offload_note(config, *test::Cpu::make(1)).empty());
  const Trained expected = run_steps(config, 2), found = run_steps(offloaded(config, 3), 2);
  CHECK(found.numbers == expected.numbers);
  CHECK(found.device.peak == expected.device.peak);
  CHECK(offload_note(offloaded(config, 3), *test::Cpu::make(1)) ==
        "model.cpu_offloading: nothing is offloaded, because the memory of the device cpu is the host's");
  CHECK(offload_note(offloaded(config, 3), *test::Checked::make(1)).empty());
  CHECK(estimate_step(offloaded(config, 3)).memory.peak == estimate_step(config).memory.peak);
}
