// Run with any number of ranks.
#include <doctest/doctest.h>

#include <vector>

#include "comm/mesh.hpp"
#include "comm/reduce.hpp"
#include "comm/world.hpp"

using namespace capstan;
using namespace capstan::comm;

namespace {
World& world() {
  static const std::unique_ptr<World> joined = World::join();
  return *joined;
}
const kernels::Table& no_table() {
  static const char nothing[1] = {};
  return reinterpret_cast<const kernels::Table&>(nothing);
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
    auto incoming = group.start_receive(&from, 4, (me + n - 1) % n, 7);
    group.start_send(&me, 4, (me + 1) % n, 7)->wait();
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
  const auto cpu = make_cpu_device(no_table(), 1), guard = make_guard_device(no_table(), 1);
  for (Device* device : {cpu.get(), guard.get()}) {
    const Tensor a = Tensor::from_host<float>(*device, {count}, values),
                 b = Tensor::from_host<float>(*device, {count}, values);
    all_reduce_sum(group, a);
    CHECK(a.to_host<float>() == expected);
    reduce_scatter_sum(group, b);
    all_gather_slices(group, b);
    CHECK(b.to_host<float>() == expected);
    const Tensor odd = Tensor::from_host<float>(*device, {17}, std::span<const float>(values).first(17));
    all_reduce_sum_any(group, odd);
    CHECK(odd.to_host<float>() == std::vector<float>(expected.begin(), expected.begin() + 17));
  }
  CHECK(all_reduce(group, static_cast<double>(me + 1)) == n * (n + 1) / 2.0);
  CHECK(all_reduce(group, static_cast<double>(me), ReduceOp::max) == n - 1);
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
  CHECK(mesh.group("tp").alone());
}
