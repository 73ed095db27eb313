// Bugs in the order of transfers, planted, on the channel that buffers nothing: each is reported with the
// ranks and their transfers. Two ranks.
#include "comm/blocking_channel.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/error.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "tests/support/channels.hpp"

using namespace capstan;
using namespace capstan::comm;
using test::world;

namespace {

// The error that the host finds when it waits for the device.
std::string error_of(Device& device) {
  try {
    device.synchronize();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::rank_failure);
    return error.what();
  }
  return "";
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("ranks that receive before they send are named with their transfers, without a time-out") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  const Tensor arriving = Tensor::zeros(*device, {8}), leaving = Tensor::zeros(*device, {8});
  const test::WithBlockingChannel with(group, *device);
  const auto start = std::chrono::steady_clock::now();
  group.channel().start(Batch().receive(arriving, previous_in(group))).wait();
  group.channel().start(Batch().send(leaving, next_in(group))).wait();
  const std::string error = error_of(*device);
  CAPTURE(error);
  CHECK(has(error,
            "transfers wait for each other: rank 0, group `world`, batch 1: receive of 32 bytes from rank 1; "
            "rank 1, group `world`, batch 1: receive of 32 bytes from rank 0"));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

TEST_CASE("a circle through the compute queue and two channels is found") {
  Communicator& all = world().communicator();
  if (all.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  const auto forward = all.split(0, all.rank(), "forward"), backward = all.split(0, all.rank(), "backward");
  const Tensor arriving = Tensor::zeros(*device, {8}), leaving = Tensor::zeros(*device, {8});
  const test::WithBlockingChannel a(*forward, *device), b(*backward, *device);
  Communicator &in = all.rank() == 0 ? *backward : *forward, &out = all.rank() == 0 ? *forward : *backward;
  const int other = 1 - all.rank();
  // Rank 0 looks first, and has failed when rank 1 looks for the second time.
  if (all.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  in.channel().start(Batch().receive(arriving, other)).wait();
  out.channel().start(Batch().send(leaving, other)).wait();
  const std::string error = error_of(*device);
  CAPTURE(error);
  CHECK(has(error, "rank 0, group `backward`, batch 1: receive of 32 bytes from rank 1"));
  CHECK(has(error, "rank 1, group `forward`, batch 1: receive of 32 bytes from rank 0"));
  CHECK(has(error, "waits for the compute queue"));
}

TEST_CASE("ranks that start different collectives are named with both") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  const Tensor mine = Tensor::zeros(*device, {8}), all = Tensor::zeros(*device, {16});
  const test::WithBlockingChannel with(group, *device);
  Batch batch;
  if (group.rank() == 0)
    batch.all_gather(mine, all);
  else
    batch.all_to_all(Tensor::zeros(*device, {16}), all);
  group.channel().start(std::move(batch)).wait();
  const std::string error = error_of(*device);
  CAPTURE(error);
  CHECK(has(error, "transfers of group `world` do not match"));
  CHECK(has(error, "all_gather of 32 bytes"));
  CHECK(has(error, "all_to_all of 32 bytes"));
}

TEST_CASE("kernels that do not wait for a batch read old values") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1, {.patient = true});
  const test::WithBlockingChannel with(group, *device);
  const std::vector<float> values(8, 1.0f + static_cast<float>(group.rank()));
  const Tensor arriving = Tensor::zeros(*device, {8}),
               leaving = Tensor::from_host<float>(*device, {8}, values);
  Transfers transfers =
      group.channel().start(Batch().receive(arriving, previous_in(group)).send(leaving, next_in(group)));
  const std::vector<float> early = arriving.to_host<float>();
  transfers.wait();
  CHECK(early[0] == 0.0f);
  CHECK(arriving.to_host<float>()[0] == 1.0f + static_cast<float>(previous_in(group)));
}

TEST_CASE("a sum on the communication queue is complete while the compute queue is busy") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  const test::WithBlockingChannel with(group, *device);
  const float mine = 1.0f + static_cast<float>(group.rank());
  const Tensor values = Tensor::from_host<float>(*device, {6}, std::vector<float>(6, mine));
  const Tensor sum = Tensor::zeros(*device, {3});
  Reduction reduction = Reduction::reduce_scatter(group, values, sum, Queue::communication);
  const auto summed = device->record(Queue::communication);
  std::atomic<bool> seen{false};
  device->enqueue(Queue::compute, [&seen] {
    for (int i = 0; i < 20'000 && !seen.load(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!seen.load()) fail(ErrorCode::rank_failure, "the sum waits for the compute queue");
  });
  summed->wait();
  seen.store(true);
  reduction.finish();
  CHECK(sum.to_host<float>() == std::vector<float>(3, 3.0f));
}
