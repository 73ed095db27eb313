// Muon: a matrix against PyTorch's updates, and matrices in pieces and shards on the ranks of a world against
// the same matrices on one rank.
#include "optim/muon.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>

#include "base/file.hpp"
#include "base/json.hpp"
#include "kernels/table.hpp"
#include "support/paths.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/step_control.hpp"
#include "tests/support/worlds.hpp"

using namespace capstan;
using namespace capstan::optim;
using config::MuonTpMode;
using test::world;

namespace {

std::vector<float> noise(int64_t count, uint64_t instance) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(
        static_cast<float>(normal_at(philox_key(5, purpose::test, instance), static_cast<uint64_t>(i))));
  return values;
}

config::OptimizerConfig muon() {
  config::OptimizerConfig config;
  config.optimizer = config::OptimizerKind::muon;
  return config;
}

// The elements of a rank's shard, row-major.
std::vector<float> shard_of(const std::vector<float>& full, const Matrix& matrix, int rank, int size) {
  const Shard shard = capstan::shard_of("matrix", matrix.global, matrix.sharding, {.tensor = {rank, size}});
  std::vector<float> values;
  const auto rows_of = [&](int dim) {
    std::vector<int64_t> global;
    if (shard.dim != dim) {
      for (int64_t i = 0; i < matrix.global[dim]; ++i) global.push_back(i);
      return global;
    }
    for (const ShardSegment& segment : shard.segments)
      for (int64_t i = 0; i < segment.count; ++i) global.push_back(segment.global + i);
    return global;
  };
  for (const int64_t row : rows_of(0))
    for (const int64_t column : rows_of(1))
      values.push_back(full[static_cast<size_t>(row * matrix.global[1] + column)]);
  return values;
}

void check_close(const std::vector<float>& got, const std::vector<float>& expected) {
  REQUIRE(got.size() == expected.size());
  double apart = 0;
  for (size_t i = 0; i < got.size(); ++i)
    apart = std::max(apart, std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i])));
  CHECK(apart < 2e-4);
}

// The result of one rank that holds the full matrix.
template <class D>
std::vector<float> alone(const config::OptimizerConfig& config, Matrix matrix,
                         const std::vector<float>& momentum) {
  const auto device = D::make(1);
  matrix.begin = 0;
  const Tensor slice = Tensor::from_host<float>(*device, {static_cast<int64_t>(momentum.size())}, momentum);
  Orthogonalizer(config, {}).run({matrix}, slice);
  return slice.to_host<float>();
}

// Columns, rows, gate and up; queries, keys and values in two groups, which three and more ranks share.
std::vector<Matrix> matrices_for(int64_t ranks) {
  const int64_t heads = 4 * ranks, groups = ranks % 2 == 0 ? 2 : ranks;
  return {{.global = {5 * ranks, 7}, .sharding = {ShardingAxis::tensor, 0}},
          {.global = {9, 3 * ranks}, .sharding = {ShardingAxis::tensor, 1}},
          {.global = {4 * ranks, 11}, .sharding = {ShardingAxis::tensor, 0, 2}},
          {.global = {6, 5}},
          {.global = {(heads + 2 * groups) * 3, 13},
           .sharding = {ShardingAxis::tensor, 0, 1, groups, 6},
           .split = {heads / groups * 3, 3, 3}}};
}

}  // namespace

TEST_CASE_TEMPLATE("Muon's updates equal those of PyTorch", D, EVERY_DEVICE) {
  const Json fixture =
      json_of(read_file(std::filesystem::path(test::kSourceDirectory) / "tests/optim/muon.json"));
  const auto device = D::make(1);
  for (const auto& one : fixture["cases"]) {
    const std::vector<float> start = one["start"];
    const std::vector<int64_t> shape = one["shape"];
    config::OptimizerConfig config = muon();
    const std::string coefficients = one["coefficients"], scale = one["scale"];
    CAPTURE(coefficients);
    config.muon_coefficient_type = coefficients == "simple"    ? config::MuonCoefficients::simple
                                   : coefficients == "quintic" ? config::MuonCoefficients::quintic
                                                               : config::MuonCoefficients::polar_express;
    config.muon_scale_mode = scale == "spectral"        ? config::MuonScaleMode::spectral
                             : scale == "shape_scaling" ? config::MuonScaleMode::shape_scaling
                                                        : config::MuonScaleMode::unit_rms_norm;
    config.muon_num_ns_steps = one["steps"];
    config.muon_use_nesterov = one["nesterov"];
    config.muon_extra_scale_factor = one["extra"];
    config.muon_momentum = fixture["momentum"];
    const auto n = static_cast<int64_t>(start.size());
    FlatBuffer buffer{
        Tensor::from_host<float>(*device, {n}, start), Tensor::zeros(*device, {n}), Tensor(), {{0, n}}};
    buffer.slice = buffer.gradients;
    buffer.matrices = {{.global = {shape[0], shape[1]}, .split = one["split"]}};
    const auto optimizer = build(config, *device, {buffer});
    for (size_t t = 0; t < one["weights"].size(); ++t) {
      std::vector<float> gradients = one["gradients"][t];
      for (float& g : gradients) g *= 4;
      buffer.gradients.copy_from_host_bytes(std::as_bytes(std::span(gradients)));
      optimizer->step({.lr = fixture["lr"][t], .weight_decay = fixture["weight_decay"]},
                      test::step_control(*device, 0.25f));
      const std::vector<double> expected = one["weights"][t];
      const auto result = buffer.main.to_host<float>();
      for (size_t i = 0; i < expected.size(); ++i)
        CHECK(std::abs(static_cast<double>(result[i]) - expected[i]) < 2e-5);
    }
  }
}

TEST_CASE_TEMPLATE("Muon has one momentum for matrices, and Adam's moments for other buffers", D,
                   EVERY_DEVICE) {
  const auto device = D::make(1);
  FlatBuffer matrix{Tensor::zeros(*device, {12}), Tensor::zeros(*device, {12}), Tensor(), {{0, 12}}};
  matrix.slice = matrix.gradients;
  matrix.matrices = {{.global = {3, 4}}};
  const FlatBuffer vector{Tensor::zeros(*device, {5}), Tensor::zeros(*device, {5}), Tensor(), {{0, 5}}};
  const auto optimizer = build(muon(), *device, {matrix, vector});
  std::map<std::string, std::array<bool, 2>> there;
  for (const auto& state : optimizer->state()) there[state.name] = {state.has(0), state.has(1)};
  CHECK(there == std::map<std::string, std::array<bool, 2>>{{"exp_avg", {false, true}},
                                                            {"exp_avg_sq", {false, true}},
                                                            {"momentum_buffer", {true, false}}});
}

TEST_CASE_TEMPLATE("L2 regularization adds the weights to the gradients of Muon", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  const auto start = noise(15, 1), gradient = noise(15, 2);
  const auto run = [&](bool decoupled, double decay, const std::vector<float>& gradients) {
    config::OptimizerConfig config = muon();
    config.decoupled_weight_decay = decoupled;
    FlatBuffer buffer{Tensor::from_host<float>(*device, {15}, start),
                      Tensor::from_host<float>(*device, {15}, gradients),
                      Tensor(),
                      {{0, 15}}};
    buffer.slice = buffer.gradients;
    buffer.matrices = {{.global = {3, 5}}};
    build(config, *device, {buffer})->step({.lr = 0.1, .weight_decay = decay}, test::step_control(*device));
    return buffer.main.to_host<float>();
  };
  std::vector<float> sum = gradient;
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += 0.5f * start[i];
  check_close(run(false, 0.5, gradient), run(true, 0, sum));
}

TEST_CASE_TEMPLATE("slices of matrices on data-parallel ranks: what one rank computes", D, EVERY_DEVICE) {
  const int64_t ranks = world().size();
  const auto config = muon();
  for (const int64_t scale : {1, 3, 7}) {
    // Buckets of equal slices that split matrices anywhere, one matrix larger than a slice, and padding.
    std::vector<Matrix> matrices{{.global = {3 * scale, 5}},
                                 {.global = {4, 9 * scale}},
                                 {.global = {7 * scale, 8 * scale}},
                                 {.global = {1, 6}}};
    int64_t elements = 0;
    std::vector<float> bucket, expected;
    for (Matrix& matrix : matrices) {
      matrix.begin = elements;
      elements += (matrix.global.elements() + 63) / 64 * 64;
    }
    elements = (elements + 64 * ranks - 1) / (64 * ranks) * 64 * ranks;
    bucket.assign(static_cast<size_t>(elements), 0.0f);
    expected = bucket;
    for (size_t i = 0; i < matrices.size(); ++i) {
      const auto values = noise(matrices[i].global.elements(), i);
      std::copy(values.begin(), values.end(), bucket.begin() + matrices[i].begin);
      const auto result = alone<D>(config, matrices[i], values);
      std::copy(result.begin(), result.end(), expected.begin() + matrices[i].begin);
    }
    const auto device = D::make(1);
    const int64_t slice = elements / ranks, begin = slice * world().rank();
    const Tensor mine = Tensor::from_host<float>(
        *device, {slice},
        std::span<const float>(bucket).subspan(static_cast<size_t>(begin), static_cast<size_t>(slice)));
    Orthogonalizer(config, {.shard = &world().communicator()}).run(matrices, mine);
    // The same arithmetic on the same matrices.
    CHECK(mine.to_host<float>() ==
          std::vector<float>(expected.begin() + begin, expected.begin() + begin + slice));
  }
}

TEST_CASE_TEMPLATE("shards of matrices on tensor-parallel ranks, in every mode", D, EVERY_DEVICE) {
  const int ranks = world().size(), rank = world().rank();
  for (const MuonTpMode mode : {MuonTpMode::duplicated, MuonTpMode::distributed, MuonTpMode::blockwise})
    for (const bool split : {true, false}) {
      CAPTURE(config::enum_name(mode));
      config::OptimizerConfig config = muon();
      config.muon_tp_mode = mode;
      for (Matrix matrix : matrices_for(ranks)) {
        const DimSharding* const over_ranks = matrix.sharding.over(ShardingAxis::tensor);
        const int64_t groups = over_ranks ? over_ranks->groups : 0;
        const bool shared = groups > 0 && groups < ranks;
        if (!split && shared && mode != MuonTpMode::duplicated) continue;  // which a rule refuses
        if (!split) matrix.split.clear();
        CAPTURE(matrix.global.text());
        const auto full = noise(matrix.global.elements(), static_cast<uint64_t>(matrix.global[0]));
        const auto local = shard_of(full, matrix, rank, ranks);
        const auto device = D::make(1);
        const Tensor mine = Tensor::from_host<float>(*device, {static_cast<int64_t>(local.size())}, local);
        Orthogonalizer(config, {.tensor = &world().communicator()}).run({matrix}, mine);
        const auto got = mine.to_host<float>();
        if (mode != MuonTpMode::blockwise) {
          check_close(got, shard_of(alone<D>(config, matrix, full), matrix, rank, ranks));
          continue;
        }
        // Each shard is a matrix by itself.
        Matrix own{
            .global = capstan::shard_of("", matrix.global, matrix.sharding, {.tensor = {rank, ranks}}).shape,
            .split = matrix.split};
        if (shared && split) own.split[0] = own.global[0] - own.split[1] - own.split[2];
        CHECK(got == alone<D>(config, own, local));
      }
    }
}
