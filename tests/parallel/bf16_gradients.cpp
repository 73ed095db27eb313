// Gradients in bf16, on any number of ranks: the bits of fp32 sums that are rounded where flat_store.hpp says
// so, and training with them.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <span>

#include "base/philox.hpp"
#include "models/registry.hpp"
#include "parallel/flat_store.hpp"
#include "support/devices.hpp"
#include "support/errors.hpp"
#include "support/preset_recipe.hpp"
#include "support/running.hpp"
#include "support/sanitized.hpp"
#include "tests/parallel/store_run.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/fit.hpp"

using namespace capstan;
using namespace capstan::test;
using config::ShardingStrategy;
using parallel::FlatStore;

namespace {

float rounded(float value) {
  return static_cast<float>(bf16(value));
}

// The weight gradient of element i of a parameter in a micro-batch of a rank.
float gradient_of(int parameter, int64_t i, int rank, int micro_batch) {
  const auto key = philox_key(static_cast<uint64_t>(parameter), purpose::test,
                              static_cast<uint64_t>(rank * 100 + micro_batch));
  const std::array<uint32_t, 4> words = philox4x32(key, 0, static_cast<uint64_t>(i));
  // A third of them is small, so that sums lose bits.
  const float scale = words[1] % 3 == 0 ? 0x1p-8f : 1.0f;
  return scale * (static_cast<float>(words[0]) * 0x1p-31f - 1.0f);
}

// Groups of a world of `shards` * `replicas` ranks.
struct Groups {
  Groups(int shard_ranks, int replica_ranks)
      : shard(world().communicator().split(world().rank() / shard_ranks, world().rank(), "shard")),
        replica(world().communicator().split(world().rank() % shard_ranks, world().rank(), "replica")),
        shards(shard_ranks),
        replicas(replica_ranks) {}
  std::unique_ptr<comm::Communicator> shard, replica;
  int shards, replicas;
};

// The sum over the parts in fp32, in their order.
template <class Part>
float sum_of(int parts, Part&& part) {
  float sum = part(0);
  for (int i = 1; i < parts; ++i) sum += part(i);
  return sum;
}

// The rule of flat_store.hpp for one element.
float expected_gradient(int parameter, int64_t i, const Groups& groups, bool sharded, int micro_batches) {
  const auto value = [&](int shard, int replica, int micro_batch) {
    return gradient_of(parameter, i, replica * groups.shards + shard, micro_batch);
  };
  const auto over_micro_batches = [&](auto&& part) {
    float sum = rounded(part(0));
    for (int m = 1; m < micro_batches; ++m) sum = rounded(sum + part(m));
    return sum;
  };
  const auto of_instance = [&](int replica) {
    if (sharded)
      return over_micro_batches(
          [&](int m) { return sum_of(groups.shards, [&](int shard) { return value(shard, replica, m); }); });
    return rounded(sum_of(groups.shards, [&](int shard) {
      return over_micro_batches([&](int m) { return value(shard, replica, m); });
    }));
  };
  return rounded(sum_of(groups.replicas, of_instance));
}

// One step at the store: every micro-batch adds gradient_of() to all parameters, in two halves.
void run_micro_batches(FlatStore& store, std::span<const std::unique_ptr<Parameter>> parameters,
                       int micro_batches) {
  store.zero_gradients();
  for (int m = 0; m < micro_batches; ++m) {
    if (m + 1 == micro_batches) store.begin_last_micro_batch();
    PendingUses tape;
    for (const auto& parameter : parameters) store.note_use(*parameter, tape);
    for (size_t p = parameters.size(); p-- > 0;) {
      const Parameter& parameter = *parameters[p];
      std::vector<float> values(static_cast<size_t>(parameter.shape().elements()));
      for (int half = 0; half < 2; ++half) {
        bool uninitialized;
        const Tensor gradient = store.gradient_for_write(parameter, uninitialized);
        CHECK_FALSE(uninitialized);
        REQUIRE((gradient.to_floats() == values));
        for (size_t i = 0; i < values.size(); ++i)
          values[i] += 0.5f * gradient_of(parameter.index(), static_cast<int64_t>(i), world().rank(), m);
        gradient.copy_from_host_bytes(std::as_bytes(std::span(std::as_const(values))));
      }
      store.note_weight_gradient(parameter, tape);
    }
  }
  store.finish_gradients();
}

}  // namespace

TEST_CASE_TEMPLATE("sums over micro-batches and ranks are rounded where the rule says, bit by bit", D,
                   EVERY_DEVICE) {
  const int ranks = world().size();
  config::Config config = store_config<D>(ranks, 1);
  config.model.num_layers = D::kSlow ? 1 : 3;
  const auto model = models::build(config.model);
  const auto& parameters = model->parameters();
  for (const int replicas : {1, 2}) {
    if (replicas == 2 && ranks != 4) continue;
    const Groups ranks_of(ranks / replicas, replicas);
    for (const ShardingStrategy strategy : kStrategies)
      for (const int micro_batches : {1, 2, 5})
        for (const int64_t bucket : {int64_t{5000}, int64_t{1} << 30}) {
          if ((D::kSlow || test::kSanitized) && (micro_batches == 2 || bucket != 5000)) continue;
          CAPTURE(replicas);
          CAPTURE(text_of(strategy));
          CAPTURE(micro_batches);
          CAPTURE(bucket);
          const auto device = D::make(1);
          FlatStore::Options options;
          options.compute = options.main_grads = DType::bf16;
          options.sharding = strategy;
          options.overlap_grad_reduce = bucket == 5000;
          options.shard_over_replicas = replicas > 1 && strategy == ShardingStrategy::optim_grads_params;
          options.bucket_elements = bucket;
          parallel::StoreGroups groups;
          groups.dense.shard = ranks_of.shard.get(), groups.dense.replica = ranks_of.replica.get();
          FlatStore store(*device, parameters, groups, options);
          // The second step finds what the first one left.
          for (int step = 0; step < 2; ++step) run_micro_batches(store, parameters, micro_batches);
          const bool sharded = ranks_of.shards > 1 && strategy != ShardingStrategy::no_shard &&
                               strategy != ShardingStrategy::optim;
          std::vector<Tensor> gradients;
          for (const auto& buffer : store.flat_buffers()) {
            REQUIRE(buffer.gradients.dtype() == DType::bf16);
            gradients.push_back(buffer.gradients);
          }
          int64_t differences = 0;
          for (const auto& shard : store.parameter_shards()) {
            const auto values = FlatStore::range_of(shard, shard.range, gradients).to_floats();
            for (size_t i = 0; i < values.size(); ++i) {
              const int64_t element = shard.range.begin + static_cast<int64_t>(i);
              const float expected =
                  expected_gradient(shard.parameter->index(), element, ranks_of, sharded, micro_batches);
              differences += values[i] == expected ? 0 : 1;
            }
          }
          CHECK(differences == 0);
        }
  }
}

TEST_CASE_TEMPLATE("a bucket without weight gradients has zeros; two tapes add to it", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  config::Config config = store_config<D>(world().size(), 1);
  config.model.num_layers = 1;
  const auto model = models::build(config.model);
  const auto& parameters = model->parameters();
  for (const ShardingStrategy strategy : {ShardingStrategy::no_shard, ShardingStrategy::optim_grads}) {
    FlatStore::Options options;
    options.compute = options.main_grads = DType::bf16;
    options.sharding = strategy;
    options.bucket_elements = 1;
    parallel::StoreGroups groups;
    groups.dense.shard = &world().communicator();
    FlatStore store(*device, parameters, groups, options);
    const auto write = [&](float value) {
      const std::vector<float> values(static_cast<size_t>(parameters[0]->shape().elements()), value);
      store.gradient(*parameters[0]).copy_from_host_bytes(std::as_bytes(std::span(values)));
    };
    run_micro_batches(store, parameters, 1);
    store.zero_gradients();
    PendingUses first, second;
    store.note_use(*parameters[0], first);
    store.begin_last_micro_batch();
    store.note_use(*parameters[0], second);
    write(1);
    store.note_weight_gradient(*parameters[0], second);
    write(0x1p-9f);
    store.note_weight_gradient(*parameters[0], first);
    store.finish_gradients();
    // 1 + 2^-9 is rounded to 1; over several ranks only where they are rounded before they are summed.
    const bool sharded = strategy != ShardingStrategy::no_shard && world().size() > 1;
    const auto ranks = static_cast<float>(world().size());
    const float expected = sharded ? rounded(ranks + ranks * 0x1p-9f) : ranks;
    for (const auto& buffer : store.flat_buffers()) {
      const bool written = std::ranges::any_of(buffer.ranges, [&](const kernels::UpdateRange& range) {
        return range.parameter == random_sequence_of(parameters[0]->name());
      });
      const auto values = buffer.gradients.to_floats();
      for (const auto& range : buffer.ranges)
        for (int64_t i = range.begin; i < range.begin + range.count; ++i)
          REQUIRE(values[static_cast<size_t>(i)] == (written ? expected : 0));
    }
  }
}

namespace {

template <class D>
config::Config bf16_gradients(int64_t ranks, int64_t micro_batches, bool llama = true) {
  config::Config c = store_config<D>(ranks, micro_batches, llama);
  c.mixed_precision.params_dtype = config::Precision::bf16;
  c.optimizer.use_precision_aware_optimizer = true;
  c.optimizer.main_grads_dtype = config::Precision::bf16;
  c.ddp.bucket_size = 5000;
  return c;
}

// All gradients of a step of the samples from `first` on, of one rank.
std::vector<float> gradients_of_step(const config::Config& config, int64_t first,
                                     train::StepResult* result = nullptr) {
  train::StepRunner runner(config, world());
  runner.initialize();
  const auto data = train::open_datasets(config, nullptr);
  data::LoaderOptions options = runner.loader_options();
  options.consumed_samples = first;
  data::Loader loader(data[0], options);
  train::StepTimers timers;
  timers.start_step();
  const train::StepResult step = runner.train_step(loader, timers);
  if (result) *result = step;
  std::vector<float> all;
  for (const auto& buffer : runner.store().flat_buffers()) {
    const auto values = buffer.gradients.to_floats();
    for (const auto& range : buffer.ranges)
      all.insert(all.end(), values.begin() + range.begin, values.begin() + range.begin + range.count);
  }
  return all;
}

}  // namespace

TEST_CASE_TEMPLATE("the gradients of a model: rounded sums of the fp32 gradients of its micro-batches", D,
                   EVERY_DEVICE) {
  if (world().size() > 1) return;
  for (const bool llama : {true, false})
    for (const int64_t micro_batches : {1, 3}) {
      if (D::kSlow && (!llama || micro_batches == 1)) continue;
      CAPTURE(llama);
      CAPTURE(micro_batches);
      config::Config config = bf16_gradients<D>(1, micro_batches, llama);
      config.logger.log_num_zeros_in_grad = true;
      config::Config one = config;
      one.optimizer.main_grads_dtype = config::Precision::fp32;
      one.train.global_batch_size = 1;
      std::vector<float> expected;
      for (int64_t m = 0; m < micro_batches; ++m) {
        const std::vector<float> part = gradients_of_step(one, m);
        expected.resize(part.size());
        for (size_t i = 0; i < part.size(); ++i) expected[i] = rounded(expected[i] + part[i]);
      }
      train::StepResult result;
      CHECK((gradients_of_step(config, 0, &result) == expected));
      double squares = 0;
      for (const float value : expected) squares += static_cast<double>(value) * static_cast<double>(value);
      const double tokens = static_cast<double>(micro_batches * config.model.seq_length);
      CHECK(result.gradient_norm == doctest::Approx(std::sqrt(squares) / tokens).epsilon(1e-6));
      REQUIRE(result.num_zeros);
      CHECK(*result.num_zeros == std::ranges::count(expected, 0.0f));
    }
}

TEST_CASE_TEMPLATE("strategies that sum in the same order give the same bits, with any bucket and overlap", D,
                   FAST_DEVICES) {
  const int64_t ranks = world().size();
  for (const bool llama : {true, false})  // the other one ties its embeddings
    for (const int64_t micro_batches : {1, 3}) {
      // Many processes on few cores, or queues that wait: one model of several micro-batches will do.
      const bool few = test::kSanitized || (ranks > 1 && D::type == DeviceType::checked);
      if (few && (!llama || micro_batches == 1)) continue;
      CAPTURE(llama);
      CAPTURE(micro_batches);
      config::Config config = bf16_gradients<D>(ranks, micro_batches, llama);
      config::Config wide = config;
      wide.optimizer.main_grads_dtype = config::Precision::fp32;
      const StoreRun in_fp32 = run_store(wide, world());
      const StoreRun full = run_store(config, world());
      config.ddp.data_parallel_sharding_strategy = ShardingStrategy::optim_grads;
      const StoreRun sharded = run_store(config, world());
      check_same(full, in_fp32, 2e-2);
      check_same(sharded, in_fp32, 2e-2);
      CHECK(full.values != in_fp32.values);
      if (ranks == 1) check_same(sharded, full, 0);
      for (const ShardingStrategy strategy : kStrategies) {
        CAPTURE(text_of(strategy));
        config.ddp.data_parallel_sharding_strategy = strategy;
        config.ddp.overlap_grad_reduce = true;
        config.ddp.overlap_param_gather = strategy != ShardingStrategy::no_shard;
        config.ddp.bucket_size = 2000;
        const bool full_sums = strategy == ShardingStrategy::no_shard || strategy == ShardingStrategy::optim;
        check_same(run_store(config, world()), full_sums ? full : sharded, 0);
      }
    }
}

TEST_CASE("sums over tensor-parallel ranks, instances of the optimizer and stages: near those of fp32") {
  const int64_t ranks = world().size();
  if (ranks != 4) return;
  for (const ShardingStrategy strategy : kStrategies) {
    CAPTURE(text_of(strategy));
    const auto compare = [&](config::Config config, bool stages = false) {
      config.ddp.data_parallel_sharding_strategy = strategy;
      const StoreRun found = run_store(config, world(), 2, nullptr, !stages);
      config.optimizer.main_grads_dtype = config::Precision::fp32;
      check_same(found, run_store(config, world(), 2, nullptr, !stages), 2e-2);
    };
    for (const int64_t size : {2, 4}) {
      auto tensor = bf16_gradients<test::Cpu>(4 / size, 3);
      // Fewer than four tensor-parallel ranks.
      tensor.model.num_attention_heads = 8, tensor.model.num_query_groups = 2;
      tensor.model.hidden_size = 64, tensor.model.ffn_hidden_size = 72;
      tensor.dist.world_size = 4, tensor.dist.tensor_model_parallel_size = size;
      tensor.dist.sequence_parallel = size == 2;
      compare(tensor, true);
    }
    auto tied = bf16_gradients<test::Cpu>(2, 4, false);
    tied.model.num_layers = 4;
    tied.dist.world_size = 4, tied.dist.pipeline_model_parallel_size = 2;
    compare(tied, true);
    auto hybrid = bf16_gradients<test::Cpu>(4, 3);
    if (strategy == ShardingStrategy::no_shard) continue;
    hybrid.ddp.num_distributed_optimizer_instances = 2;
    compare(hybrid);
    hybrid.ddp.outer_dp_sharding_strategy = ShardingStrategy::optim;
    compare(hybrid);
  }
}

namespace {

const std::vector<std::string> kNarrow = {"optimizer.use_precision_aware_optimizer=true",
                                          "optimizer.main_grads_dtype=bf16", "ddp.bucket_size=5000"};
// Without main parameters, and with moments in bf16: 8 bytes a parameter.
const std::vector<std::string> kAllNarrow = {"optimizer.use_precision_aware_optimizer=true",
                                             "optimizer.main_grads_dtype=bf16",
                                             "optimizer.main_params_dtype=bf16",
                                             "optimizer.exp_avg_dtype=bf16",
                                             "optimizer.exp_avg_sq_dtype=bf16",
                                             "optimizer.stochastic_rounding=true"};

std::vector<std::string> with(std::vector<std::string> first, const std::vector<std::string>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

}  // namespace

TEST_CASE("a model learns as with gradients in fp32") {
  if (world().size() > 1) return;
  constexpr int64_t kSteps = test::kSanitized ? 10 : 60;
  const std::vector<std::string> model = {"model.hidden_size=64", "model.ffn_hidden_size=160",
                                          "model.kv_channels=16", "train.train_iters=60"};
  const auto expected = run(resolve_preset<test::Cpu>("bf16_mixed", model), kSteps);
  for (const auto& narrow : {kNarrow, kAllNarrow}) {
    const auto trace = run(resolve_preset<test::Cpu>("bf16_mixed", with(model, narrow)), kSteps);
    CHECK(trace != expected);
    double apart = 0;
    for (size_t i = 0; i < trace.size(); i += 2) apart += std::abs(trace[i] - expected[i]) / kSteps;
    CHECK_MESSAGE(apart < 0.02, apart);
    if (!test::kSanitized) CHECK(trace[trace.size() - 2] < 0.9 * trace[0]);
  }
}

TEST_CASE_TEMPLATE("resume is bitwise equal to the uninterrupted run", D, FAST_DEVICES) {
  for (const char* strategy : {"no_shard", "optim_grads"})
    check_resume(
        resolve_preset<D>("bf16_mixed",
                          with(kAllNarrow, {std::string("ddp.data_parallel_sharding_strategy=") + strategy})),
        6, 3);
}

TEST_CASE_TEMPLATE("a step that is computed again has the same gradients", D, FAST_DEVICES) {
  for (const char* strategy : {"no_shard", "optim_grads_params"}) {
    Running r(resolve_preset<D>(
        "bf16_mixed",
        with(kNarrow, {"resilience.rerun_mode=validate_results", "resilience.loss_spike_action=warn",
                       std::string("ddp.data_parallel_sharding_strategy=") + strategy})));
    r.step(), r.step();
    r.runner.state().recent_losses.assign(16, 1e-3);
    const train::StepResult result = r.step();
    REQUIRE(result.anomalies.size() == 2);
    CHECK(result.anomalies[1].text.find("gave the same bits when computed again") != std::string::npos);
  }
}

TEST_CASE_TEMPLATE("a gradient that is not finite is found and named", D, EVERY_DEVICE) {
  if (world().size() > 1) return;
  Running r(resolve_preset<D>("bf16_mixed", kNarrow));
  const std::string parameter = r.spoil_last_parameter();
  const std::string error = test::error_of([&] { r.step(); });
  CHECK(test::holds(error, "parameter `" + parameter + "` itself is not finite"));
  CHECK(test::holds(error, "first gradient: `"));
}

TEST_CASE_TEMPLATE("memory is estimated: gradients take two bytes, and four while a bucket's are computed", D,
                   FAST_DEVICES) {
  constexpr auto kGradients = static_cast<size_t>(MemoryCategory::gradients);
  for (const char* strategy : {"no_shard", "optim_grads"}) {
    CAPTURE(strategy);
    const std::vector<std::string> model = {"model.hidden_size=96", "model.vocab_size=600",
                                            "ddp.bucket_size=20000",
                                            std::string("ddp.data_parallel_sharding_strategy=") + strategy};
    const auto used_by = [&](const config::Config& config) {
      const train::StepEstimate estimate =
          train::estimate_step(config, world().rank(), static_cast<int>(world().size()));
      train::StepRunner runner(config, world());
      runner.initialize();
      run_until(runner, config, 2);
      const MemoryUse used = runner.device().memory();
      INFO("estimated: ", train::memory_text(estimate.memory));
      INFO("used: ", train::memory_text(used));
      CHECK(used.peak == doctest::Approx(estimate.memory.peak).epsilon(0.02));
      CHECK(used.reserved == doctest::Approx(estimate.memory.reserved).epsilon(0.02));
      CHECK(used.peak_by_category[kGradients] == estimate.memory.peak_by_category[kGradients]);
      return std::pair(used.peak_by_category[kGradients], runner.store().elements());
    };
    const auto wide = used_by(resolve_preset<D>("bf16_mixed", model)),
               narrow = used_by(resolve_preset<D>("bf16_mixed", with(kNarrow, model)));
    const int64_t elements = wide.second, ranks = strategy == std::string("no_shard") ? 1 : world().size();
    if (ranks == 1) {
      CHECK(wide.first == doctest::Approx(4 * elements).epsilon(0.01));
      // The embedding and the head are the largest buckets.
      const int64_t largest = 4 * 640 * 96;
      CHECK(narrow.first >= 2 * elements + largest);
      CHECK(narrow.first <= 2.02 * static_cast<double>(elements) + 1.5 * static_cast<double>(largest));
    } else {
      CHECK(static_cast<double>(wide.first - narrow.first) ==
            doctest::Approx(2.0 * static_cast<double>(elements) / static_cast<double>(ranks)).epsilon(0.05));
    }
  }
}
