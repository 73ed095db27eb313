// Rows with unequal counts between ranks: values, gradients, counts. 2 to 4 ranks. A row holds the rank that
// it comes from, the rank that it is for and its number, so that every misplaced row is found.
#include "ops/row_exchange.hpp"

#include <doctest/doctest.h>

#include <numeric>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "comm/channel.hpp"
#include "ops/bias_dropout_add.hpp"
#include "ops/matmul.hpp"
#include "tests/support/channels.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/simple_store.hpp"

using namespace capstan;
using test::holds;
using test::world;

namespace {

using Floats = std::vector<float>;
using Counts = std::vector<int64_t>;
// [from][to].
using CountMatrix = std::vector<Counts>;

size_t ranks() {
  return static_cast<size_t>(world().size());
}
size_t me() {
  return static_cast<size_t>(world().rank());
}
int64_t total(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

CountMatrix filled(auto&& count) {
  CountMatrix all(ranks(), Counts(ranks()));
  for (size_t from = 0; from < ranks(); ++from)
    for (size_t to = 0; to < ranks(); ++to) all[from][to] = count(from, to);
  return all;
}
std::vector<CountMatrix> count_matrices() {
  return {filled([](size_t from, size_t to) { return int64_t(1 + 3 * from + 7 * to) % 11; }),
          // Everything goes to one rank.
          filled([](size_t, size_t to) { return to == 1 ? 5 : 0; }),
          // One rank takes part with nothing, the others exchange.
          filled([](size_t from, size_t to) { return from == 0 || to == 0 ? 0 : 3; }),
          // Every rank keeps its rows; nothing is transferred.
          filled([](size_t from, size_t to) { return from == to ? int64_t(2 + from) : 0; }),
          filled([](size_t, size_t) { return 0; }),
          // More than a chunk of the blocking channel.
          filled([](size_t from, size_t to) { return int64_t(from < to ? 6000 : 1); })};
}
ops::RowCounts counts_here(const CountMatrix& all) {
  ops::RowCounts counts{all[me()], {}};
  for (size_t from = 0; from < ranks(); ++from) counts.received.push_back(all[from][me()]);
  return counts;
}

// Rows of all ranks that `mine` selects, in the order of (from, to).
Floats rows_where(const CountMatrix& all, int64_t cols, auto&& mine) {
  Floats values;
  for (size_t from = 0; from < ranks(); ++from)
    for (size_t to = 0; to < ranks(); ++to)
      for (int64_t row = 0; mine(from, to) && row < all[from][to]; ++row)
        for (int64_t col = 0; col < cols; ++col)
          values.push_back(static_cast<float>(col % 2 ? row % 128 : static_cast<int64_t>(16 * from + to)));
  return values;
}
Tensor upload(Device& device, int64_t rows, int64_t cols, const Floats& values, DType type) {
  const Tensor wide = Tensor::from_host<float>(device, {rows, cols}, values),
               tensor = Tensor::empty(device, {rows, cols}, type);
  ops::copy_matrix(wide, tensor);
  return tensor;
}

void check_exchange(Device& device, const CountMatrix& all, int64_t cols, DType type) {
  comm::Communicator& group = world().communicator();
  const ops::RowCounts counts = counts_here(all);
  const Floats sent = rows_where(all, cols, [](size_t from, size_t) { return from == me(); }),
               received = rows_where(all, cols, [](size_t, size_t to) { return to == me(); });
  test::SimpleStore store(device);
  StepContext context{device, store};
  Tape tape(context);
  const Var x = tape.input("x", upload(device, total(counts.sent), cols, sent, type), true);
  ops::RowExchange exchange(tape, x, counts, group, "rows of a test");
  // Work beside the transfer, in both directions.
  tape.output("other", ops::add(tape, x, x));
  const Var y = exchange.wait(tape);
  CHECK((y.value.to_floats() == received));
  tape.output("y", y);
  tape.backward({{"y", upload(device, total(counts.received), cols, received, type)}});
  CHECK((tape.input_gradient("x").to_floats() == sent));
}

// Each rank has counts[its rank] rows of a number of its own.
void check_gather(Device& device, const Counts& counts, int64_t cols, DType type) {
  comm::Communicator& group = world().communicator();
  const int64_t own = counts[me()];
  Floats all, mine(static_cast<size_t>(own * cols), static_cast<float>(1 + me()));
  for (size_t rank = 0; rank < ranks(); ++rank)
    all.insert(all.end(), static_cast<size_t>(counts[rank] * cols), static_cast<float>(1 + rank));
  // Every rank adds all rows of all ranks, so that each has as many times its own.
  Floats sum = mine;
  for (float& value : sum) value *= static_cast<float>(ranks());

  test::SimpleStore store(device);
  StepContext context{device, store};
  for (const bool gathers : {true, false}) {
    CAPTURE(gathers);
    Tape tape(context);
    const auto upload_all = [&] { return upload(device, total(counts), cols, all, type); };
    const auto upload_mine = [&] { return upload(device, own, cols, mine, type); };
    const Var x = tape.input("x", gathers ? upload_mine() : upload_all(), true);
    const Var y = gathers ? ops::gather_rows(tape, x, counts, group, "rows of a test")
                          : ops::reduce_rows(tape, x, counts, group, "rows of a test");
    CHECK((y.value.to_floats() == (gathers ? all : sum)));
    tape.output("y", y);
    tape.backward({{"y", gathers ? upload_all() : upload_mine()}});
    CHECK((tape.input_gradient("x").to_floats() == (gathers ? sum : all)));
  }
}

// Calls check() with the channel of the communicator, and with one that blocks its queue as NCCL does.
void on_every_channel(Device& device, auto&& check) {
  check();
  if (!test::has_blocking_channels(device)) return;
  const test::WithBlockingChannel with(world().communicator(), device);
  check();
}

// Rows that a rank has for each of `here` experts of each rank.
Tensor upload_sizes(Device& device, int64_t here, auto&& of) {
  Counts sizes;
  for (int64_t expert = 0; expert < here * world().size(); ++expert) sizes.push_back(of(me(), expert));
  return Tensor::from_host<int64_t>(device, {static_cast<int64_t>(sizes.size())}, sizes);
}

}  // namespace

TEST_CASE_TEMPLATE("rows with unequal counts go to their ranks, and their gradients back", D, EVERY_DEVICE) {
  if (world().size() == 1) return;
  const auto device = D::make(1);
  on_every_channel(*device, [&] {
    for (const CountMatrix& all : count_matrices())
      for (const int64_t cols : {1, 3, 8})
        check_exchange(*device, all, cols, cols == 3 ? DType::bf16 : DType::f32);
  });
}

TEST_CASE("a rank without rows stays in step with ranks that have some, also in another group") {
  if (world().size() == 1) return;
  const auto device = test::Checked::make(1);
  comm::Communicator& group = world().communicator();
  const auto other = group.split(0, group.rank(), "other");
  const test::WithBlockingChannel rows(group, *device), gathers(*other, *device);
  const Tensor mine = Tensor::zeros(*device, {8}), all = Tensor::zeros(*device, {8 * group.size()});
  for (const CountMatrix& counts : count_matrices()) {
    check_exchange(*device, counts, 2, DType::f32);
    other->channel().start(comm::TransferBatch("").all_gather(mine, all)).wait();
  }
  CHECK(test::device_error(*device).empty());
}

TEST_CASE_TEMPLATE("rows of all ranks are gathered and summed with unequal counts", D, EVERY_DEVICE) {
  if (world().size() == 1) return;
  const auto device = D::make(1);
  on_every_channel(*device, [&] {
    for (const Counts& of_four : {Counts{3, 1, 4, 2}, {0, 5, 0, 1}, {0, 0, 0, 0}, {2, 2, 2, 2}})
      for (const int64_t cols : {1, 3, 8})
        check_gather(*device, {of_four.begin(), of_four.begin() + world().size()}, cols,
                     cols == 3 ? DType::bf16 : DType::f32);
  });
}

TEST_CASE_TEMPLATE(
    "counts of rows become known to every rank, and a recomputed region has them without waiting", D,
    EVERY_DEVICE) {
  if (world().size() == 1) return;
  comm::Communicator& group = world().communicator();
  const auto device = D::make(1);
  test::SimpleStore store(*device);
  StepContext context{*device, store};
  constexpr int64_t kHere = 3;
  const auto of = [](size_t rank, int64_t expert) { return static_cast<int64_t>(rank) * 5 + expert % 4; };
  const Tensor sizes = upload_sizes(*device, kHere, of);
  ops::ExpertRows first, again;
  Tape tape(context);
  const Var x = tape.input("x", Tensor::zeros(*device, {1, 1}), true);
  const auto y = tape.recompute("region", {x}, [&](Tape& inner, std::span<const Var> arguments) {
    again = ops::exchange_counts(inner, sizes, 1000, {&group, nullptr}, "experts of layer 3");
    return std::vector<Var>{ops::add(inner, arguments[0], arguments[0])};
  });
  first = again;
  // Another load, which the recomputed pass must not see.
  const Tensor other = upload_sizes(*device, kHere, [](size_t, int64_t) { return int64_t{9}; });
  ops::copy_matrix(other.view({1, other.elements()}), sizes.view({1, sizes.elements()}));
  tape.output("y", y[0]);
  const int64_t waits = device->host_waits();
  tape.backward({{"y", Tensor::zeros(*device, {1, 1})}});
  CHECK(device->host_waits() == waits);

  Counts sent, received, of_experts;
  for (size_t rank = 0; rank < ranks(); ++rank) {
    sent.push_back(0), received.push_back(0);
    for (int64_t i = 0; i < kHere; ++i) {
      sent.back() += of(me(), static_cast<int64_t>(rank) * kHere + i);
      of_experts.push_back(of(rank, static_cast<int64_t>(me()) * kHere + i));
      received.back() += of_experts.back();
    }
  }
  for (const ops::ExpertRows* rows : {&first, &again}) {
    CHECK(rows->exchanged.sent == sent);
    CHECK(rows->exchanged.received == received);
    CHECK(rows->gathered == Counts{total(received)});
    CHECK((rows->of_experts.shape() == Shape{world().size(), kHere}));
    CHECK(rows->of_experts.template to_host<int64_t>() == of_experts);
  }
  const ops::ExpertRows equal = ops::equal_counts(
      upload_sizes(*device, kHere, [](size_t, int64_t) { return int64_t{4}; }), 4, {&group, nullptr});
  CHECK(equal.exchanged.sent == Counts(ranks(), 4 * kHere));
  CHECK(equal.exchanged.received == equal.exchanged.sent);
  CHECK(equal.of_experts.template to_host<int64_t>() == Counts(ranks() * kHere, 4));
}

TEST_CASE("a rank that announces an impossible count is named") {
  if (world().size() == 1) return;
  comm::Communicator& group = world().communicator();
  const auto device = test::Cpu::make(1);
  test::SimpleStore store(*device);
  StepContext context{*device, store};
  Tape tape(context);
  const Tensor sizes =
      upload_sizes(*device, 2, [](size_t rank, int64_t) { return rank == 1 ? int64_t{-7} : int64_t{3}; });
  std::string message;
  try {
    ops::exchange_counts(tape, sizes, 1000, {&group, nullptr}, "experts of layer 3");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::rank_failure);
    message = error.what();
  }
  CAPTURE(message);
  CHECK(holds(message, "rank 1 of `world` announces -7 rows for expert"));
  CHECK(holds(message, "experts of layer 3"));
}

TEST_CASE("a rank that sends other rows than it has announced is named, with what the rows are") {
  if (world().size() != 2) return;
  comm::Communicator& group = world().communicator();
  const auto device = test::Checked::make(1);
  test::SimpleStore store(*device);
  StepContext context{*device, store};
  const test::WithBlockingChannel with(group, *device);
  Tape tape(context);
  // Rank 1 sends 5 rows where rank 0 expects 4.
  const ops::RowCounts counts = me() == 0 ? ops::RowCounts{{0, 2}, {0, 4}} : ops::RowCounts{{5, 0}, {2, 0}};
  const Var x{Tensor::zeros(*device, {total(counts.sent), 2})};
  std::string message;
  try {
    ops::exchange_rows(tape, x, counts, group, "rows of the experts of layer 3");
    message = test::device_error(*device);
  } catch (const Error& error) {
    message = error.what();
  }
  CAPTURE(message);
  CHECK(holds(message, "transfers of group `world` do not match"));
  CHECK(holds(message, "rank 1 sends with send of 40 bytes (rows of the experts of layer 3)"));
  CHECK(holds(message, "rank 0 receives with send of 32 bytes (rows of the experts of layer 3)"));
  while (!test::device_error(*device).empty()) continue;
}
