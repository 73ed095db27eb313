// Sharded data parallelism on any number of ranks: every strategy gives the numbers of plain data
// parallelism, with the memory, the bytes and the order of collectives that flat_store.hpp says.
#include "parallel/flat_store.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>

#include "kernels/table.hpp"
#include "support/devices.hpp"
#include "support/sanitized.hpp"
#include "support/step_control.hpp"
#include "tensor/launch.hpp"
#include "tests/parallel/store_run.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/device_batch.hpp"

using namespace capstan;
using namespace capstan::test;
using config::ShardingStrategy;
using parallel::FlatStore;

namespace {

// Everything that was observed, and the most memory of two categories at any of those moments.
class Events final : public TapeObserver {
 public:
  void observe(const TapeEvent& event) override {
    names.push_back(std::string(1, event.phase) + " " + event.name);
    if (!device) return;
    const auto& now = device->memory().now_by_category;
    for (size_t i = 0; i < now.size(); ++i) most[i] = std::max(most[i], now[i]);
  }
  size_t first(const std::string& name) const {
    return static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
  }
  std::vector<std::string> names;
  Device* device = nullptr;
  std::array<int64_t, kMemoryCategories> most{};
};

// Bytes that this rank sends, from the events of the store's collectives.
class SentSum final : public TapeObserver {
 public:
  void observe(const TapeEvent& event) override { bytes += event.cost.sent_bytes; }
  double bytes = 0;
};

}  // namespace

TEST_CASE_TEMPLATE("every strategy, bucket size and overlap gives the numbers of plain data parallelism", D,
                   FAST_DEVICES) {
  const int64_t ranks = world().size();
  for (const int64_t micro_batches : {1, 3}) {
    auto config = store_config<D>(ranks, micro_batches);
    const StoreRun plain = run_store(config, world());
    {
      const auto alone = comm::World::single_process();
      auto one = config;
      one.dist.world_size = 1, one.dist.data_parallel_size = 1;
      const StoreRun single = run_store(one, *alone);
      check_close(plain.losses, single.losses, 1e-5);
      check_close(plain.norms, single.norms, 1e-5);
    }
    for (const bool overlap : {false, true})
      for (const int64_t bucket : {3000, 1, 40'000'000}) {
        // Many processes on few cores: one size will do.
        if ((ranks > 2 || test::kSanitized) && bucket != 3000) continue;
        if (test::kSanitized && !overlap) continue;
        config.ddp.bucket_size = bucket;
        config.ddp.overlap_grad_reduce = overlap;
        config.ddp.overlap_param_gather = false;
        config.ddp.data_parallel_sharding_strategy = ShardingStrategy::no_shard;
        CAPTURE(micro_batches);
        CAPTURE(overlap);
        CAPTURE(bucket);
        check_same(run_store(config, world()), plain, 0);
        config.ddp.overlap_param_gather = overlap;
        for (const auto strategy : kShardedStrategies) {
          CAPTURE(text_of(strategy));
          config.ddp.data_parallel_sharding_strategy = strategy;
          // Sharded gradients are summed over ranks first, then over micro-batches.
          const bool same_order = micro_batches == 1 || strategy == ShardingStrategy::optim || ranks == 1;
          check_same(run_store(config, world()), plain, same_order ? 0 : 1e-6);
        }
      }
  }
}

TEST_CASE_TEMPLATE(
    "parameters in 16 bits, gradients that are sent in them, tied embeddings and recomputation", D,
    FAST_DEVICES) {
  const int64_t ranks = world().size();
  for (const bool llama : {true, false})  // the other one ties its embeddings
    for (const auto& [precision, narrow_gradients] : {std::pair(config::Precision::bf16, false),
                                                      {config::Precision::bf16, true},
                                                      {config::Precision::fp16, true}}) {
      auto config = store_config<D>(ranks, 1, llama);
      config.mixed_precision.params_dtype = precision;
      config.mixed_precision.grad_reduce_in_fp32 = !narrow_gradients;
      config.mixed_precision.initial_loss_scale = 1024;
      config.ddp.bucket_size = 5000;
      const StoreRun plain = run_store(config, world());
      config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = true;
      for (const auto strategy : kShardedStrategies) {
        CAPTURE(text_of(strategy));
        CAPTURE(llama);
        CAPTURE(narrow_gradients);
        config.ddp.data_parallel_sharding_strategy = strategy;
        check_same(run_store(config, world()), plain, 0);
        auto again = config;
        again.model.recompute_granularity = config::RecomputeGranularity::full;
        again.model.recompute_method = config::RecomputeMethod::uniform;
        again.model.recompute_num_layers = 2;
        check_same(run_store(again, world()), plain, 0);
      }
    }
}

TEST_CASE_TEMPLATE("instances of the optimizer (HSDP): sharded within, reduced between, or sharded over both",
                   D, FAST_DEVICES) {
  const int64_t ranks = world().size();
  if (ranks != 4) return;
  for (const int64_t micro_batches : {1, 3})
    for (const auto precision : {config::Precision::fp32, config::Precision::bf16}) {
      auto config = store_config<D>(ranks, micro_batches);
      config.mixed_precision.params_dtype = precision;
      config.ddp.bucket_size = 5000;
      const StoreRun plain = run_store(config, world());
      config.ddp.num_distributed_optimizer_instances = 2;
      for (const auto outer : {ShardingStrategy::no_shard, ShardingStrategy::optim})
        for (const auto strategy : kShardedStrategies) {
          CAPTURE(text_of(strategy));
          CAPTURE(text_of(outer));
          config.ddp.outer_dp_sharding_strategy = outer;
          config.ddp.data_parallel_sharding_strategy = strategy;
          check_same(run_store(config, world()), plain, precision == config::Precision::fp32 ? 1e-6 : 2e-2);
        }
    }
}

TEST_CASE("under tensor-parallel ranks every strategy gives the numbers of one rank") {
  if (world().size() != 4) return;
  for (const bool llama : {true, false})
    for (const int64_t tensor : {2, 4}) {
      auto config = store_config<test::Cpu>(4, 1, llama);
      config.model.num_layers = 4;
      config.model.ffn_hidden_size = 72;
      config.model.num_attention_heads = 8;
      // Fewer groups than four tensor-parallel ranks.
      config.model.num_query_groups = llama ? 2 : 8;
      config.model.hidden_size = 64;
      auto one = config;
      one.dist.world_size = 1, one.dist.data_parallel_size = 1;
      const auto alone = comm::World::single_process();
      const StoreRun single = run_store(one, *alone);
      config.dist.tensor_model_parallel_size = tensor;
      config.dist.data_parallel_size = 4 / tensor;
      config.dist.sequence_parallel = tensor == 2;
      config.ddp.bucket_size = 3000;
      for (const auto strategy : kStrategies) {
        CAPTURE(text_of(strategy));
        CAPTURE(llama);
        CAPTURE(tensor);
        config.ddp.data_parallel_sharding_strategy = strategy;
        config.ddp.overlap_grad_reduce = true;
        config.ddp.overlap_param_gather = strategy != ShardingStrategy::no_shard;
        const StoreRun result = run_store(config, world(), 2, nullptr, false);
        check_close(result.losses, single.losses, 1e-5);
        check_close(result.norms, single.norms, 1e-5);
      }
    }
}

TEST_CASE_TEMPLATE("a rank holds the memory of each category that flat_store.hpp states", D, FAST_DEVICES) {
  const int64_t ranks = world().size();
  for (const auto& [half, narrow_gradients] : {std::pair(false, false), {true, false}, {true, true}})
    for (const bool overlap : {false, true})
      for (const auto strategy : kStrategies) {
        CAPTURE(text_of(strategy));
        CAPTURE(half);
        CAPTURE(narrow_gradients);
        CAPTURE(overlap);
        CAPTURE(ranks);
        auto config = store_config<D>(ranks, 2);
        config.model.hidden_size = 192, config.model.kv_channels = 32, config.model.ffn_hidden_size = 384;
        config.mixed_precision.params_dtype = half ? config::Precision::bf16 : config::Precision::fp32;
        if (narrow_gradients) config.optimizer.main_grads_dtype = config::Precision::bf16;
        config.ddp.data_parallel_sharding_strategy = strategy;
        config.ddp.bucket_size = 150'000;
        config.ddp.overlap_grad_reduce = overlap;
        config.ddp.overlap_param_gather = overlap && strategy != ShardingStrategy::no_shard;
        train::StepRunner runner(config, world());
        runner.initialize();
        Events events;
        events.device = &runner.device();
        runner.observe(&events);
        const auto data = train::open_datasets(config, nullptr);
        data::Loader loader(data[0], runner.loader_options());
        train::StepTimers timers;
        timers.start_step();
        runner.train_step(loader, timers);

        const bool sharded = strategy != ShardingStrategy::no_shard && ranks > 1,
                   shards_gradients = sharded && strategy != ShardingStrategy::optim,
                   shards_parameters = sharded && strategy == ShardingStrategy::optim_grads_params;
        const auto layout =
            parallel::plan_buckets(runner.model().parameters(), {.bucket_elements = 150'000,
                                                                 .shards = ranks,
                                                                 .by_block = shards_parameters,
                                                                 .trainable = nullptr});
        // Those whose reductions are under way, and the one whose gradients are computed.
        const size_t held = !overlap || !shards_gradients
                                ? 1
                                : 1 + (runner.device().queues_work() ? FlatStore::kPendingReductions : 1);
        int64_t b = 0, two_blocks = 0, held_buckets = 0;
        std::vector<int64_t> block(layout.blocks.size());
        for (size_t i = 0; i < layout.buckets.size(); ++i) {
          const int64_t n = layout.buckets[i].elements;
          b += n;
          block[layout.buckets[i].block] += n;
          int64_t together = 0;
          for (size_t j = i + 1 - std::min(held, i + 1); j <= i; ++j) together += layout.buckets[j].elements;
          held_buckets = std::max(held_buckets, together);
        }
        for (size_t i = 0; i + 1 < block.size(); ++i)
          two_blocks = std::max(two_blocks, block[i] + block[i + 1]);
        const int64_t widest_block = *std::max_element(block.begin(), block.end());
        const int64_t P = half ? 2 : 4, A = narrow_gradients ? 2 : 4, S = sharded ? ranks : 1;
        const auto index = [](MemoryCategory category) { return static_cast<size_t>(category); };
        const auto near = [&](int64_t got, int64_t formula, const char* what) {
          CAPTURE(what);
          CHECK(static_cast<double>(got) >= 0.98 * static_cast<double>(formula));
          // Blocks of the allocator are up to an eighth larger than what was asked for.
          CHECK(static_cast<double>(got) <= 1.02 * static_cast<double>(formula) * 1.125 + 512.0 * 64);
        };
        near(events.most[index(MemoryCategory::parameters)],
             shards_parameters ? P * b / S + P * (overlap ? two_blocks : widest_block) : P * b, "parameters");
        near(events.most[index(MemoryCategory::main_parameters)], half ? 4 * b / S : 0, "main parameters");
        near(events.most[index(MemoryCategory::gradients)],
             (shards_gradients ? A * b / S : A * b) +
                 (shards_gradients || narrow_gradients ? 4 * held_buckets : 0),
             "gradients");
        near(events.most[index(MemoryCategory::moments)], 8 * b / S, "moments");
      }
}

TEST_CASE(
    "buckets of sharded gradients are a sixteenth of a small model, and those of a large one are full") {
  CHECK(parallel::default_bucket_elements(124'000'000, 8) == 7'750'000);
  CHECK(parallel::default_bucket_elements(3'000'000, 8) == 1'000'000);
  CHECK(parallel::default_bucket_elements(8'000'000'000, 8) == 40'000'000);
  CHECK(parallel::default_bucket_elements(8'000'000'000, 64) == 64'000'000);
}

TEST_CASE("a step sends the bytes that flat_store.hpp says") {
  const int64_t ranks = world().size();
  enum class Types : uint8_t { fp32, bf16, bf16_sent_in_fp32, bf16_gradients };
  for (const auto types : {Types::fp32, Types::bf16, Types::bf16_sent_in_fp32, Types::bf16_gradients})
    for (const int64_t micro_batches : {1, 3})
      for (const bool overlap : {false, true})
        for (const auto strategy : kStrategies) {
          CAPTURE(text_of(strategy));
          CAPTURE(static_cast<int>(types));
          CAPTURE(micro_batches);
          CAPTURE(overlap);
          const bool half = types != Types::fp32;
          auto config = store_config<test::Cpu>(ranks, micro_batches);
          config.mixed_precision.params_dtype = half ? config::Precision::bf16 : config::Precision::fp32;
          config.mixed_precision.grad_reduce_in_fp32 = types != Types::bf16;
          if (types == Types::bf16_gradients) config.optimizer.main_grads_dtype = config::Precision::bf16;
          config.ddp.data_parallel_sharding_strategy = strategy;
          config.ddp.bucket_size = 3000;
          config.ddp.overlap_grad_reduce = overlap;
          config.ddp.overlap_param_gather = overlap && strategy != ShardingStrategy::no_shard;
          test::CountingWorld counting(world());
          train::StepRunner runner(config, counting);
          runner.initialize();
          const auto data = train::open_datasets(config, nullptr);
          data::Loader loader(data[0], runner.loader_options());
          train::StepTimers timers;
          timers.start_step();
          runner.train_step(loader, timers);
          const int64_t before = counting.sent["shard"];
          timers.start_step();
          SentSum noted;
          runner.observe(&noted);
          runner.train_step(loader, timers);
          runner.observe(nullptr);
          const int64_t sent = counting.sent["shard"] - before;

          const bool blocks = strategy == ShardingStrategy::optim_grads_params && ranks > 1;
          const auto layout = parallel::plan_buckets(
              runner.model().parameters(),
              {.bucket_elements = 3000, .shards = ranks, .by_block = blocks, .trainable = nullptr});
          int64_t b = 0;
          std::vector<int64_t> block(layout.blocks.size());
          for (const auto& bucket : layout.buckets)
            b += bucket.elements, block[bucket.block] += bucket.elements;
          const bool each_micro_batch =
              strategy == ShardingStrategy::optim_grads || strategy == ShardingStrategy::optim_grads_params;
          const bool sent_in_bf16 =
              types == Types::bf16 || (types == Types::bf16_gradients && !each_micro_batch);
          const int64_t G = sent_in_bf16 ? 2 : 4, P = half ? 2 : 4, M = micro_batches;
          int64_t bytes = 0;
          if (strategy == ShardingStrategy::no_shard) bytes = 2 * G * b;
          if (strategy == ShardingStrategy::optim) bytes = (G + P) * b;
          if (strategy == ShardingStrategy::optim_grads) bytes = (M * G + P) * b;
          if (strategy == ShardingStrategy::optim_grads_params) {
            // The embedding's block is used by no backward pass, and the last block is still there when one
            // begins.
            const size_t n = block.size();
            int64_t gathered = 0;
            if (overlap)  // gathered ahead: blocks 0 and 1 stay between passes, as the last two do
              gathered = b + M * (b - block[n - 1] - block[n - 2]) + (M - 1) * (b - block[0] - block[1]);
            else
              gathered = M * b + M * (b - block[n - 1] - block[0]);
            bytes = M * G * b + P * gathered;
          }
          // Norms and the like are a few numbers.
          CHECK(static_cast<double>(sent) ==
                doctest::Approx(static_cast<double>(bytes * (ranks - 1) / ranks)).epsilon(0.02));
          CHECK(noted.bytes == doctest::Approx(static_cast<double>(sent)).epsilon(0.02));
        }
}

TEST_CASE_TEMPLATE("what must start before what: sums under the backward pass, gathers before the compute", D,
                   EVERY_DEVICE) {
  if (world().size() == 1) return;
  for (const auto strategy : kStrategies)
    for (const bool recompute : {false, true}) {
      CAPTURE(text_of(strategy));
      CAPTURE(recompute);
      auto config = store_config<D>(world().size(), 1);
      if (recompute) {
        config.model.recompute_granularity = config::RecomputeGranularity::full;
        config.model.recompute_method = config::RecomputeMethod::uniform;
        config.model.recompute_num_layers = 1;
      }
      config.ddp.data_parallel_sharding_strategy = strategy;
      config.ddp.bucket_size = 3000;
      config.ddp.overlap_grad_reduce = true;
      config.ddp.overlap_param_gather = strategy != ShardingStrategy::no_shard;
      Events events;
      run_store(config, world(), 1, &events);
      // Bucket 0 holds the last layers: its sum starts while earlier layers' backward is still to come, and
      // nothing waits for it before that.
      const size_t start = events.first("C start reduce bucket 0"),
                   wait = events.first("C wait reduce bucket 0");
      REQUIRE(wait < events.names.size());
      const auto works = [&](size_t from, size_t to, char phase) {
        return std::count_if(events.names.begin() + static_cast<std::ptrdiff_t>(from),
                             events.names.begin() + static_cast<std::ptrdiff_t>(to),
                             [&](const std::string& name) { return name[0] == phase; });
      };
      CHECK(works(start, events.names.size(), 'B') > 10);
      CHECK(works(start, wait, 'B') > 0);
      if (strategy != ShardingStrategy::optim_grads_params) continue;
      // The gather of layer 1 starts before layer 0 computes anything, and layer 0's backward finds its
      // parameters asked for before layer 1's backward has begun.
      const size_t layer0 = events.first("C wait gather layer 0"),
                   layer1 = events.first("C start gather layer 1");
      REQUIRE(layer1 < events.names.size());
      CHECK(layer1 > layer0);
      CHECK(works(layer0, layer1, 'F') == 0);
      const auto last = [&](const std::string& name) {
        return events.names.size() - 1 -
               static_cast<size_t>(std::find(events.names.rbegin(), events.names.rend(), name) -
                                   events.names.rbegin());
      };
      CHECK(last("C start gather layer 0") < last("C wait gather layer 0"));
      CHECK(works(last("C start gather layer 0"), last("C wait gather layer 0"), 'B') > 2);
    }
}

TEST_CASE_TEMPLATE("what does not train keeps its values, has no state, and changes nothing for the rest", D,
                   EVERY_DEVICE) {
  const int64_t ranks = world().size();
  const auto config = store_config<D>(ranks, 1);
  const auto trainable = [](const Parameter& parameter) {
    return parameter.spec().name.find("mlp") == std::string::npos;
  };
  const auto step = [&](ShardingStrategy strategy, DType compute, bool frozen) {
    const auto device = D::make(1);
    const auto model = models::build(config.model);
    FlatStore::Options options;
    options.compute = compute;
    options.sharding = strategy;
    options.bucket_elements = 3000;
    options.overlap_param_gather = options.overlap_grad_reduce = true;
    if (frozen) options.trainable = trainable;
    parallel::StoreGroups groups;
    groups.dense.shard = &world().communicator();
    FlatStore store(*device, model->parameters(), groups, options);
    train::initialize_parameters(store, 7, device->host_threads());
    const auto optimizer = optim::build(config.optimizer, *device, store.flat_buffers());
    data::MicroBatch shape;
    shape.rows = 1, shape.sequence_length = 24;
    for (int i = 0; i < 24; ++i) {
      shape.tokens.push_back((i * 7 + world().rank()) % 61), shape.labels.push_back((i * 5 + 3) % 61);
      shape.loss_mask.push_back(1), shape.position_ids.push_back(i);
    }
    shape.sample_ids.push_back(0);
    store.zero_gradients();
    store.begin_last_micro_batch();
    StepContext context{*device, store};
    Tape tape(context);
    model->forward(tape, train::upload(*device, shape, false), {});
    tape.backward({{"loss", Tensor::from_host<float>(*device, {1}, std::vector<float>{1})}});
    store.finish_gradients();
    optimizer->step({.lr = 0.01}, test::step_control(*device));
    store.after_update();
    int64_t state = 0;
    for (const Tensor& t : optimizer->state()[0].buffers) state += t.elements();
    return std::pair(gathered(world().communicator(), store, nullptr), state);
  };
  for (const DType compute : {DType::f32, DType::bf16}) {
    const auto [all, all_state] = step(ShardingStrategy::no_shard, compute, false);
    const auto [plain, plain_state] = step(ShardingStrategy::no_shard, compute, true);
    CHECK(plain_state < all_state);
    for (const auto strategy : kShardedStrategies) {
      CAPTURE(text_of(strategy));
      const auto [values, state] = step(strategy, compute, true);
      CHECK(values == plain);
      CHECK(state * ranks <= plain_state * 2);
    }
    const auto model = models::build(config.model);
    for (const auto& parameter : model->parameters()) {
      const auto i = static_cast<size_t>(parameter->index());
      if (trainable(*parameter))
        CHECK_MESSAGE(plain[i] == all[i], parameter->name());
      else
        CHECK_MESSAGE(plain[i] != all[i], parameter->name());
    }
  }
}

TEST_CASE_TEMPLATE("what a GEMM sets is not zeroed first, what is added to and what has no writer is zero", D,
                   EVERY_DEVICE) {
  const auto device = D::make(1);
  const auto model = models::build(store_config<D>(world().size(), 1).model);
  const auto fill = [&](const Tensor& t, float value) {
    launch(*device, device->table().elementwise->fill, t, value, t.elements());
  };
  for (const auto strategy : {ShardingStrategy::no_shard, ShardingStrategy::optim_grads}) {
    CAPTURE(text_of(strategy));
    FlatStore::Options options;
    options.sharding = strategy;
    options.bucket_elements = int64_t{1} << 30;
    parallel::StoreGroups groups;
    groups.dense.shard = &world().communicator();
    FlatStore store(*device, model->parameters(), groups, options);
    const auto& parameters = model->parameters();
    const bool sharded = strategy != ShardingStrategy::no_shard && world().size() > 1;
    const auto ranks = static_cast<float>(world().size());
    const auto step = [&](const std::function<void()>& gradients) {
      store.zero_gradients();
      store.begin_last_micro_batch();
      gradients();
      store.finish_gradients();
      std::vector<std::vector<float>> sums;
      for (const auto& buffer : store.flat_buffers()) sums.push_back(buffer.gradients.to_floats());
      return sums;
    };
    step([&] {
      for (const auto& parameter : parameters) fill(store.gradient(*parameter), 5);
    });
    const auto sums = step([&] {
      bool uninitialized;
      const Tensor set = store.gradient_for_write(*parameters[0], uninitialized);
      CHECK(uninitialized == !sharded);
      fill(set, 3);
      store.gradient_for_write(*parameters[0], uninitialized);
      CHECK_FALSE(uninitialized);
      for (const float value : store.gradient(*parameters[1]).to_floats()) REQUIRE(value == 0);
      store.gradient_for_write(*parameters[1], uninitialized);
      CHECK_FALSE(uninitialized);
    });
    int64_t threes = 0, others = 0;
    for (const auto& buffer : sums)
      for (const float value : buffer) {
        REQUIRE((value == 0 || value == 3 * ranks));
        ++(value == 0 ? others : threes);
      }
    CHECK(others > 0);
    if (!sharded) CHECK(threes == parameters[0]->shape().elements());
  }
}
