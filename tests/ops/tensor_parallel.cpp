// Linear layers over tensor-parallel ranks, with integers: every sum is exact in fp32, so that the bits do
// not depend on chunks, ranks and channels. 2 to 4 ranks.
#include "ops/tensor_parallel.hpp"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/support/channels.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/simple_store.hpp"
#include "tests/support/worlds.hpp"

using namespace capstan;
using test::world;

namespace {

using Values = std::vector<float>;

// Rows of each rank, which few numbers of chunks divide, and features, which all numbers of ranks divide.
constexpr int64_t kRows = 7, kIn = 24, kOut = 36;

struct Matrix {
  int64_t rows, columns;
  Values values;
  float at(int64_t row, int64_t column) const { return values[static_cast<size_t>(row * columns + column)]; }
  Matrix transposed() const {
    Matrix result{columns, rows, {}};
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = 0; r < rows; ++r) result.values.push_back(at(r, c));
    return result;
  }
  Matrix slice(int64_t row, int64_t row_count, int64_t column, int64_t column_count) const {
    Matrix result{row_count, column_count, {}};
    for (int64_t r = row; r < row + row_count; ++r)
      for (int64_t c = column; c < column + column_count; ++c) result.values.push_back(at(r, c));
    return result;
  }
  // This rank's share of the rows, or of the columns.
  Matrix my_rows() const {
    const int64_t count = rows / world().size();
    return slice(world().rank() * count, count, 0, columns);
  }
  Matrix my_columns() const { return transposed().my_rows().transposed(); }
};
Matrix integers(int64_t rows, int64_t columns, uint64_t seed) {
  PhiloxSequence random(philox_key(seed, purpose::test, 3));
  Matrix result{rows, columns, {}};
  for (int64_t i = 0; i < rows * columns; ++i)
    result.values.push_back(static_cast<float>(random.below(7)) - 3);
  return result;
}
// a b^T.
Matrix product(const Matrix& a, const Matrix& b) {
  Matrix result{a.rows, b.rows, {}};
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t j = 0; j < b.rows; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < a.columns; ++k) sum += a.at(i, k) * b.at(j, k);
      result.values.push_back(sum);
    }
  return result;
}

struct Case {
  // Column-parallel; else row-parallel.
  bool column, sequence, trainable, delayed;
};
// What a layer computes of full matrices, this rank's part.
struct Part {
  Matrix x, dy, y, dx, dw;
};
Part expected_part(const Case& c, const Matrix& x, const Matrix& w, const Matrix& dy) {
  const auto rows = [&](const Matrix& m) { return c.sequence ? m.my_rows() : m; };
  const Matrix y = product(x, w), dx = product(dy, w.transposed()),
               dw = product(dy.transposed(), x.transposed());
  if (c.column) return {rows(x), dy.my_columns(), y.my_columns(), rows(dx), dw.my_rows()};
  return {x.my_columns(), rows(dy), rows(y), dx.my_columns(), dw.my_columns()};
}

void check_layer(Device& device, const Case& c, int64_t splits, uint64_t seed) {
  CAPTURE(c.column);
  CAPTURE(c.sequence);
  CAPTURE(c.trainable);
  CAPTURE(splits);
  comm::Communicator& group = world().communicator();
  const int64_t rows = kRows * group.size();
  const Matrix w = integers(kOut, kIn, seed);
  const Part part = expected_part(c, integers(rows, kIn, seed + 1), w, integers(rows, kOut, seed + 2));

  const ParamSpec spec{
      .name = "w", .shape = {kOut, kIn}, .sharding = {ShardingAxis::tensor, c.column ? 0 : 1}};
  const Parameter weight(spec, 0, group.rank(), group.size());
  test::SimpleStore store(device, DType::f32, /*gathered=*/true);
  store.add(weight);
  store.begin();
  store.set(weight, (c.column ? w.my_rows() : w.my_columns()).values);
  if (!c.trainable) store.freeze(weight);
  store.begin_last_micro_batch();
  StepContext context{device, store};
  Tape tape(context);
  const auto upload = [&](const Matrix& m) {
    return Tensor::from_host<float>(device, {m.rows, m.columns}, m.values);
  };
  const ops::TensorParallel parallel{&group, c.sequence, splits};
  const Var x = tape.input("x", upload(part.x), true);
  const Var y = c.column ? ops::column_linear(tape, x, weight, nullptr, parallel)
                         : ops::row_linear(tape, x, weight, parallel);
  CHECK((y.value.to_floats() == part.y.values));
  tape.output("y", y);
  tape.backward({{"y", upload(part.dy)}}, {.delay_weight_gradients = c.delayed});
  tape.run_weight_gradients();
  CHECK((tape.input_gradient("x").to_floats() == part.dx.values));
  if (c.trainable) CHECK((store.gradient(weight).to_floats() == part.dw.values));
  CHECK(store.pins == 0);
}

void check_layers(Device& device, uint64_t seed) {
  for (const bool column : {true, false})
    for (const bool sequence : {true, false})
      for (const bool trainable : {true, false})
        for (const int64_t splits : {1, 2, 3, 4, 64})
          check_layer(device, {column, sequence, trainable, splits % 2 == 0}, splits, seed);
}

}  // namespace

TEST_CASE_TEMPLATE("linear layers over tensor-parallel ranks give exact sums in any number of chunks", D,
                   EVERY_DEVICE) {
  comm::Communicator& group = world().communicator();
  if (group.is_single()) return;
  const auto device = D::make(1);
  for (const uint64_t seed : {1, 2})
    if (seed == 1 || !D::kSlow) check_layers(*device, seed);
  if (device->shares_host_memory()) return;
  // Transfers that block their queue until all ranks have come to them, as NCCL's.
  const test::WithBlockingChannel with(group, *device);
  check_layers(*device, 3);
}
