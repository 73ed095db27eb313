// Matrices in 4 bits: codes and scales are those of a reference (make_nf4.py), on every device and however
// the matrix is sharded.
#include <doctest/doctest.h>

#include <cstring>
#include <limits>
#include <map>

#include "base/error.hpp"
#include "base/philox.hpp"
#include "checkpoint/safetensors.hpp"
#include "kernels/common/nf4.hpp"
#include "parallel/nf4_weight.hpp"
#include "support/devices.hpp"
#include "support/paths.hpp"
#include "support/worlds.hpp"

using namespace capstan;
using namespace capstan::parallel;
using test::world;

namespace {

const checkpoint::SafetensorsFile& fixture() {
  static const checkpoint::SafetensorsFile file(std::string(capstan::test::kSourceDirectory) +
                                                "/tests/parallel/nf4.safetensors");
  return file;
}
template <class T>
std::vector<T> stored(const std::string& name) {
  const auto bytes = fixture().bytes(fixture().at(name));
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}
// The same bits but for the sign of a zero.
void check_equal(const std::vector<float>& got, const std::vector<float>& expected) {
  REQUIRE(got.size() == expected.size());
  size_t different = 0;
  for (size_t i = 0; i < got.size(); ++i) different += got[i] != expected[i];
  CHECK(different == 0);
}

ParamSpec matrix(int64_t rows, int64_t columns, Sharding sharding = {}) {
  ParamSpec spec;
  spec.name = "matrix.weight";
  spec.shape = {rows, columns};
  spec.sharding = sharding;
  return spec;
}

std::vector<float> random_matrix(int64_t elements) {
  PhiloxSequence random(philox_key(7, purpose::test, 0));
  std::vector<float> values(static_cast<size_t>(elements));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>((2 * random.uniform() - 1) * (1 + static_cast<double>(i % 977) / 50));
  return values;
}

// The elements of a shard, from the full matrix or the full matrices of experts.
std::vector<float> shard_of(const Parameter& parameter, const std::vector<float>& full) {
  const Shape& global = parameter.spec().shape;
  const Shard& shard = parameter.shard();
  const bool experts = global.rank() == 3;
  const int64_t rows = global[global.rank() - 2], columns = global[global.rank() - 1];
  std::vector<float> values;
  const auto take_matrix = [&](int64_t matrix) {
    const auto take = [&](int64_t row, int64_t column, int64_t count) {
      const auto begin = full.begin() + (matrix * rows + row) * columns + column;
      values.insert(values.end(), begin, begin + count);
    };
    const int dim = shard.dim - (experts ? 1 : 0);
    if (dim == 0) {
      for (const ShardSegment& segment : shard.segments)
        for (int64_t row = segment.global; row < segment.global + segment.count; ++row) take(row, 0, columns);
    } else if (dim == 1) {
      for (int64_t row = 0; row < rows; ++row)
        for (const ShardSegment& segment : shard.segments) take(row, segment.global, segment.count);
    } else {
      for (int64_t row = 0; row < rows; ++row) take(row, 0, columns);
    }
  };
  const int64_t first = experts && shard.dim == 0 ? shard.segments[0].global : shard.first;
  for (int64_t matrix = 0; matrix < (experts ? shard.shape[0] : 1); ++matrix) take_matrix(first + matrix);
  return values;
}

}  // namespace

TEST_CASE("the 8-bit map of scales is the reference's") {
  const auto map = kernels::nf4_scale_map();
  CHECK((std::vector<float>(map.begin(), map.end()) == stored<float>("map")));
}

TEST_CASE_TEMPLATE("codes, scales and what they give back are the reference's", D, EVERY_DEVICE) {
  for (const int threads : {1, 3}) {
    const auto device = D::make(threads);
    const Tensor map = nf4_scale_map(*device);
    int cases = 0;
    for (const auto& entry : fixture().entries()) {
      if (!entry.name.ends_with(".values")) continue;
      ++cases;
      const std::string name = entry.name.substr(0, entry.name.size() - 7);
      CAPTURE(name);
      const int64_t block = std::stoll(name.substr(name.find('.') + 1));
      const Parameter parameter(matrix(entry.shape[0], entry.shape[1]), 0);
      const auto values = stored<float>(entry.name);

      Nf4Weight plain(*device, parameter, {.block = block, .two_stage = false}, {});
      plain.set(values, nullptr);
      CHECK((plain.codes().template to_host<uint8_t>() == stored<uint8_t>(name + ".codes")));
      check_equal(plain.scales().to_floats(), stored<float>(name + ".scales"));
      const auto expanded = stored<float>(name + ".expanded");
      check_equal(plain.expand(DType::f32).to_floats(), expanded);
      std::vector<float> rounded;
      for (const float value : expanded) rounded.push_back(static_cast<float>(bf16(value)));
      check_equal(plain.expand(DType::bf16).to_floats(), rounded);

      Nf4Weight two(*device, parameter, {.block = block, .two_stage = true}, map);
      two.set(values, nullptr);
      CHECK((two.codes().template to_host<uint8_t>() == stored<uint8_t>(name + ".codes")));
      CHECK((two.scale_codes().template to_host<uint8_t>() == stored<uint8_t>(name + ".scale_codes")));
      auto nested = stored<float>(name + ".nested");
      nested.push_back(stored<float>(name + ".offset")[0]);
      check_equal(two.nested().to_floats(), nested);
      check_equal(two.expand(DType::f32).to_floats(), stored<float>(name + ".expanded_double"));
    }
    CHECK(cases == 7);
  }
}

TEST_CASE("however a matrix is sharded, each shard expands to the values of the full one") {
  const int ranks = world().size(), rank = world().rank();
  comm::Communicator& group = world().communicator();
  const auto device = test::Cpu::make(1);
  const Tensor map = nf4_scale_map(*device);
  struct Case {
    int64_t rows, columns;
    Sharding sharding;
  };
  const std::vector<Case> cases = {
      {200, 96, {ShardingAxis::tensor, 0}},     // rows
      {256, 64, {ShardingAxis::tensor, 0, 2}},  // gate and up
      {37, 512, {ShardingAxis::tensor, 1}},     // columns
      {96,
       64,
       {ShardingAxis::tensor, 0, 1, 2, 16}},  // two groups of heads, whose keys and values more ranks share
      {31, 97, {}},                           // not sharded
  };
  for (const Case& c : cases)
    for (const bool two_stage : {false, true}) {
      CAPTURE(c.rows);
      CAPTURE(two_stage);
      const auto values = random_matrix(c.rows * c.columns);
      const Parameter full(matrix(c.rows, c.columns), 0),
          part(matrix(c.rows, c.columns, c.sharding), 0, {.tensor = {rank, ranks}});
      const Nf4Options options{.block = 64, .two_stage = two_stage};
      Nf4Weight one(*device, full, options, map), mine(*device, part, options, map);
      one.set(values, nullptr);
      mine.set(shard_of(part, values), &group);
      check_equal(mine.expand(DType::f32).to_floats(), shard_of(part, one.expand(DType::f32).to_floats()));
    }
}

TEST_CASE("each expert is a matrix of its own, however experts and their widths are sharded") {
  const int ranks = world().size(), rank = world().rank();
  const auto device = test::Cpu::make(1);
  const Tensor map = nf4_scale_map(*device);
  const auto check = [&](int64_t experts, int64_t rows, int64_t columns, const Sharding& sharding,
                         const ShardRanks& on, comm::Communicator* group, bool two_stage) {
    CAPTURE(two_stage);
    ParamSpec spec = matrix(rows, columns, sharding);
    spec.shape = {experts, rows, columns};
    const Parameter part(spec, 0, on), full(spec, 0), alone(matrix(rows, columns), 0);
    const auto values = random_matrix(experts * rows * columns);
    const Nf4Options options{.block = 64, .two_stage = two_stage};
    Nf4Weight mine(*device, part, options, map), one(*device, alone, options, map);
    mine.set(shard_of(part, values), group);
    std::vector<float> expected;
    for (int64_t expert = 0; expert < experts; ++expert) {
      one.set(std::span(values).subspan(static_cast<size_t>(expert * rows * columns),
                                        static_cast<size_t>(rows * columns)),
              nullptr);
      const auto expanded = one.expand(DType::f32).to_floats();
      expected.insert(expected.end(), expanded.begin(), expanded.end());
    }
    check_equal(mine.expand(DType::f32).to_floats(), shard_of(part, expected));
  };
  comm::Communicator& group = world().communicator();
  const ShardRanks by_expert{.expert = {rank, ranks}}, by_width{.expert_tensor = {rank, ranks}},
      of_many{.expert = {1, 3}, .expert_tensor = {rank, ranks}};
  const Sharding whole{ShardingAxis::expert, 0},
      gated{{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 1, 2}},
      columns{{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 2}};
  for (const bool two_stage : {false, true}) {
    check(12, 31, 97, whole, by_expert, nullptr, two_stage);  // matrices of an odd number of elements
    check(3, 48, 64, gated, by_width, &group, two_stage);
    check(6, 48, 64, gated, of_many, &group, two_stage);
    check(6, 37, 768, columns, of_many, &group, two_stage);
  }
}

TEST_CASE("a boundary inside a block and values that are not finite are refused") {
  const auto device = test::Cpu::make(1);
  const auto refused = [&](const ParamSpec& spec, int size) {
    const Parameter parameter(spec, 0, {.tensor = {size - 1, size}});
    CHECK_THROWS_WITH_AS(Nf4Weight(*device, parameter, {.block = 64, .two_stage = false}, {}),
                         doctest::Contains("inside a block of 64 elements"), Error);
  };
  refused(matrix(6, 32, {ShardingAxis::tensor, 0}), 2);    // 3 rows of 32
  refused(matrix(5, 192, {ShardingAxis::tensor, 1}), 2);   // 96 columns
  refused(matrix(4, 1000, {ShardingAxis::tensor, 0}), 4);  // 1000 elements
  const Parameter parameter(matrix(3, 50), 0);
  Nf4Weight weight(*device, parameter, {.block = 64, .two_stage = false}, {});
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> values = random_matrix(150);
    values[77] = bad;
    CHECK_THROWS_WITH_AS(weight.set(values, nullptr), doctest::Contains("not finite"), Error);
  }
}

TEST_CASE("it takes half a byte for each element, and its scales") {
  const auto device = test::Cpu::make(1);
  const Tensor map = nf4_scale_map(*device);
  const Parameter parameter(matrix(1024, 2048), 0);
  for (const bool two_stage : {false, true}) {
    const int64_t before = device->memory().now;
    const Nf4Weight weight(*device, parameter, {.block = 64, .two_stage = two_stage}, map);
    const int64_t n = 1024 * 2048;
    const int64_t expected = n / 2 + (two_stage ? n / 64 + 4 * (n / 64 / 256 + 1) : 4 * (n / 64));
    const int64_t taken = device->memory().now - before;
    CHECK(taken >= expected);
    CHECK(taken <= expected + expected / 100);
  }
}
