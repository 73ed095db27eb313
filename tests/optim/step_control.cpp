// The decision about an update on the device, against its formulas; and that a skipped update changes
// nothing.
#include "kernels/step_control.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "optim/optimizer.hpp"
#include "tensor/launch.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/step_control.hpp"

using namespace capstan;
using kernels::StepLimits;
using kernels::StepValues;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

StepValues decide(Device& device, const StepValues& sums, const StepLimits& limits) {
  const Tensor values =
      Tensor::from_host_bytes(device, {sizeof sums}, DType::u8, std::as_bytes(std::span(&sums, 1)));
  launch(device, device.table().step_control->control, limits, values);
  StepValues result;
  values.copy_to_host_bytes(DType::u8, std::as_writable_bytes(std::span(&result, 1)));
  return result;
}

}  // namespace

TEST_CASE_TEMPLATE("mean loss, norm and gradient factor follow from the sums", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  for (const double tokens : {1.0, 7.0, 4096.0})
    for (const double squares : {0.0, 0.3, 1e9})
      for (const double clip : {0.0, 0.5, 1.0})
        for (const double scale : {1.0, 65536.0}) {
          const StepValues sums{
              .loss_sum = 2.5 * tokens * scale, .loss_tokens = tokens, .gradient_squares = squares};
          const StepValues v = decide(*device, sums, {.clip = clip, .loss_scale = scale});
          const double norm = std::sqrt(squares) / tokens / scale;
          CHECK(v.loss == doctest::Approx(2.5).epsilon(1e-15));
          CHECK(v.norm == doctest::Approx(norm).epsilon(1e-14));
          const double factor = clip > 0 && norm > clip ? clip / (norm + 1e-6) : 1;
          CHECK(static_cast<double>(v.control.gradient) ==
                doctest::Approx(factor / tokens / scale).epsilon(1e-7));
          CHECK(v.control.skip == 0);
        }
  // A batch without loss tokens.
  const StepValues none = decide(*device, {.gradient_squares = 4}, {.clip = 1});
  CHECK(none.loss == 0);
  CHECK(none.norm == 0);
  CHECK(none.control.gradient == 0);
}

TEST_CASE_TEMPLATE("an update is skipped for what the limits name, and for nothing else", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  const auto skips = [&](double loss, double norm, const StepLimits& limits) {
    return decide(*device, {.loss_sum = loss, .loss_tokens = 1, .gradient_squares = norm * norm}, limits)
               .control.skip != 0;
  };
  CHECK(!skips(3, 2, {}));
  for (const double bad : {kNan, kInfinity}) {
    CHECK(!skips(bad, 2, {}));
    CHECK(!skips(3, bad, {}));
    CHECK(skips(bad, 2, {.require_finite = 1}));
    CHECK(skips(3, bad, {.require_finite = 1}));
    // Values that are not finite are no spikes.
    CHECK(!skips(bad, bad, {.loss_spike = 1, .norm_spike = 1}));
  }
  CHECK(!skips(3, 2, {.require_finite = 1}));
  CHECK(skips(3, 2, {.loss_spike = 2.9}));
  CHECK(!skips(3, 2, {.loss_spike = 3}));
  CHECK(skips(3, 2, {.norm_spike = 1.9}));
  CHECK(!skips(3, 2, {.norm_spike = 2}));
  CHECK(skips(3, 2, {.largest_norm = 1.9}));
  CHECK(!skips(3, 2, {.largest_norm = 2}));
  CHECK(skips(3, kInfinity, {.largest_norm = 2}));
  CHECK(!skips(3, kNan, {.largest_norm = 2}));
}

TEST_CASE_TEMPLATE("sums over micro-batches and ranks are added in order", D, EVERY_DEVICE) {
  const auto device = D::make(3);
  const auto& family = *device->table().step_control;
  // Another order gives another sum.
  const std::vector<double> sums{1e16, 1.0, -1e16, 1.0, 3.0};
  const Tensor total = Tensor::empty(*device, {2}, DType::f64);
  const Tensor values = Tensor::from_host<double>(*device, {5}, sums);
  launch(*device, family.sum_losses, values, 5, 11.0, total);
  CHECK(total.to_host<double>() == std::vector<double>{4, 11});
  launch(*device, family.sum_losses, Tensor(), 0, 0.0, total);
  CHECK(total.to_host<double>() == std::vector<double>{0, 0});
  launch(*device, family.sum_ranks, values, 5, total.flat_range(1, 1, {1}), 1);
  CHECK(total.to_host<double>()[1] == 4);
  launch(*device, family.sum_ranks, values.flat_range(0, 4, {4}), 2, total, 2);
  CHECK(total.to_host<double>() == std::vector<double>{0, 2});
  const Tensor counts =
      Tensor::from_host<int64_t>(*device, {3}, std::vector<int64_t>{1, -4, int64_t{1} << 60});
  const Tensor count = Tensor::empty(*device, {1}, DType::i64);
  launch(*device, family.sum_ranks, counts, 3, count, 1);
  CHECK(count.to_host<int64_t>()[0] == (int64_t{1} << 60) - 3);
}

TEST_CASE_TEMPLATE("a skipped update leaves parameters and state as they are", D, EVERY_DEVICE) {
  using enum config::OptimizerKind;
  const auto device = D::make(2);
  for (const auto& [kind, moments] : {std::pair{adam, config::MomentType::fp32},
                                      {adam, config::MomentType::bf16},
                                      {adam, config::MomentType::fp8},
                                      {sgd, config::MomentType::fp32},
                                      {lion, config::MomentType::fp32},
                                      {muon, config::MomentType::fp32}}) {
    config::OptimizerConfig config;
    config.optimizer = kind;
    config.exp_avg_dtype = config.exp_avg_sq_dtype = moments;
    const int64_t n = 37;
    std::vector<float> start(static_cast<size_t>(n)), gradient(start.size());
    for (size_t i = 0; i < start.size(); ++i)
      start[i] = std::sin(static_cast<float>(i)), gradient[i] = std::cos(static_cast<float>(i));
    gradient[3] = std::nanf("");
    optim::FlatBuffer buffer{Tensor::from_host<float>(*device, {n}, start),
                             Tensor::from_host<float>(*device, {n}, gradient),
                             Tensor::zeros(*device, {n}, DType::bf16),
                             {{0, n, true}}};
    if (kind == muon) {
      buffer.matrices = {{.begin = 0, .global = {4, 9}}};
      buffer.slice = buffer.gradients;
    }
    const auto optimizer = optim::build(config, *device, {buffer});
    optimizer->step({.lr = 0.1, .weight_decay = 0.1}, test::step_control(*device, 1, true));
    CHECK(buffer.main.to_host<float>() == start);
    for (const float value : buffer.model.to_floats()) CHECK(value == 0);
    for (const auto& state : optimizer->state())
      for (const Tensor& tensor : {state.buffers[0], state.scales[0]})
        if (tensor.defined())
          for (const uint8_t byte : tensor.as_type(DType::u8).to_host<uint8_t>()) CHECK(byte == 0);
    optimizer->step({.lr = 0.1, .weight_decay = 0.1}, test::step_control(*device));
    CHECK(buffer.main.to_host<float>() != start);
  }
}
