// Element-wise kernels and reductions, against the formulas in double.
#include <cstring>

#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;

namespace {
const kernels::Elementwise& elementwise() {
  return *table().elementwise;
}
const Vec<int64_t> kSizes{1, 7, 37, 1000, 70001};
}  // namespace

TEST_CASE("fill, cast, add, scale, axpy, strided copies") {
  const auto& e = elementwise();
  for (int64_t n : kSizes) {
    const Array wide(DType::f32, random_values(n, 1));
    const Array narrow(DType::bf16, random_values(n, 2)), half(DType::f16, random_values(n, 2));
    for (DType to : kTypes)
      for (const Array* from : {&wide, &narrow, &half}) {
        const auto y = run_kernel({Array::zeros(to, n)}, [&](kernels::Context& c, Vec<Array>& out) {
          e.cast(c, *from, out[0].out(), n);
        });
        CHECK(y[0].bytes() == Array(to, from->rounded()).bytes());  // the cast is the type's own rounding
      }
    for (const Array* x : {&wide, &narrow, &half}) {
      const DType type = kernels::In(*x).dtype;
      const Array z(type, random_values(n, 3));
      const auto xs = x->rounded(), zs = z.rounded();
      Vec<double> sum = xs, scaled = xs, moved = wide.rounded();
      for (size_t i = 0; i < xs.size(); ++i) {
        sum[i] += zs[i];
        scaled[i] *= 0.75;
        moved[i] -= 1.5 * xs[i];
      }
      const auto y =
          run_kernel({*x, *x, wide, Array::zeros(type, n)}, [&](kernels::Context& c, Vec<Array>& out) {
            e.add(c, out[0], z, out[0].out(), n);
            e.scale(c, out[1].out(), 0.75f, n);
            e.axpy(c, -1.5f, *x, out[2].f32(), n);
            e.fill(c, out[3].out(), 2.5f, n);
          });
      CHECK(error(y[0].rounded(), sum) < tolerance(type));
      CHECK(error(y[1].rounded(), scaled) < tolerance(type));
      CHECK(error(y[2].rounded(), moved) < 1e-6);
      CHECK(y[3].bytes() == Array::zeros(type, n, 2.5).bytes());
    }
  }
  for (DType from : kTypes)
    for (DType to : kTypes) {
      const int64_t rows = 13, cols = 37, xs = 50, ys = 41;
      const Array x(from, random_values(rows * xs, 4)), start(to, random_values(rows * ys, 5));
      const auto y = run_kernel({start}, [&](kernels::Context& c, Vec<Array>& out) {
        e.copy_rows(c, x, xs, out[0].out(), ys, rows, cols);
      });
      Vec<double> expected = start.rounded();
      const auto values = x.rounded();
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < cols; ++i)
          expected[static_cast<size_t>(r * ys + i)] = values[static_cast<size_t>(r * xs + i)];
      CHECK(y[0].bytes() == Array(to, expected).bytes());
    }
}

TEST_CASE("sums of arrays of different types are fp32 sums, rounded once") {
  const auto& e = elementwise();
  for (const int64_t n : sizes<int64_t>({1, 7, 37, 1000, 70001}, {7, 1000}))
    for (const DType a : kTypes)
      for (const DType b : kTypes)
        for (const DType to : kTypes) {
          const Array x(a, random_values(n, 1)), z(b, random_values(n, 2, 0.01));
          const auto xs = x.rounded(), zs = z.rounded();
          Vec<double> sums;
          for (size_t i = 0; i < xs.size(); ++i)
            sums.push_back(static_cast<double>(static_cast<float>(xs[i]) + static_cast<float>(zs[i])));
          const Array expected(to, sums);
          const auto y = run_kernel({Array::zeros(to, n)}, [&](kernels::Context& c, Vec<Array>& out) {
            e.add(c, x, z, out[0].out(), n);
          });
          CHECK(y[0].bytes() == expected.bytes());
          if (a != to) continue;
          const auto in_place = run_kernel(
              {x}, [&](kernels::Context& c, Vec<Array>& out) { e.add(c, out[0], z, out[0].out(), n); });
          CHECK(in_place[0].bytes() == expected.bytes());
        }
}

TEST_CASE("bias, dropout and residual in one pass, and its gradient") {
  const auto& e = elementwise();
  const PhiloxKey key = philox_key(3, purpose::hidden_dropout, 8);
  for (DType type : kTypes)
    for (float p : {0.0f, 0.1f, 0.5f})
      for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {3, 5}, {17, 37}, {2, 257}, {300, 128}})
        for (int variant = 0; variant < 4; ++variant) {
          INFO("p=", p, " ", rows, "x", cols, " ", text(type), " variant=", variant);
          const Array x(type, random_values(rows * cols, 1)),
              bias = variant & 1 ? Array(type, random_values(cols, 2)) : Array(),
              residual = variant & 2 ? Array(type, random_values(rows * cols, 3)) : Array();
          const auto ids = dropout_rows(rows);
          const auto y =
              run_kernel({Array::zeros(type, rows * cols), x}, [&](kernels::Context& c, Vec<Array>& out) {
                e.bias_dropout_add(c, x, bias, residual, out[0].out(), rows, cols, p, key, ids.data());
                e.dropout(c, out[1], out[1].out(), rows, cols, 0, p, key, ids.data());
              });
          Vec<double> expected(static_cast<size_t>(rows * cols)), gradient = expected;
          const auto xs = x.rounded(), bs = bias.rounded(), rs = residual.rounded();
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < cols; ++i) {
              const auto at = static_cast<size_t>(r * cols + i);
              const bool keep =
                  kernels::keep_hidden(key, ids[static_cast<size_t>(r)], i, kernels::dropout_threshold(p));
              const double factor = keep ? 1 / (1 - static_cast<double>(p)) : 0;
              gradient[at] = factor * xs[at];
              expected[at] = factor * (xs[at] + (bs.empty() ? 0 : bs[static_cast<size_t>(i)])) +
                             (rs.empty() ? 0 : rs[at]);
            }
          CHECK(error(y[0].rounded(), expected) < tolerance(type));
          CHECK(error(y[1].rounded(), gradient) < tolerance(type));
        }
}

TEST_CASE("jitter multiplies by uniform noise of the element's position") {
  const auto& e = elementwise();
  const PhiloxKey key = philox_key(3, purpose::router_jitter, 8);
  for (DType type : kTypes)
    for (const float epsilon : {0.01f, 0.5f})
      for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {3, 5}, {17, 37}, {2, 257}, {300, 128}}) {
        INFO(epsilon, " ", rows, "x", cols, " ", text(type));
        const Array x(type, random_values(rows * cols, 1));
        const auto ids = dropout_rows(rows);
        const auto y =
            run_kernel({Array::zeros(type, rows * cols), x}, [&](kernels::Context& c, Vec<Array>& out) {
              e.jitter(c, x, out[0].out(), rows, cols, epsilon, key, ids.data());
              e.jitter(c, out[1], out[1].out(), rows, cols, epsilon, key, ids.data());
            });
        Vec<double> expected = x.rounded();
        double sum = 0, least = 2, most = 0;
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < cols; ++i) {
            const uint32_t word = philox4x32(key, static_cast<uint64_t>(ids[static_cast<size_t>(r)]),
                                             static_cast<uint64_t>(i / 4))[static_cast<size_t>(i % 4)];
            const double noise = 1 + static_cast<double>(epsilon) * (2 * (word >> 8) / 16777216.0 - 1);
            sum += noise, least = std::min(least, noise), most = std::max(most, noise);
            expected[static_cast<size_t>(r * cols + i)] *= noise;
          }
        CHECK(error(y[0].rounded(), expected) < tolerance(type));
        CHECK(y[1].bytes() == y[0].bytes());
        CHECK(least >= 1 - static_cast<double>(epsilon));
        CHECK(most <= 1 + static_cast<double>(epsilon));
        if (rows * cols > 30000) {
          CHECK(sum / static_cast<double>(rows * cols) == doctest::Approx(1).epsilon(0.01));
          CHECK(most - least > 1.99 * static_cast<double>(epsilon));
        }
      }
}

TEST_CASE("reductions of fixed shape") {
  const auto& e = elementwise();
  for (DType type : kTypes)
    for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{37}, int64_t{1025}, int64_t{200001}}) {
      Vec<double> values = random_values(n, 1);
      const Array x(type, values);
      Array a(DType::f32, random_values(n, 2)), b(DType::f32, random_values(n, 3));
      double sum = 0, weighted = 0, magnitude = 1;
      for (double v : x.rounded()) sum += v, magnitude += std::abs(v);
      const auto ad = a.rounded(), bd = b.rounded();
      for (size_t i = 0; i < ad.size(); ++i) weighted += ad[i] * bd[i];
      for (int threads = 1; threads <= 3; ++threads) {
        Launch launch(threads);
        kernels::Context& c = launch.context();
        static double first[2];
        double s = 1, w = 1;
        e.sum(c, x, n, &s, false);
        e.weighted_sum(c, a.f32(), b.f32(), n, &w, false);
        CHECK(std::abs(s - sum) < 1e-6 * magnitude);
        CHECK(std::abs(w - weighted) < 1e-6 * magnitude);
        if (threads == 1) first[0] = s, first[1] = w;
        CHECK((first[0] == s && first[1] == w));
      }
      if (n < 37) continue;
      values[0] = NAN;
      values[5] = INFINITY;
      values[static_cast<size_t>(n) - 1] = -INFINITY;
      const Array broken(type, values);
      Launch launch(2);
      kernels::Context& c = launch.context();
      int64_t count = 4;
      e.count_nonfinite(c, broken, n, &count, true);
      CHECK(count == 7);
      e.count_nonfinite(c, x, n, &count, false);
      CHECK(count == 0);
    }
}

TEST_CASE("sums and maxima of parts, in their order, in place too") {
  const auto& e = elementwise();
  for (const DType type : kTypes)
    for (const int64_t n : kSizes)
      for (const int64_t count : {1, 2, 5}) {
        const Array parts(type, random_values(n * count, 11));
        const auto x = parts.rounded();
        Vec<double> sum(static_cast<size_t>(n)), largest = sum;
        for (size_t i = 0; i < sum.size(); ++i) {
          auto total = static_cast<float>(x[i]);
          largest[i] = x[i];
          for (size_t p = 1; p < static_cast<size_t>(count); ++p) {
            total += static_cast<float>(x[p * sum.size() + i]);
            largest[i] = std::max(largest[i], x[p * sum.size() + i]);
          }
          sum[i] = static_cast<double>(total);
        }
        const auto y = run_kernel({Array::zeros(type, n), Array::zeros(type, n), parts},
                                  [&](kernels::Context& c, Vec<Array>& out) {
                                    e.sum_parts(c, parts, count, out[0].out(), n);
                                    e.max_parts(c, parts, count, out[1].out(), n);
                                    e.sum_parts(c, out[2], count, out[2].out(), n);
                                  });
        CHECK(y[0].bytes() == Array(type, sum).bytes());
        CHECK(y[1].bytes() == Array(type, largest).bytes());
        const auto first = y[2].rounded();
        CHECK(Vec<double>(first.begin(), first.begin() + n) == Array(type, sum).rounded());
      }
}
