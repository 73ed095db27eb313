// QLoRA below the recipe: what weights in 4 bits take, and what devices compute beside them.
#include <doctest/doctest.h>

#include "support/device_kind.hpp"
#include "support/devices.hpp"
#include "support/running.hpp"
#include "support/tiny.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;

namespace {

config::Config with_adapters(config::Config config, config::BaseQuantization quantization,
                             bool two_stage = true) {
  config::PeftConfig& peft = config.peft.emplace();
  peft.dim = 4;
  peft.lora_b_init = config::LoraInit::xavier;
  peft.lora_dtype = config::Precision::fp32;
  peft.base_quantization = quantization;
  peft.quantization_block = 32;
  peft.quantization_double = two_stage;
  return config;
}

}  // namespace

TEST_CASE("weights in 4 bits take an eighth of fp32, and one of them at a time is expanded") {
  config::Config config = capstan::testing::tiny_config(true);
  config.model.num_layers = 6, config.model.hidden_size = 128, config.model.ffn_hidden_size = 512;
  config.model.num_attention_heads = 16, config.model.num_query_groups = 16;
  constexpr auto kParameters = static_cast<size_t>(MemoryCategory::parameters);
  const int64_t weights = 6 * (128 * (3 * 128) + 128 * 128 + 3 * 128 * 512), largest = 2 * 128 * 512 * 4;
  const auto taken = [&](config::BaseQuantization quantization, bool two_stage) {
    return estimate_step(with_adapters(config, quantization, two_stage), 0)
        .memory.peak_by_category[kParameters];
  };
  const int64_t plain = taken(config::BaseQuantization::none, false);
  // Embeddings, norms, adapters.
  const int64_t rest = plain - 4 * weights;
  const int64_t codes = weights / 2;
  // Bytes by which allocations are rounded up.
  const int64_t rounding = 6 * 4 * 1024;
  for (const bool two_stage : {false, true}) {
    const int64_t scales = two_stage ? weights / 32 + 4 * weights / 32 / 256 : 4 * weights / 32;
    const int64_t quantized = taken(config::BaseQuantization::nf4, two_stage);
    CHECK(quantized >= codes + scales);
    CHECK(quantized <= codes + scales + rest + largest + rounding);
  }
}

TEST_CASE("so do those of experts, of which a layer's are expanded together") {
  config::Config config = capstan::testing::tiny_experts_config();
  config.model.num_layers = 6, config.model.num_moe_experts = 16, config.model.moe_ffn_hidden_size = 256;
  constexpr auto kParameters = static_cast<size_t>(MemoryCategory::parameters);
  const auto taken = [&](config::BaseQuantization quantization) {
    return estimate_step(with_adapters(config, quantization), 0).memory.peak_by_category[kParameters];
  };
  const int64_t matrix = 16 * 256 * config.model.hidden_size, experts = 6 * 3 * matrix,
                expanded = 4 * 2 * matrix, codes = experts / 2 + experts / 32 + 4 * experts / 32 / 256;
  const int64_t saved = taken(config::BaseQuantization::none) - taken(config::BaseQuantization::nf4);
  // The other layers' weights are less than a twentieth.
  CHECK(saved > 4 * experts - codes - expanded);
  CHECK(saved < 1.05 * static_cast<double>(4 * experts - codes - expanded));
}

TEST_CASE_TEMPLATE(
    "beside weights in 4 bits the losses are those of the CPU, near those beside the weights themselves", D,
    EVERY_DEVICE) {
  const int64_t steps = D::kSlow ? 1 : 4;
  for (config::Config config : {capstan::testing::tiny_config(false), capstan::testing::tiny_config(true),
                                capstan::testing::tiny_experts_config()}) {
    const auto exact = test::run(with_adapters(config, config::BaseQuantization::none), steps);
    config = with_adapters(config, config::BaseQuantization::nf4);
    const auto cpu = test::run(config, steps);
    config.train.device = test::device_kind(D::type);
    test::check_cpu_numbers<D>(test::run(config, steps), cpu);
    config.train.threads = 3;
    test::check_cpu_numbers<D>(test::run(config, steps), cpu);
    for (size_t i = 0; i < cpu.size(); i += 2) {
      CHECK(cpu[i] != exact[i]);
      CHECK(cpu[i] == doctest::Approx(exact[i]).epsilon(0.02));
    }
  }
}
