// Updates and statistics over tables of ranges, against the formulas in double.
#include "kernels/optimizers.hpp"

#include <bit>
#include <cmath>
#include <cstring>
#include <tuple>

#include "base/philox.hpp"
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;

namespace {

const kernels::Optimizers& optimizers() {
  return *table().optimizers;
}

// Ranges of every kind, with padding between them that belongs to none: odd sizes, one larger than a tile.
Vec<kernels::UpdateRange> ranges_of(int64_t n) {
  if (n < 8) return {{.count = n}};
  const int64_t third = n / 3;
  return {{.begin = 1, .count = third - 1},
          {.begin = third + 3, .count = 1, .decoupled_lr = 1, .weight_decay = 0, .counted = 0},
          {.begin = third + 4, .count = n - third - 6, .lr_factor = 3}};
}
kernels::In table_of(const Vec<kernels::UpdateRange>& ranges) {
  return {ranges.data(), DType::u8};
}
int64_t count(const Vec<kernels::UpdateRange>& ranges) {
  return static_cast<int64_t>(ranges.size());
}

// Calls update(i, lr, decay) for every element of a range.
template <class Update>
void for_elements(const Vec<kernels::UpdateRange>& ranges, const kernels::StepScale& s, Update&& update) {
  for (const auto& range : ranges)
    for (int64_t i = range.begin; i < range.begin + range.count; ++i)
      update(static_cast<size_t>(i), (range.decoupled_lr ? s.decoupled_lr : s.lr) * range.lr_factor,
             range.weight_decay ? static_cast<double>(s.weight_decay) : 0.0);
}

const Vec<int64_t> kLengths{1, 37, 20003, 60001};
constexpr kernels::StepScale kScale{
    .lr = 3e-3, .decoupled_lr = 5e-3, .weight_decay = 0.1f, .decoupled_decay = true};
// On the heap, which a GPU reads (gpu_table.cpp).
kernels::In step_control() {
  static const Vec<kernels::StepControl> control{{.gradient = 0.5f}};
  return {control.data(), DType::u8};
}

}  // namespace

TEST_CASE("Adam over ranges; padding keeps its bits") {
  for (const bool decoupled : {true, false})
    for (const int64_t n : kLengths) {
      const auto ranges = ranges_of(n);
      kernels::AdamStep s{kScale, 0.9f, 0.95f, 1e-8f, 1 - std::pow(0.9f, 3.0f), 1 - std::pow(0.95f, 3.0f)};
      s.scale.decoupled_decay = decoupled;
      const Array grad(DType::f32, random_values(n, 1)), main(DType::f32, random_values(n, 2)),
          m(DType::f32, random_values(n, 3, 0.1));
      Vec<double> squares = random_values(n, 4);
      for (double& v : squares) v = v * v;
      const Array v(DType::f32, squares), model(DType::bf16, random_values(n, 5));
      const auto y = run_kernel({main, m, v, model}, [&](kernels::Context& c, Vec<Array>& out) {
        optimizers().adam(c, s, step_control(), table_of(ranges), count(ranges), grad, out[0].out(),
                          out[1].out(), nullptr, out[2].out(), nullptr, out[3].out());
      });
      Vec<double> w = main.rounded(), em = m.rounded(), ev = v.rounded(), copy = model.rounded();
      const auto gs = grad.rounded(), got = y[0].rounded();
      for_elements(ranges, s.scale, [&](size_t i, double lr, double decay) {
        double g = gs[i] * 0.5;
        if (!decoupled) g += decay * w[i];
        em[i] = static_cast<double>(s.beta1) * em[i] + (1 - static_cast<double>(s.beta1)) * g;
        ev[i] = static_cast<double>(s.beta2) * ev[i] + (1 - static_cast<double>(s.beta2)) * g * g;
        double update =
            em[i] / s.bias_correction1 / (std::sqrt(ev[i] / s.bias_correction2) + static_cast<double>(s.eps));
        if (decoupled) update += decay * w[i];
        w[i] -= lr * update;
        copy[i] = got[i];
      });
      CHECK(error(y[0].rounded(), w) < 1e-6);
      CHECK(error(y[1].rounded(), em) < 1e-6);
      CHECK(error(y[2].rounded(), ev) < 1e-6);
      CHECK(y[3].bytes() == Array(DType::bf16, copy).bytes());
      if (n >= 8) CHECK((got[0] == main.rounded()[0] && got.back() == main.rounded().back()));
    }
}

// Decays the weight, or returns the gradient with that of L2 regularization.
static double decayed(bool decoupled, double lr, double decay, double gradient, double& weight) {
  if (!decoupled) return gradient + decay * weight;
  weight *= 1 - lr * decay;
  return gradient;
}

TEST_CASE("SGD over ranges, with and without momentum and decoupled decay") {
  for (const bool decoupled : {false, true})
    for (const float momentum : {0.0f, 0.9f})
      for (const int64_t n : kLengths) {
        const auto ranges = ranges_of(n);
        kernels::SgdStep s{kScale, momentum};
        s.scale.decoupled_decay = decoupled;
        const Array grad(DType::f32, random_values(n, 1)), main(DType::f32, random_values(n, 2)),
            buffer(DType::f32, random_values(n, 3));
        const auto y = run_kernel({main, buffer, main}, [&](kernels::Context& c, Vec<Array>& out) {
          Array g = grad;
          optimizers().sgd(c, s, step_control(), table_of(ranges), count(ranges), g.f32(), out[0].f32(),
                           out[1].f32(), out[2].out());
        });
        Vec<double> w = main.rounded(), b = buffer.rounded();
        const auto gs = grad.rounded();
        for_elements(ranges, s.scale, [&](size_t i, double lr, double decay) {
          const double g = decayed(decoupled, lr, decay, 0.5 * gs[i], w[i]);
          if (momentum != 0) b[i] = static_cast<double>(momentum) * b[i] + g;
          w[i] -= lr * (momentum == 0 ? g : b[i]);
        });
        CHECK(error(y[0].rounded(), w) < 1e-6);
        CHECK(error(y[1].rounded(), b) < 1e-6);
        CHECK(y[2].bytes() == y[0].bytes());
      }
}

TEST_CASE("Lion over ranges: the sign of the interpolated momentum, zero where it is zero") {
  for (const bool decoupled : {false, true})
    for (const int64_t n : kLengths) {
      const auto ranges = ranges_of(n);
      kernels::LionStep s{kScale, 0.95f, 0.98f};
      s.scale.decoupled_decay = decoupled;
      Vec<double> gradients = random_values(n, 1), momenta = random_values(n, 3);
      // Without decay neither has a direction: the weight stays.
      const size_t still = static_cast<size_t>(n) / 2;
      if (decoupled) gradients[still] = momenta[still] = 0;
      const Array grad(DType::f32, gradients), main(DType::f32, random_values(n, 2)), m(DType::f32, momenta);
      const auto y = run_kernel({main, m, main}, [&](kernels::Context& c, Vec<Array>& out) {
        Array g = grad;
        optimizers().lion(c, s, step_control(), table_of(ranges), count(ranges), g.f32(), out[0].f32(),
                          out[1].f32(), out[2].out());
      });
      Vec<double> w = main.rounded(), em = m.rounded();
      const auto gs = grad.rounded();
      for_elements(ranges, s.scale, [&](size_t i, double lr, double decay) {
        const double g = decayed(decoupled, lr, decay, 0.5 * gs[i], w[i]);
        const double c = 0.95 * em[i] + 0.05 * g;
        w[i] -= lr * (c > 0 ? 1 : c < 0 ? -1 : 0);
        em[i] = 0.98 * em[i] + 0.02 * g;
      });
      CHECK(error(y[0].rounded(), w) < 1e-6);
      CHECK(error(y[1].rounded(), em) < 1e-6);
      CHECK(y[2].bytes() == y[0].bytes());
    }
}

TEST_CASE("Adam in bf16: rounded to nearest, or where Philox says for the global index") {
  for (const bool stochastic : {false, true})
    for (const int64_t n : kLengths) {
      auto ranges = ranges_of(n);
      // The last one is columns 5 to 12 of rows of 29, and begins with column 8.
      ranges.back().parameter = 0xFEDCBA9876543210, ranges.back().origin = 29 * 100 + 5;
      ranges.back().column = 3, ranges.back().columns = 8, ranges.back().row_stride = 29;
      kernels::AdamStep s{kScale, 0.9f, 0.95f, 1e-8f, 0.2f, 0.1f};
      s.rounding = {stochastic, {1, 2}, {3, 4}, {5, 6}};
      Vec<double> squares = random_values(n, 4);
      for (double& v : squares) v = v * v;
      const Array grad(DType::f32, random_values(n, 1));
      const Vec<Array> narrow{Array(DType::bf16, random_values(n, 2)),
                              Array(DType::bf16, random_values(n, 3)), Array(DType::bf16, squares)};
      Vec<Array> wide;
      for (const Array& array : narrow) wide.emplace_back(DType::f32, array.rounded());
      const auto update = [&](const Vec<Array>& arrays) {
        return run_kernel(arrays, [&](kernels::Context& c, Vec<Array>& out) {
          optimizers().adam(c, s, step_control(), table_of(ranges), count(ranges), grad, out[0].out(),
                            out[1].out(), nullptr, out[2].out(), nullptr, {});
        });
      };
      const auto exact = update(wide), got = update(narrow);
      const PhiloxKey keys[] = {s.rounding.main, s.rounding.exp_avg, s.rounding.exp_avg_sq};
      for (size_t a = 0; a < 3; ++a) {
        Vec<double> expected = narrow[a].rounded();
        const Vec<double> values = exact[a].rounded();
        for (const auto& range : ranges)
          for (int64_t i = 0; i < range.count; ++i) {
            const auto e = static_cast<size_t>(range.begin + i);
            const int64_t j = range.column + i;
            const auto position = static_cast<uint64_t>(
                range.columns == 0 ? range.origin + i
                                   : range.origin + j / range.columns * range.row_stride + j % range.columns);
            const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(values[e])),
                           noise = philox4x32(keys[a], range.parameter, position / 4)[position % 4] >> 16;
            expected[e] =
                static_cast<double>(stochastic ? std::bit_cast<float>((bits + noise) & 0xFFFF0000u)
                                               : static_cast<float>(bf16(static_cast<float>(values[e]))));
          }
        CHECK(got[a].rounded() == expected);
      }
    }
}

TEST_CASE("Adam with a bf16 gradient: the bits of the same values in fp32") {
  for (const int64_t n : kLengths) {
    auto ranges = ranges_of(n);
    int64_t blocks = 0;
    for (auto& range : ranges) range.first_block = blocks, blocks += (range.count + 63) / 64;
    const kernels::AdamStep s{kScale, 0.9f, 0.95f, 1e-8f, 0.2f, 0.1f};
    const Array narrow(DType::bf16, random_values(n, 1)), wide(DType::f32, narrow.rounded());
    CHECK(narrow.rounded() != random_values(n, 1));
    Vec<double> squares = random_values(n, 4);
    for (double& v : squares) v = v * v;
    for (const DType state : {DType::f32, DType::bf16}) {
      const Vec<Array> arrays{Array(state, random_values(n, 2)), Array(state, random_values(n, 3)),
                              Array(state, squares), Array(DType::bf16, random_values(n, 5))};
      const auto update = [&](const Array& gradient) {
        return run_kernel(arrays, [&](kernels::Context& c, Vec<Array>& out) {
          optimizers().adam(c, s, step_control(), table_of(ranges), count(ranges), gradient, out[0].out(),
                            out[1].out(), nullptr, out[2].out(), nullptr, out[3].out());
        });
      };
      const auto got = update(narrow), exact = update(wide);
      for (size_t a = 0; a < arrays.size(); ++a) CHECK(got[a].bytes() == exact[a].bytes());
    }
    Vec<uint8_t> codes(static_cast<size_t>(n), 0x31);
    Vec<float> scales(static_cast<size_t>(blocks), 0.5f);
    const auto update = [&](const Array& gradient) {
      Vec<uint8_t> m = codes, v = codes;
      Vec<float> m_scales = scales, v_scales = scales;
      Array w(DType::f32, random_values(n, 2));
      const Launch launch(2);
      optimizers().adam(launch.context(), s, step_control(), table_of(ranges), count(ranges), gradient,
                        w.out(), {m.data(), DType::u8}, m_scales.data(), {v.data(), DType::u8},
                        v_scales.data(), {});
      return std::tuple(w.rounded(), m, v, m_scales, v_scales);
    };
    CHECK(update(narrow) == update(wide));
  }
}

TEST_CASE("fp8 moments: codes, scales and their values; ranges and padding") {
  for (const int64_t n : kLengths) {
    auto ranges = ranges_of(n);
    int64_t blocks = 0;
    for (auto& range : ranges) range.first_block = blocks, blocks += (range.count + 63) / 64;
    const Array values(DType::f32, random_values(n, 1));
    for (const bool root : {false, true}) {
      Vec<uint8_t> codes(static_cast<size_t>(n), 0xEE);
      Vec<float> scales(static_cast<size_t>(blocks)), decoded(static_cast<size_t>(n), 7.0f);
      Vec<float> x;
      for (const double v : values.rounded()) x.push_back(static_cast<float>(root ? v * v : v));
      const Launch launch(3);
      kernels::Context& c = launch.context();
      optimizers().encode_moment(c, table_of(ranges), count(ranges), root, x.data(), 0, n, codes.data(),
                                 scales.data());
      optimizers().decode_moment(c, table_of(ranges), count(ranges), root, codes.data(), scales.data(), 0, n,
                                 decoded.data());
      Vec<char> inside(static_cast<size_t>(n), 0);
      for (const auto& range : ranges)
        for (int64_t i = 0; i < range.count; ++i) {
          const auto e = static_cast<size_t>(range.begin + i);
          inside[e] = 1;
          const double v = static_cast<double>(root ? std::sqrt(x[e]) : x[e]),
                       got = static_cast<double>(root ? std::sqrt(decoded[e]) : decoded[e]),
                       scale = static_cast<double>(scales[static_cast<size_t>(range.first_block + i / 64)]);
          // Half of the last place of 4 significant bits, or of the smallest numbers.
          CHECK(std::abs(got - v) <= std::max(std::abs(v) / 15.9, scale * 0x1.01p-10));
        }
      for (size_t e = 0; e < inside.size(); ++e)
        if (!inside[e]) CHECK((codes[e] == 0xEE && decoded[e] == 7.0f));
    }
  }
}

TEST_CASE("Adam with fp8 moments: as with the fp32 moments that they decode to, encoded again") {
  for (const int64_t n : kLengths) {
    auto ranges = ranges_of(n);
    int64_t blocks = 0;
    for (auto& range : ranges) range.first_block = blocks, blocks += (range.count + 63) / 64;
    const auto length = static_cast<size_t>(n);
    const kernels::AdamStep s{kScale, 0.9f, 0.95f, 1e-8f, 0.2f, 0.1f};
    const Array gradient(DType::f32, random_values(n, 1)), main(DType::f32, random_values(n, 2));
    struct Moment {
      Vec<uint8_t> codes;
      Vec<float> scales;
    };
    const auto adam = [&](kernels::Context& c, Array& w, kernels::Out m, float* m_scales, kernels::Out v,
                          float* v_scales) {
      optimizers().adam(c, s, step_control(), table_of(ranges), count(ranges), gradient, w.out(), m, m_scales,
                        v, v_scales, {});
    };
    for (int number = 0; number < 4; ++number) {
      prepare_launch(number);
      const Launch launch(3);
      kernels::Context& c = launch.context();
      std::array<Moment, 2> moments, expected;
      std::array<Vec<float>, 2> wide;
      for (size_t i = 0; i < 2; ++i) {
        Vec<float> values;
        for (const double v : random_values(n, 3 + i))
          values.push_back(static_cast<float>(i == 0 ? v : v * v));
        moments[i] = {Vec<uint8_t>(length, 0xEE), Vec<float>(static_cast<size_t>(blocks))};
        optimizers().encode_moment(c, table_of(ranges), count(ranges), i == 1, values.data(), 0, n,
                                   moments[i].codes.data(), moments[i].scales.data());
        wide[i].resize(length);
        optimizers().decode_moment(c, table_of(ranges), count(ranges), i == 1, moments[i].codes.data(),
                                   moments[i].scales.data(), 0, n, wide[i].data());
      }
      Array w = main, exact = main;
      adam(c, exact, {wide[0].data(), DType::f32}, nullptr, {wide[1].data(), DType::f32}, nullptr);
      expected = moments;
      for (size_t i = 0; i < 2; ++i)
        optimizers().encode_moment(c, table_of(ranges), count(ranges), i == 1, wide[i].data(), 0, n,
                                   expected[i].codes.data(), expected[i].scales.data());
      adam(c, w, {moments[0].codes.data(), DType::u8}, moments[0].scales.data(),
           {moments[1].codes.data(), DType::u8}, moments[1].scales.data());
      CHECK(w.bytes() == exact.bytes());
      for (size_t i = 0; i < 2; ++i) {
        CHECK(moments[i].codes == expected[i].codes);
        CHECK(moments[i].scales == expected[i].scales);
      }
    }
  }
}

TEST_CASE("Muon's momentum and update over ranges; normalization of a matrix") {
  for (const bool nesterov : {false, true})
    for (const bool decoupled : {false, true})
      for (const int64_t n : kLengths) {
        const auto ranges = ranges_of(n);
        kernels::MuonStep s{kScale, 0.95f, nesterov};
        s.scale.decoupled_decay = decoupled;
        const Array grad(DType::f32, random_values(n, 1)), main(DType::f32, random_values(n, 2)),
            buffer(DType::f32, random_values(n, 3));
        const auto y = run_kernel({grad, buffer, main, main}, [&](kernels::Context& c, Vec<Array>& out) {
          optimizers().muon_momentum(c, s, step_control(), table_of(ranges), count(ranges), out[0].f32(),
                                     out[2].f32(), out[1].f32());
          optimizers().muon_update(c, s.scale, step_control(), table_of(ranges), count(ranges), out[0].f32(),
                                   out[2].f32(), out[3].out());
        });
        Vec<double> u = grad.rounded(), m = buffer.rounded(), w = main.rounded();
        for_elements(ranges, s.scale, [&](size_t i, double lr, double decay) {
          const double g = 0.5 * u[i] + (decoupled ? 0 : decay * w[i]);
          m[i] += 0.05 * (g - m[i]);
          u[i] = nesterov ? g + 0.95 * (m[i] - g) : m[i];
          if (decoupled) w[i] *= 1 - lr * decay;
          w[i] -= lr * u[i];
        });
        CHECK(error(y[0].rounded(), u) < 1e-6);
        CHECK(error(y[1].rounded(), m) < 1e-6);
        CHECK(error(y[2].rounded(), w) < 1e-6);
        CHECK(y[3].bytes() == y[2].bytes());

        const auto normalized = run_kernel({grad, grad}, [&](kernels::Context& c, Vec<Array>& out) {
          const double squares = 4, none = 0;
          optimizers().normalize(c, &squares, 1e-7f, out[0].f32(), n);
          optimizers().normalize(c, &none, 4.0f, out[1].f32(), n);
        });
        Vec<double> half = grad.rounded(), quarter = half;
        for (double& v : half) v /= 2;
        for (double& v : quarter) v /= 4;
        CHECK(normalized[0].rounded() == half);
        CHECK(normalized[1].rounded() == quarter);
      }
}

TEST_CASE("sums of squares and numbers of zeros over the counted ranges, for any number of threads") {
  const std::pair<int64_t, DType> cases[] = {{1, DType::f32},      {37, DType::f32},      {1025, DType::f32},
                                             {200001, DType::f32}, {1500001, DType::f32}, {37, DType::bf16},
                                             {1025, DType::bf16},  {200001, DType::bf16}};
  for (const auto& [n, dtype] : cases) {
    if (test::kSanitized && n > 1'000'000) continue;  // as 200,001, with more blocks
    const auto ranges = ranges_of(n);
    Vec<double> values = random_values(n, 1);
    for (size_t i = 0; i < values.size(); i += 5) values[i] = i % 2 ? 0.0 : -0.0;
    // The smallest numbers are not zeros.
    for (size_t i = 1; i < values.size(); i += 5) values[i] = 1e-30;
    const Array x(dtype, values);
    const Vec<double> rounded = x.rounded();
    long double squares = 0;
    int64_t zeros = 0;
    for (const auto& range : ranges)
      for (int64_t i = range.begin; range.counted && i < range.begin + range.count; ++i) {
        const double v = rounded[static_cast<size_t>(i)];
        squares += v * v, zeros += v == 0;
      }
    double first = 0;
    for (int threads = 1; threads <= 3; ++threads) {
      Launch launch(threads);
      kernels::Context& c = launch.context();
      double sum = 1;
      int64_t number = 3;
      optimizers().sum_of_squares(c, table_of(ranges), count(ranges), x, &sum, true);
      optimizers().count_zeros(c, table_of(ranges), count(ranges), x, &number, true);
      CHECK(sum == doctest::Approx(static_cast<double>(squares + 1)).epsilon(1e-13));
      CHECK(number == zeros + 3);
      if (threads == 1) first = sum;
      CHECK(sum == first);
      optimizers().sum_of_squares(c, table_of(ranges), 0, x, &sum, false);
      optimizers().count_zeros(c, table_of(ranges), 0, x, &number, false);
      CHECK((sum == 0 && number == 0));
    }
  }
}
