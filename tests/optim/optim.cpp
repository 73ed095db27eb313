#include "optim/optimizer.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "kernels/common/step_control.hpp"
#include "kernels/table.hpp"
#include "optim/schedule.hpp"
#include "support/paths.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/step_control.hpp"

using namespace capstan;
using namespace capstan::optim;
using config::LrDecayStyle;
using config::WeightDecayStyle;
using config::WsdDecayStyle;

TEST_CASE("learning-rate schedules: values worked out by hand") {
  ScheduleOptions o{.max_lr = 1.0,
                    .min_lr = 0.1,
                    .init_lr = 0.2,
                    .warmup_samples = 100,
                    .decay_samples = 1100,
                    .wsd_decay_samples = 200};
  const auto lr = [&](LrDecayStyle style, int64_t n, WsdDecayStyle wsd = WsdDecayStyle::linear) {
    o.style = style, o.wsd_style = wsd;
    return Schedule(o).learning_rate(n);
  };
  for (auto style : {LrDecayStyle::constant, LrDecayStyle::linear, LrDecayStyle::cosine, LrDecayStyle::wsd,
                     LrDecayStyle::inverse_square_root}) {
    CHECK(lr(style, 0) == doctest::Approx(0.2));
    CHECK(lr(style, 50) == doctest::Approx(0.6));
    CHECK(lr(style, 100) == doctest::Approx(1.0));
  }
  CHECK(lr(LrDecayStyle::constant, 5000) == 1.0);
  CHECK(lr(LrDecayStyle::linear, 600) == doctest::Approx(0.55));
  CHECK(lr(LrDecayStyle::linear, 1100) == doctest::Approx(0.1));
  CHECK(lr(LrDecayStyle::linear, 1101) == doctest::Approx(0.1));
  CHECK(lr(LrDecayStyle::cosine, 350) == doctest::Approx(0.1 + 0.9 * 0.5 * (1 + std::sqrt(0.5))));
  CHECK(lr(LrDecayStyle::inverse_square_root, 400) == doctest::Approx(0.5));
  CHECK(lr(LrDecayStyle::inverse_square_root, 1099) == doctest::Approx(10.0 / std::sqrt(1099.0)));
  CHECK(lr(LrDecayStyle::wsd, 900) == doctest::Approx(1.0));
  CHECK(lr(LrDecayStyle::wsd, 1000) == doctest::Approx(0.55));
  CHECK(lr(LrDecayStyle::wsd, 1000, WsdDecayStyle::cosine) == doctest::Approx(0.55));
  CHECK(lr(LrDecayStyle::wsd, 1000, WsdDecayStyle::exponential) ==
        doctest::Approx(0.1 + 0.9 * (2 * std::sqrt(0.5) - 1)));
  CHECK(lr(LrDecayStyle::wsd, 950, WsdDecayStyle::minus_sqrt) == doctest::Approx(0.55));
}

TEST_CASE("weight-decay schedules and the rules of a schedule") {
  ScheduleOptions o{.max_lr = 1.0,
                    .decay_samples = 100,
                    .weight_decay_samples = 100,
                    .start_weight_decay = 0.1,
                    .end_weight_decay = 0.3};
  o.weight_decay_style = WeightDecayStyle::linear;
  CHECK(Schedule(o).weight_decay(50) == doctest::Approx(0.2));
  CHECK(Schedule(o).weight_decay(500) == doctest::Approx(0.3));
  o.weight_decay_style = WeightDecayStyle::cosine;
  CHECK(Schedule(o).weight_decay(0) == doctest::Approx(0.1));
  CHECK(Schedule(o).weight_decay(25) == doctest::Approx(0.1 + 0.2 * 0.5 * (1 - std::sqrt(0.5))));
  o.weight_decay_style = WeightDecayStyle::constant;
  CHECK(Schedule(o).weight_decay(3) == 0.3);
  o.warmup_samples = 100;
  CHECK_THROWS_AS(Schedule{o}, Error);
  o.warmup_samples = 0, o.min_lr = 2.0;
  CHECK_THROWS_AS(Schedule{o}, Error);
}

TEST_CASE("clipping scales the norm down to the limit and never up") {
  CHECK(kernels::clip_factor(0.5, 1.0) == 1.0);
  CHECK(kernels::clip_factor(4.0, 1.0) == doctest::Approx(0.25).epsilon(1e-5));
  CHECK(kernels::clip_factor(4.0, 0.0) == 1.0);
}

TEST_CASE_TEMPLATE("AdamW equals the formula in double over ranges with and without decay", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  for (int64_t n : {1, 7, 64, 1000}) {
    std::vector<float> start(static_cast<size_t>(n)), gradient(start.size());
    for (size_t i = 0; i < start.size(); ++i)
      start[i] = std::sin(static_cast<float>(i)), gradient[i] = std::cos(3.0f * static_cast<float>(i));
    const int64_t decayed = n / 2;
    FlatBuffer buffer{Tensor::from_host<float>(*device, {n}, start),
                      Tensor::from_host<float>(*device, {n}, gradient),
                      Tensor(),
                      {}};
    if (decayed) buffer.ranges.push_back({.count = decayed});
    buffer.ranges.push_back({.begin = decayed, .count = n - decayed, .weight_decay = 0});
    config::OptimizerConfig config;
    config.adam_beta2 = 0.95;
    auto adam = build(config, *device, {buffer});
    std::vector<double> p(start.begin(), start.end()), m(p.size()), v(p.size());
    for (int t = 1; t <= 5; ++t) {
      adam->step({.lr = 1e-2, .weight_decay = 0.1}, test::step_control(*device, 0.5f));
      for (size_t i = 0; i < p.size(); ++i) {
        const double g = 0.5 * static_cast<double>(gradient[i]);
        m[i] = 0.9 * m[i] + 0.1 * g, v[i] = 0.95 * v[i] + 0.05 * g * g;
        if (static_cast<int64_t>(i) < decayed) p[i] -= 1e-2 * 0.1 * p[i];
        p[i] -= 1e-2 * (m[i] / (1 - std::pow(0.9, t))) / (std::sqrt(v[i] / (1 - std::pow(0.95, t))) + 1e-8);
      }
    }
    const auto result = buffer.main.to_host<float>();
    for (size_t i = 0; i < p.size(); ++i) CHECK(result[i] == doctest::Approx(p[i]).epsilon(2e-6));
  }
}

TEST_CASE_TEMPLATE("updates equal those of PyTorch's optimizers", D, EVERY_DEVICE) {
  const Json fixture =
      json_of(read_file(std::filesystem::path(test::kSourceDirectory) / "tests/optim/optimizers.json"));
  const std::vector<float> start = fixture["start"];
  const auto n = static_cast<int64_t>(start.size());
  const auto device = D::make(1);
  for (const auto& [name, steps] : fixture["cases"].items()) {
    CAPTURE(name);
    config::OptimizerConfig config;
    config.adam_beta2 = 0.95;
    config.decoupled_weight_decay = !name.ends_with("_l2");
    config.optimizer = name == "lion"            ? config::OptimizerKind::lion
                       : name.starts_with("sgd") ? config::OptimizerKind::sgd
                                                 : config::OptimizerKind::adam;
    if (name == "sgd_without_momentum") config.sgd_momentum = 0;
    const FlatBuffer buffer{
        Tensor::from_host<float>(*device, {n}, start), Tensor::zeros(*device, {n}), Tensor(), {{0, n}}};
    const auto optimizer = build(config, *device, {buffer});
    for (size_t t = 0; t < steps.size(); ++t) {
      const std::vector<float> gradients = fixture["gradients"][t];
      buffer.gradients.copy_from_host_bytes(std::as_bytes(std::span(gradients)));
      optimizer->step({.lr = fixture["lr"][t], .weight_decay = fixture["weight_decay"]},
                      test::step_control(*device));
      const std::vector<double> expected = steps[t];
      const auto result = buffer.main.to_host<float>();
      for (size_t i = 0; i < expected.size(); ++i)
        CHECK(static_cast<double>(result[i]) == doctest::Approx(expected[i]).epsilon(2e-6).scale(0.1));
    }
  }
}

TEST_CASE_TEMPLATE("an update is one launch for each buffer, whatever the number of parameters", D,
                   EVERY_DEVICE) {
  const auto device = D::make(1);
  for (const auto kind :
       {config::OptimizerKind::adam, config::OptimizerKind::sgd, config::OptimizerKind::lion}) {
    config::OptimizerConfig config;
    config.optimizer = kind;
    std::vector<FlatBuffer> buffers;
    for (int b = 0; b < 3; ++b) {
      FlatBuffer buffer{Tensor::zeros(*device, {100}), Tensor::zeros(*device, {100}), Tensor(), {}};
      for (int64_t begin = 0; begin < 100; begin += 10)
        buffer.ranges.push_back({.begin = begin, .count = 7, .weight_decay = begin % 20 == 0});
      buffers.push_back(buffer);
    }
    const auto optimizer = build(config, *device, buffers);
    const Tensor sum = Tensor::empty(*device, {1}, DType::f64);
    const int64_t before = device->launches();
    optimizer->step({}, test::step_control(*device));
    CHECK(device->launches() - before == 3);
    sum_of_squares(optimizer->buffers(), sum);
    CHECK(device->launches() - before == 6);
  }
}

TEST_CASE_TEMPLATE("SGD decays apart from the gradient, or adds the decay to it", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  for (const bool decoupled : {true, false})
    for (const double momentum : {0.0, 0.9})
      for (const int64_t n : {1, 7, 1000}) {
        std::vector<float> start(static_cast<size_t>(n)), gradient(start.size());
        for (size_t i = 0; i < start.size(); ++i)
          start[i] = std::sin(static_cast<float>(i) + 1),
          gradient[i] = std::cos(3.0f * static_cast<float>(i));
        const int64_t decayed = n / 2;
        FlatBuffer buffer{Tensor::from_host<float>(*device, {n}, start),
                          Tensor::from_host<float>(*device, {n}, gradient),
                          Tensor(),
                          {}};
        if (decayed) buffer.ranges.push_back({.count = decayed});
        buffer.ranges.push_back({.begin = decayed, .count = n - decayed, .weight_decay = 0});
        config::OptimizerConfig config;
        config.optimizer = config::OptimizerKind::sgd;
        config.decoupled_weight_decay = decoupled;
        config.sgd_momentum = momentum;
        auto sgd = build(config, *device, {buffer});
        std::vector<double> w(start.begin(), start.end()), b(w.size());
        for (int t = 0; t < 4; ++t) {
          sgd->step({.lr = 0.1, .weight_decay = 0.3}, test::step_control(*device, 0.5f));
          for (size_t i = 0; i < w.size(); ++i) {
            const double decay = static_cast<int64_t>(i) < decayed ? 0.3 : 0.0;
            b[i] = momentum * b[i] + 0.5 * static_cast<double>(gradient[i]) + (decoupled ? 0 : decay * w[i]);
            w[i] -= 0.1 * (b[i] + (decoupled ? decay * w[i] : 0));
          }
        }
        const auto result = buffer.main.to_host<float>();
        for (size_t i = 0; i < w.size(); ++i)
          CHECK(static_cast<double>(result[i]) == doctest::Approx(w[i]).epsilon(2e-6).scale(0.1));
      }
}

TEST_CASE_TEMPLATE("zeros and norms count the ranges that this rank counts", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  const std::vector<float> gradient{0, 1, -0.0f, 2, 0, 0, 3}, main{3, 4, 0, 0, 9, 9, 12};
  FlatBuffer buffer{Tensor::from_host<float>(*device, {7}, main),
                    Tensor::from_host<float>(*device, {7}, gradient),
                    Tensor(),
                    {}};
  buffer.ranges = {
      {.count = 4}, {.begin = 4, .count = 2, .counted = 0}, {.begin = 6, .count = 1, .weight_decay = 0}};
  const auto buffers = with_range_tables(*device, {buffer});
  const Tensor sum = Tensor::empty(*device, {1}, DType::f64), count = Tensor::empty(*device, {1}, DType::i64);
  const auto squares_of = [&](const std::vector<FlatBuffer>& all,
                              Tensor FlatBuffer::*which = &FlatBuffer::gradients) {
    sum_of_squares(all, sum, which);
    return sum.to_host<double>()[0];
  };
  const auto zeros_of = [&](const std::vector<FlatBuffer>& all) {
    count_zeros(all, count);
    return count.to_host<int64_t>()[0];
  };
  CHECK(zeros_of(buffers) == 2);  // not those of the range that another rank counts
  CHECK(squares_of(buffers) == 14);
  CHECK(squares_of(buffers, &FlatBuffer::main) == 169);
  CHECK(squares_of(with_range_tables(*device, {buffer, buffer})) == 28);
  buffer.ranges.clear();  // a rank that owns padding only
  CHECK(squares_of(with_range_tables(*device, {buffer})) == 0);
  CHECK(zeros_of({}) == 0);
}
