// Moments below fp32, parameters without main parameters apart, and stochastic rounding.
#include <doctest/doctest.h>

#include <cmath>

#include "base/philox.hpp"
#include "kernels/common/fp8_moment.hpp"
#include "kernels/table.hpp"
#include "optim/optimizer.hpp"
#include "tensor/launch.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/step_control.hpp"

using namespace capstan;
using namespace capstan::optim;
using config::MomentType;

namespace {

constexpr uint64_t kSeed = 17;

std::vector<float> noise(int64_t count, uint64_t instance, double scale = 1) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(
        scale * normal_at(philox_key(5, purpose::test, instance), static_cast<uint64_t>(i))));
  return values;
}
std::vector<bf16> bf16_of(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

// Between 1e-3 and 1e3, with zeros.
std::vector<float> gradients_of(int64_t n, uint64_t instance) {
  auto values = noise(n, instance);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] *= i % 7 == 3 ? 0.0f : std::pow(10.0f, static_cast<float>(i % 7) - 3);
  return values;
}

config::OptimizerConfig adam_with(MomentType first, MomentType second, bool stochastic) {
  config::OptimizerConfig config;
  config.exp_avg_dtype = first, config.exp_avg_sq_dtype = second;
  config.stochastic_rounding = stochastic;
  return config;
}

struct Result {
  std::vector<float> main, first, second;
  bool operator==(const Result&) const = default;
};
// Ranges of one buffer of n elements; main parameters of the type of `start`.
struct Trial {
  std::vector<kernels::UpdateRange> ranges;
  DType main = DType::f32;
  int64_t steps = 1;
};
Result run(Device& device, const config::OptimizerConfig& config, const std::vector<float>& start,
           const Trial& trial, const std::vector<std::vector<float>>& gradients) {
  const auto n = static_cast<int64_t>(start.size());
  FlatBuffer buffer{Tensor(), Tensor::zeros(device, {n}), Tensor(), trial.ranges};
  buffer.main = trial.main == DType::f32 ? Tensor::from_host<float>(device, {n}, start)
                                         : Tensor::from_host<bf16>(device, {n}, bf16_of(start));
  const auto adam = build(config, device, {buffer}, kSeed);
  for (int64_t t = 0; t < trial.steps; ++t) {
    buffer.gradients.copy_from_host_bytes(std::as_bytes(std::span(gradients[static_cast<size_t>(t)])));
    adam->step({.lr = 1e-2, .weight_decay = 0.1}, test::step_control(device));
  }
  const auto& state = adam->state();
  return {buffer.main.to_floats(), adam->values(state[0], 0, 0, n).to_floats(),
          adam->values(state[1], 0, 0, n).to_floats()};
}

// Rounds up with the probability of the distance from the value below, as Philox says for the position.
float rounded(float value, int64_t step, int array, uint64_t parameter, int64_t position) {
  const PhiloxKey key =
      philox_key(kSeed, purpose::stochastic_rounding, static_cast<uint64_t>(3 * step + array));
  const uint32_t word =
      philox4x32(key, parameter, static_cast<uint64_t>(position) / 4)[static_cast<size_t>(position) % 4];
  const uint32_t bits = std::bit_cast<uint32_t>(value), low = bits & 0xFFFF;
  const bool up = low + (word >> 16) >= 0x10000;
  return std::bit_cast<float>((bits & 0xFFFF0000u) + (up ? 0x10000u : 0u));
}

// All values of E4M3 without a sign.
std::vector<double> e4m3() {
  std::vector<double> values;
  for (int exponent = 0; exponent < 16; ++exponent)
    for (int mantissa = 0; mantissa < 8; ++mantissa)
      values.push_back(exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9));
  values.pop_back();  // NaN
  return values;
}

}  // namespace

TEST_CASE_TEMPLATE("moments in bf16 are the fp32 moments rounded to nearest", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  for (const int64_t n : {1, 7, 64, 1031, 20011}) {
    const auto start = noise(n, 1);
    const std::vector<std::vector<float>> gradients{gradients_of(n, 2)};
    const Trial trial{{{0, n}}};
    const Result exact = run(*device, adam_with(MomentType::fp32, MomentType::fp32, false), start, trial,
                             gradients),
                 narrow = run(*device, adam_with(MomentType::bf16, MomentType::bf16, false), start, trial,
                              gradients),
                 mixed = run(*device, adam_with(MomentType::bf16, MomentType::fp32, false), start, trial,
                             gradients);
    CHECK(narrow.main == exact.main);
    for (size_t i = 0; i < start.size(); ++i) {
      CHECK(narrow.first[i] == static_cast<float>(bf16(exact.first[i])));
      CHECK(narrow.second[i] == static_cast<float>(bf16(exact.second[i])));
    }
    CHECK(mixed.first == narrow.first);
    CHECK(mixed.second == exact.second);
  }
}

TEST_CASE_TEMPLATE("stochastic rounding: the neighbor that Philox chooses at the element's position", D,
                   EVERY_DEVICE) {
  const auto device = D::make(2);
  for (const int64_t n : {1, 13, 1500}) {
    auto start = noise(n, 1);
    for (float& w : start) w = static_cast<float>(bf16(w));
    const std::vector<std::vector<float>> gradients{gradients_of(n, 2)};
    kernels::UpdateRange range{.count = n};
    range.parameter = 0xABCDEF0123456789, range.origin = 77;
    const Trial fp32{{range}}, without_copy{{range}, DType::bf16};
    const Result exact = run(*device, adam_with(MomentType::fp32, MomentType::fp32, false), start, fp32,
                             gradients),
                 got = run(*device, adam_with(MomentType::bf16, MomentType::bf16, true), start, without_copy,
                           gradients);
    for (int64_t i = 0; i < n; ++i) {
      const auto j = static_cast<size_t>(i);
      CHECK(got.main[j] == rounded(exact.main[j], 1, 0, range.parameter, 77 + i));
      CHECK(got.first[j] == rounded(exact.first[j], 1, 1, range.parameter, 77 + i));
      CHECK(got.second[j] == rounded(exact.second[j], 1, 2, range.parameter, 77 + i));
    }
  }
}

TEST_CASE_TEMPLATE("stochastic rounding does not depend on the layout of the elements", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  const int64_t rows = 37, columns = 53, n = rows * columns, steps = 3;
  const auto start = noise(n, 1);
  std::vector<std::vector<float>> gradients;
  for (uint64_t t = 0; t < steps; ++t) gradients.push_back(gradients_of(n, 10 + t));
  const auto config = adam_with(MomentType::bf16, MomentType::bf16, true);
  const Result full = run(*device, config, start, {{{0, n}}, DType::bf16, steps}, gradients);
  // Part of the columns, begun within a row, behind padding.
  for (const auto& [first, count, skipped] :
       {std::array<int64_t, 3>{0, columns, 0}, {0, 20, 0}, {20, 33, 5}, {52, 1, 3}, {7, 4, 41}}) {
    CAPTURE(first);
    std::vector<size_t> elements;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = first; c < first + count; ++c)
        elements.push_back(static_cast<size_t>(r * columns + c));
    elements.erase(elements.begin(), elements.begin() + skipped);
    const auto take = [&](const std::vector<float>& from) {
      std::vector<float> values(3, 0.0f);  // padding
      for (const size_t e : elements) values.push_back(from[e]);
      return values;
    };
    kernels::UpdateRange range{.begin = 3, .count = static_cast<int64_t>(elements.size())};
    range.origin = first, range.column = skipped, range.columns = count, range.row_stride = columns;
    std::vector<std::vector<float>> parts;
    for (const auto& g : gradients) parts.push_back(take(g));
    const Result part = run(*device, config, take(start), {{range}, DType::bf16, steps}, parts);
    for (size_t i = 0; i < elements.size(); ++i) {
      CHECK(part.main[i + 3] == full.main[elements[i]]);
      CHECK(part.first[i + 3] == full.first[elements[i]]);
      CHECK(part.second[i + 3] == full.second[elements[i]]);
    }
  }
}

TEST_CASE_TEMPLATE("stochastic rounding is unbiased; to nearest, small updates are lost", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  const int64_t n = 40'000;
  // The update of 0.01 is 0.64 of a bf16 ulp below 4, and 0.16 of one above.
  for (const float weight : {2.5f, 5.0f}) {
    const std::vector<float> start(static_cast<size_t>(n), weight);
    const std::vector<std::vector<float>> gradients{std::vector<float>(static_cast<size_t>(n), -1.0f)};
    const auto mean_change = [&](bool stochastic) {
      kernels::UpdateRange range{.count = n};
      range.weight_decay = false;
      const Result got = run(*device, adam_with(MomentType::fp32, MomentType::fp32, stochastic), start,
                             {{range}, DType::bf16}, gradients);
      double sum = 0;
      for (const float w : got.main) sum += static_cast<double>(w) - static_cast<double>(weight);
      return sum / static_cast<double>(n);
    };
    const double ulp = weight < 4 ? 0x1p-6 : 0x1p-5, p = 0.01 / ulp;
    CHECK(std::abs(mean_change(true) - 0.01) < 5 * ulp * std::sqrt(p * (1 - p) / static_cast<double>(n)));
    CHECK(std::abs(mean_change(false) - 0.01) > 0.3 * 0.01);
  }
}

TEST_CASE("the scale of an fp8 block is at most the quotient, by the last 4 of its bits") {
  // Above it the largest element would be below the largest code, and stochastic rounding could lower it.
  uint32_t bits = 12345;
  for (int i = 0; i < 100000; ++i) {
    bits = bits * 1664525u + 1013904223u;
    const float largest = std::ldexp(1.0f + static_cast<float>(bits >> 9) * 0x1p-23f, i % 200 - 100);
    const double scale = static_cast<double>(kernels::fp8_scale(largest)), most = 448 * scale;
    CHECK(most <= static_cast<double>(largest));
    CHECK(most >= static_cast<double>(largest) * (1 - 0x1p-18));
  }
}

TEST_CASE_TEMPLATE("moments in fp8: E4M3 with the largest of 64 elements at 448, second moments as roots", D,
                   EVERY_DEVICE) {
  const auto device = D::make(2);
  const std::vector<double> values = e4m3();
  for (const int64_t n : {1, 63, 64, 65, 1031, 20011}) {
    const auto start = noise(n, 1);
    const std::vector<std::vector<float>> gradients{gradients_of(n, 2)};
    const Trial trial{{{0, n}}};
    const Result exact = run(*device, adam_with(MomentType::fp32, MomentType::fp32, false), start, trial,
                             gradients),
                 got = run(*device, adam_with(MomentType::fp8, MomentType::fp8, false), start, trial,
                           gradients);
    CHECK(got.main == exact.main);
    const auto check = [&](const std::vector<float>& have, const std::vector<float>& want, bool root) {
      for (int64_t begin = 0; begin < n; begin += 64) {
        double largest = 0;
        const auto at = [&](const std::vector<float>& from, int64_t i) {
          const double v = static_cast<double>(from[static_cast<size_t>(i)]);
          return root ? std::sqrt(v) : v;
        };
        const int64_t end = std::min(n, begin + 64);
        for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(at(want, i)));
        for (int64_t i = begin; i < end; ++i) {
          // The nearest value, at a scale that may be rounded.
          const double x = std::abs(at(want, i)) * 448 / largest, y = std::abs(at(have, i)) * 448 / largest;
          double nearest = 1e9;
          if (largest == 0) {
            CHECK(at(have, i) == 0);
            continue;
          }
          for (const double v : values) nearest = std::min(nearest, std::abs(v - x));
          CHECK(std::abs(x - y) <= nearest + 1e-5 * std::max(x, 1e-3));
          CHECK(std::signbit(at(have, i)) == std::signbit(at(want, i)));
        }
      }
    };
    check(got.first, exact.first, false);
    check(got.second, exact.second, true);
  }
}

TEST_CASE_TEMPLATE("fp8 moments that are stored as fp32 and loaded again give the same values", D,
                   EVERY_DEVICE) {
  const auto device = D::make(2);
  const int64_t n = 3001;
  FlatBuffer buffer{Tensor::from_host<float>(*device, {n}, noise(n, 1)),
                    Tensor::zeros(*device, {n}),
                    Tensor(),
                    {{0, 1000}, {1024, 1977}}};
  for (const bool stochastic : {false, true}) {
    const auto config = adam_with(MomentType::fp8, MomentType::fp8, stochastic);
    const auto adam = build(config, *device, {buffer}, kSeed),
               other = build(config, *device, {buffer}, kSeed);
    for (uint64_t t = 0; t < 5; ++t) {
      const auto gradients = gradients_of(n, 20 + t);
      buffer.gradients.copy_from_host_bytes(std::as_bytes(std::span(gradients)));
      adam->step({.lr = 1e-2}, test::step_control(*device));
      for (size_t s = 0; s < 2; ++s)
        for (const auto& range : buffer.ranges) {
          const auto& from = adam->state()[s];
          CHECK(from.stored == DType::f32);
          const Tensor values = adam->values(from, 0, range.begin, range.count);
          other->set_values(other->state()[s], 0, range.begin, values);
          CHECK(other->values(other->state()[s], 0, range.begin, range.count).to_floats() ==
                values.to_floats());
          // Any part of it.
          CHECK(adam->values(from, 0, range.begin + 37, 500).to_floats() ==
                values.flat_range(37, 500, {500}).to_floats());
        }
    }
  }
}

TEST_CASE_TEMPLATE("training with moments in fp8 stays beside that in fp32", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  const int64_t n = 2000, steps = 40;
  const auto start = noise(n, 1);
  std::vector<std::vector<float>> gradients;
  for (uint64_t t = 0; t < steps; ++t) {
    gradients.push_back(noise(n, 100 + t));
    for (size_t i = 0; i < gradients.back().size(); ++i)
      gradients.back()[i] += static_cast<float>(std::sin(static_cast<double>(i)));
  }
  const Trial trial{{{0, n}}, DType::f32, steps};
  const Result exact =
      run(*device, adam_with(MomentType::fp32, MomentType::fp32, false), start, trial, gradients);
  for (const bool stochastic : {false, true}) {
    const Result got =
        run(*device, adam_with(MomentType::fp8, MomentType::fp8, stochastic), start, trial, gradients);
    double apart = 0, moved = 0;
    for (size_t i = 0; i < start.size(); ++i) {
      apart += std::pow(static_cast<double>(got.main[i] - exact.main[i]), 2);
      moved += std::pow(static_cast<double>(exact.main[i] - start[i]), 2);
    }
    CHECK(std::sqrt(apart / moved) < 0.1);
  }
}

TEST_CASE_TEMPLATE("moments in fp16 are refused by name", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  CHECK_THROWS_AS(build(adam_with(MomentType::fp16, MomentType::fp32, false), *device, {}), Error);
  CHECK_THROWS_AS(build(adam_with(MomentType::fp32, MomentType::fp16, false), *device, {}), Error);
}
