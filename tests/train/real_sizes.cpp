// The CUDA kernels at real sizes: steps of recipes, with all of their launches, on a device that runs a sample
// of the blocks of each (tests/support/sampled_device.hpp). Accesses outside of arrays, integers that are too
// small, and launches that no GPU runs are errors.
#include <doctest/doctest.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "config/resolve/resolve.hpp"
#include "support/child.hpp"
#include "support/sampled_device.hpp"
#include "support/sanitized.hpp"
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
  INFO(step.recipe << ": " << config::render(resolution.diagnostics, resolution.sources));
  REQUIRE(resolution.ok());
  return resolution.config;
}

int capability_of(const config::MixedPrecisionConfig& precision) {
  return precision.fp4 || (precision.fp8 && precision.fp8_recipe == config::Fp8Recipe::mxfp8) ? 100 : 90;
}

void run(const Step& step, int64_t rank) {
  const config::Config config = config_of(step);
  const test::SimulatedGpu gpu(step.capability > 0 ? step.capability : capability_of(config.mixed_precision));
  test::SampledDevice device;
  device.report_faults();
  train::choose_tf32(device, config.mixed_precision);
  train::run_meta_step(config, device, rank);
}

// Runs the step on the first rank and on the last, which is that of another pipeline stage.
void check(const Step& step) {
  std::string name = step.recipe;
  for (const std::string& text : step.overrides) name += " " + text;
  const int64_t last = config_of(step).dist.world_size - 1;
  for (const int64_t rank : last > 0 ? std::vector<int64_t>{0, last} : std::vector<int64_t>{0}) {
    const double begin = steady_seconds();
    const test::ChildResult result = test::run_in_child([&] { run(step, rank); });
    MESSAGE(name << ", rank " << rank << ": " << steady_seconds() - begin << " s");
    CHECK_MESSAGE(result.succeeded, name << ", rank " << rank << ": " << result.text);
  }
}

}  // namespace

TEST_CASE("real sizes: the launches of every recipe") {
  const char* const only = std::getenv("ONLY");
  for (const auto& entry : config::Library::standard().recipes())
    if (!only || entry.name == only) check({entry.name});
}

// One GPU that holds everything.
void check_one_rank(std::vector<std::string> overrides, int capability = 0) {
  overrides.insert(overrides.begin(), {"dist.context_parallel_size=1", "ddp=no_shard"});
  check({"llama3-8b", std::move(overrides), 1, capability});
}

// Buckets of 8e9 elements and more, logits and activations of more than 2^31 elements, all experts.
TEST_CASE("real sizes: one rank") {
  const std::string length = "model.seq_length=8192";
  check_one_rank({length});
  check_one_rank({length, "train.micro_batch_size=2"});
  check_one_rank({length, "train.micro_batch_size=4"});
  check_one_rank({length, "model=llama3.1-405b"});
  check_one_rank({length, "model=gemma2-27b", "train.micro_batch_size=4"});
  check_one_rank({length, "model=deepseek-v3"});
  check_one_rank({length, "model=gpt-oss-120b", "train.micro_batch_size=4"});
  check({"llama3-8b",
         {length, "model=llama3.1-405b", "dist.context_parallel_size=1", "dist.tensor_model_parallel_size=8"},
         8});
}

TEST_CASE("real sizes: long sequences") {
  for (const char* length : {"131072", "524288", "1048576"})
    check_one_rank({std::string("model.seq_length=") + length});
  check_one_rank({"model.seq_length=1048576", "model=gemma2-9b"});
  check_one_rank({"model.seq_length=262144", "model=deepseek-v2"});
  check({"llama3-8b-128k", {"model.seq_length=1048576"}});
}

TEST_CASE("real sizes: every precision and optimizer") {
  for (const char* precision :
       {"fp32", "fp16_mixed", "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_current_scaling_mixed",
        "bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed"})
    for (const char* model : {"llama3-8b", "deepseek-v2"})
      check_one_rank({std::string("mixed_precision=") + precision, std::string("model=") + model,
                      "model.seq_length=8192"});
  for (const char* optimizer : {"lion", "muon", "sgd"})
    check_one_rank({std::string("optimizer=") + optimizer});
  check_one_rank({"model.hidden_dropout=0.1", "model.attention_dropout=0.1"});
}

// Less shared memory.
TEST_CASE("real sizes: every GPU") {
  for (const int capability : {80, 89, 100, 120})
    for (const char* model : {"gpt3-175b", "llama3.1-405b", "gemma2-27b", "deepseek-v3", "gpt-oss-120b"})
      check_one_rank({std::string("model=") + model}, capability);
}
