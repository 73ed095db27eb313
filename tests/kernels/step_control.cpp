// The end of a training step: sums in their order, and the decision from them.
#include "kernels/step_control.hpp"

#include <algorithm>
#include <limits>

#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;

namespace {
constexpr double kInfinite = std::numeric_limits<double>::infinity();

kernels::StepValues control_of(const kernels::StepLimits& limits, double loss, double tokens,
                               double squares) {
  kernels::StepValues values;
  values.loss_sum = loss;
  values.loss_tokens = tokens;
  values.gradient_squares = squares;
  const Launch launch(2);
  table().step_control->control(launch.context(), limits, {&values, DType::u8});
  return values;
}
}  // namespace

TEST_CASE("losses and sums of ranks are added in their order") {
  const auto& step = *table().step_control;
  for (const int64_t n : {1, 7, 300}) {
    const auto values = random_values(5 * n, 1, 1e9);
    Vec<int64_t> integers;
    for (const double v : values) integers.push_back(static_cast<int64_t>(v));
    Vec<double> sum(static_cast<size_t>(n)), expected = sum;
    Vec<int64_t> integer_sum(static_cast<size_t>(n)), expected_integers = integer_sum;
    for (size_t i = 0; i < expected.size(); ++i)
      for (size_t rank = 0; rank < 5; ++rank) {
        expected[i] += values[rank * expected.size() + i];
        expected_integers[i] += integers[rank * expected.size() + i];
      }
    for (int number = 0; number < 4; ++number) {
      prepare_launch(number);
      const Launch launch(2);
      kernels::Context& c = launch.context();
      step.sum_ranks(c, {values.data(), DType::f64}, 5, {sum.data(), DType::f64}, n);
      step.sum_ranks(c, {integers.data(), DType::i64}, 5, {integer_sum.data(), DType::i64}, n);
      CHECK(sum == expected);
      CHECK(integer_sum == expected_integers);
      double total[2] = {7, 7}, in_order = 0;
      for (int64_t i = 0; i < n; ++i) in_order += values[static_cast<size_t>(i)];
      step.sum_losses(c, values.data(), n, 123, total);
      CHECK((total[0] == in_order && total[1] == 123));
      step.sum_losses(c, values.data(), 0, 0, total);
      CHECK((total[0] == 0 && total[1] == 0));
    }
  }
}

TEST_CASE("a fingerprint is the sum of the hashes of words, and shows every change") {
  const auto& step = *table().step_control;
  for (const int64_t bytes : {1, 3, 4, 7, 1030, 300'001}) {
    Vec<uint8_t> data(static_cast<size_t>(bytes));
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * i % 251);
    const auto fingerprint = [&](int64_t salt) {
      const Launch launch(2);
      int64_t sum = 17;
      step.add_fingerprint(launch.context(), {data.data(), DType::u8}, bytes, salt, &sum);
      return sum;
    };
    // The definition, of words in little-endian order.
    uint64_t expected = 17;
    for (int64_t word = 0; 4 * word < bytes; ++word) {
      uint64_t value = 0;
      for (int64_t i = 4 * word; i < std::min(bytes, 4 * word + 4); ++i)
        value += uint64_t{data[static_cast<size_t>(i)]} << 8 * (i % 4);
      uint64_t h = (uint64_t{5} << 40) + static_cast<uint64_t>(word + 1);
      h = h * 0x9E3779B97F4A7C15u ^ value * 0xD1B54A32D192ED03u;
      h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9u;
      h = (h ^ h >> 27) * 0x94D049BB133111EBu;
      expected += h ^ h >> 31;
    }
    const int64_t first = fingerprint(5);
    CHECK(first == static_cast<int64_t>(expected));
    for (int number = 0; number < 4; ++number) {
      prepare_launch(number);
      CHECK(fingerprint(5) == first);
    }
    CHECK(fingerprint(6) != first);
    // One bit, and two words that change places.
    for (const size_t at : {size_t{0}, data.size() / 2, data.size() - 1}) {
      data[at] ^= 16;
      CHECK(fingerprint(5) != first);
      data[at] ^= 16;
    }
    if (bytes < 1000) continue;
    std::swap_ranges(data.begin(), data.begin() + 4, data.begin() + 400);
    CHECK(fingerprint(5) != first);
  }
}

TEST_CASE("the decision of a step: mean loss, norm, clipping, and steps that are skipped") {
  using Limits = kernels::StepLimits;
  const auto plain = control_of({.loss_scale = 8}, 8 * 30, 10, 8 * 8 * 900);
  CHECK(plain.loss == doctest::Approx(3));
  CHECK(plain.norm == doctest::Approx(3));
  CHECK(plain.control.gradient == doctest::Approx(1.0 / 80));
  CHECK(plain.control.skip == 0);
  const auto clipped = control_of({.clip = 1.5}, 30, 10, 900);
  CHECK(clipped.norm == doctest::Approx(3));
  CHECK(clipped.control.gradient == doctest::Approx(0.05));
  CHECK(control_of({}, 5, 0, 4).control.gradient == 0);

  const auto skips = [](const Limits& limits, double loss, double squares) {
    return control_of(limits, loss, 1, squares).control.skip != 0;
  };
  CHECK_FALSE(skips({}, kInfinite, kInfinite));
  CHECK(skips({.require_finite = 1}, kInfinite, 1));
  CHECK(skips({.require_finite = 1}, 1, NAN));
  CHECK_FALSE(skips({.require_finite = 1}, 1, 1));
  CHECK(skips({.loss_spike = 4}, 5, 1));
  CHECK_FALSE(skips({.loss_spike = 4}, kInfinite, 1));
  CHECK(skips({.norm_spike = 4}, 1, 25));
  CHECK_FALSE(skips({.norm_spike = 4}, 1, kInfinite));
  CHECK(skips({.largest_norm = 4}, 1, kInfinite));
}
