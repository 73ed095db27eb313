// A training step: how often the host waits for the device, loss scaling, batches that grow.
#include "train/trainer/step_runner.hpp"

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <functional>
#include <optional>
#include <tuple>

#include "base/error.hpp"
#include "kernels/table.hpp"
#include "support/running.hpp"
#include "support/sanitized.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/device_batch.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/saver.hpp"

using namespace capstan;
using namespace capstan::train;
using capstan::testing::tiny_config;
using config::DeviceKind;
using test::Running;
using test::world;

namespace {

// On every rank, where `data_parallel` of them share a batch.
void set_micro_batches(config::Config& config, int64_t micro_batches, int64_t data_parallel) {
  config.dist.data_parallel_size = data_parallel;
  config.train.global_batch_size = config.train.micro_batch_size * micro_batches * data_parallel;
}
// On each rank; each has a buffer (BatchUploader).
config::Config several_micro_batches(bool llama, int64_t micro_batches = 3) {
  config::Config config = tiny_config(llama, world().size());
  set_micro_batches(config, micro_batches, world().size());
  return config;
}

config::Config on_stand_in(config::Config config) {
  config.train.device = DeviceKind::checked;
  if (world().size() > 1) config.dist.distributed_backend = config::DistributedBackend::nccl_stand_in;
  return config;
}

// The scale of the mean loss with which sums of losses have the factor 2^127.
double overflowing_scale(const config::Config& config) {
  const int64_t tokens = config.train.global_batch_size.value() * config.model.seq_length;
  return std::ldexp(static_cast<double>(std::bit_ceil(static_cast<uint64_t>(tokens))), 127);
}

int64_t waits_of_a_step(const config::Config& config,
                        const std::optional<config::MixedPrecisionConfig>& loss_scaling = {}) {
  Running r(config);
  if (loss_scaling) r.runner.scale_loss(*loss_scaling);
  r.step();
  const int64_t before = r.runner.device().host_waits();
  r.step();
  const int64_t waits = r.runner.device().host_waits() - before;
  return waits;
}

}  // namespace

TEST_CASE("the host waits for the device once a step") {
  for (const bool llama : {false, true}) {
    config::Config config = several_micro_batches(llama);
    config.model.hidden_dropout = 0.1;
    config.optimizer.clip_grad = 0.5;
    config.optimizer.grad_norm_skip_threshold = 1e6;
    config.resilience.loss_spike_action = config::SpikeAction::skip;
    config.resilience.grad_norm_spike_action = config::SpikeAction::rewind;
    for (const bool logs : {false, true}) {
      config.logger.log_params_norm = config.logger.log_num_zeros_in_grad = logs;
      // The staging channel needs the host for every transfer.
      if (world().size() == 1) CHECK(waits_of_a_step(config) == 1);
      CHECK(waits_of_a_step(on_stand_in(config)) == 1);
    }
  }
}

TEST_CASE("the host waits for the device once a step of a pipeline and with sharded parameters") {
  if (world().size() == 1) return;
  config::Config config = several_micro_batches(true);
  config.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim_grads_params;
  config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = true;
  CHECK(waits_of_a_step(on_stand_in(config)) == 1);
  config = several_micro_batches(true);
  config.dist.pipeline_model_parallel_size = config.model.num_layers = world().size();
  set_micro_batches(config, 4, 1);
  config.logger.log_params_norm = true;
  CHECK(waits_of_a_step(on_stand_in(config)) == 1);
}

TEST_CASE("the host waits for the device once a step under every kind of parallelism together") {
  const int size = world().size();
  if (size % 4 != 0) return;
  for (const bool params : {false, true}) {
    config::Config config = several_micro_batches(true);
    config.dist.tensor_model_parallel_size = config.dist.pipeline_model_parallel_size = 2;
    config.dist.sequence_parallel = true;
    set_micro_batches(config, 4, size / 4);
    config.ddp.data_parallel_sharding_strategy =
        params ? config::ShardingStrategy::optim_grads_params : config::ShardingStrategy::optim_grads;
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = true;
    config.optimizer.clip_grad = 0.5;
    config.logger.log_params_norm = config.logger.log_num_zeros_in_grad = true;
    CHECK(waits_of_a_step(on_stand_in(config)) == 1);
  }
  // ZeRO and tensor parallelism share the ranks.
  config::Config config = several_micro_batches(true);
  config.dist.tensor_model_parallel_size = 2;
  set_micro_batches(config, 3, size / 2);
  config.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim_grads;
  config.ddp.overlap_grad_reduce = true;
  CHECK(waits_of_a_step(on_stand_in(config)) == 1);
}

TEST_CASE(
    "the host waits once a step with experts, and where they exchange tokens once a layer and micro-batch; "
    "memory of the system is taken in the first steps only, unless the number of tokens varies") {
  struct Kind {
    config::TokenDispatcher dispatcher;
    bool padded;
  };
  constexpr int64_t kMicroBatches = 3;
  const int64_t ranks = world().size();
  for (const auto& [dispatcher, padded] : {Kind{config::TokenDispatcher::allgather, false},
                                           {config::TokenDispatcher::alltoall, true},
                                           {config::TokenDispatcher::alltoall, false}})
    for (const bool recomputes : {false, true}) {
      CAPTURE(static_cast<int>(dispatcher));
      CAPTURE(padded);
      CAPTURE(recomputes);
      config::Config config = capstan::testing::tiny_experts_config(ranks);
      set_micro_batches(config, kMicroBatches, ranks);
      config.model.moe_token_dispatcher_type = dispatcher;
      if (padded) {
        config.model.moe_expert_capacity_factor = 2;
        config.model.moe_pad_expert_input_to_capacity = true;
      }
      if (recomputes) {
        config.model.recompute_granularity = config::RecomputeGranularity::full;
        config.model.recompute_method = config::RecomputeMethod::uniform;
        config.model.recompute_num_layers = 1;
      }
      const bool reads_counts = dispatcher == config::TokenDispatcher::alltoall && !padded && ranks > 1;
      const int64_t expected = 1 + (reads_counts ? config.model.num_layers * kMicroBatches : 0);
      if (ranks == 1) CHECK(waits_of_a_step(config) == expected);
      Running r(on_stand_in(config));
      for (int step = 0; step < 2; ++step) r.step();
      const Device& device = r.runner.device();
      const int64_t waits = device.host_waits(), requests = device.memory().system_requests;
      r.step();
      CHECK(device.host_waits() - waits == expected);
      if (!reads_counts) CHECK(device.memory().system_requests == requests);
    }
}

TEST_CASE("the host waits for the device once a step, however many micro-batches there are") {
  for (const int64_t micro_batches : {5, 24}) {
    config::Config config = several_micro_batches(true, micro_batches);
    if (world().size() == 1) CHECK(waits_of_a_step(config) == 1);
    CHECK(waits_of_a_step(on_stand_in(config)) == 1);
  }
}

TEST_CASE("the host waits for the device once a step with reruns too: the device hashes the gradients") {
  config::Config config = several_micro_batches(true, 6);
  config.resilience.rerun_mode = config::RerunMode::validate_results;
  config.resilience.loss_spike_action = config::SpikeAction::warn;
  config.ddp.bucket_size = 5000;
  CHECK(waits_of_a_step(on_stand_in(config)) == 1);
  if (world().size() == 1) return;
  // The gradients of each micro-batch.
  config.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim_grads;
  CHECK(waits_of_a_step(on_stand_in(config)) == 1);
}

TEST_CASE("a step that is computed again waits for both decisions and for the update") {
  config::Config config = on_stand_in(several_micro_batches(true, 6));
  config.resilience.rerun_mode = config::RerunMode::validate_results;
  config.resilience.loss_spike_action = config::SpikeAction::warn;
  const int64_t once = waits_of_a_step(config);
  Running r(config);
  r.step();
  r.runner.state().recent_losses.assign(16, 1e-3);
  const int64_t before = r.runner.device().host_waits();
  const StepResult result = r.step();
  REQUIRE(result.anomalies.size() == 2);
  // After the second pass the update runs, and its result is read.
  CHECK(r.runner.device().host_waits() - before == 2 * once + 1);
}

TEST_CASE("the host waits for the device once a step in fp16, whether the loss scale holds or overflows") {
  config::Config config = several_micro_batches(true);
  config.mixed_precision.params_dtype = config::Precision::fp16;
  config::MixedPrecisionConfig scaling = config.mixed_precision;
  for (const double scale : {1024.0, overflowing_scale(config)}) {
    scaling.initial_loss_scale = scale;
    CHECK(waits_of_a_step(on_stand_in(config), scaling) == 1);
  }
}

TEST_CASE("the host waits once for an evaluation, and for a save once a chunk of what this rank writes") {
  config::Config config = several_micro_batches(true);
  config.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim;
  Running r(on_stand_in(config));
  r.step();
  Device& device = r.runner.device();
  const auto waits_of = [&](const std::function<void()>& act) {
    const int64_t before = device.host_waits();
    act();
    return device.host_waits() - before;
  };
  CHECK(waits_of([&] { r.runner.evaluate(r.data[0], 1); }) == 1);
  const test::SharedDirectory root;
  int64_t tensors = 0;
  for (const StateTensor& t : state_tensors(r.runner.store(), &r.runner.optimizer()))
    tensors += t.elements() > 0 ? 1 : 0;
  const auto save = [&] { test::save_in(root.path(), r.runner); };
  const int64_t copied = device.copied_bytes(Queue::device_to_host);
  CHECK(waits_of(save) == tensors);
  CHECK(device.copied_bytes(Queue::device_to_host) > copied);
  CHECK(waits_of([&] { r.step(); }) == 1);
}

TEST_CASE(
    "the host memory of a step is estimated: buffers of micro-batches, and of transfers between ranks") {
  const int size = world().size();
  std::vector<config::Config> configs{several_micro_batches(true)};
  if (size > 1) {
    configs[0].ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim_grads_params;
    configs[0].ddp.overlap_grad_reduce = configs[0].ddp.overlap_param_gather = true;
    configs.push_back(several_micro_batches(true));
    configs.back().dist.pipeline_model_parallel_size = configs.back().model.num_layers = size;
    configs.back().dist.data_parallel_size = 1;
  }
  for (config::Config& config : configs) {
    config.train.device = DeviceKind::checked;
    int64_t data_of_one = 0;
    for (const int64_t micro_batches : {1, 2, 3, 5, 16, 64}) {
      CAPTURE(micro_batches);
      set_micro_batches(config, micro_batches, config.dist.data_parallel_size.value());
      Running r(config);
      for (int step = 0; step < 2; ++step) r.step();
      Device& device = r.runner.device();
      // As at the end of a run.
      state_reader(device, state_tensors(r.runner.store(), &r.runner.optimizer()));
      const MemoryUse run = device.memory(MemoryKind::host),
                      estimate = estimate_step(config, world().rank(), size).host_memory;
      CHECK(estimate.peak_by_category == run.peak_by_category);
      CHECK(estimate.total() == run.total());
      const int64_t data = run.peak_by_category[static_cast<size_t>(MemoryCategory::data)];
      if (micro_batches == 1) data_of_one = data;
      CHECK(data == micro_batches * data_of_one);
    }
  }
}

TEST_CASE(
    "there are buffers for all micro-batches of a step up to 16 MiB; with fewer the host waits for them") {
  // Rows of 131072 tokens of 16 bytes.
  for (const auto& [rows, seq, buffers] :
       {std::tuple<int64_t, int64_t, int64_t>{2, 16, 9}, {1, 131072, 8}, {2, 131072, 4}, {3, 131072, 4}}) {
    CAPTURE(rows);
    const auto device = make_checked_device(kernels::cpu_table(), 1, {.patient = true});
    BatchUploader uploader(*device, {});
    data::MicroBatch micro = data::MicroBatch::zeros(rows, seq);
    for (int64_t row = 0; row < rows; ++row) {
      micro.sample_ids.push_back(static_cast<uint64_t>(row));
      micro.cu_seqlens.push_back({0, static_cast<int32_t>(seq)});
    }
    const int64_t bytes = rows * seq * 16;
    std::vector<PendingBatch> pending;
    for (int32_t m = 0; m < 9; ++m) {
      micro.tokens.assign(static_cast<size_t>(rows * seq), m);
      pending.push_back(uploader.start(micro, false, 1));
      CHECK(device->host_waits() == std::max<int64_t>(0, m + 1 - buffers));
      CHECK(device->host_memory().now == std::min<int64_t>(m + 1, buffers) * bytes);
    }
    for (int32_t m = 0; m < 9; ++m) {
      const auto tokens = pending[static_cast<size_t>(m)].get().tokens.to_host<int32_t>();
      CHECK((tokens.front() == m && tokens.back() == m));
    }
    uploader.begin_step();
    uploader.start(micro, false, 1);
    CHECK(device->host_memory().now == buffers * bytes);
    // The estimate reserves the same host memory.
    const auto other = make_checked_device(kernels::cpu_table(), 1);
    BatchUploader reserved(*other, {});
    reserved.reserve(micro, false, 9);
    CHECK(other->host_memory().now == buffers * bytes);
  }
}

TEST_CASE("the estimate counts the sums of the losses of every micro-batch") {
  config::Config config = several_micro_batches(true);
  constexpr int64_t kFew = 2000, kMany = 100'000;
  const auto peak = [&](int64_t micro_batches) {
    set_micro_batches(config, micro_batches, config.dist.data_parallel_size.value());
    return estimate_step(config, world().rank(), world().size()).memory.peak;
  };
  const int64_t more = peak(kMany) - peak(kFew);
  // Sizes are rounded up, by less than 16 KiB.
  CHECK(std::abs(more - 8 * (kMany - kFew)) < 16384);
}

TEST_CASE("a pipeline rank without parameters has none to gather") {
  config::Config config = capstan::testing::tiny_config(true);
  config.dist.world_size = 6, config.dist.pipeline_model_parallel_size = 3,
  config.dist.data_parallel_size = 2;
  config.dist.pipeline_model_parallel_layout = "Et||tL";
  config.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim_grads_params;
  config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = true;
  for (const int64_t rank : {0, 2, 4}) {
    const MemoryUse memory = estimate_step(config, rank).memory;
    CHECK((memory.peak_by_category[static_cast<size_t>(MemoryCategory::parameters)] > 0) == (rank != 2));
  }
}

TEST_CASE("the bytes that a step copies are estimated, with reruns too") {
  for (const bool stand_in : {false, true})
    for (const auto mode : {config::RerunMode::disabled, config::RerunMode::validate_results}) {
      config::Config config = on_stand_in(several_micro_batches(true));
      if (!stand_in) config.dist.distributed_backend = config::DistributedBackend::automatic;
      config.resilience.rerun_mode = mode;
      Running r(config);
      r.step();
      const Device& device = r.runner.device();
      const auto copied = [&] {
        return std::array{device.copied_bytes(Queue::host_to_device),
                          device.copied_bytes(Queue::device_to_host)};
      };
      const auto before = copied();
      r.step();
      const auto after = copied();
      const StepEstimate estimate = estimate_step(config, world().rank(), world().size());
      CAPTURE(stand_in);
      CAPTURE(static_cast<int>(mode));
      CHECK(estimate.copied_to_device == after[0] - before[0]);
      CHECK(estimate.copied_to_host == after[1] - before[1]);
    }
}

TEST_CASE("micro-batches arrive as they are, from buffers that are free again when their copies are done") {
  constexpr int64_t kRows = 3, kSeq = 20;
  const auto micro_batch = [](int64_t seed, bool documents) {
    data::MicroBatch micro;
    micro.rows = kRows, micro.sequence_length = kSeq;
    for (int32_t i = 0; i < kRows * kSeq; ++i) {
      micro.tokens.push_back(i * 7 + static_cast<int32_t>(seed));
      micro.labels.push_back(i * 5 + static_cast<int32_t>(seed));
      micro.loss_mask.push_back(static_cast<float>((i + seed) % 3));
      micro.position_ids.push_back(i % static_cast<int32_t>(kSeq));
    }
    micro.cu_seqlens.assign(kRows, documents ? std::vector<int32_t>{0, 7, 20} : std::vector<int32_t>{0, 20});
    for (int64_t row = 0; row < kRows; ++row)
      micro.sample_ids.push_back(static_cast<uint64_t>(100 * seed + row));
    // With documents the second one of a row is padding, but for the first row.
    if (documents) micro.lengths = {20, 7, 7};
    return micro;
  };
  for (const bool patient : {false, true})
    for (const ContextShard shard : {ContextShard{}, ContextShard{.ranks = 2, .rank = 1}}) {
      const auto device = patient ? make_checked_device(kernels::cpu_table(), 1, {.patient = true})
                                  : make_cpu_device(kernels::cpu_table(), 1);
      BatchUploader uploader(*device, shard);
      const auto positions = shard.positions(kSeq);
      std::vector<PendingBatch> pending;
      for (int64_t m = 0; m < 4; ++m)
        pending.push_back(uploader.start(micro_batch(m, m % 2 == 1), m > 1, m == 3 ? 8.0 : 1.0));
      // Those under way have a buffer each.
      const auto data = static_cast<size_t>(MemoryCategory::data);
      const int64_t buffer = kRows * static_cast<int64_t>(positions.size()) * 16;  // bytes, at least
      CHECK(device->host_memory().now_by_category[data] >= (patient ? 4 : 1) * buffer);
      CHECK(device->host_waits() == 0);
      for (int64_t m = 0; m < 4; ++m) {
        const data::MicroBatch micro = micro_batch(m, m % 2 == 1);
        const models::Batch& batch = pending[static_cast<size_t>(m)].get();
        REQUIRE(batch.batch == kRows);
        REQUIRE(batch.seq == static_cast<int64_t>(positions.size()));
        CHECK(batch.positions_end == kSeq);
        for (const Tensor* view : {&batch.labels, &batch.loss_mask, &batch.positions})
          CHECK((view->address() - batch.tokens.address()) % 64 == 0);
        CHECK(batch.document_start.defined() == (m % 2 == 1));
        CHECK(batch.dropout_rows.defined() == (m > 1));
        CHECK(batch.padding.defined() == (m % 2 == 1));
        CHECK(batch.tokens_in_use == (m % 2 == 1 ? 34 : 0));
        std::vector<int32_t> tokens, labels, ids, starts, padding;
        std::vector<float> mask;
        std::vector<int64_t> rows;
        for (int64_t row = 0; row < kRows; ++row)
          for (const int64_t p : positions) {
            const auto at = static_cast<size_t>(row * kSeq + p);
            tokens.push_back(micro.tokens[at]);
            labels.push_back(micro.labels[at]);
            ids.push_back(micro.position_ids[at]);
            mask.push_back(micro.loss_mask[at] * (m == 3 ? 8.0f : 1.0f));
            starts.push_back(p < 7 ? 0 : 7);
            padding.push_back(row > 0 && p >= 7 ? 1 : 0);
            rows.push_back((100 * m + row) * (int64_t{1} << 24) + p);
          }
        CHECK(batch.tokens.to_host<int32_t>() == tokens);
        CHECK(batch.labels.to_host<int32_t>() == labels);
        CHECK(batch.positions.to_host<int32_t>() == ids);
        CHECK(batch.loss_mask.to_host<float>() == mask);
        if (m % 2 == 1) CHECK(batch.document_start.to_host<int32_t>() == starts);
        if (m % 2 == 1) CHECK(batch.padding.to_host<int32_t>() == padding);
        if (m > 1) CHECK(batch.dropout_rows.to_host<int64_t>() == rows);
        const models::Batch once = upload(*device, micro, m > 1, shard);
        CHECK(once.tokens.to_host<int32_t>() == tokens);
      }
      pending.clear();
      device->synchronize();
      const int64_t used = device->host_memory().now;
      uploader.begin_step();
      (void)uploader.start(micro_batch(9, false), false, 1);
      CHECK(device->host_memory().now == used);
    }
}

TEST_CASE("statistics of a step are those of another device, and of a step without them") {
  config::Config config = several_micro_batches(true);
  config.optimizer.clip_grad = 0.1;
  Running plain(config);
  config.logger.log_params_norm = config.logger.log_num_zeros_in_grad = true;
  Running logged(config), checked(on_stand_in(config));
  for (int i = 0; i < 3; ++i) {
    const StepResult a = plain.step(), b = logged.step(), c = checked.step();
    CHECK(a.loss == b.loss);
    CHECK(a.gradient_norm == b.gradient_norm);
    CHECK(!a.params_norm);
    CHECK(b.loss == c.loss);
    CHECK(b.gradient_norm == c.gradient_norm);
    CHECK(b.loss_tokens == c.loss_tokens);
    CHECK(b.num_zeros == c.num_zeros);
    CHECK(b.params_norm == c.params_norm);
    if (world().size() == 1) {
      double squares = 0;
      for (const float value : logged.parameters())
        squares += static_cast<double>(value) * static_cast<double>(value);
      CHECK(*b.params_norm == doctest::Approx(std::sqrt(squares)).epsilon(1e-12));
    }
  }
  CHECK(plain.parameters() == logged.parameters());
  CHECK(plain.parameters() == checked.parameters());
}

TEST_CASE("a loss scale that is a power of two changes no bit") {
  for (const auto precision : {config::Precision::fp32, config::Precision::bf16})
    for (const DeviceKind kind : {DeviceKind::cpu, DeviceKind::checked, DeviceKind::simulated}) {
      if (kind == DeviceKind::simulated && (test::kSanitized || world().size() > 1)) continue;
      config::Config config = several_micro_batches(true);
      config.mixed_precision.params_dtype = precision;
      config.train.device = kind;
      config.optimizer.clip_grad = 0.1;
      Running plain(config), scaled(config);
      config::MixedPrecisionConfig fp16;
      fp16.initial_loss_scale = 1024;
      fp16.loss_scale_window = 2;
      scaled.runner.scale_loss(fp16);
      double scale = 1024;
      for (int i = 0; i < 5; ++i) {
        const StepResult a = plain.step(), b = scaled.step();
        CHECK(a.loss == b.loss);
        CHECK(a.gradient_norm == b.gradient_norm);
        CHECK(!a.loss_scale);
        CHECK(b.loss_scale == scale);
        if (i % 2 == 1) scale *= 2;
        CHECK(scaled.runner.state().loss_scale->scale == scale);
      }
      CHECK(plain.parameters() == scaled.parameters());
      CHECK(plain.runner.evaluate(plain.data[0], 1) == scaled.runner.evaluate(scaled.data[0], 1));
    }
}

TEST_CASE("gradients that overflow skip the update, and the loss scale shrinks until they do not") {
  for (const DeviceKind kind : {DeviceKind::cpu, DeviceKind::checked}) {
    config::Config config = several_micro_batches(true);
    config.train.device = kind;
    config.scheduler.lr_warmup_iters = 0;
    Running r(config);
    config::MixedPrecisionConfig fp16;
    fp16.initial_loss_scale = overflowing_scale(config);
    r.runner.scale_loss(fp16);
    const auto before = r.parameters();
    double scale = fp16.initial_loss_scale;
    int overflows = 0;
    StepResult result = r.step();
    for (; result.overflow; result = r.step()) {
      ++overflows;
      REQUIRE(overflows < 60);
      CHECK(result.skipped);
      CHECK(result.loss_scale == scale);
      // The first overflow uses up the hysteresis.
      if (overflows >= fp16.hysteresis) scale /= 2;
      CHECK(r.runner.state().loss_scale->scale == scale);
      CHECK(r.parameters() == before);
      CHECK(r.runner.state().schedule_samples == 0);
      CHECK(r.runner.optimizer().steps() == 0);
      CHECK(r.runner.state().step == overflows);
      CHECK(r.runner.state().consumed_samples == overflows * *config.train.global_batch_size);
    }
    CHECK(overflows >= 2);
    CHECK(std::isfinite(result.loss));
    CHECK(!result.skipped);
    CHECK(r.parameters() != before);
    CHECK(r.runner.optimizer().steps() == 1);
    CHECK(r.runner.state().schedule_samples == *config.train.global_batch_size);
  }
}

TEST_CASE("only values that are not finite are an overflow: a spike is a clean step for the loss scale") {
  for (const auto action : {config::SpikeAction::skip, config::SpikeAction::rewind}) {
    config::Config config = several_micro_batches(true);
    config.resilience.loss_spike_action = action;
    config.resilience.spike_window = 1;
    Running r(config);
    config::MixedPrecisionConfig fp16;
    fp16.initial_loss_scale = 1024;
    r.runner.scale_loss(fp16);
    // Any loss is a spike.
    r.runner.state().recent_losses = {1e-6};
    const StepResult result = r.step();
    CHECK(!result.overflow);
    CHECK(result.rewind == (action == config::SpikeAction::rewind));
    CHECK(r.runner.state().loss_scale->scale == 1024);
    CHECK(r.runner.state().loss_scale->clean_steps == 1);
    CHECK(r.runner.state().loss_scale->overflows_left == fp16.hysteresis);
  }
}

TEST_CASE("with a static loss scale, a gradient that is not finite ends the run or skips the update") {
  config::Config config = several_micro_batches(true);
  config::MixedPrecisionConfig fp16;
  fp16.loss_scale = overflowing_scale(config);
  {
    Running r(config);
    r.runner.scale_loss(fp16);
    CHECK_THROWS_AS(r.step(), Error);
  }
  config.resilience.check_for_nan = false;
  Running r(config);
  r.runner.scale_loss(fp16);
  const auto before = r.parameters();
  const StepResult result = r.step();
  CHECK(result.overflow);
  CHECK(result.skipped);
  CHECK(r.parameters() == before);
  CHECK(r.runner.state().loss_scale->scale == *fp16.loss_scale);
}

TEST_CASE("the loss scale is part of a checkpoint") {
  const config::Config config = several_micro_batches(true);
  config::MixedPrecisionConfig fp16;
  fp16.initial_loss_scale = overflowing_scale(config);
  Running r(config);
  r.runner.scale_loss(fp16);
  for (int i = 0; i < 3; ++i) r.step();
  const test::SharedDirectory root;
  const auto directory = test::save_in(root.path(), r.runner);
  Running other(config);
  other.runner.scale_loss(fp16);
  test::load_into(other.runner, directory);
  REQUIRE(other.runner.state().loss_scale);
  CHECK(*other.runner.state().loss_scale == *r.runner.state().loss_scale);
  CHECK(other.runner.state().loss_scale->overflows_left <= 0);
  other.open_loader();
  for (int i = 0; i < 30; ++i) {
    const StepResult a = r.step(), b = other.step();
    CHECK(a.loss_scale == b.loss_scale);
    CHECK(a.overflow == b.overflow);
  }
  CHECK(r.parameters() == other.parameters());
}

namespace {

// Returns the losses.
std::vector<double> check_growing_batch(config::DeviceKind device) {
  config::Config config = tiny_config(true, world().size());
  config.train.device = device;
  const int64_t unit = 2 * world().size();
  config.train.global_batch_size = 4 * unit;
  config.train.rampup_batch_size = {unit, unit, 12 * unit};
  config.train.train_iters.reset();
  config.train.train_samples = 40 * unit;
  config.scheduler.lr_warmup_iters.reset();
  config.scheduler.lr_decay_samples = 40 * unit;
  // Intervals of 4 units: four steps of one unit, two of two units, and then of three and four.
  const std::vector<int64_t> units{1, 1, 1, 1, 2, 2, 3, 3, 4, 4};
  Running full(config), first(config);
  int64_t consumed = 0;
  std::vector<double> losses;
  for (size_t i = 0; i < units.size(); ++i) {
    CHECK(full.runner.micro_batches() == units[i]);
    const StepResult result = full.step();
    losses.push_back(result.loss);
    consumed += units[i] * unit;
    const TrainState& state = full.runner.state();
    CHECK(result.global_batch_size == units[i] * unit);
    CHECK(state.consumed_samples == consumed);
    CHECK(state.consumed_tokens == consumed * config.model.seq_length);
    CHECK(state.schedule_samples == consumed);
    CHECK(result.loss_tokens == result.global_batch_size * config.model.seq_length);
  }
  // Each step is that of a constant batch of its size.
  for (int i = 0; i < 5; ++i) CHECK(first.step().loss == losses[static_cast<size_t>(i)]);
  {
    config::Config constant = config;
    constant.train.rampup_batch_size.clear();
    constant.train.global_batch_size = unit;
    Running small(constant);
    for (int i = 0; i < 4; ++i) CHECK(small.step().loss == losses[static_cast<size_t>(i)]);
  }
  // A run that continues from a checkpoint of the fifth step, whose batch has two units.
  Running resumed(config);
  const test::SharedDirectory root;
  test::load_into(resumed.runner, test::save_in(root.path(), first.runner));
  resumed.open_loader();
  for (size_t i = 5; i < units.size(); ++i) CHECK(resumed.step().loss == losses[i]);
  CHECK(resumed.parameters() == full.parameters());
  return losses;
}

}  // namespace

TEST_CASE("a batch that is rounded down is one of the rounded size, on other ranks of another") {
  const int64_t unit = 2 * world().size(), given = 4 * unit - 1, rounded = 3 * unit;
  config::Config config = tiny_config(true, world().size());
  config.train.global_batch_size = given;
  config.train.decrease_batch_size_if_needed = true;
  config.validation.eval_global_batch_size = 2 * unit + 1;
  Running run(config);
  config::Config plain = tiny_config(true, world().size());
  plain.train.global_batch_size = rounded;
  plain.validation.eval_global_batch_size = 2 * unit;
  Running expected(plain);
  CHECK(run.runner.micro_batches() == 3);
  for (int i = 0; i < 3; ++i) {
    const StepResult a = run.step(), b = expected.step();
    CHECK(a.loss == b.loss);
    CHECK(a.learning_rate == b.learning_rate);
    CHECK(a.global_batch_size == rounded);
  }
  CHECK(run.parameters() == expected.parameters());
  CHECK(run.runner.state().consumed_samples == 3 * rounded);
  CHECK(run.runner.state().schedule_samples == 3 * rounded);
  CHECK(run.runner.evaluate(run.data[0], 2) == expected.runner.evaluate(expected.data[0], 2));
  // A run on one rank continues after the samples that were used, with the size that one rank divides.
  const test::SharedDirectory root;
  const auto saved = test::save_in(root.path(), run.runner);
  if (world().rank() == 0) {
    const auto alone = comm::World::single_process();
    config::Config one = config;
    one.dist.world_size = 1, one.dist.data_parallel_size = 1;
    const int64_t size = given / 2 * 2;
    StepRunner resumed(one, *alone);
    resumed.initialize();
    test::load_into(resumed, saved);
    const auto data = open_datasets(one, nullptr);
    data::Loader loader(data[0], resumed.loader_options());
    CHECK(loader.consumed_samples() == 3 * rounded);
    StepTimers timers;
    timers.start_step();
    CHECK(resumed.train_step(loader, timers).loss_tokens == size * config.model.seq_length);
    CHECK(resumed.state().consumed_samples == 3 * rounded + size);
    // The length of the run is that of the samples that are left.
    one.train.train_iters.reset();
    one.train.train_samples = 3 * rounded + 5 * size + 1;
    CHECK(total_iterations_after(one, *data[0], 3, 3 * rounded) == 8);
  }
  world().communicator().barrier();
}

TEST_CASE("a batch that grows: sizes, samples, tokens, schedule; a resumed run has the same bits") {
  const std::vector<double> losses = check_growing_batch(DeviceKind::cpu);
  CHECK(check_growing_batch(DeviceKind::checked) == losses);
}
