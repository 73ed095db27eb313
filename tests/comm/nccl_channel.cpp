// The channel on NCCL's communicators, on a backend without CUDA: order, errors of every call, and an error
// of the transport; on two GPUs order, and what is published. Two ranks. nccl_faults.cpp has worlds of real
// processes in which a rank is at fault.
#include "comm/nccl_channel.hpp"

#include <doctest/doctest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "comm/watchdog/rank_status.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"
#include "tests/support/channels.hpp"
#include "tests/support/nccl_gpus.hpp"

using namespace capstan;
using namespace capstan::comm;
using test::world;

namespace {

std::unique_ptr<cuda::CudaDevice> fresh_device() {
  return test::make_nccl_gpu(test::kRealNccl ? world().local_rank() : 0);
}
Tensor filled(Device& device, float value) {
  return Tensor::from_host<float>(device, {8}, std::vector<float>(8, value));
}
// Each rank sends to the next one.
TransferBatch rotation(const Communicator& group, const Tensor& leaving, const Tensor& arriving) {
  return TransferBatch("").receive(arriving, previous_in(group)).send(leaving, next_in(group));
}
[[maybe_unused]] std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::rank_failure);
    return error.what();
  }
  return "";
}
void wait_for(const std::function<bool()>& condition) {
  for (int i = 0; i < 5000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(condition());
}

}  // namespace

TEST_CASE("nccl: a batch follows the work of its queue, and other work waits for it by an event") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = fresh_device();
  {
    const test::WithNcclChannel with(group, *device);
    const Tensor leaving = filled(*device, 0), arriving = filled(*device, -1);
    const int64_t waits = device->host_waits();
    for (int round = 1; round <= 3; ++round) {
      CAPTURE(round);
      const auto value = static_cast<float>(10 * round + group.rank());
      // The fill runs before the batch, and the next one after it.
      launch(*device, device->table().elementwise->fill, leaving, value, 8);
      group.channel().start(rotation(group, leaving, arriving)).wait();
      launch(*device, device->table().elementwise->fill, leaving, -2.0f, 8);
      CHECK(device->host_waits() == waits + round - 1);
      CHECK(arriving.to_host<float>()[7] == static_cast<float>(10 * round + 1 - group.rank()));
    }
    CHECK(group.channel().sent_bytes() == 3 * 32);
  }
  CHECK(test::fake_nccl().open == 0);
  CHECK(test::fake_nccl().aborted == 0);
}

// Of the stand-in alone.
#ifndef CAPSTAN_SEVERAL_GPUS
TEST_CASE("nccl: the stand-in's memory has no name once all ranks have joined, so that a kill leaves none") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = fresh_device();
  const test::WithNcclChannel with(group, *device);
  group.barrier();
  const std::string prefix = "capstan-fake-nccl-" + std::to_string(::getpid()) + "-";
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm"))
    CHECK(!file.path().filename().string().starts_with(prefix));
}
#endif

TEST_CASE("nccl: the host does not wait for peers that are connected") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = fresh_device();
  const test::WithNcclChannel with(group, *device);
  const Tensor leaving = filled(*device, 1), arriving = filled(*device, -1);
  group.channel().start(rotation(group, leaving, arriving)).wait();
  // Rank 1 starts its batch after the host of rank 0 has gone on.
  if (group.rank() == 1) group.barrier();
  PendingTransfers second = group.channel().start(rotation(group, leaving, arriving));
  if (group.rank() == 0) group.barrier();
  second.wait();
  CHECK(arriving.to_host<float>()[0] == 1.0f);
}

TEST_CASE("nccl: what the device works on is published, with world ranks") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = fresh_device();
  const auto dp = group.split(0, group.rank(), "dp");
  REQUIRE(dp->device_batches());
  const DeviceBatches& batches = *dp->device_batches();
  const test::WithNcclChannel with(*dp, *device);
  const Tensor mine = filled(*device, 1), all = Tensor::zeros(*device, {16});
  // The world's watchdog polls.
  dp->channel().start(TransferBatch("").all_gather(mine, all)).wait();
  device->synchronize();
  CHECK(batches.started == 1);
  wait_for([&] { return batches.done == 1 && batches.begun == 1; });
  if (dp->rank() == 1) group.barrier();
  dp->channel().start(TransferBatch("").all_gather(mine, all)).wait();
  if (dp->rank() == 0) {
    // The other rank has not come.
    wait_for([&] { return batches.begun == 2; });
    CHECK(batches.done == 1);
    CHECK(std::string(batches.text.data()) == "all_gather of 32 bytes");
    group.barrier();
  }
  device->synchronize();
  wait_for([&] { return batches.done == 2; });
}

// Planted errors.
#ifndef CAPSTAN_SEVERAL_GPUS
TEST_CASE("nccl: an error of each call names rank, group and call") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const std::string who = "rank " + std::to_string(group.rank()) + ", group `world`: NCCL cannot ";
  struct Case {
    const char *function, *action;
  };
  for (const auto& [function, action] :
       {Case{"get_unique_id", "make the id of the communicator"},
        {"init_rank", "join the communicator of 2 ranks"},
        {"get_async_error", "join the communicator of 2 ranks"},
        {"group_start", "begin transfer batch 1 of group `world` (all_gather of 32 bytes)"},
        {"group_end", "start transfer batch 1 of group `world` (all_gather of 32 bytes)"},
        {"all_gather", "queue transfer batch 1 of group `world` (all_gather of 32 bytes)"}}) {
    CAPTURE(function);
    const auto device = fresh_device();
    test::fake_nccl().failing = function;
    const std::string error = message_of([&] {
      const test::WithNcclChannel with(group, *device);
      const Tensor mine = filled(*device, 1), all = Tensor::zeros(*device, {16});
      group.channel().start(TransferBatch("").all_gather(mine, all)).wait();
    });
    group.use_channel(nullptr);
    const std::string reason = ": fake_nccl_" + std::string(function) + ": planted error";
    // Only rank 0 makes the id.
    if (std::string(function) != "get_unique_id" || group.rank() == 0)
      CHECK(error.starts_with(who + action + reason));
    else
      CHECK(error.starts_with("making a NCCL communicator failed on rank 0: rank 0, group `world`"));
    CHECK(test::fake_nccl().open == 0);
    group.barrier();
  }
}

TEST_CASE("nccl: ranks that do not find each other are named after the time-out") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = fresh_device();
  test::fake_nccl().wrong_id = group.rank() == 1;
  const std::string error = message_of([&] { const test::WithNcclChannel with(group, *device, 0.2); });
  CHECK(error.starts_with("rank " + std::to_string(group.rank()) +
                          ", group `world`: NCCL cannot join the communicator of 2 ranks: "
                          "timed out after 0.2 s (resilience.timeout): not all ranks reached it"));
  CHECK(test::fake_nccl().aborted == 1);
  group.barrier();
}

TEST_CASE("nccl: ranks that share a GPU are refused by the communicator") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = fresh_device();
  test::fake_nccl().gpu = 3;
  const std::string error = message_of([&] { const test::WithNcclChannel with(group, *device); });
  CHECK(error.find("invalid usage: two ranks have the same GPU") != std::string::npos);
  group.barrier();
}

TEST_CASE(
    "nccl: an error of the transport is named with its batch, and an abort ends the waits of the host") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  auto device = fresh_device();
  const auto watch = std::make_shared<TransferWatch>();
  {
    const auto other = group.split(0, group.rank(), "other");
    const test::WithNcclChannel with(group, *device, 60, watch), second(*other, *device, 60, watch);
    const Tensor mine = filled(*device, 1), all = Tensor::zeros(*device, {16});
    group.channel().start(TransferBatch("").all_gather(mine, all)).wait();
    device->synchronize();
    CHECK(!watch->poll());
    test::fake_nccl().fails_at = 2;
    group.channel().start(TransferBatch("").all_gather(mine, all)).wait();
    std::optional<std::string> problem;
    wait_for([&] { return (problem = watch->poll()).has_value(); });
    CHECK(*problem ==
          "in transfer batch 2 of group `world` (all_gather of 32 bytes), NCCL reports: "
          "fake_nccl_get_async_error: "
          "remote process exited or there was a network error");
    // As the watchdog's thread does, while the host waits.
    std::thread aborting([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      watch->abort(Error(ErrorCode::rank_failure, "the network is down"));
    });
    CHECK(message_of([&] { static_cast<void>(all.to_host<float>()); }) == "the network is down");
    aborting.join();
    CHECK(test::fake_nccl().aborted == 2);
    CHECK(test::fake_nccl().open == 0);
    // Later calls fail with the same error, and so do channels made later.
    CHECK(message_of([&] { device->synchronize(); }) == "the network is down");
    CHECK(message_of([&] { other->channel().start(TransferBatch("").all_gather(mine, all)).wait(); }) ==
          "the network is down");
  }
  device.reset();
  CHECK(test::fake_cuda().open_devices == 0);
  group.barrier();
}
#endif
