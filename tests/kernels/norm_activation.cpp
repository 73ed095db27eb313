// Norms and activations, against the scalar references.
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using reference::Complex;

TEST_CASE("norms and their gradients") {
  const auto& norm = *table().norm;
  for (bool rms : {false, true})
    for (DType type : kTypes)
      for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1},
                                      {1, 257},
                                      {3, 5},
                                      {17, 37},
                                      {70, 16},
                                      {3, 768},
                                      {3, 2320},
                                      {2, 3001}})
        for (double offset : {0.0, 1.0}) {
          INFO("rms=", rms, " ", text(type), " rows=", rows, " cols=", cols, " offset=", offset);
          const double eps = 1e-5;
          const kernels::NormRows shape{rows, cols, 1, 0, cols};
          const Array x(type, random_values(rows * cols, 1, 2.0)), gamma(type, random_values(cols, 2)),
              beta(type, random_values(cols, 3)), dy(type, random_values(rows * cols, 4));
          const auto zeros = Array::zeros(type, rows * cols);
          const auto stats = Array::zeros(DType::f32, rows);
          const auto y = run_kernel({zeros, stats, stats}, [&](kernels::Context& c, Vec<Array>& out) {
            norm.forward(c, rms, shape, x, {}, {}, gamma, static_cast<float>(offset),
                         rms ? kernels::In{} : kernels::In(beta), static_cast<float>(eps), out[0].out(),
                         rms ? nullptr : out[1].f32(), out[2].f32(), {});
          });
          auto formula = [&](const auto& xs, const auto& gs, const auto& bs) {
            return reference::norm(rms, xs, gs, offset, rms ? std::decay_t<decltype(bs)>{} : bs, eps, cols);
          };
          const auto xd = x.rounded(), gd = gamma.rounded(), bd = beta.rounded(), wd = dy.rounded();
          CHECK(error(y[0].rounded(), formula(xd, gd, bd)) < tolerance(type));

          // In place: x and y the same array.
          const auto in_place = run_kernel({x, stats, stats}, [&](kernels::Context& c, Vec<Array>& out) {
            norm.forward(c, rms, shape, out[0], {}, {}, gamma, static_cast<float>(offset),
                         rms ? kernels::In{} : kernels::In(beta), static_cast<float>(eps), out[0].out(),
                         rms ? nullptr : out[1].f32(), out[2].f32(), {});
          });
          CHECK(in_place[0].bytes() == y[0].bytes());

          if (rows * cols > 1000) continue;
          const auto xc = reference::convert<Complex>(xd), gc = reference::convert<Complex>(gd),
                     bc = reference::convert<Complex>(bd);
          const auto dx = reference::complex_step(
              xd, [&](const auto& z) { return reference::contract(formula(z, gc, bc), wd); });
          const auto dg = reference::complex_step(
              gd, [&](const auto& z) { return reference::contract(formula(xc, z, bc), wd); });
          const auto db = reference::complex_step(
              bd, [&](const auto& z) { return reference::contract(formula(xc, gc, z), wd); });
          for (bool accumulate : {false, true}) {
            const Array start(type, random_values(rows * cols, 7)),
                dgamma(DType::f32, random_values(cols, 8)), dbeta(DType::f32, random_values(cols, 9));
            const auto g = run_kernel({start, dgamma, dbeta}, [&](kernels::Context& c, Vec<Array>& out) {
              Array mean = y[1], rstd = y[2];
              norm.backward(c, rms, shape, dy, x, gamma, static_cast<float>(offset),
                            rms ? nullptr : mean.f32(), rstd.f32(), out[0].out(), accumulate, out[1].f32(),
                            rms ? nullptr : out[2].f32());
            });
            Vec<double> ex = dx, eg = dgamma.rounded(), eb = dbeta.rounded();
            for (size_t i = 0; i < ex.size(); ++i) ex[i] += accumulate ? start.rounded()[i] : 0;
            for (size_t i = 0; i < eg.size(); ++i) eg[i] += dg[i], eb[i] += rms ? 0 : db[i];
            // A LayerNorm over one column has no gradient at all, and what rounding leaves of it is not
            // compared.
            if (cols > 1) CHECK(error(g[0].rounded(), ex) < tolerance(type) * (type == DType::f32 ? 3 : 2));
            CHECK(error(g[1].rounded(), eg) < 1e-5);
            CHECK(error(g[2].rounded(), eb) < 1e-5);
          }
          // dx in dy's own storage.
          const auto fresh = run_kernel({zeros}, [&](kernels::Context& c, Vec<Array>& out) {
            Array mean = y[1], rstd = y[2];
            norm.backward(c, rms, shape, dy, x, gamma, static_cast<float>(offset), mean.f32(), rstd.f32(),
                          out[0].out(), false, nullptr, nullptr);
          });
          const auto reused = run_kernel({dy}, [&](kernels::Context& c, Vec<Array>& out) {
            Array mean = y[1], rstd = y[2];
            norm.backward(c, rms, shape, out[0], x, gamma, static_cast<float>(offset), mean.f32(), rstd.f32(),
                          out[0].out(), false, nullptr, nullptr);
          });
          CHECK(fresh[0].bytes() == reused[0].bytes());
        }
}

TEST_CASE("gradients of norms over many rows, and over wide ones") {
  const auto& norm = *table().norm;
  for (bool rms : {false, true})
    for (DType type : kTypes)
      for (const auto [rows, cols] :
           {std::array<int64_t, 2>{701, 19}, {261, 264}, {3, 5003}, {3, 8192}, {3, 8201}}) {
        INFO("rms=", rms, " ", text(type), " rows=", rows, " cols=", cols);
        const kernels::NormRows shape{rows, cols, 1, 0, cols};
        const Array x(type, random_values(rows * cols, 1)), dy(type, random_values(rows * cols, 2)),
            gamma(type, random_values(cols, 3));
        Vec<double> means, rstds, dx, dgamma(static_cast<size_t>(cols)), dbeta = dgamma;
        const auto xs = x.rounded(), ds = dy.rounded(), gs = gamma.rounded();
        const double n = static_cast<double>(cols);
        for (size_t at = 0; at < xs.size(); at += dgamma.size()) {
          double mean = 0, variance = 0, sum_h = 0, sum_hx = 0;
          for (size_t i = 0; i < dgamma.size(); ++i) mean += rms ? 0 : xs[at + i] / n;
          for (size_t i = 0; i < dgamma.size(); ++i) variance += std::pow(xs[at + i] - mean, 2) / n;
          const double rstd = 1 / std::sqrt(variance + 1e-5);
          const auto hat = [&](size_t i) { return (xs[at + i] - mean) * rstd; };
          for (size_t i = 0; i < dgamma.size(); ++i) {
            sum_h += rms ? 0 : ds[at + i] * gs[i];
            sum_hx += ds[at + i] * gs[i] * hat(i);
            dgamma[i] += ds[at + i] * hat(i);
            dbeta[i] += ds[at + i];
          }
          for (size_t i = 0; i < dgamma.size(); ++i)
            dx.push_back(rstd * (ds[at + i] * gs[i] - sum_h / n - hat(i) * sum_hx / n));
          means.push_back(mean), rstds.push_back(rstd);
        }
        const Array mean(DType::f32, means), rstd(DType::f32, rstds);
        const auto zeros = Array::zeros(DType::f32, cols);
        const auto y = run_kernel(
            {Array::zeros(type, rows * cols, NAN), zeros, zeros}, [&](kernels::Context& c, Vec<Array>& out) {
              Array m = mean, r = rstd;
              norm.backward(c, rms, shape, dy, x, gamma, 0, m.f32(), r.f32(), out[0].out(), false,
                            out[1].f32(), rms ? nullptr : out[2].f32());
            });
        CHECK(error(y[0].rounded(), dx) < tolerance(type));
        CHECK(error(y[1].rounded(), dgamma) < 1e-5);
        if (!rms) CHECK(error(y[2].rounded(), dbeta) < 1e-5);
      }
}

TEST_CASE("norm with a residual: the sum is written, normalized and may lie in x") {
  const auto& norm = *table().norm;
  for (DType type : kTypes)
    for (const int64_t cols : {37, 40}) {
      const int64_t rows = 19;
      const kernels::NormRows shape{rows, cols, 1, 0, cols};
      const Array x(type, random_values(rows * cols, 1)), residual(type, random_values(rows * cols, 2)),
          gamma(type, random_values(cols, 3));
      const auto zeros = Array::zeros(type, rows * cols);
      const auto stats = Array::zeros(DType::f32, rows);
      const auto y = run_kernel({x, zeros, stats, stats}, [&](kernels::Context& c, Vec<Array>& out) {
        norm.forward(c, false, shape, out[0], residual, out[0].out(), gamma, 0, {}, 1e-5f, out[1].out(),
                     out[2].f32(), out[3].f32(), {});
      });
      Vec<double> sum = x.rounded();
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += residual.rounded()[i];
      CHECK(error(y[0].rounded(), sum) < tolerance(type));
      CHECK(error(y[1].rounded(), reference::norm<double>(false, y[0].rounded(), gamma.rounded(), 0, {}, 1e-5,
                                                          cols)) < tolerance(type));
    }
}

TEST_CASE("norm of heads inside packed rows leaves the rest alone") {
  const auto& norm = *table().norm;
  for (bool rms : {false, true}) {
    const int64_t tokens = 11, inner = 3, cols = 20, inner_stride = 24, outer = 90;
    const kernels::NormRows shape{tokens * inner, cols, inner, inner_stride, outer};
    const Array x(DType::f32, random_values(tokens * outer, 1)), gamma(DType::f32, random_values(cols, 2)),
        dy(DType::f32, random_values(tokens * outer, 3));
    const auto stats = Array::zeros(DType::f32, shape.rows);
    const auto y = run_kernel({x, stats, stats}, [&](kernels::Context& c, Vec<Array>& out) {
      norm.forward(c, rms, shape, out[0], {}, {}, gamma, 0, {}, 1e-6f, out[0].out(), out[1].f32(),
                   out[2].f32(), {});
    });
    const auto g =
        run_kernel({dy, Array::zeros(DType::f32, cols)}, [&](kernels::Context& c, Vec<Array>& out) {
          Array mean = y[1], rstd = y[2];
          norm.backward(c, rms, shape, out[0], x, gamma, 0, mean.f32(), rstd.f32(), out[0].out(), false,
                        out[1].f32(), nullptr);
        });
    Vec<double> expected = x.rounded(), gradient = dy.rounded(), dgamma(static_cast<size_t>(cols));
    const auto xs = x.rounded(), ws = dy.rounded(), gs = gamma.rounded();
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int64_t at = r / inner * outer + r % inner * inner_stride;
      const Vec<double> row(xs.begin() + at, xs.begin() + at + cols),
          w(ws.begin() + at, ws.begin() + at + cols);
      const auto value = reference::norm<double>(rms, row, gs, 0, {}, 1e-6, cols);
      const auto dx = reference::complex_step(row, [&](const auto& z) {
        return reference::contract(
            reference::norm(rms, z, reference::convert<Complex>(gs), 0, {}, 1e-6, cols), w);
      });
      const auto dg = reference::complex_step(gs, [&](const auto& z) {
        return reference::contract(
            reference::norm(rms, reference::convert<Complex>(row), z, 0, {}, 1e-6, cols), w);
      });
      std::copy(value.begin(), value.end(), expected.begin() + at);
      std::copy(dx.begin(), dx.end(), gradient.begin() + at);
      for (size_t i = 0; i < dgamma.size(); ++i) dgamma[i] += dg[i];
    }
    CHECK(error(y[0].rounded(), expected) < 1e-5);
    CHECK(error(g[0].rounded(), gradient) < 1e-5);
    CHECK(error(g[1].rounded(), dgamma) < 1e-5);
  }
}

TEST_CASE("activations and their gradients, with and without bias and gate") {
  using Kind = kernels::ActivationKind;
  const auto& activation = *table().activation;
  for (Kind kind : {Kind::gelu, Kind::gelu_tanh, Kind::silu, Kind::relu, Kind::squared_relu})
    for (bool gated : {false, true})
      for (bool with_bias : {false, true})
        for (DType type : kTypes)
          for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {3, 5}, {17, 37}, {2, 257}}) {
            INFO("kind=", static_cast<int>(kind), " gated=", gated, " bias=", with_bias, " ", text(type), " ",
                 rows, "x", cols);
            const int64_t width = gated ? 2 * cols : cols;
            const Array x(type, random_values(rows * width, 11, 5.0)),
                dy(type, random_values(rows * cols, 12)),
                bias = with_bias ? Array(type, random_values(width, 13)) : Array();
            const auto y =
                run_kernel({Array::zeros(type, rows * cols)}, [&](kernels::Context& c, Vec<Array>& out) {
                  activation.forward(c, kind, gated, x, bias, out[0].out(), rows, cols, {});
                });
            const auto xd = x.rounded(), bd = bias.rounded();
            CHECK(error(y[0].rounded(), reference::activation(kind, gated, xd, bd, rows, cols)) <
                  tolerance(type));
            const auto g = run_kernel({x}, [&](kernels::Context& c, Vec<Array>& out) {
              activation.backward(c, kind, gated, dy, out[0], bias, out[0].out(), rows, cols);
            });
            // Row by row: the function of a row does not look at another.
            Vec<double> expected;
            for (int64_t r = 0; r < rows; ++r) {
              const Vec<double> row(xd.begin() + r * width, xd.begin() + (r + 1) * width);
              const auto w = dy.rounded();
              const Vec<double> weight(w.begin() + r * cols, w.begin() + (r + 1) * cols);
              const auto dx = reference::complex_step(row, [&](const auto& z) {
                return reference::contract(
                    reference::activation(kind, gated, z, reference::convert<Complex>(bd), int64_t{1}, cols),
                    weight);
              });
              expected.insert(expected.end(), dx.begin(), dx.end());
            }
            CHECK(error(g[0].rounded(), expected) < tolerance(type));
          }
}

TEST_CASE("activations with slope and limits: weights of rows, rows that are not in use") {
  using Kind = kernels::ActivationKind;
  const auto& activation = *table().activation;
  const auto of = [](const kernels::ActivationFunction& e, const auto& x, const auto& weights, int64_t cols) {
    using S = typename std::decay_t<decltype(x)>::value_type;
    Vec<S> y;
    const auto n = static_cast<size_t>(cols), width = e.gated ? 2 * n : n;
    // gpt-oss: x sigmoid(1.702 x).
    const auto f = [&](S v) {
      if (e.slope != 1) return v / (1.0 + std::exp(-double{e.slope} * v));
      return reference::activate(e.kind, v);
    };
    const auto clamped = [&](S v, bool below) {
      if (e.limit > 0 && reference::real(v) > double{e.limit}) return S{e.limit};
      return e.limit > 0 && below && reference::real(v) < -double{e.limit} ? S{-e.limit} : v;
    };
    for (size_t r = 0; r * width < x.size(); ++r)
      for (size_t c = 0; c < n; ++c) {
        const S first = x[r * width + c];
        S v = e.gated ? f(clamped(first, false)) * (clamped(x[r * width + n + c], true) + double{e.up_offset})
                      : f(first);
        y.push_back(weights.empty() ? v : v * weights[r]);
      }
    return y;
  };
  for (const kernels::ActivationFunction& e :
       {kernels::ActivationFunction{Kind::silu},
        {.kind = Kind::silu, .slope = 1.702f, .limit = 1.5f, .up_offset = 1},
        {Kind::gelu_tanh},
        {.kind = Kind::squared_relu, .gated = false},
        {.kind = Kind::gelu, .gated = false},
        {.kind = Kind::relu, .limit = 2, .up_offset = 0.5f}})
    for (const DType type : kTypes)
      for (const bool weighted : {false, true})
        for (const int64_t cols : {1, 37, 136}) {
          INFO("kind=", static_cast<int>(e.kind), " gated=", e.gated, " ", text(type), " ", cols);
          // Without weights all rows are in use.
          const int64_t rows = 7, used = weighted ? 5 : rows, width = e.gated ? 2 * cols : cols;
          const int64_t* number = weighted ? &used : nullptr;
          const Array x(type, random_values(rows * width, 51, 4.0)), dy(type, random_values(rows * cols, 52));
          Array weights(DType::f32, random_values(weighted ? rows : 0, 53));
          const auto y = run_kernel(
              {Array::zeros(type, rows * cols, 96), x, Array::zeros(DType::f32, rows, 96)},
              [&](kernels::Context& c, Vec<Array>& out) {
                activation.expert_forward(c, e, out[1], weights.f32(), number, out[0].out(), rows, cols);
                activation.expert_backward(c, e, dy, out[1], weights.f32(), number, out[1].out(),
                                           weighted ? out[2].f32() : nullptr, rows, cols);
              });
          const auto first = [&](Vec<double> values, int64_t n) {
            values.resize(static_cast<size_t>(n));
            return values;
          };
          const auto xs = first(x.rounded(), used * width),
                     ws = first(weights.rounded(), weighted ? used : 0), d = first(dy.rounded(), used * cols);
          CHECK(error(first(y[0].rounded(), used * cols), of(e, xs, ws, cols)) < tolerance(type));
          for (int64_t i = used * cols; i < rows * cols; ++i)
            CHECK(y[0].rounded()[static_cast<size_t>(i)] == 96);
          // Row by row: the function of a row does not look at another.
          Vec<double> dx;
          for (int64_t r = 0; r < used; ++r) {
            const auto part = [&](const Vec<double>& all, int64_t n) {
              return Vec<double>(all.begin() + r * n, all.begin() + (r + 1) * n);
            };
            const auto weight = weighted ? Vec<Complex>{ws[static_cast<size_t>(r)]} : Vec<Complex>{};
            const auto own = reference::complex_step(part(xs, width), [&](const auto& z) {
              return reference::contract(of(e, z, weight, cols), part(d, cols));
            });
            dx.insert(dx.end(), own.begin(), own.end());
          }
          CHECK(error(first(y[1].rounded(), used * width), dx) < tolerance(type));
          if (!weighted) continue;
          const auto dw = reference::complex_step(ws, [&](const auto& z) {
            return reference::contract(of(e, reference::convert<Complex>(xs), z, cols), d);
          });
          CHECK(error(first(y[2].rounded(), used), dw) < tolerance(type));
          CHECK(y[2].rounded()[static_cast<size_t>(used)] == 96);
        }
}

TEST_CASE("activations of extreme, infinite and undefined inputs") {
  using Kind = kernels::ActivationKind;
  const auto& activation = *table().activation;
  const Array x(DType::f32, {-1e30, -200, -20, -6, 0, 6, 20, 200, 1e30, NAN});
  for (Kind kind : {Kind::gelu, Kind::gelu_tanh, Kind::silu}) {
    const auto y = run_kernel({Array::zeros(DType::f32, 10)},
                              [&](kernels::Context& c, Vec<Array>& out) {
                                activation.forward(c, kind, false, x, {}, out[0].out(), 1, 10, {});
                              })[0]
                       .rounded();
    CHECK(std::abs(y[0]) < 1e-6);
    CHECK(std::abs(y[1]) < 1e-30);
    CHECK(y[4] == 0);
    CHECK(y[7] == 200);
    CHECK(y[8] == static_cast<float>(1e30));
    CHECK(std::isnan(y[9]));
    // The lower tail is right relative to itself.
    if (kind == Kind::gelu)
      CHECK(y[3] == doctest::Approx(-6 * 0.5 * std::erfc(6 / std::sqrt(2.0))).epsilon(1e-5));
  }
}
