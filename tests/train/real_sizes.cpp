// The CUDA kernels at real sizes: steps of recipes, with all of their launches, on a device that runs a
// sample of the blocks of each (tests/support/sampled_device.hpp). Accesses outside of arrays, integers that
// are too small, and launches that no GPU runs are errors.
#include <doctest/doctest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "config/resolve/resolve.hpp"
#include "support/child.hpp"
#include "support/sampled_device.hpp"
#include "support/simulated_gpu.hpp"
#include "train/setup/device.hpp"
#include "train/trainer/estimate.hpp"

using namespace capstan;

namespace {

// A recipe with these overrides on a GPU; ranks 0: as many as the recipe has.
struct Step {
  std::string recipe;
  std::vector<std::string> overrides;
  int64_t ranks = 0;
  // 0: the oldest GPU with the recipe's precision, from 9.0 on.
  int capability = 0;
};

config::Config config_of(const Step& step) {
  config::Request request;
  request.recipe = step.recipe;
  if (step.ranks > 0) request.ranks = step.ranks;
  for (const std::string& text : step.overrides) request.overrides.push_back(config::Override::token(text));
  request.overrides.push_back(config::Override::token("train.device=cuda"));
  const config::Resolution resolution = config::resolve(request);
  INFO(config::render(resolution.diagnostics, resolution.sources));
  REQUIRE(resolution.ok());
  return resolution.config;
}

int capability_of(const config::MixedPrecisionConfig& precision) {
  return precision.fp4 || (precision.fp8 && precision.fp8_recipe == config::Fp8Recipe::mxfp8) ? 100 : 90;
}

// The launches that the steps of this program have run.
kernels::simulated::SharedLaunches& launches() {
  static kernels::simulated::SharedLaunches shared;
  return shared;
}

// Runs the step on the first rank and on the last one, which in a pipeline has the loss. A launch of both, or
// of an earlier step, runs once.
void run(const Step& step) {
  const config::Config config = config_of(step);
  const test::SimulatedGpu gpu(step.capability > 0 ? step.capability : capability_of(config.mixed_precision));
  const int64_t last = config.dist.world_size - 1;
  test::SampledDevice device({.shared = &launches()});
  device.report_faults();
  train::choose_tf32(device, config.mixed_precision);
  for (const int64_t rank : last > 0 ? std::vector<int64_t>{0, last} : std::vector<int64_t>{0})
    train::run_meta_step(config, device, rank);
}

void check(const Step& step) {
  std::string name = step.recipe;
  for (const std::string& text : step.overrides) name += " " + text;
  const double begin = steady_seconds();
  launches();  // shared from before the child is made
  const test::ChildResult result = test::run_in_child([&] { run(step); });
  CHECK_MESSAGE(result.succeeded, name << ": " << result.text);
  MESSAGE(name << ": " << steady_seconds() - begin << " s");
}

// One GPU that holds everything, at 8192 tokens.
void check_one_rank(std::vector<std::string> overrides, int capability = 0) {
  overrides.insert(overrides.begin(),
                   {"dist.context_parallel_size=1", "ddp=no_shard", "model.seq_length=8192"});
  check({"llama3-8b", std::move(overrides), 1, capability});
}

}  // namespace

TEST_CASE("real sizes: a dense model and one with experts, on one rank") {
  check_one_rank({"train.micro_batch_size=4"});
  check_one_rank({"model=deepseek-v3"});
}

// Minutes: the full tests run them (src/train/CMakeLists.txt).
TEST_SUITE_BEGIN("full");

// Every fourth; with CAPSTAN_TEST_FULL (scripts/cuda.sh all) every one.
TEST_CASE("real sizes: recipes") {
  const size_t apart = std::getenv("CAPSTAN_TEST_FULL") ? 1 : 4;
  const auto& recipes = config::Library::standard().recipes();
  for (size_t i = 0; i < recipes.size(); i += apart) check({recipes[i].name});
}

// Buckets of 8e9 elements and more, logits and activations of more than 2^31.
TEST_CASE("real sizes: models on one rank") {
  check_one_rank({"train.micro_batch_size=2"});
  check_one_rank({"model=llama3.1-405b"});
  check_one_rank({"model=gemma2-27b", "train.micro_batch_size=4"});
  check_one_rank({"model=gpt-oss-120b", "train.micro_batch_size=4"});
  check_one_rank({"model.hidden_dropout=0.1", "model.attention_dropout=0.1"});
  check({"llama3-8b",
         {"model=llama3.1-405b", "dist.context_parallel_size=1", "dist.tensor_model_parallel_size=8"},
         8});
}

TEST_CASE("real sizes: long sequences") {
  const auto length = [](const std::string& tokens) {
    return std::vector<std::string>{"model.seq_length=" + tokens, "model.max_position_embeddings=" + tokens};
  };
  for (const char* tokens : {"131072", "524288", "1048576"}) check_one_rank(length(tokens));
  for (const char* model : {"model=gemma2-9b", "model=deepseek-v2"}) {
    std::vector<std::string> overrides = length("1048576");
    overrides.emplace_back(model);
    check_one_rank(overrides);
  }
  check({"llama3-8b-128k", length("1048576")});
}

TEST_CASE("real sizes: every precision and optimizer") {
  for (const std::string precision :
       {"fp32", "fp16_mixed", "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_current_scaling_mixed"})
    for (const std::string model : {"llama3-8b", "deepseek-v2"})
      check_one_rank({"mixed_precision=" + precision, "model=" + model});
  // Not for experts.
  for (const std::string precision :
       {"bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed"})
    check_one_rank({"mixed_precision=" + precision});
  for (const std::string optimizer : {"lion", "muon", "sgd"}) check_one_rank({"optimizer=" + optimizer});
}

// Others than 9.0 have less shared memory, or the same.
TEST_CASE("real sizes: every GPU") {
  for (const int capability : {80, 89, 100, 120})
    for (const char* model : {"model=gpt3-175b", "model=llama3.1-405b", "model=gemma2-27b",
                              "model=deepseek-v3", "model=gpt-oss-120b"})
      check_one_rank({model}, capability);
}

TEST_SUITE_END();
