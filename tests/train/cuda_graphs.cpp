// Steps and generation with CUDA graphs (model.cuda_graph_impl): the same bits, and few executable graphs.
#include <doctest/doctest.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "support/device_kind.hpp"
#include "support/devices.hpp"
#include "support/running.hpp"
#include "support/saves.hpp"
#include "support/temporary_directory.hpp"
#include "support/tiny.hpp"
#include "train/inference/loaded_model.hpp"
#include "train/trainer/saver.hpp"

using namespace capstan;
using namespace capstan::train;
using capstan::testing::tiny_config;
using test::Running;
using test::world;

namespace {

constexpr int64_t kLayers = 3, kMicroBatches = 2;

template <class D>
config::Config tiny() {
  config::Config config = tiny_config(true, 1);
  config.train.device = test::device_kind(D::type);
  config.train.global_batch_size = kMicroBatches * config.train.micro_batch_size;
  config.model.num_layers = kLayers;
  config.model.hidden_dropout = 0.1;
  config.optimizer.clip_grad = 0.1;
  return config;
}
config::Config with_graphs(config::Config config, int64_t warmup) {
  config.model.cuda_graph_impl = config::CudaGraphImpl::local;
  config.model.cuda_graph_warmup_steps = warmup;
  return config;
}

// The graphs of a step.
int64_t compare_steps(const config::Config& config) {
  Running plain(config), graphs(with_graphs(config, 2));
  const Device& device = graphs.runner.device();
  int64_t in_a_step = 0;
  for (int step = 0; step < 5; ++step) {
    CAPTURE(step);
    const Device::GraphCounts before = device.graph_counts();
    const StepResult a = plain.step(), b = graphs.step();
    const Device::GraphCounts after = device.graph_counts();
    CHECK(a.loss == b.loss);
    CHECK(a.gradient_norm == b.gradient_norm);
    const int64_t added = after.graphs - before.graphs;
    if (step < 2) CHECK(added == 0);
    if (step == 2) in_a_step = added;
    if (step > 2) CHECK(added == in_a_step);
    // Later steps use the executable graphs of the first one.
    if (step > 2) CHECK(after.instantiated == before.instantiated);
    if (step > 2) CHECK(after.nodes > before.nodes + 5 * added);
  }
  CHECK(plain.parameters() == graphs.parameters());
  CHECK(plain.runner.evaluate(plain.data[0], 1) == graphs.runner.evaluate(graphs.data[0], 1));
  CHECK(plain.runner.device().graph_counts().graphs == 0);
  CHECK(plain.runner.device().launches() == device.launches());
  CHECK(plain.runner.device().memory().peak == device.memory().peak);
  return in_a_step;
}

}  // namespace

TEST_CASE_TEMPLATE("CUDA graphs of layers change no bit of a step", D, CUDA_KERNEL_DEVICES) {
  config::Config config = tiny<D>();
  // One for each layer, direction and micro-batch.
  constexpr int64_t kGraphs = 2 * kLayers * kMicroBatches;
  CHECK(compare_steps(config) == kGraphs);
  if (test::kSanitized) return;
  SUBCASE("recomputation is part of the backward pass") {
    config.model.recompute_granularity = config::RecomputeGranularity::full;
    config.model.recompute_method = config::RecomputeMethod::uniform;
    config.model.recompute_num_layers = 1;
    CHECK(compare_steps(config) == kGraphs);
  }
  SUBCASE("copies of offloaded activations divide graphs") {
    config.model.cpu_offloading = true;
    config.model.cpu_offloading_num_layers = 1;
    CHECK(compare_steps(config) >= kGraphs);
  }
  SUBCASE("bf16") {
    config.mixed_precision.params_dtype = config::Precision::bf16;
    CHECK(compare_steps(config) == kGraphs);
  }
}

TEST_CASE_TEMPLATE("an observed step has no CUDA graphs", D, CUDA_KERNEL_DEVICES) {
  struct Observer final : TapeObserver {
    void observe(const TapeEvent&) override {}
    bool waits() const override { return false; }
  } observer;
  Running r(with_graphs(tiny<D>(), 0));
  const auto graphs_of_step = [&] {
    const int64_t before = r.runner.device().graph_counts().graphs;
    r.step();
    return r.runner.device().graph_counts().graphs - before;
  };
  CHECK(graphs_of_step() > 0);
  r.runner.observe(&observer);
  CHECK(graphs_of_step() == 0);
  r.runner.observe(nullptr);
  r.runner.allow_graphs(false);
  CHECK(graphs_of_step() == 0);
  r.runner.allow_graphs(true);
  CHECK(graphs_of_step() > 0);
}

TEST_CASE_TEMPLATE("CUDA graphs of tokens change no logit", D, CUDA_KERNEL_DEVICES) {
  const test::TemporaryDirectory directory;
  const config::Config config = tiny<D>();
  Running trained(config);
  trained.step();
  const auto checkpoint = save_state(world(), test::plan_in(directory.path()), trained.runner.state(),
                                     trained.runner.store(), trained.runner.optimizer());
  LoadedModel plain(checkpoint, config, world()), graphs(checkpoint, with_graphs(config, 2), world());
  auto plain_cache = plain.make_cache(12), graphs_cache = graphs.make_cache(12);
  std::vector<int32_t> next = {3, 1, 4};
  for (int token = 0; token < 8; ++token) {
    CAPTURE(token);
    const auto logits = plain.next_logits(next, plain_cache);
    CHECK(logits == graphs.next_logits(next, graphs_cache));
    next = {static_cast<int32_t>(std::distance(logits.begin(), std::ranges::max_element(logits)))};
  }
  const Device::GraphCounts counts = graphs.device().graph_counts();
  // The prompt and the first token are launched kernel by kernel.
  CHECK(counts.graphs == 6);
  CHECK(counts.nodes > 6 * 5 * kLayers);
  CHECK(counts.instantiated == 1);
}
