// Run with any number of ranks.
#include <doctest/doctest.h>

#include <memory>
#include <optional>
#include <vector>

#include "comm/channel.hpp"
#include "comm/mesh.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "tests/support/channels.hpp"
#include "tests/support/nccl_gpus.hpp"

using namespace capstan;
using namespace capstan::comm;

using test::world;

namespace {

enum class ChannelKind : uint8_t { staging, blocking, nccl };

// A device, with a channel of the group for its tensors while it lives.
struct ChannelCase {
  ChannelCase(std::unique_ptr<Device> made, ChannelKind kind, Communicator& group) : device(std::move(made)) {
    if (kind == ChannelKind::blocking) blocking.emplace(group, *device);
    if (kind == ChannelKind::nccl) nccl.emplace(group, dynamic_cast<cuda::CudaDevice&>(*device));
  }
  std::unique_ptr<Device> device;
  std::optional<test::WithBlockingChannel> blocking;
  std::optional<test::WithNcclChannel> nccl;
};

// Calls body(device) for each device and channel that the ranks may transfer by.
template <class Body>
void on_every_channel(Communicator& group, Body body) {
  const auto checked = [](bool patient) {
    return make_checked_device(kernels::cpu_table(), 1, {.patient = patient});
  };
  const auto cuda_device = [](bool patient) {
    return test::make_nccl_gpu(test::kRealNccl ? world().local_rank() : 0, 1, patient);
  };
  const auto run = [&](std::unique_ptr<Device> device, ChannelKind kind) {
    CAPTURE(name_of(device->type()));
    CAPTURE(static_cast<int>(kind));
    const ChannelCase with(std::move(device), kind, group);
    body(*with.device);
  };
  run(make_cpu_device(kernels::cpu_table(), 1), ChannelKind::staging);
  for (const bool patient : {false, true}) {
    run(checked(patient), ChannelKind::staging);
    run(checked(patient), ChannelKind::blocking);
    run(cuda_device(patient), ChannelKind::staging);
    run(cuda_device(patient), ChannelKind::nccl);
    CHECK(test::fake_nccl().open == 0);
    CHECK(test::fake_nccl().aborted == 0);
    CHECK(test::fake_cuda().events == 0);
  }
}

}  // namespace

TEST_CASE("collectives move the bytes where they belong") {
  Communicator& group = world().communicator();
  const int n = group.size(), me = group.rank();
  std::vector<int> all(static_cast<size_t>(n) * 3), mine{me, me + 10, me + 20};
  group.all_gather(mine.data(), all.data(), 12);
  for (int r = 0; r < n; ++r) CHECK(all[static_cast<size_t>(r) * 3 + 2] == r + 20);
  std::vector<int> send(static_cast<size_t>(n)), receive(static_cast<size_t>(n));
  for (int r = 0; r < n; ++r) send[static_cast<size_t>(r)] = me * 100 + r;
  group.all_to_all(send.data(), receive.data(), 4);
  for (int r = 0; r < n; ++r) CHECK(receive[static_cast<size_t>(r)] == r * 100 + me);
  int value = me == n - 1 ? 42 : 0;
  group.broadcast(&value, 4, n - 1);
  CHECK(value == 42);
  if (n > 1) {
    int from = -1;
    auto incoming = group.start_receive(&from, 4, (me + n - 1) % n);
    group.start_send(&me, 4, (me + 1) % n)->wait();
    incoming->wait();
    CHECK(from == (me + n - 1) % n);
  }
}

TEST_CASE("sums are made in rank order and agree on every rank; scatter and gather give the same bits") {
  Communicator& group = world().communicator();
  const int n = group.size(), me = group.rank();
  const int64_t count = 1000 * n;
  const auto value = [&](int rank, int64_t i) {
    return static_cast<float>(1.0 / (1 + i + 7 * rank)) * (rank % 2 ? 1e6f : 1.0f);
  };
  std::vector<float> values(static_cast<size_t>(count)), expected(values.size());
  for (int64_t i = 0; i < count; ++i) {
    values[static_cast<size_t>(i)] = value(me, i);
    float sum = value(0, i);
    for (int r = 1; r < n; ++r) sum += value(r, i);
    expected[static_cast<size_t>(i)] = sum;
  }
  on_every_channel(group, [&](Device& device) {
    const Tensor a = Tensor::from_host<float>(device, {count}, values),
                 b = Tensor::from_host<float>(device, {count}, values);
    all_reduce_sum(group, a, "");
    CHECK(a.to_host<float>() == expected);
    reduce_scatter_sum(group, b, "");
    start_gather_slices(group, b, "").wait();
    CHECK(b.to_host<float>() == expected);
    const Tensor odd = Tensor::from_host<float>(device, {17}, std::span<const float>(values).first(17));
    all_reduce_sum_any(group, odd, "");
    CHECK(odd.to_host<float>() == std::vector<float>(expected.begin(), expected.begin() + 17));

    // The slice alone, while something else is launched.
    const Tensor c = Tensor::from_host<float>(device, {count}, values),
                 part = Tensor::empty(device, {count / n});
    auto reduction = Reduction::reduce_scatter(group, c, part, "");
    CHECK(Tensor::zeros(device, {5}).to_host<float>()[4] == 0.0f);
    reduction.finish();
    reduction.finish();
    CHECK(part.to_host<float>() ==
          std::vector<float>(expected.begin() + me * 1000, expected.begin() + (me + 1) * 1000));

    // bf16 and fp16 are summed in fp32 and rounded once.
    const auto check_half = [&]<class T>(T) {
      std::vector<float> rounded(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) {
        auto sum = static_cast<float>(T(value(0, i)));
        for (int r = 1; r < n; ++r) sum += static_cast<float>(T(value(r, i)));
        rounded[static_cast<size_t>(i)] = static_cast<float>(T(sum));
      }
      const Tensor d = Tensor::from_host<T>(device, {count}, std::vector<T>(values.begin(), values.end()));
      all_reduce_sum(group, d, "");
      CHECK(d.to_floats() == rounded);
    };
    check_half(bf16());
    check_half(f16());

    const Tensor most =
        Tensor::from_host<float>(device, {3}, std::vector<float>{float(me), -float(me), 2.0f});
    all_reduce_max(group, most, "");
    CHECK(most.to_host<float>() == std::vector<float>{float(n - 1), 0.0f, 2.0f});

    // In rank order, as on the host: another order would round otherwise.
    std::vector<double> numbers{1.0 / (me + 3), me % 2 == 0 ? 1e17 : -1e17, 1.0};
    const Tensor sums = Tensor::from_host<double>(device, {3}, numbers);
    all_reduce_numbers(group, sums, "");
    all_reduce(group, numbers);
    CHECK(sums.to_host<double>() == numbers);
    const Tensor counts =
        Tensor::from_host<int64_t>(device, {1}, std::vector<int64_t>{int64_t{1} << (50 + me)});
    all_reduce_numbers(group, counts, "");
    CHECK(counts.to_host<int64_t>()[0] == (int64_t{1} << (50 + n)) - (int64_t{1} << 50));
  });
  CHECK(all_reduce(group, static_cast<double>(me + 1)) == n * (n + 1) / 2.0);
  CHECK(all_reduce(group, static_cast<double>(me), ReduceOp::max) == n - 1);
}

TEST_CASE(
    "tensors are transferred while the program continues, over every channel, and several pieces end "
    "together") {
  Communicator& group = world().communicator();
  const int n = group.size(), me = group.rank();
  const auto numbers = [](int rank, int salt, size_t count) {
    std::vector<int32_t> values;
    for (size_t i = 0; i < count; ++i) values.push_back(rank * 1000 + salt * 100 + static_cast<int>(i));
    return values;
  };
  on_every_channel(group, [&](Device& device) {
    const auto upload = [&](const std::vector<int32_t>& values) {
      return Tensor::from_host<int32_t>(device, {static_cast<int64_t>(values.size())}, values);
    };
    const auto count = static_cast<size_t>(n);
    const Tensor mine = upload(numbers(me, 1, 3)), all = upload(numbers(-1, 0, 3 * count)),
                 parts = upload(numbers(me, 2, 2 * count)), received = upload(numbers(-1, 0, 2 * count));
    group.channel().start(TransferBatch("").all_gather(mine, all).all_to_all(parts, received)).wait();
    std::vector<int32_t> expected_all, expected_parts;
    for (int r = 0; r < n; ++r) {
      for (const int32_t v : numbers(r, 1, 3)) expected_all.push_back(v);
      const auto theirs = numbers(r, 2, 2 * count);
      for (size_t i = 0; i < 2; ++i) expected_parts.push_back(theirs[2 * static_cast<size_t>(me) + i]);
    }
    CHECK(all.to_host<int32_t>() == expected_all);
    CHECK(received.to_host<int32_t>() == expected_parts);
    if (n == 1) return;
    // Messages between two ranks arrive in their order, within a batch and from batch to batch. 20,000
    // numbers are more than a channel moves at once.
    const size_t large = 20'000;
    const Tensor first = upload(numbers(-1, 0, large)), second = upload({-1, -1}), third = upload({-1});
    PendingTransfers pair = group.channel().start(TransferBatch("")
                                                      .send(upload(numbers(me, 3, large)), next_in(group))
                                                      .send(upload(numbers(me, 4, 2)), next_in(group))
                                                      .receive(first, previous_in(group))
                                                      .receive(second, previous_in(group)));
    PendingTransfers single = group.channel().start(
        TransferBatch("").receive(third, previous_in(group)).send(upload(numbers(me, 5, 1)), next_in(group)));
    single.wait();
    pair.wait();
    pair.wait();
    CHECK(first.to_host<int32_t>() == numbers(previous_in(group), 3, large));
    CHECK(second.to_host<int32_t>() == numbers(previous_in(group), 4, 2));
    CHECK(third.to_host<int32_t>() == numbers(previous_in(group), 5, 1));
  });
}

TEST_CASE("the host buffers of transfers are counted, used again, and as many on the meta device") {
  Communicator& group = world().communicator();
  if (group.size() == 1) return;
  const auto checked = make_checked_device(kernels::cpu_table(), 1),
             meta = make_meta_device(kernels::cpu_table(), 1, {}, false),
             shared = make_meta_device(kernels::cpu_table(), 1);
  const auto on_meta = make_meta_communicator(group.rank(), group.size(), "world");
  const auto transfer = [](Device& device, Communicator& ranks) {
    const auto zeros = [&](int64_t n) { return Tensor::zeros(device, {n}); };
    const auto start = [&](int64_t n) {
      return ranks.channel().start(
          TransferBatch("").send(zeros(n), next_in(ranks)).receive(zeros(n), previous_in(ranks)));
    };
    for (int round = 0; round < 5; ++round) {
      PendingTransfers first = start(1000), second = start(1000), third = start(300);
      second.wait(Queue::communication);
      PendingTransfers fourth = start(1000);
      first.wait();
    }
  };
  transfer(*checked, group);
  transfer(*meta, *on_meta);
  transfer(*shared, *on_meta);
  const auto workspace = static_cast<size_t>(MemoryCategory::workspace);
  // Two batches of 2 x 4000 bytes and one of 2 x 1200, rounded up to 512 bytes.
  CHECK(checked->host_memory().now_by_category[workspace] == 4 * 4096 + 2 * 1536);
  CHECK(meta->host_memory().peak == checked->host_memory().peak);
  CHECK(meta->host_memory().system_requests == 6);
  for (const Queue direction : {Queue::host_to_device, Queue::device_to_host})
    CHECK(meta->copied_bytes(direction) == checked->copied_bytes(direction));
  CHECK(shared->memory(MemoryKind::host).peak == 0);
  CHECK(shared->copied_bytes(Queue::host_to_device) == 0);
}

TEST_CASE("on the meta device nothing is sent or touched") {
  const auto device = make_meta_device(kernels::cpu_table(), 1);
  const auto group = make_meta_communicator(1, 4, "cp");
  group->channel()
      .start(TransferBatch("")
                 .send(Tensor::empty(*device, {8}), 2)
                 .receive(Tensor::empty(*device, {8}), 0)
                 .all_gather(Tensor::empty(*device, {8}), Tensor::empty(*device, {32})))
      .wait();
  CHECK(group->sent_bytes() == 32 + 3 * 32);
}

TEST_CASE("the mesh splits the world into its groups") {
  const int n = world().size(), me = world().rank();
  const int pp = n % 2 == 0 ? 2 : 1;
  Mesh mesh({.world = n, .pp = pp, .experts = true, .ep = n / pp}, me);
  mesh.connect(world().communicator());
  for (const std::string& name : mesh.group_names()) {
    CAPTURE(name);
    const auto members = mesh.members(name, me);
    Communicator& group = mesh.group(name);
    CHECK(group.name() == name);
    std::vector<int> ranks(static_cast<size_t>(group.size()));
    group.all_gather(&me, ranks.data(), sizeof me);
    CHECK(std::vector<int64_t>(ranks.begin(), ranks.end()) == members);
    CHECK(members[static_cast<size_t>(group.rank())] == me);
  }
  CHECK(mesh.group("ep").size() == n / pp);
  CHECK(mesh.group("tp").is_single());
}
