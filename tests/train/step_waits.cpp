// Waits that a training step lacks are found: the checked device leaves out one wait between two queues, or
// of the host for a queue, and names the accesses that it should have ordered.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kernels/table.hpp"
#include "support/errors.hpp"
#include "support/sanitized.hpp"
#include "support/saves.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/device_batch.hpp"
#include "train/trainer/saver.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;
using test::world;

namespace {

config::Config config_of_test() {
  config::Config config = testing::tiny_config(true, world().size());
  config.train.device = config::DeviceKind::checked;
  config.train.micro_batch_size = 1;
  config.train.global_batch_size = 2 * world().size();
  return config;
}

// Sums of gradients, which the communication queue rounds to bf16 before they are sent. Through host memory,
// both ranks find an error at the same transfer; on the stand-in for NCCL one may begin a transfer that the
// other leaves out (tests/parallel/store_waits.cpp has its waits).
config::Config with_sums() {
  config::Config config = config_of_test();
  config.dist.distributed_backend = config::DistributedBackend::mpi;
  config.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim;
  config.ddp.overlap_grad_reduce = true;
  config.mixed_precision.params_dtype = config::Precision::bf16;
  config.mixed_precision.grad_reduce_in_fp32 = false;
  return config;
}

// Losses of two steps on a device with these options.
std::vector<double> losses_of(const config::Config& config, const CheckedOptions& options) {
  StepRunner runner(config, world(), make_checked_device(kernels::cpu_table(), 1, options));
  runner.initialize();
  const auto data = open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  StepTimers timers;
  std::vector<double> losses;
  for (int step = 0; step < 2; ++step) {
    timers.start_step();
    losses.push_back(runner.train_step(loader, timers).loss);
  }
  return losses;
}

// A kind of wait: `waiter` for events of `source`.
struct Kind {
  Queue waiter, source;
  // How many of the first kLeftOut are needed; the others repeat earlier ones.
  int64_t needed;
};
constexpr int64_t kLeftOut = test::kSanitized ? 3 : 8;

void check_kind(const config::Config& config, const std::vector<double>& expected, const Kind& kind) {
  CAPTURE(name_of(kind.waiter));
  CAPTURE(name_of(kind.source));
  int64_t found = 0;
  for (int64_t ignored = 0; ignored < kLeftOut; ++ignored) {
    CAPTURE(ignored);
    std::vector<double> losses;
    const std::string error = test::error_of([&] {
      losses = losses_of(
          config, {.ignored_wait = ignored, .ignored_waiter = kind.waiter, .ignored_source = kind.source});
    });
    if (error.empty()) {
      CHECK(losses == expected);
      continue;
    }
    ++found;
    CHECK_MESSAGE(error.find("missing wait: ") != std::string::npos, error);
    // An allocation and a release name the other queue alone.
    const auto names = [&](Queue queue) {
      return error.find("the queue " + std::string(name_of(queue))) != std::string::npos;
    };
    CHECK_MESSAGE((names(kind.waiter) || names(kind.source)), error);
  }
  CHECK(found >= std::min<int64_t>(kind.needed, test::kSanitized ? 1 : kLeftOut));
}

}  // namespace

TEST_CASE("a wait between two queues that a training step lacks is found: copies to and from the host") {
  if (world().size() > 1) return;
  config::Config config = config_of_test();
  // Activations go to the host and return.
  config.model.cpu_offloading = true;
  config.model.cpu_offloading_num_layers = 1;
  const std::vector<double> expected = losses_of(config, {});
  for (const Kind& kind :
       {Kind{Queue::compute, Queue::host_to_device, 6}, Kind{Queue::host_to_device, Queue::compute, 8},
        Kind{Queue::compute, Queue::device_to_host, 4}, Kind{Queue::device_to_host, Queue::compute, 4}})
    check_kind(config, expected, kind);
}

TEST_CASE("a wait between two queues that a training step lacks is found: sums of gradients") {
  if (world().size() != 2) return;
  const config::Config config = with_sums();
  const std::vector<double> expected = losses_of(config, {});
  for (const Kind& kind :
       {Kind{Queue::compute, Queue::communication, 5}, Kind{Queue::communication, Queue::compute, 3}})
    check_kind(config, expected, kind);
}

TEST_CASE("a wait of the host that a training step lacks is found: transfers through host memory") {
  if (world().size() != 2) return;
  const config::Config config = with_sums();
  int64_t found = 0;
  for (int64_t ignored = 0; ignored < 6; ++ignored) {
    CAPTURE(ignored);
    const std::string error = test::error_of([&] { losses_of(config, {.ignored_host_wait = ignored}); });
    if (error.empty()) continue;
    ++found;
    CHECK_MESSAGE(error.find("missing wait: the host ") != std::string::npos, error);
    CHECK_MESSAGE(error.find(" of a pinned buffer (workspace) that a copy ") != std::string::npos, error);
  }
  CHECK(found >= 4);
}

TEST_CASE("a wait of the host for a micro-batch that is under way is found where its buffer is written") {
  const auto device = make_checked_device(kernels::cpu_table(), 1, {.patient = true, .ignored_host_wait = 0});
  BatchUploader uploader(*device, {});
  // Four buffers.
  data::MicroBatch micro = data::MicroBatch::zeros(2, 131072);
  for (uint64_t row = 0; row < 2; ++row) {
    micro.sample_ids.push_back(row);
    micro.cu_seqlens.push_back({0, 131072});
  }
  std::vector<PendingBatch> pending;
  for (size_t m = 0; m < BatchUploader::kFewestBuffers; ++m)
    pending.push_back(uploader.start(micro, false, 1));
  const std::string error = test::error_of([&] { pending.push_back(uploader.start(micro, false, 1)); });
  CHECK_MESSAGE(error.find("missing wait: the host writes ") != std::string::npos, error);
  CHECK_MESSAGE(error.find(" of a pinned buffer (data) that a copy from the host on the queue host to device "
                           "reads") != std::string::npos,
                error);
}

TEST_CASE("a wait of the host for the copy of the state is found where an asynchronous save reads it") {
  if (world().size() > 1) return;
  config::Config config = testing::tiny_config(true);
  config.train.device = config::DeviceKind::checked;
  for (const int64_t ignored : {-1, 0}) {
    StepRunner runner(
        config, world(),
        make_checked_device(kernels::cpu_table(), 1, {.patient = true, .ignored_host_wait = ignored}));
    runner.initialize();
    runner.device().synchronize();
    Saver saver(world(), runner.store(), runner.optimizer(), true, runner.device());
    const test::SharedDirectory root;
    const std::string error =
        test::error_of([&] { saver.begin(test::plan_in(root.path()), runner.state()); });
    if (ignored < 0) {
      CHECK(error == "");
      saver.finish();
      continue;
    }
    CHECK_MESSAGE(error.find("missing wait: the host reads ") != std::string::npos, error);
    CHECK_MESSAGE(error.find(" of a pinned buffer (snapshot) that a copy to the host on the queue device to "
                             "host writes") != std::string::npos,
                  error);
  }
}
