// Overlap of the sharded store: transfers and sums of gradients run beside kernels, by the times of the
// queues' events, and give the same bits.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "support/devices.hpp"
#include "support/running.hpp"
#include "support/step_control.hpp"
#include "tests/parallel/store_run.hpp"

using namespace capstan;
using namespace capstan::test;
using config::DistributedBackend;
using config::ShardingStrategy;

namespace {

// Work of the queues during some training steps, with the times of its events.
struct Timeline {
  struct Interval {
    std::string queue, name;
    double begin, end;  // seconds
  };
  int64_t spans_on(const std::string& queue) const {
    return std::ranges::count_if(others, [&](const Interval& one) { return one.queue == queue; });
  }
  // Seconds that both a kernel and another queue's work took. The queue's name begins with `queue`, the
  // description of its work with `work`, and that of the kernel with `kernel`.
  double overlap(const std::string& queue = "", const std::string& work = "",
                 const std::string& kernel = "") const {
    double seconds = 0;
    for (const Interval& a : kernels)
      for (const Interval& b : others)
        if (b.queue.starts_with(queue) && b.name.starts_with(work) && a.name.starts_with(kernel))
          seconds += std::max(0.0, std::min(a.end, b.end) - std::max(a.begin, b.begin));
    return seconds;
  }
  // Kernels of the compute queue that wait for nothing: weight gradients, blocks of ring attention, chunks of
  // tensor-parallel GEMMs.
  std::vector<Interval> kernels;
  // Work of the other queues.
  std::vector<Interval> others;
  std::vector<double> losses;
};

class SpanCollector final : public TapeObserver {
 public:
  bool waits() const override { return false; }
  void observe(const TapeEvent& event) override {
    const bool is_part =
        event.nested && (event.name.find("block") != std::string::npos || event.name == "GEMM of a chunk");
    if (event.phase == 'W' || is_part) kernels.push_back({"compute", event.name, event.before, event.after});
  }
  void queue_span(const QueueSpan& span) override {
    if (!span.queue.starts_with("delivery")) others.push_back(span);
  }
  std::vector<QueueSpan> kernels, others;
};

// The timeline of training steps; backend: the stand-in for NCCL, or transfers through host memory.
Timeline timeline_of(config::Config config, int steps,
                     DistributedBackend backend = DistributedBackend::nccl_stand_in) {
  config.dist.distributed_backend = backend;
  train::StepRunner runner(config, world());
  runner.initialize();
  SpanCollector spans;
  runner.observe(&spans);
  const auto data = train::open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  train::StepTimers timers;
  Timeline timeline;
  for (int i = 0; i < steps; ++i) {
    timers.start_step();
    timeline.losses.push_back(runner.train_step(loader, timers).loss);
  }
  runner.observe(nullptr);
  runner.device().synchronize();
  const auto add = [](const std::vector<QueueSpan>& from, std::vector<Timeline::Interval>& to) {
    for (const QueueSpan& span : from)
      to.push_back({span.queue, span.name, span.before->time(), span.after->time()});
  };
  add(spans.kernels, timeline.kernels);
  add(spans.others, timeline.others);
  return timeline;
}

// Holds the communication queue during a training step until the gradients of `goal` buckets were sent over
// `shard`, or for `most` milliseconds. Returns how many were sent.
int64_t transfers_beside_held_sums(const config::Config& config, int64_t goal, int most) {
  const bool stand_in = config.dist.distributed_backend == DistributedBackend::nccl_stand_in;
  const std::string queue = stand_in ? "transfers of `shard`" : std::string(name_of(Queue::device_to_host)),
                    work = stand_in ? "all_to_all" : "copy for all_to_all";
  test::Running running(config);
  train::StepRunner& runner = running.runner;
  std::mutex mutex;
  std::vector<QueueSpan> spans;
  runner.device().listen([&](const QueueSpan& span) {
    if (span.queue != queue || !span.name.starts_with(work)) return;
    const std::lock_guard lock(mutex);
    spans.push_back(span);
  });
  std::atomic<int64_t> complete{0};
  runner.device().enqueue(Queue::communication, [&] {
    for (int i = 0; i < most && complete.load() < goal; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const std::lock_guard lock(mutex);
      complete.store(std::ranges::count_if(spans, [](const QueueSpan& span) { return span.after->done(); }));
    }
  });
  running.step();
  runner.device().synchronize();
  runner.device().listen(nullptr);
  return complete.load();
}

// Whether the compute queue runs on while a tensor that a pipeline stage sends is not under way. The queue of
// the stage's sends is held after the first one of a step, until the compute queue has come to the third, or
// for twenty seconds.
bool computes_beside_sends(const config::Config& config) {
  test::Running running(config);
  train::StepRunner& runner = running.runner;
  // Channels add their queues with their first batch.
  running.step();
  Device& device = runner.device();
  const auto queues = static_cast<size_t>(device.add_queue(AddedQueue::work, "the last queue"));
  const auto queue_of = [&](const std::string& name) {
    for (size_t i = 0; i < queues; ++i)
      if (device.queue_name(static_cast<Queue>(i)) == name) return std::optional(static_cast<Queue>(i));
    return std::optional<Queue>();
  };
  std::atomic<bool> runs_on{false}, in_time{false};
  int sends = 0;
  // The queue of the sends, from the first one until it is held.
  std::optional<Queue> to_hold;
  device.listen([&](const QueueSpan& span) {
    if (span.queue.starts_with("transfers of `pp-") && span.name.starts_with("send")) {
      ++sends;
      if (sends == 1) to_hold = queue_of(span.queue);
      if (sends == 3) device.enqueue(Queue::compute, [&] { runs_on.store(true); });
    } else if (const std::optional<Queue> queue = std::exchange(to_hold, std::nullopt)) {
      // The next receive, before the second send.
      CHECK(sends == 1);
      device.enqueue(*queue, [&] {
        for (int i = 0; i < 20'000 && !runs_on.load(); ++i)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        in_time.store(runs_on.load());
      });
    }
  });
  running.step();
  device.synchronize();
  device.listen(nullptr);
  CHECK(sends >= 3);
  return in_time.load();
}

}  // namespace

TEST_CASE("buckets are summed beside the backward pass: events of the queues show it, and cost no bits") {
  const int ranks = world().size();
  if (ranks == 1) return;
  auto config = store_config<test::Checked>(ranks, 1);
  config.ddp.data_parallel_sharding_strategy = ShardingStrategy::optim;
  config.ddp.bucket_size = 2000;
  auto on_compute = config;
  on_compute.train.device = config::DeviceKind::cpu;
  const std::vector<double> losses = run_store(on_compute, world(), 1).losses;
  for (const auto backend : {DistributedBackend::nccl_stand_in, DistributedBackend::mpi})
    for (const bool overlap : {true, false}) {
      CAPTURE(static_cast<int>(backend));
      CAPTURE(overlap);
      config.ddp.overlap_grad_reduce = overlap;
      const Timeline timeline = timeline_of(config, 1, backend);
      CHECK(timeline.losses == losses);
      CHECK(timeline.kernels.size() > 20);
      CHECK(std::ranges::count_if(timeline.others, [](const Timeline::Interval& one) {
              return one.queue == "communication" && one.name.ends_with("over `shard`");
            }) > 5);
      if (backend == DistributedBackend::nccl_stand_in) CHECK(timeline.spans_on("transfers of `shard`") > 10);
      // A rank that other programs keep from its processor may show none.
      const double beside = comm::all_reduce(world().communicator(), timeline.overlap());
      CHECK((beside > 0) == overlap);
    }
}

TEST_CASE("sharded gradients are summed over the instances of the optimizer beside the backward pass") {
  const int ranks = world().size();
  if (ranks != 4) return;
  auto config = store_config<test::Checked>(ranks, 2);
  config.ddp.num_distributed_optimizer_instances = 2;
  config.ddp.bucket_size = 2000;
  for (const auto strategy : {ShardingStrategy::optim_grads, ShardingStrategy::optim_grads_params})
    for (const bool overlap : {true, false}) {
      CAPTURE(text_of(strategy));
      CAPTURE(overlap);
      config.ddp.data_parallel_sharding_strategy = strategy;
      config.ddp.overlap_grad_reduce = overlap;
      const Timeline timeline = timeline_of(config, 2);
      // Two transfers for each bucket and step, whatever the overlap.
      CHECK(timeline.spans_on("transfers of `replica`") > 10);
      const double beside =
          comm::all_reduce(world().communicator(), timeline.overlap("transfers of `replica`"));
      CHECK((beside > 0) == overlap);
    }
}

TEST_CASE("gradients of tied parameters are summed on the communication queue") {
  const int ranks = world().size();
  if (ranks != 2) return;
  auto config = store_config<test::Checked>(ranks, 2, false);
  config.model.num_layers = 2;
  config.dist.pipeline_model_parallel_size = 2;
  config.dist.data_parallel_size = 1;
  config.train.global_batch_size = 4;
  for (const auto backend : {DistributedBackend::nccl_stand_in, DistributedBackend::mpi}) {
    CAPTURE(static_cast<int>(backend));
    const Timeline timeline = timeline_of(config, 1, backend);
    CHECK(std::ranges::count_if(timeline.others, [](const Timeline::Interval& one) {
            return one.queue == "communication" && one.name.ends_with("over `embedding`");
          }) == 1);
  }
}

TEST_CASE("several buckets are sent before the first is summed; a bucket waits for no earlier sum") {
  const int64_t ranks = world().size();
  if (ranks == 1) return;
  auto config = store_config<test::Checked>(ranks, 1);
  config.dist.distributed_backend = config::DistributedBackend::nccl_stand_in;
  config.ddp.data_parallel_sharding_strategy = ShardingStrategy::optim;
  config.ddp.bucket_size = 2000;
  config.ddp.overlap_grad_reduce = true;
  constexpr auto kMost = static_cast<int64_t>(parallel::FlatStore::kPendingReductions);
  CHECK(transfers_beside_held_sums(config, kMost, 20'000) == kMost);
  // No more are sent: their memory is limited.
  CHECK(transfers_beside_held_sums(config, kMost + 1, 300) == kMost);
  // Through host memory a third one may need the host's buffer of the first.
  auto by_host = config;
  by_host.dist.distributed_backend = DistributedBackend::mpi;
  CHECK(transfers_beside_held_sums(by_host, 2, 20'000) >= 2);
  // The queue is held that is seen to be free above: without overlap no transfer passes the sum before it.
  config.ddp.overlap_grad_reduce = by_host.ddp.overlap_grad_reduce = false;
  CHECK(transfers_beside_held_sums(config, 2, 300) <= 1);
  CHECK(transfers_beside_held_sums(by_host, 2, 300) <= 1);

  // Gradients that the communication queue casts, or sums over tensor-parallel ranks, before they are sent:
  // that of the next bucket is queued there before the sum of the first.
  for (const bool tensor : {false, true}) {
    if (tensor && ranks % 2 != 0) continue;
    for (const bool overlap : {true, false}) {
      config.ddp.overlap_grad_reduce = overlap;
      config.mixed_precision.params_dtype = tensor ? config::Precision::fp32 : config::Precision::bf16;
      config.mixed_precision.grad_reduce_in_fp32 = tensor;
      config.dist.tensor_model_parallel_size = tensor ? 2 : 1;
      config.dist.sequence_parallel = tensor;
      if (tensor && ranks == 2) continue;  // no rank to send to
      std::string order;
      train::StepRunner runner(config, world());
      runner.initialize();
      runner.device().listen([&](const QueueSpan& span) {
        if (span.queue == "transfers of `shard`" && span.name.starts_with("all_to_all")) order += 'T';
        if (span.queue == "communication" && span.name.ends_with("over `shard`")) order += 'S';
      });
      const auto data = train::open_datasets(config, nullptr);
      data::Loader loader(data[0], runner.loader_options());
      train::StepTimers timers;
      timers.start_step();
      runner.train_step(loader, timers);
      runner.device().listen(nullptr);
      CAPTURE(order);
      CHECK(order.starts_with(overlap ? "TTSTS" : "TSTSTS"));
    }
  }
}

TEST_CASE("transfers run beside kernels: gathers of parameters, pipelines, rings, sums over tensor ranks") {
  const int ranks = world().size();
  if (ranks == 1) return;
  const auto base = store_config<test::Checked>(ranks, 2);
  // A rank that waits for slower ones has no kernel to run meanwhile: one rank with overlap is enough.
  const auto total = [](double seconds) { return comm::all_reduce(world().communicator(), seconds); };
  const auto overlap_of = [&](const config::Config& config, const char* queue, const char* work = "") {
    return total(timeline_of(config, 2).overlap(queue, work));
  };
  {
    auto config = base;
    config.ddp.data_parallel_sharding_strategy = ShardingStrategy::optim_grads_params;
    config.ddp.overlap_param_gather = true;
    CHECK(overlap_of(config, "transfers of `shard`", "all_gather") > 0);
  }
  if (ranks % 2 != 0) return;
  const int64_t pairs = ranks / 2;
  {
    auto config = base;
    config.model.num_layers = 2;
    config.dist.pipeline_model_parallel_size = 2;
    config.train.global_batch_size = 4 * pairs;
    config.dist.distributed_backend = DistributedBackend::nccl_stand_in;
    CHECK(computes_beside_sends(config));
  }
  {
    auto config = base;
    config.dist.context_parallel_size = 2;
    config.train.global_batch_size = 2 * pairs;
    CHECK(overlap_of(config, "transfers of `cp`") > 0);
  }
  {
    auto config = base;
    config.dist.tensor_model_parallel_size = 2;
    config.dist.sequence_parallel = true;
    config.train.global_batch_size = 2 * pairs;
    config.ddp.bucket_size = 2000;
    config.ddp.overlap_grad_reduce = true;
    CHECK(overlap_of(config, "transfers of `tp-gradients`") > 0);
    config.comm_overlap.tp_comm_overlap = true;
    config.comm_overlap.tp_comm_num_splits = 3;
    const Timeline timeline = timeline_of(config, 2);
    // The rows of column-parallel layers, the sums of both kinds, and in the backward pass the rows of
    // row-parallel ones.
    for (const char* const work : {"all_gather", "all_to_all", "send"}) {
      CAPTURE(work);
      CHECK(total(timeline.overlap("transfers of `tp`", work, "GEMM of a chunk")) > 0);
    }
  }
}

TEST_CASE("Muon gathers momentum over the instances beside the orthogonalization of the matrices before") {
  const int64_t ranks = world().size();
  if (ranks % 2 != 0) return;
  auto config = store_config<test::Checked>(ranks, 1);
  config.dist.distributed_backend = DistributedBackend::nccl_stand_in;
  config.optimizer.optimizer = config::OptimizerKind::muon;
  config.ddp.data_parallel_sharding_strategy = ShardingStrategy::optim;
  config.ddp.num_distributed_optimizer_instances = 2;
  config.ddp.outer_dp_sharding_strategy = ShardingStrategy::optim;
  config.ddp.bucket_size = 2000;
  test::Running running(config);
  train::StepRunner& runner = running.runner;
  running.step();
  Device& device = runner.device();
  const Tensor control = step_control(device);
  // The launches that are queued when each gather begins.
  std::vector<int64_t> launches;
  device.listen([&](const QueueSpan& span) {
    if (span.queue == "transfers of `replica`") launches.push_back(device.launches());
  });
  const int64_t before = device.launches();
  runner.optimizer().step({.lr = 1e-3}, control);
  device.listen(nullptr);
  device.synchronize();
  REQUIRE(launches.size() >= 3);
  // The first orthogonalization is queued behind the start of the second gather, which follows the update of
  // the second momentum.
  CHECK(launches[1] - launches[0] == 1);
  // With sharded matrices, a rank may have none of a bucket.
  CHECK(comm::all_reduce(world().communicator(), static_cast<double>(device.launches() - launches[1])) > 50);
  CHECK(launches[0] - before < 10);
}

TEST_CASE("sums on the communication queue give the bits of those on the compute queue") {
  const int64_t ranks = world().size();
  if (ranks == 1) return;
  // stages: losses and norms alone, because the stages of a pipeline have other parameters.
  const auto compare = [](const config::Config& on_communication, bool stages = false) {
    config::Config on_compute = on_communication;
    on_compute.train.device = config::DeviceKind::cpu;
    const StoreRun expected = run_store(on_compute, world(), 2, nullptr, !stages);
    for (const auto backend : {DistributedBackend::mpi, DistributedBackend::nccl_stand_in}) {
      CAPTURE(static_cast<int>(backend));
      config::Config found = on_communication;
      found.dist.distributed_backend = backend;
      check_same(run_store(found, world(), 2, nullptr, !stages), expected, 0);
    }
  };
  for (const auto& [half, narrow_gradients] : {std::pair(false, false), {true, false}, {true, true}})
    for (const auto strategy : kStrategies) {
      // Sanitizers see each path of the transfers once.
      if (test::kSanitized && half && strategy != ShardingStrategy::optim_grads_params) continue;
      CAPTURE(text_of(strategy));
      CAPTURE(half);
      CAPTURE(narrow_gradients);
      auto config = store_config<test::Checked>(ranks, 2);
      if (narrow_gradients) config.optimizer.main_grads_dtype = config::Precision::bf16;
      config.ddp.data_parallel_sharding_strategy = strategy;
      config.ddp.bucket_size = 2000;
      config.ddp.overlap_grad_reduce = true;
      config.mixed_precision.params_dtype = half ? config::Precision::bf16 : config::Precision::fp32;
      config.mixed_precision.grad_reduce_in_fp32 = !half || narrow_gradients;
      compare(config);
      if (half && strategy == ShardingStrategy::optim_grads) continue;  // nothing that the others lack
      if (ranks % 2 != 0) continue;
      // Norm weights whose gradients are sums over the tensor-parallel ranks.
      auto tensor = config;
      tensor.dist.tensor_model_parallel_size = 2;
      tensor.dist.sequence_parallel = true;
      tensor.train.global_batch_size = ranks;
      compare(tensor);
      // Embeddings that the first and the last stage tie.
      auto tied = store_config<test::Checked>(ranks, 2, false);
      tied.ddp = config.ddp, tied.mixed_precision = config.mixed_precision;
      tied.optimizer = config.optimizer;
      tied.model.num_layers = 4;
      tied.dist.pipeline_model_parallel_size = 2;
      tied.dist.data_parallel_size = ranks / 2;
      compare(tied, true);
      // Sums over the instances of the optimizer.
      config.ddp.num_distributed_optimizer_instances = 2;
      compare(config);
      if (strategy == ShardingStrategy::no_shard) continue;
      config.ddp.outer_dp_sharding_strategy = ShardingStrategy::optim;
      compare(config);
      if (half || strategy != ShardingStrategy::optim_grads) continue;
      // Of its two kinds of buffers, each lacks some of the state.
      config.optimizer.optimizer = config::OptimizerKind::muon;
      compare(config, true);
    }
}
