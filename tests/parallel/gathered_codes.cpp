// Weights in 8 bits that data-parallel ranks gather as codes: the bits of weights that are gathered in the
// compute type and quantized afterward, with fewer bytes sent and held.
#include <doctest/doctest.h>

#include <algorithm>

#include "comm/reduce.hpp"
#include "parallel/flat_store.hpp"
#include "support/device_kind.hpp"
#include "support/devices.hpp"
#include "support/running.hpp"
#include "support/sanitized.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/trainer/estimate.hpp"

using namespace capstan;
using config::Fp8Recipe;
using config::ShardingStrategy;
using test::world;

namespace {

constexpr ShardingStrategy kSharded[] = {ShardingStrategy::optim, ShardingStrategy::optim_grads,
                                         ShardingStrategy::optim_grads_params};

template <class D>
config::Config config_of(Fp8Recipe recipe, ShardingStrategy strategy) {
  config::Config c = capstan::testing::tiny_config(true, world().size());
  c.train.device = test::device_kind(D::type);
  c.model.num_layers = 3;
  // Weights whose shards end within rows.
  c.model.ffn_hidden_size = 70;
  c.train.micro_batch_size = 1;
  c.train.global_batch_size = 2 * world().size();
  c.mixed_precision.params_dtype = config::Precision::bf16;
  c.mixed_precision.fp8 = config::Fp8Format::hybrid;
  c.mixed_precision.fp8_recipe = recipe;
  c.mixed_precision.fp8_amax_history_len = 2;
  c.mixed_precision.fp8_amax_compute_algo = config::Fp8AmaxAlgo::max;
  c.ddp.data_parallel_sharding_strategy = strategy;
  c.ddp.bucket_size = 9000;
  return c;
}

std::vector<uint8_t> bytes_of(const Tensor& tensor) {
  return tensor.view({tensor.elements()}).as_type(DType::u8).to_host<uint8_t>();
}

// The codes of all weights for both GEMMs, and the inverse scales.
struct Weights {
  std::vector<std::vector<uint8_t>> codes;
  std::vector<float> scales;
  bool operator==(const Weights&) const = default;
};
Weights weights_of(parallel::FlatStore& store) {
  Weights weights;
  for (const Parameter* parameter : store.low_precision()->parameters())
    for (const WeightRole role : {WeightRole::forward, WeightRole::input_gradient}) {
      const OperandPin pin(store, *parameter, role);
      weights.codes.push_back(bytes_of(pin->values));
      weights.scales.push_back(pin->scale.to_host<float>()[0]);
    }
  return weights;
}

// All main parameters of all ranks.
std::vector<double> parameters_of(const parallel::FlatStore& store) {
  std::vector<double> all;
  for (const auto& parameter : store.parameters()) {
    std::vector<double> values(static_cast<size_t>(parameter->shape().elements()), -1e30);
    for (const auto& shard : store.parameter_shards())
      if (shard.parameter == parameter.get())
        std::ranges::copy(shard.values().to_floats(), values.begin() + shard.range.begin);
    comm::all_reduce(*store.groups().dense.shard, values, comm::ReduceOp::max);
    if (store.groups().dense.replica)
      comm::all_reduce(*store.groups().dense.replica, values, comm::ReduceOp::max);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// Losses, norms and weights after each step.
void check_same_steps(config::Config config, bool first_layer_in_bf16 = false) {
  config.mixed_precision.first_last_layers_bf16 = first_layer_in_bf16;
  config.mixed_precision.num_layers_at_end_in_bf16 = 0;
  config.mixed_precision.fp8_param_gather = false;
  test::Running plain(config);
  config.mixed_precision.fp8_param_gather = true;
  test::Running coded(config);
  CHECK(weights_of(coded.runner.store()) == weights_of(plain.runner.store()));
  for (int step = 0; step < 3; ++step) {
    const auto expected = plain.step(), got = coded.step();
    CHECK(got.loss == expected.loss);
    // The sum over the buckets has another order.
    CHECK(got.gradient_norm == doctest::Approx(expected.gradient_norm).epsilon(1e-12));
    CHECK(weights_of(coded.runner.store()) == weights_of(plain.runner.store()));
  }
  CHECK(parameters_of(coded.runner.store()) == parameters_of(plain.runner.store()));
}

}  // namespace

TEST_CASE_TEMPLATE("gathered codes are those of gathered values, under every strategy", D, FAST_DEVICES) {
  for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::tensorwise})
    for (const ShardingStrategy strategy : kSharded)
      for (const bool overlap : {false, true}) {
        CAPTURE(config::enum_name(recipe));
        CAPTURE(config::enum_name(strategy));
        CAPTURE(overlap);
        config::Config config = config_of<D>(recipe, strategy);
        if (!test::multiplies<D>(config.mixed_precision)) continue;
        config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = overlap;
        check_same_steps(config, overlap && recipe == Fp8Recipe::tensorwise);
      }
}

TEST_CASE("gathered codes: Muon, a model without main parameters, fp16, recomputation") {
  const config::Config base = config_of<test::Cpu>(Fp8Recipe::delayed, ShardingStrategy::optim);
  config::Config muon = base;
  muon.optimizer.optimizer = config::OptimizerKind::muon;
  check_same_steps(muon);
  config::Config narrow = base;
  narrow.optimizer.use_precision_aware_optimizer = narrow.optimizer.stochastic_rounding = true;
  narrow.optimizer.main_params_dtype = config::Precision::bf16;
  check_same_steps(narrow);
  config::Config half = base;
  half.mixed_precision.params_dtype = config::Precision::fp16;
  half.mixed_precision.initial_loss_scale = 1024;
  check_same_steps(half);
  config::Config again = config_of<test::Cpu>(Fp8Recipe::tensorwise, ShardingStrategy::optim_grads_params);
  again.model.recompute_granularity = config::RecomputeGranularity::full;
  again.model.recompute_method = config::RecomputeMethod::uniform;
  again.model.recompute_num_layers = 1;
  check_same_steps(again);
}

TEST_CASE("gathered codes: optimizer state sharded over two instances, and tensor-parallel ranks") {
  if (world().size() != 4) return;
  for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::tensorwise})
    for (const ShardingStrategy strategy : kSharded) {
      if (test::kSanitized && recipe == Fp8Recipe::delayed) continue;
      config::Config config = config_of<test::Checked>(recipe, strategy);
      config.ddp.num_distributed_optimizer_instances = 2;
      check_same_steps(config);
      config.ddp.outer_dp_sharding_strategy = ShardingStrategy::optim;
      check_same_steps(config);
      config = config_of<test::Cpu>(recipe, strategy);
      config.model.ffn_hidden_size = 72;
      config.dist.tensor_model_parallel_size = 2;
      config.dist.data_parallel_size = 2;
      config.dist.sequence_parallel = true;
      check_same_steps(config);
    }
}

TEST_CASE("gathered codes take a byte of each weight, on the way and where they are held") {
  const int64_t ranks = world().size();
  if (ranks == 1) return;
  for (const ShardingStrategy strategy : {ShardingStrategy::optim, ShardingStrategy::optim_grads}) {
    config::Config config = config_of<test::Cpu>(Fp8Recipe::tensorwise, strategy);
    config.model.hidden_size = 192, config.model.kv_channels = 32, config.model.ffn_hidden_size = 384;
    const auto bytes = [&](bool codes) {
      config.mixed_precision.fp8_param_gather = codes;
      test::CountingWorld counting(world());
      train::StepRunner runner(config, counting);
      runner.initialize();
      test::run_until(runner, config, 1);
      const int64_t before = counting.sent["shard"];
      test::run_until(runner, config, 2);
      const int64_t sent = counting.sent["shard"] - before;
      const train::StepEstimate estimate =
          train::estimate_step(config, world().rank(), static_cast<int>(ranks));
      CHECK(static_cast<double>(estimate.sent.at("shard")) ==
            doctest::Approx(static_cast<double>(sent)).epsilon(0.01));
      const auto parameters = static_cast<size_t>(MemoryCategory::parameters);
      const int64_t held = runner.device().memory().peak_by_category[parameters];
      CHECK(estimate.memory.peak_by_category[parameters] == held);
      return std::pair(sent, held);
    };
    int64_t covered = 0;
    {
      test::Running r(config);
      for (const Parameter* parameter : r.runner.store().low_precision()->parameters())
        covered += parameter->shape().elements();
    }
    const auto [sent, held] = bytes(false);
    const auto [sent_codes, held_codes] = bytes(true);
    CHECK(static_cast<double>(sent - sent_codes) ==
          doctest::Approx(static_cast<double>(covered * (ranks - 1) / ranks)).epsilon(0.02));
    // Instead of bf16 for all and codes: bf16 for the slice, and codes.
    CHECK(static_cast<double>(held - held_codes) ==
          doctest::Approx(static_cast<double>(2 * covered * (ranks - 1) / ranks)).epsilon(0.05));
  }
}
