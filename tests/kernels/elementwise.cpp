#include <cstring>

#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;

namespace {
const kernels::Elementwise& elementwise() {
  return *kernels::cpu_table().elementwise;
}
const Vec<int64_t> kSizes{1, 7, 37, 1000, 70001};
}  // namespace

TEST_CASE("fill, cast, add, scale, axpy, strided copies") {
  const auto& e = elementwise();
  for (int64_t n : kSizes) {
    const Array wide(DType::f32, random_values(n, 1));
    const Array narrow(DType::bf16, random_values(n, 2));
    for (DType to : kTypes)
      for (const Array* from : {&wide, &narrow}) {
        const auto y = run_kernel({Array::zeros(to, n)}, [&](kernels::Context& c, Vec<Array>& out) {
          e.cast(c, *from, out[0].out(), n);
        });
        CHECK(y[0].bytes() == Array(to, from->rounded()).bytes());  // the cast is bf16's own rounding
      }
    for (const Array* x : {&wide, &narrow}) {
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

TEST_CASE("embedding with positions and shards, and its gradient") {
  const auto& embedding = *kernels::cpu_table().embedding;
  for (DType type : kTypes)
    for (int64_t cols : {1, 5, 37, 257}) {
      const int64_t rows = 61, vocabulary = 11, first = 3, here = 6;
      const auto ids = random_ints(rows, 1, vocabulary), positions = random_ints(rows, 2, 20);
      const Array table(type, random_values(here * cols, 3)), place(type, random_values(20 * cols, 4)),
          dout(type, random_values(rows * cols, 5)), start(DType::f32, random_values(here * cols, 6));
      for (bool with_positions : {false, true}) {
        const auto y =
            run_kernel({Array::zeros(type, rows * cols), start}, [&](kernels::Context& c, Vec<Array>& out) {
              embedding.forward(c, table, ids.data(), with_positions ? kernels::In(place) : kernels::In{},
                                with_positions ? positions.data() : nullptr, out[0].out(), rows, cols, first,
                                here);
              embedding.backward(c, dout, ids.data(), out[1].f32(), rows, cols, first, here);
            });
        Vec<double> expected(static_cast<size_t>(rows * cols)), gradient = start.rounded();
        const auto ts = table.rounded(), ps = place.rounded(), ds = dout.rounded();
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < cols; ++i) {
            const int64_t id = ids[static_cast<size_t>(r)] - first;
            double& value = expected[static_cast<size_t>(r * cols + i)];
            if (id >= 0 && id < here) {
              value = ts[static_cast<size_t>(id * cols + i)];
              gradient[static_cast<size_t>(id * cols + i)] += ds[static_cast<size_t>(r * cols + i)];
            }
            if (with_positions)
              value += ps[static_cast<size_t>(positions[static_cast<size_t>(r)] * cols + i)];
          }
        CHECK(error(y[0].rounded(), expected) < tolerance(type));
        CHECK(error(y[1].rounded(), gradient) < 1e-5);
      }
    }
}

TEST_CASE("cross-entropy in chunks, full and split over vocabulary shards") {
  const auto& ce = *kernels::cpu_table().cross_entropy;
  for (DType type : kTypes)
    for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {3, 5}, {17, 37}, {5, 257}, {40, 1000}}) {
      INFO(rows, "x", cols, " ", text(type));
      const int64_t stride = cols + 7;
      const Array logits(type, random_values(rows * stride, 1, 8));
      const auto labels = random_ints(rows, 2, cols);
      Array weight(DType::f32, random_values(rows, 3));
      const auto none = Array::zeros(DType::f32, rows);
      const auto y = run_kernel({none, none, none, none, logits}, [&](kernels::Context& c, Vec<Array>& o) {
        ce.row_max(c, logits, rows, cols, stride, o[0].f32());
        ce.row_sums(c, logits, labels.data(), o[0].f32(), rows, cols, stride, 0, o[1].f32(), o[2].f32());
        ce.loss(c, o[0].f32(), o[1].f32(), o[2].f32(), rows, o[3].f32());
        ce.backward(c, o[4], labels.data(), o[0].f32(), o[1].f32(), weight.f32(), rows, cols, stride, 0, 0,
                    o[4].out(), stride);
      });
      const auto values = logits.rounded();
      CHECK(error(y[3].rounded(), reference::cross_entropy(values, labels, cols, stride)) < 1e-5);
      Vec<double> gradient(values.size());
      for (int64_t r = 0; r < rows; ++r) {
        const double loss =
            reference::cross_entropy<double>(values, labels, cols, stride)[static_cast<size_t>(r)];
        const double lse = loss + values[static_cast<size_t>(r * stride + labels[static_cast<size_t>(r)])];
        for (int64_t i = 0; i < cols; ++i)
          gradient[static_cast<size_t>(r * stride + i)] =
              (std::exp(values[static_cast<size_t>(r * stride + i)] - lse) -
               (i == labels[static_cast<size_t>(r)] ? 1.0 : 0.0)) *
              weight.rounded()[static_cast<size_t>(r)];
      }
      CHECK(error(y[4].rounded(), gradient) < tolerance(type));  // and zeros in the padding

      // In one go: in place, and with a bf16 gradient in the first half of each row of logits.
      const auto full = run_kernel({none, logits}, [&](kernels::Context& c, Vec<Array>& o) {
        ce.full(c, o[1].out(), labels.data(), weight.f32(), rows, cols, stride, 0, o[0].f32(), o[1].out(),
                stride);
      });
      CHECK(full[0].rounded() == y[3].rounded());
      CHECK(full[1].rounded() == y[4].rounded());
      if (type == DType::f32) {
        const auto halves =
            run_kernel({none, logits, Array::zeros(DType::bf16, rows * stride)},
                       [&](kernels::Context& c, Vec<Array>& o) {
                         const kernels::Out narrow{o[1].out().data, DType::bf16};
                         ce.full(c, o[1].out(), labels.data(), weight.f32(), rows, cols, stride, 0,
                                 o[0].f32(), narrow, 2 * stride);
                         for (int64_t r = 0; r < rows; ++r)
                           std::memcpy(o[2].out().as<bf16>() + r * stride, narrow.as<bf16>() + 2 * r * stride,
                                       static_cast<size_t>(stride) * sizeof(bf16));
                       });
        CHECK(halves[0].rounded() == y[3].rounded());
        CHECK(halves[2].rounded() == Array(DType::bf16, y[4].rounded()).rounded());
      }

      if (cols < 5) continue;
      const int64_t half = cols / 2;  // two shards: maxima and sums are combined as ranks would
      const auto shards =
          run_kernel({none, none, none, none, none, none}, [&](kernels::Context& c, Vec<Array>& o) {
            const kernels::In right{static_cast<const char*>(kernels::In(logits).data) + half * size_of(type),
                                    type};
            ce.row_max(c, logits, rows, half, stride, o[0].f32());
            ce.row_max(c, right, rows, cols - half, stride, o[1].f32());
            for (int64_t r = 0; r < rows; ++r) o[0].f32()[r] = std::max(o[0].f32()[r], o[1].f32()[r]);
            ce.row_sums(c, logits, labels.data(), o[0].f32(), rows, half, stride, 0, o[1].f32(), o[2].f32());
            ce.row_sums(c, right, labels.data(), o[0].f32(), rows, cols - half, stride, half, o[3].f32(),
                        o[4].f32());
            for (int64_t r = 0; r < rows; ++r) o[1].f32()[r] += o[3].f32()[r], o[2].f32()[r] += o[4].f32()[r];
            ce.loss(c, o[0].f32(), o[1].f32(), o[2].f32(), rows, o[5].f32());
          });
      CHECK(error(shards[5].rounded(), reference::cross_entropy(values, labels, cols, stride)) < 1e-5);
    }
}

TEST_CASE("capped logits: values, and the gradient for what was capped") {
  const auto& ce = *kernels::cpu_table().cross_entropy;
  for (const float cap : {3.0f, 30.0f})
    for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {3, 5}, {17, 37}, {5, 257}}) {
      INFO(rows, "x", cols, " cap=", cap);
      const int64_t stride = cols + 7;
      const Array logits(DType::f32, random_values(rows * stride, 1, 8));
      const auto labels = random_ints(rows, 2, cols);
      Array weight(DType::f32, random_values(rows, 3));
      const auto none = Array::zeros(DType::f32, rows);
      const auto y = run_kernel(
          {none, none, none, none, logits, Array::zeros(DType::f32, rows * stride, NAN)},
          [&](kernels::Context& c, Vec<Array>& o) {
            ce.softcap(c, o[4].out(), cap, rows * stride);
            ce.row_max(c, o[4], rows, cols, stride, o[0].f32());
            ce.row_sums(c, o[4], labels.data(), o[0].f32(), rows, cols, stride, 0, o[1].f32(), o[2].f32());
            ce.loss(c, o[0].f32(), o[1].f32(), o[2].f32(), rows, o[3].f32());
            ce.backward(c, o[4], labels.data(), o[0].f32(), o[1].f32(), weight.f32(), rows, cols, stride, 0,
                        cap, o[5].out(), stride);
          });
      const auto full = run_kernel({none, logits}, [&](kernels::Context& c, Vec<Array>& o) {
        ce.full(c, o[1].out(), labels.data(), weight.f32(), rows, cols, stride, cap, o[0].f32(), o[1].out(),
                stride);
      });
      CHECK(full[0].rounded() == y[3].rounded());
      CHECK(full[1].rounded() == y[5].rounded());
      const auto losses = [&](const auto& x) {
        auto z = x;
        for (auto& v : z) v = reference::capped(v, static_cast<double>(cap));
        return reference::cross_entropy(z, labels, cols, stride);
      };
      CHECK(error(y[3].rounded(), losses(logits.rounded())) < 1e-5);
      const auto gradient = reference::complex_step(
          logits.rounded(), [&](const auto& z) { return reference::contract(losses(z), weight.rounded()); });
      CHECK(error(y[5].rounded(), gradient) < 1e-5);
    }
}

TEST_CASE("an undefined logit makes the loss undefined") {
  const auto& ce = *kernels::cpu_table().cross_entropy;
  for (size_t bad : {size_t{0}, size_t{9}, size_t{36}}) {
    Vec<double> values = random_values(37, 1);
    values[bad] = NAN;
    const Array logits(DType::f32, values);
    const int32_t label = 20;
    const auto none = Array::zeros(DType::f32, 1);
    const auto y = run_kernel({none, none, none, none}, [&](kernels::Context& c, Vec<Array>& o) {
      ce.row_max(c, logits, 1, 37, 37, o[0].f32());
      ce.row_sums(c, logits, &label, o[0].f32(), 1, 37, 37, 0, o[1].f32(), o[2].f32());
      ce.loss(c, o[0].f32(), o[1].f32(), o[2].f32(), 1, o[3].f32());
    });
    CHECK(std::isnan(y[3].rounded()[0]));
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
