// Linear layers over tensor-parallel ranks, with integers: every sum is exact in fp32, so that the bits do
// not depend on chunks, ranks and channels. 2 to 4 ranks.
#include "ops/tensor_parallel.hpp"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "comm/reduce.hpp"
#include "nn/linear.hpp"
#include "tests/support/channels.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/shards.hpp"
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
// This rank's shards of the matrices that an unsharded layer reads and computes.
struct LayerShards {
  Matrix x, dy, y, dx, dw;
};
LayerShards expected_shards(const Case& c, const Matrix& x, const Matrix& w, const Matrix& dy) {
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
  const LayerShards expected =
      expected_shards(c, integers(rows, kIn, seed + 1), w, integers(rows, kOut, seed + 2));

  const ParamSpec spec{
      .name = "w", .shape = {kOut, kIn}, .sharding = {ShardingAxis::tensor, c.column ? 0 : 1}};
  const Parameter weight(spec, 0, {.tensor = {group.rank(), group.size()}});
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
  const Var x = tape.input("x", upload(expected.x), true);
  const Var y = c.column ? ops::column_linear(tape, x, weight, nullptr, parallel)
                         : ops::row_linear(tape, x, weight, parallel);
  CHECK((y.value.to_floats() == expected.y.values));
  tape.output("y", y);
  tape.backward({{"y", upload(expected.dy)}}, {.delay_weight_gradients = c.delayed});
  tape.run_weight_gradients();
  CHECK((tape.input_gradient("x").to_floats() == expected.dx.values));
  if (c.trainable) CHECK((store.gradient(weight).to_floats() == expected.dw.values));
  CHECK(store.pins == 0);
}

void check_layers(Device& device, uint64_t seed) {
  for (const bool column : {true, false})
    for (const bool sequence : {true, false})
      for (const bool trainable : {true, false})
        for (const int64_t splits : {1, 2, 3, 4, 64})
          check_layer(device, {column, sequence, trainable, splits % 2 == 0}, splits, seed);
}

// y = x (W + 2 B A)^T of a layer with an adapter, which has to be sharded as the layer's output is.
struct AdaptedLayer {
  nn::LinearSharding sharding;
  bool sequence;
  // This rank's part of the layer's input or output, by how each is sharded.
  Matrix of_input(const Matrix& m) const {
    if (sharding == nn::LinearSharding::row) return m.my_columns();
    return sequence ? m.my_rows() : m;
  }
  Matrix of_output(const Matrix& m) const {
    if (sharding == nn::LinearSharding::column) return m.my_columns();
    return sequence ? m.my_rows() : m;
  }
};

void check_adapted_layer(Device& device, const AdaptedLayer& layer, uint64_t seed) {
  CAPTURE(layer.sequence);
  CAPTURE(static_cast<int>(layer.sharding));
  comm::Communicator& group = world().communicator();
  constexpr int64_t kRank = 3;
  const int64_t rows = kRows * group.size();
  const Matrix x = integers(rows, kIn, seed), dy = integers(rows, kOut, seed + 1);
  std::map<std::string, Matrix> full{{"layer.weight", integers(kOut, kIn, seed + 2)},
                                     {"layer.adapter.linear_in.weight", integers(kRank, kIn, seed + 3)},
                                     {"layer.adapter.linear_out.weight", integers(kOut, kRank, seed + 4)}};
  const Matrix &w = full.at("layer.weight"), &a = full.at("layer.adapter.linear_in.weight"),
               &b = full.at("layer.adapter.linear_out.weight");
  Matrix sum = product(b, a.transposed());
  for (size_t i = 0; i < sum.values.size(); ++i) sum.values[i] = w.values[i] + 2 * sum.values[i];
  const Matrix dw = product(dy.transposed(), x.transposed());
  std::map<std::string, Matrix> gradients{
      {"layer.weight", dw},
      {"layer.adapter.linear_in.weight", product(b.transposed(), dw.transposed())},
      {"layer.adapter.linear_out.weight", product(dw, a)}};

  nn::AdapterOptions adapters;
  adapters.adapts = [](std::string_view) { return true; };
  adapters.rank = kRank;
  adapters.scale = 2;
  nn::Parallel parallel;
  parallel.tensor = {&group, layer.sequence, 1};
  nn::ParamList list(parallel, &adapters);
  const nn::Linear linear(list, {"layer", 0, "layer 0"},
                          {.in = kIn, .out = kOut, .sharding = layer.sharding});
  const auto parameters = list.take();
  test::SimpleStore store(device, parameters, DType::f32, /*gathered=*/true);
  for (const auto& p : parameters) store.set(*p, test::shard_of(*p, full.at(p->name()).values));
  store.begin();
  store.begin_last_micro_batch();
  StepContext context{device, store};
  Tape tape(context);
  const auto upload = [&](const Matrix& m) {
    return Tensor::from_host<float>(device, {m.rows, m.columns}, m.values);
  };
  nn::TokenContext tokens;
  tokens.batch = 1;
  tokens.seq = rows;
  const Var in = tape.input("x", upload(layer.of_input(x)), true),
            out = linear.forward(tape, in, tokens, nn::Linear::Bias::by_caller);
  CHECK((out.value.to_floats() == layer.of_output(product(x, sum)).values));
  tape.output("y", out);
  tape.backward({{"y", upload(layer.of_output(dy))}});
  CHECK((tape.input_gradient("x").to_floats() == layer.of_input(product(dy, sum.transposed())).values));
  for (const auto& p : parameters) {
    CAPTURE(p->name());
    const float scale = p->spec().adapter ? 2 : 1;
    Values expected = test::shard_of(*p, gradients.at(p->name()).values),
           got = store.gradient(*p).to_floats();
    for (float& v : expected) v *= scale;
    if (p->spec().partial_over_tensor) {
      std::vector<double> total(got.begin(), got.end());
      comm::all_reduce(group, total);
      got.assign(total.begin(), total.end());
    }
    CHECK((got == expected));
  }
}

}  // namespace

TEST_CASE_TEMPLATE("linear layers over tensor-parallel ranks give exact sums in any number of chunks", D,
                   EVERY_DEVICE) {
  comm::Communicator& group = world().communicator();
  if (group.is_single()) return;
  const auto device = D::make(1);
  for (const uint64_t seed : {1, 2})
    if (seed == 1 || !D::kSlow) check_layers(*device, seed);
  if (!test::has_blocking_channels(*device)) return;
  // Transfers that block their queue until all ranks have come to them, as NCCL's.
  const test::WithBlockingChannel with(group, *device);
  check_layers(*device, 3);
}

TEST_CASE_TEMPLATE("the update of an adapter is in the parallel state of its layer's output", D,
                   EVERY_DEVICE) {
  if (world().communicator().is_single()) return;
  const auto device = D::make(1);
  for (const nn::LinearSharding sharding :
       {nn::LinearSharding::none, nn::LinearSharding::column, nn::LinearSharding::row})
    for (const bool sequence : {false, true})
      for (const uint64_t seed : {1, 2}) check_adapted_layer(*device, {sharding, sequence}, seed);
}
