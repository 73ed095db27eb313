// Training over NCCL's channels, on a backend without CUDA and on two GPUs: the bits of transfers through the
// host, under every kind of parallelism, and what the ranks choose. Two and four ranks, with a GPU each.
#include <doctest/doctest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "support/nccl_gpus.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/setup/model.hpp"
#include "train/setup/transport.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;
using config::DistributedBackend;
using test::world;
using testing::tiny_config;

namespace {

// gpu: which of the GPUs that this process sees.
std::unique_ptr<Device> gpu_of_test(int gpu) {
  auto device = test::make_nccl_gpu(gpu, world().size());
  test::fake_nccl().gpu = gpu;
  return device;
}

struct Trained {
  std::vector<double> numbers;
  std::map<std::string, int64_t> sent;
  int64_t waits = 0;
  Transport transport;
  std::string note;
};
// Three steps; bytes and waits of the last one.
Trained train_on_gpus(config::Config config, DistributedBackend backend) {
  config.dist.distributed_backend = backend;
  if (test::kRealNccl) config.train.device = config::DeviceKind::cuda;
  StepRunner runner(config, world(), gpu_of_test(world().rank()));
  runner.initialize();
  const auto data = open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  StepTimers timers;
  Trained trained{.transport = runner.transport().transport, .note = runner.transport().note};
  for (int step = 0; step < 3; ++step) {
    const int64_t waits = runner.device().host_waits();
    const auto before = sent_bytes(runner.mesh());
    const StepResult result = runner.train_step(loader, timers);
    trained.numbers.insert(trained.numbers.end(), {result.loss, result.gradient_norm});
    trained.waits = runner.device().host_waits() - waits;
    trained.sent = sent_bytes(runner.mesh());
    for (auto& [group, bytes] : trained.sent) bytes -= before.at(group);
  }
  return trained;
}

struct Layout {
  const char* name;
  std::function<void(config::Config&)> set;
};
void set_batch(config::Config& config, int64_t micro_batches) {
  config::DistConfig& dist = config.dist;
  dist.data_parallel_size = dist.world_size / (dist.tensor_model_parallel_size * dist.context_parallel_size *
                                               dist.pipeline_model_parallel_size);
  config.train.global_batch_size =
      config.train.micro_batch_size * micro_batches * dist.data_parallel_size.value();
}
std::vector<Layout> layouts() {
  const auto shard_parameters = [](config::Config& c) {
    c.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim_grads_params;
    c.ddp.overlap_grad_reduce = c.ddp.overlap_param_gather = true;
    set_batch(c, 2);
  };
  if (world().size() == 4)
    return {{"tensor, pipeline",
             [](config::Config& c) {
               c.dist.tensor_model_parallel_size = c.dist.pipeline_model_parallel_size = 2;
               set_batch(c, 4);
             }},
            {"tensor, shards",
             [&](config::Config& c) {
               c.dist.tensor_model_parallel_size = 2, c.dist.sequence_parallel = true;
               shard_parameters(c);
             }},
            {"four stages", [](config::Config& c) {
               c.dist.pipeline_model_parallel_size = c.model.num_layers = 4;
               set_batch(c, 4);
             }}};
  return {{"tensor",
           [](config::Config& c) {
             c.dist.tensor_model_parallel_size = 2, c.dist.sequence_parallel = true;
             set_batch(c, 2);
           }},
          {"context",
           [](config::Config& c) {
             c.dist.context_parallel_size = 2;
             set_batch(c, 2);
           }},
          {"pipeline",
           [](config::Config& c) {
             c.dist.pipeline_model_parallel_size = 2;
             set_batch(c, 4);
           }},
          {"shards", shard_parameters}};
}

}  // namespace

TEST_CASE("a model trains over NCCL's channels to the bits of transfers through the host") {
  if (world().size() == 1) return;
  for (const Layout& layout : layouts()) {
    CAPTURE(layout.name);
    config::Config config = tiny_config(true, world().size());
    layout.set(config);
    const Trained by_host = train_on_gpus(config, DistributedBackend::mpi);
    const Trained by_nccl = train_on_gpus(config, DistributedBackend::automatic);
    CHECK(by_host.transport == Transport::host);
    CHECK(by_host.note.empty());
    CHECK(by_nccl.transport == Transport::nccl);
    CHECK(by_nccl.note.starts_with("transfers between GPUs by NCCL 2."));
    if (!test::kRealNccl) CHECK(by_nccl.note.ends_with(" 2.28.9"));
    CHECK(by_nccl.numbers == by_host.numbers);
    CHECK(by_nccl.sent == by_host.sent);
    // At the end of the step.
    CHECK(by_nccl.waits == 1);
    const StepEstimate estimate = estimate_step(config, world().rank(), 1, 0, Transport::nccl);
    for (const auto& [group, bytes] : estimate.sent) {
      CAPTURE(group);
      CHECK(bytes == by_nccl.sent.at(group));
    }
    CHECK(test::fake_nccl().open == 0);
    CHECK(test::fake_nccl().aborted == 0);
    CHECK(test::fake_cuda().streams == 0);
    CHECK(test::fake_cuda().events == 0);
  }
}

TEST_CASE("ranks that share a GPU transfer through the host and say so; nccl is refused there") {
  if (world().size() == 1) return;
  config::Config config = tiny_config(true, world().size());
  if (test::kRealNccl) config.train.device = config::DeviceKind::cuda;
  set_batch(config, 1);
  const std::string shared =
      std::to_string(world().size()) + " ranks share 1 GPU, and NCCL needs one for each rank";
  {
    StepRunner runner(config, world(), gpu_of_test(0));
    CHECK(runner.transport().transport == Transport::host);
    CHECK(runner.transport().note ==
          "dist.distributed_backend=auto: transfers go through host memory, because " + shared);
  }
  config.dist.distributed_backend = DistributedBackend::nccl;
  CHECK_THROWS_WITH_AS(StepRunner(config, world(), gpu_of_test(0)),
                       doctest::Contains(("dist.distributed_backend: nccl: " + shared).c_str()), Error);
  if (test::kRealNccl) return;
  // The library is missing on one rank.
  auto device = gpu_of_test(world().rank());
  if (world().rank() == 1) test::fake_nccl().missing = "NCCL cannot be opened: no such file";
  CHECK_THROWS_WITH_AS(
      StepRunner(config, world(), std::move(device)),
      doctest::Contains("dist.distributed_backend: nccl: NCCL cannot be opened: no such file (rank 1)"),
      Error);
  world().communicator().barrier();
}
