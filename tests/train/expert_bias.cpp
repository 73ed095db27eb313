// The bias of experts: its update from the load of the global batch, skipped steps, checkpoints.
#include <doctest/doctest.h>

#include <set>

#include "support/running.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/trainer/trainer.hpp"

using namespace capstan;
using namespace capstan::train;
using test::Running;
using test::world;

namespace {

config::Config expert_config(config::DeviceKind device = config::DeviceKind::cpu) {
  config::Config c = capstan::testing::tiny_config(true, world().size());
  auto& m = c.model;
  m.num_layers = 3, m.num_moe_experts = 5, m.moe_first_dense_layers = 1, m.moe_ffn_hidden_size = 16;
  m.moe_router_score_function = config::RouterScore::sigmoid;
  m.moe_router_enable_expert_bias = true, m.moe_router_bias_update_rate = 0.03125;
  m.moe_router_load_balancing_type = config::RouterBalancing::none;
  m.init_method_std = 0.2;
  c.dist.expert_tensor_parallel_size = 1, c.dist.expert_data_parallel_size = world().size();
  c.train.micro_batch_size = 1, c.train.global_batch_size = 8;
  c.train.device = device;
  return c;
}

// The bias of each MoE layer.
using Biases = std::map<int64_t, std::vector<float>>;
Biases biases_of(StepRunner& runner) {
  Biases all;
  for (const auto& parameter : runner.model().parameters())
    if (parameter->name().ends_with("mlp.router.expert_bias"))
      all[parameter->spec().layer] = test::main_of(runner.store(), *parameter).to_host<float>();
  return all;
}

// The rule of the paper, from the loads that the step reports.
void update(Biases& biases, const StepResult& step, float rate) {
  for (const RouterResult& router : step.routers) {
    std::vector<float>& bias = biases.at(router.layer);
    const double mean = 1.0 / static_cast<double>(bias.size());
    for (size_t e = 0; e < bias.size(); ++e) {
      // Loads are fractions of 8 * 24 * 2 choices: an equal load is none of them.
      REQUIRE(router.load[e] != doctest::Approx(mean).epsilon(1e-9));
      bias[e] += router.load[e] < mean ? rate : -rate;
    }
  }
}

std::vector<const Parameter*> optimized(const StepRunner& runner, const parallel::FlatStore& store) {
  std::vector<const Parameter*> result;
  for (const auto& parameter : runner.model().parameters())
    if (store.buffer_of(*parameter) >= 0) result.push_back(parameter.get());
  return result;
}

}  // namespace

TEST_CASE("biases move against the load of all ranks, and are no parameters of the optimizer") {
  for (const auto device : {config::DeviceKind::cpu, config::DeviceKind::checked}) {
    const config::Config config = expert_config(device);
    Running r(config);
    Biases expected = biases_of(r.runner);
    REQUIRE(expected.size() == 2);
    REQUIRE(expected.count(0) == 0);
    CHECK(expected.at(1) == std::vector<float>(5, 0.0f));
    std::set<float> seen;
    for (int step = 0; step < 6; ++step) {
      update(expected, r.step(), 0.03125f);
      CHECK(biases_of(r.runner) == expected);
      for (const auto& [layer, bias] : expected) seen.insert(bias.begin(), bias.end());
    }
    CHECK(seen.size() > 3);
    for (const Parameter* parameter : optimized(r.runner, r.runner.store()))
      CHECK_FALSE(parameter->name().ends_with("expert_bias"));
    // Evaluation chooses with them and does not change them.
    r.runner.evaluate(r.data[0], 1);
    CHECK(biases_of(r.runner) == expected);
  }
}

TEST_CASE("biases change the losses from the second step on: the first chooses without them") {
  const config::Config config = expert_config();
  config::Config plain = config;
  plain.model.moe_router_enable_expert_bias = false;
  Running a(config), b(plain);
  CHECK(a.step().loss == b.step().loss);
  bool differs = false;
  for (int step = 0; step < 8; ++step) differs = a.step().loss != b.step().loss || differs;
  CHECK(differs);
}

TEST_CASE("recomputed layers give the same losses and biases") {
  const config::Config config = expert_config();
  config::Config recomputed = config;
  recomputed.model.recompute_granularity = config::RecomputeGranularity::full;
  recomputed.model.recompute_method = config::RecomputeMethod::uniform;
  recomputed.model.recompute_num_layers = 1;
  Running a(config), b(recomputed);
  for (int step = 0; step < 4; ++step) CHECK(a.step().loss == b.step().loss);
  CHECK(biases_of(a.runner) == biases_of(b.runner));
}

TEST_CASE("a skipped step leaves the biases, and one that is computed again updates them once") {
  config::Config config = expert_config();
  config.optimizer.grad_norm_skip_threshold = 1e-9;
  Running skipping(config);
  CHECK(skipping.step().skipped);
  for (const auto& [layer, bias] : biases_of(skipping.runner)) CHECK(bias == std::vector<float>(5, 0.0f));

  config = expert_config();
  config.resilience.rerun_mode = config::RerunMode::validate_results;
  config.resilience.loss_spike_action = config::SpikeAction::warn;
  config.resilience.spike_window = 1;
  Running again(config);
  again.runner.state().recent_losses = {1e-6};
  Biases expected = biases_of(again.runner);
  const StepResult step = again.step();
  REQUIRE(!step.anomalies.empty());
  REQUIRE(!step.skipped);
  update(expected, step, 0.03125f);
  CHECK(biases_of(again.runner) == expected);
}

TEST_CASE(
    "biases are part of a checkpoint, in fp32 beside parameters in 16 bits; a resumed run has the same "
    "bits") {
  for (const bool bf16 : {false, true})
    for (const auto sharding :
         {config::ShardingStrategy::no_shard, config::ShardingStrategy::optim_grads_params}) {
      config::Config config = expert_config();
      config.ddp.data_parallel_sharding_strategy = sharding;
      if (bf16) config.mixed_precision.params_dtype = config::Precision::bf16;
      Running r(config);
      for (int i = 0; i < 3; ++i) r.step();
      const test::SharedDirectory root;
      auto reader =
          checkpoint::Reader::open(test::save_in(root.path(), r.runner), checkpoint::Verification::content);
      const std::string name = "decoder.layers.1.mlp.router.expert_bias";
      REQUIRE(reader.find(name));
      CHECK(reader.find(name)->dtype == DType::f32);
      CHECK_FALSE(reader.find("optimizer.exp_avg." + name));
      Running other(config);
      test::load_into(other.runner, std::move(reader));
      CHECK(biases_of(other.runner) == biases_of(r.runner));
      other.open_loader();
      for (int i = 0; i < 3; ++i) CHECK(r.step().loss == other.step().loss);
      CHECK(biases_of(other.runner) == biases_of(r.runner));
    }
}
