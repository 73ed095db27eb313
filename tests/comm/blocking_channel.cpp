// Bugs in the order of transfers, planted, on the channel that buffers nothing: each is reported with the
// ranks and their transfers. Two ranks, some three.
#include "comm/blocking_channel.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/error.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"
#include "tests/support/channels.hpp"

using namespace capstan;
using namespace capstan::comm;
using test::holds;
using test::world;

TEST_CASE("ranks that receive before they send are named with their transfers, without a time-out") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  const Tensor arriving = Tensor::zeros(*device, {8}), leaving = Tensor::zeros(*device, {8});
  const test::WithBlockingChannel with(group, *device);
  const auto start = std::chrono::steady_clock::now();
  group.channel().start(TransferBatch("").receive(arriving, previous_in(group))).wait();
  group.channel().start(TransferBatch("").send(leaving, next_in(group))).wait();
  const std::string error = test::device_error(*device);
  CAPTURE(error);
  CHECK(
      holds(error,
            "transfers wait for each other: rank 0, group `world`, batch 1: receive of 32 bytes from rank 1; "
            "rank 1, group `world`, batch 1: receive of 32 bytes from rank 0"));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

TEST_CASE("nothing is buffered: ranks that both send before they receive wait for each other") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  const Tensor arriving = Tensor::zeros(*device, {8}), leaving = Tensor::zeros(*device, {8});
  const test::WithBlockingChannel with(group, *device);
  group.channel().start(TransferBatch("").send(leaving, next_in(group))).wait();
  group.channel().start(TransferBatch("").receive(arriving, previous_in(group))).wait();
  const std::string error = test::device_error(*device);
  CAPTURE(error);
  CHECK(holds(error,
              "transfers wait for each other: rank 0, group `world`, batch 1: send of 32 bytes to rank 1; "
              "rank 1, group `world`, batch 1: send of 32 bytes to rank 0"));
}

TEST_CASE("nothing is buffered: a send ends when its peer has come to the receive, and not before") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  const test::WithBlockingChannel with(group, *device);
  const Tensor values = Tensor::zeros(*device, {8});
  if (group.rank() == 0) {
    PendingTransfers sent = group.channel().start(TransferBatch("").send(values, 1));
    sent.wait(Queue::communication);
    const auto end = device->record(Queue::communication);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK(!end->done());
    group.barrier();
    end->wait();
    CHECK(end->done());
  } else {
    group.barrier();
    group.channel().start(TransferBatch("").receive(values, 0)).wait();
    device->synchronize();
  }
}

TEST_CASE("a ring of three ranks that receive before they send is named with all three") {
  Communicator& group = world().communicator();
  if (group.size() != 3) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  const Tensor arriving = Tensor::zeros(*device, {8}), leaving = Tensor::zeros(*device, {8});
  const test::WithBlockingChannel with(group, *device);
  group.channel().start(TransferBatch("").receive(arriving, previous_in(group))).wait();
  group.channel().start(TransferBatch("").send(leaving, next_in(group))).wait();
  const std::string error = test::device_error(*device);
  CAPTURE(error);
  CHECK(holds(error, "transfers wait for each other: "));
  for (int rank = 0; rank < 3; ++rank)
    CHECK(holds(error, "rank " + std::to_string(rank) +
                           ", group `world`, batch 1: receive of 32 bytes from rank " +
                           std::to_string((rank + 2) % 3)));
}

TEST_CASE("a cycle through the compute queue and two channels is found") {
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
  in.channel().start(TransferBatch("").receive(arriving, other)).wait();
  out.channel().start(TransferBatch("").send(leaving, other)).wait();
  const std::string error = test::device_error(*device);
  CAPTURE(error);
  CHECK(holds(error, "rank 0, group `backward`, batch 1: receive of 32 bytes from rank 1"));
  CHECK(holds(error, "rank 1, group `forward`, batch 1: receive of 32 bytes from rank 0"));
  CHECK(holds(error, "waits for the compute queue"));
}

TEST_CASE("a batch whose work is done is in no deadlock, however late its thread runs") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  TransferStatus status(group);
  ChannelSlot& mine = status.add(group);
  mine.batch = 5;
  if (group.rank() == 1) {
    // The compute queue has gone on to wait for the batch, and the queue of the transfers has not seen it.
    mine.state = static_cast<int32_t>(ChannelState::waits_for_compute);
    mine.ready = 5;
    status.compute_waits(mine.id, 5);
  } else {
    mine.transfers[0].kind = static_cast<int32_t>(TransferBatch::Kind::receive);
    mine.transfers[0].peer = 1;
    mine.count = 1;
    mine.state = static_cast<int32_t>(ChannelState::transfers);
  }
  group.barrier();
  CHECK(!status.deadlock(mine));
  group.barrier();
}

TEST_CASE("ranks that start different collectives are named with both") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  const Tensor mine = Tensor::zeros(*device, {8}), all = Tensor::zeros(*device, {16});
  const test::WithBlockingChannel with(group, *device);
  TransferBatch batch("");
  if (group.rank() == 0)
    batch.all_gather(mine, all);
  else
    batch.all_to_all(Tensor::zeros(*device, {16}), all);
  group.channel().start(std::move(batch)).wait();
  const std::string error = test::device_error(*device);
  CAPTURE(error);
  CHECK(holds(error, "transfers of group `world` do not match"));
  CHECK(holds(error, "all_gather of 32 bytes"));
  CHECK(holds(error, "all_to_all of 32 bytes"));
}

TEST_CASE("ranks that exchange two collectives of one kind and size are named by their purposes") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  struct Collective {
    const char* text;
    void (*start)(Communicator& group, const Tensor& values, const std::string& purpose);
  };
  const std::array collectives{
      Collective{"all_gather of 32 bytes",
                 [](Communicator& g, const Tensor& values, const std::string& purpose) {
                   const Tensor all = Tensor::zeros(values.device(), {16});
                   g.channel().start(TransferBatch(purpose).all_gather(values, all)).wait();
                 }},
      // Named by the bytes for one rank.
      Collective{"all_to_all of 16 bytes",
                 [](Communicator& g, const Tensor& values, const std::string& purpose) {
                   all_reduce_sum_any(g, values, purpose);
                 }},
      Collective{"all_gather of 32 bytes",
                 [](Communicator& g, const Tensor& values, const std::string& purpose) {
                   all_reduce_max(g, values, purpose);
                 }},
      Collective{"all_gather of 16 bytes",
                 [](Communicator& g, const Tensor& values, const std::string& purpose) {
                   start_gather_slices(g, values, purpose).wait();
                 }}};
  for (const auto& [text, start] : collectives)
    for (const bool exchanged : {false, true}) {
      CAPTURE(text);
      CAPTURE(exchanged);
      const auto device = make_checked_device(kernels::cpu_table(), 1);
      const test::WithBlockingChannel with(group, *device);
      const Tensor values = Tensor::zeros(*device, {8});
      const int first = exchanged ? group.rank() : 0;
      for (const int bucket : {first, 1 - first}) start(group, values, "bucket " + std::to_string(bucket));
      const std::string error = test::device_error(*device);
      CAPTURE(error);
      CHECK(error.empty() != exchanged);
      if (!exchanged) continue;
      CHECK(holds(error, "transfers of group `world` do not match"));
      for (const char* bucket : {" (bucket 0)", " (bucket 1)"})
        CHECK(holds(error, text + std::string(bucket)));
      while (!test::device_error(*device).empty()) continue;
    }
}

TEST_CASE("purposes that differ only at the end of a long text are told apart") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  for (const bool differ : {false, true}) {
    CAPTURE(differ);
    const auto device = make_checked_device(kernels::cpu_table(), 1);
    const test::WithBlockingChannel with(group, *device);
    const Tensor mine = Tensor::zeros(*device, {8}), all = Tensor::zeros(*device, {16});
    const std::string purpose = std::string(200, 'x') + std::to_string(differ ? group.rank() : 0);
    group.channel().start(TransferBatch(purpose).all_gather(mine, all)).wait();
    const std::string error = test::device_error(*device);
    CAPTURE(error);
    CHECK(error.empty() != differ);
    if (differ) CHECK(holds(error, "(" + std::string(119, 'x') + ")"));
    while (!test::device_error(*device).empty()) continue;
  }
}

TEST_CASE("ranks that start the batches of two groups in different orders are named with both batches") {
  Communicator& all = world().communicator();
  if (all.size() != 2) return;
  enum class Order : uint8_t { same, crossed, crossed_on_links };
  for (const Order order : {Order::same, Order::crossed, Order::crossed_on_links}) {
    CAPTURE(static_cast<int>(order));
    const auto device = make_checked_device(kernels::cpu_table(), 1);
    const bool links = order == Order::crossed_on_links;
    const auto tp = all.split(0, all.rank(), "tp"),
               dp = all.split(0, all.rank(), links ? "pp-forward-0" : "dp");
    const test::WithBlockingChannel a(*tp, *device), b(*dp, *device);
    const Tensor mine = Tensor::zeros(*device, {8}), first = Tensor::zeros(*device, {16}),
                 second = Tensor::zeros(*device, {16});
    const auto start = [&](Communicator& group, const Tensor& to) {
      return group.channel().start(TransferBatch("").all_gather(mine, to));
    };
    start(*tp, first).wait();
    start(*dp, second).wait();
    const bool crosses = order != Order::same && all.rank() == 1;
    // On streams of their own they do not wait for each other.
    PendingTransfers one = crosses ? start(*dp, second) : start(*tp, first);
    PendingTransfers other = crosses ? start(*tp, first) : start(*dp, second);
    one.wait();
    other.wait();
    const std::string error = test::device_error(*device);
    CAPTURE(error);
    CHECK(error.empty() == (order != Order::crossed));
    if (order != Order::crossed) continue;
    // Of whichever of the two batches meets first.
    const std::string of_tp = "transfer batch 2 of group `tp` (all_gather of 32 bytes)",
                      of_dp = "transfer batch 2 of group `dp` (all_gather of 32 bytes)";
    CHECK((holds(error, "rank 0 starts " + of_tp + " before " + of_dp + ", rank 1 after it") ||
           holds(error, "rank 1 starts " + of_dp + " before " + of_tp + ", rank 0 after it")));
    // Errors of both groups.
    while (!test::device_error(*device).empty()) continue;
  }
}

TEST_CASE("a kernel that does not wait for a batch is named with the batch") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto& fill = kernels::cpu_table().elementwise->fill;
  const auto& cast = kernels::cpu_table().elementwise->cast;
  const std::string next = std::to_string(next_in(group)), previous = std::to_string(previous_in(group));
  const std::string batch = "transfer 1 of `world` (receive of 32 bytes from rank " + previous +
                            ", send of 32 bytes to rank " + next + ")";
  enum class Bug : uint8_t {
    none,
    reads_early,
    overwrites_what_is_sent,
    overwrites_what_arrives,
    frees_what_is_sent
  };
  for (const Bug bug : {Bug::none, Bug::reads_early, Bug::overwrites_what_is_sent,
                        Bug::overwrites_what_arrives, Bug::frees_what_is_sent}) {
    CAPTURE(static_cast<int>(bug));
    const auto device = make_checked_device(kernels::cpu_table(), 1);
    const test::WithBlockingChannel with(group, *device);
    const Tensor arriving = Tensor::zeros(*device, {8}), leaving = Tensor::zeros(*device, {8}),
                 other = Tensor::zeros(*device, {8});
    PendingTransfers transfers = group.channel().start(
        TransferBatch("").receive(arriving, previous_in(group)).send(leaving, next_in(group)));
    std::string expected;
    const auto plant = [&] {
      switch (bug) {
        case Bug::none:
          return;
        case Bug::reads_early:
          expected = "kernel 1 of the queue compute reads 32 bytes that " + batch + " writes";
          return launch(*device, cast, arriving, other, 8);
        case Bug::overwrites_what_is_sent:
          expected = "kernel 1 of the queue compute writes 32 bytes that " + batch + " reads";
          return launch(*device, fill, leaving, 1.0f, 8);
        case Bug::overwrites_what_arrives:
          expected = "kernel 1 of the queue compute writes 32 bytes that " + batch + " writes";
          return launch(*device, fill, arriving, 1.0f, 8);
        case Bug::frees_what_is_sent:
          expected = "its release writes 512 bytes that " + batch + " reads";
          device->free(leaving.address(), leaving.bytes(), MemoryCategory::activations);
          // The tensor frees it again.
          REQUIRE(device->allocate(leaving.bytes(), MemoryCategory::activations) == leaving.address());
      }
    };
    plant();
    std::string error;
    try {
      device->synchronize();
    } catch (const Error& found) {
      CHECK(found.code() == ErrorCode::internal);
      error = found.what();
    }
    CAPTURE(error);
    CHECK(holds(error, expected));
    CHECK(error.empty() == (bug == Bug::none));
    transfers.wait();
    // Work that waits may do all of it.
    launch(*device, cast, arriving, other, 8);
    launch(*device, fill, leaving, 1.0f, 8);
    launch(*device, fill, arriving, 1.0f, 8);
    device->synchronize();
  }
}

TEST_CASE("a kernel that uses columns of a batch's tensors and does not wait for it is named") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  constexpr int64_t kRows = 3, kColumns = 8, kSome = 2;
  const auto& copy_rows = kernels::cpu_table().elementwise->copy_rows;
  enum class Bug : uint8_t { none, reads_early, overwrites_what_is_sent, overwrites_what_arrives };
  for (const Bug bug :
       {Bug::none, Bug::reads_early, Bug::overwrites_what_is_sent, Bug::overwrites_what_arrives}) {
    CAPTURE(static_cast<int>(bug));
    const auto device = make_checked_device(kernels::cpu_table(), 1);
    const test::WithBlockingChannel with(group, *device);
    const auto matrix = [&] { return Tensor::zeros(*device, {kRows, kColumns}); };
    const Tensor arriving = matrix(), leaving = matrix(), other = matrix();
    const auto columns = [&](const Tensor& t) { return t.slice(1, 3, kSome); };
    const auto copy = [&](const Tensor& from, const Tensor& to) {
      launch(*device, copy_rows, columns(from), kColumns, columns(to), kColumns, kRows, kSome);
    };
    PendingTransfers transfers = group.channel().start(
        TransferBatch("").receive(arriving, previous_in(group)).send(leaving, next_in(group)));
    // A sent tensor may be read.
    copy(leaving, other);
    if (bug == Bug::reads_early) copy(arriving, other);
    if (bug == Bug::overwrites_what_is_sent) copy(other, leaving);
    if (bug == Bug::overwrites_what_arrives) copy(other, arriving);
    std::string error;
    try {
      device->synchronize();
    } catch (const Error& found) {
      CHECK(found.code() == ErrorCode::internal);
      error = found.what();
    }
    CAPTURE(error);
    CHECK(error.empty() == (bug == Bug::none));
    if (bug != Bug::none)
      CHECK(holds(error, std::string("kernel 2 of the queue compute ") +
                             (bug == Bug::reads_early ? "reads" : "writes") +
                             " 24 bytes that transfer 1 of `world` (receive of 96 bytes"));
    transfers.wait();
    copy(arriving, other);
    copy(other, leaving);
    device->synchronize();
  }
}

TEST_CASE("an all-gather in place leaves this rank's part readable, and no other") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1);
  const test::WithBlockingChannel with(group, *device);
  const auto& cast = kernels::cpu_table().elementwise->cast;
  const Tensor all = Tensor::zeros(*device, {16}), other = Tensor::zeros(*device, {8});
  const auto part = [&](int rank) { return all.flat_range(8 * rank, 8, {8}); };
  PendingTransfers transfers = group.channel().start(TransferBatch("").all_gather(part(group.rank()), all));
  launch(*device, cast, part(group.rank()), other, 8);
  CHECK_NOTHROW(device->record(Queue::compute)->wait());
  launch(*device, cast, part(1 - group.rank()), other, 8);
  CHECK_THROWS_WITH_AS(device->record(Queue::compute)->wait(), doctest::Contains("all_gather of 32 bytes"),
                       Error);
  transfers.wait();
}

TEST_CASE("through host memory too, an all-gather in place leaves this rank's part readable, and no other") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  for (const bool own : {true, false}) {
    const auto device = make_checked_device(kernels::cpu_table(), 1);
    const Tensor all = Tensor::zeros(*device, {16}), other = Tensor::zeros(*device, {8});
    const auto part = [&](int rank) { return all.flat_range(8 * rank, 8, {8}); };
    PendingTransfers transfers = group.channel().start(TransferBatch("").all_gather(part(group.rank()), all));
    launch(*device, kernels::cpu_table().elementwise->cast, part(own ? group.rank() : 1 - group.rank()),
           other, 8);
    transfers.wait(Queue::communication);
    if (own)
      CHECK_NOTHROW(device->synchronize());
    else
      CHECK_THROWS_WITH_AS(device->synchronize(), doctest::Contains("missing wait"), Error);
    transfers.wait();
  }
}

TEST_CASE("received data of a batch are there for kernels that wait for it") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  const auto device = make_checked_device(kernels::cpu_table(), 1, {.patient = true});
  const test::WithBlockingChannel with(group, *device);
  const std::vector<float> values(8, 1.0f + static_cast<float>(group.rank()));
  const Tensor arriving = Tensor::zeros(*device, {8}),
               leaving = Tensor::from_host<float>(*device, {8}, values);
  PendingTransfers transfers = group.channel().start(
      TransferBatch("").receive(arriving, previous_in(group)).send(leaving, next_in(group)));
  transfers.wait();
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
  Reduction reduction = Reduction::reduce_scatter(group, values, sum, "", Queue::communication);
  reduction.start_sum();
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

TEST_CASE("a transfer waits for the sum before it only where its values are written on that sum's queue") {
  Communicator& group = world().communicator();
  if (group.size() != 2) return;
  for (const Queue written_on : {Queue::compute, Queue::communication}) {
    const auto device = make_checked_device(kernels::cpu_table(), 1);
    const test::WithBlockingChannel with(group, *device);
    std::vector<QueueSpan> transfers;
    device->listen([&](const QueueSpan& span) {
      if (span.queue == "transfers of `world`") transfers.push_back(span);
    });
    const std::vector<float> ones(6, 1.0f);
    const Tensor first = Tensor::from_host<float>(*device, {6}, ones),
                 second = Tensor::from_host<float>(*device, {6}, ones);
    const auto start = [&](const Tensor& values, Queue queue) {
      return Reduction::reduce_scatter(group, values, values.flat_range(3 * group.rank(), 3, {3}), "",
                                       Queue::communication, queue);
    };
    Reduction a = start(first, Queue::compute);
    // A sum that takes long.
    std::atomic<bool> released{false};
    device->enqueue(Queue::communication, [&released] {
      for (int i = 0; i < 20'000 && !released.load(); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    a.start_sum();
    Reduction b = start(second, written_on);
    REQUIRE(transfers.size() == 2);
    const auto wait_for_transfer = [&](int milliseconds) {
      for (int i = 0; i < milliseconds && !transfers[1].after->done(); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return transfers[1].after->done();
    };
    if (written_on == Queue::compute) {
      CHECK(wait_for_transfer(20'000));
    } else {
      wait_for_transfer(200);
      CHECK(!transfers[1].before->done());
    }
    released.store(true);
    a.finish();
    b.finish();
    for (const Tensor& values : {first, second})
      CHECK(values.flat_range(3 * group.rank(), 3, {3}).to_host<float>() == std::vector<float>(3, 2.0f));
    device->listen(nullptr);
  }
}
