// Norms across all heads of packed rows, against the scalar references.
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using reference::Complex;

namespace {
// The queries of packed rows as a matrix, or the keys.
template <class S>
Vec<S> columns_of(const kernels::QkvLayout& l, const Vec<S>& qkv, bool keys) {
  Vec<S> columns;
  for (size_t row = 0; row < qkv.size(); row += static_cast<size_t>(l.row()))
    for (int64_t g = 0; g < l.groups; ++g) {
      const int64_t first = keys ? l.key(g) : l.query(g * l.heads_per_group),
                    count = keys ? l.head_dim : l.heads_per_group * l.head_dim;
      const auto at = qkv.begin() + static_cast<std::ptrdiff_t>(row) + first;
      columns.insert(columns.end(), at, at + count);
    }
  return columns;
}
}  // namespace

TEST_CASE("norms across heads: values, sums and gradients, many rows and few") {
  const auto& norm = *testing::table().head_norm;
  for (DType type : kTypes)
    for (const auto [rows, groups, per_group, d] :
         {std::array<int64_t, 4>{1, 1, 1, 2}, {3, 2, 3, 5}, {7, 3, 1, 16}, {2000, 2, 2, 5}}) {
      INFO(text(type), " rows=", rows, " groups=", groups, " heads/group=", per_group, " d=", d);
      kernels::HeadNormShape s;
      s.qkv = {groups, per_group, d};
      s.rows = rows;
      s.query_cols = groups * per_group * d;
      s.key_cols = groups * d;
      s.gamma_offset = 0.5f;
      s.eps = 1e-3f;
      const int64_t n = rows * s.qkv.row();
      const Array x(type, random_values(n, 1, 2.0)), dy(type, random_values(n, 2)),
          q_gamma(type, random_values(s.query_cols, 3)), k_gamma(type, random_values(s.key_cols, 4));
      const auto sums = Array::zeros(DType::f32, 2 * rows, NAN), zeros = Array::zeros(type, n, NAN);
      const auto y = run_kernel({sums, zeros}, [&](kernels::Context& c, Vec<Array>& out) {
        norm.squares(c, s, x, out[0].f32());
        norm.forward(c, s, x, out[0].f32(), q_gamma, k_gamma, out[1].out());
      });
      const auto formula = [&](const auto& xs, bool keys, const auto& gamma) {
        using V = std::decay_t<decltype(xs)>;
        return reference::norm(true, columns_of(s.qkv, xs, keys), gamma, 0.5, V{}, s.eps,
                               keys ? s.key_cols : s.query_cols);
      };
      const auto xd = x.rounded(), wd = dy.rounded(), yd = y[1].rounded();
      for (const bool keys : {false, true})
        CHECK(error(columns_of(s.qkv, yd, keys),
                    formula(xd, keys, keys ? k_gamma.rounded() : q_gamma.rounded())) < tolerance(type));
      CHECK(yd[static_cast<size_t>(s.qkv.value(0))] == xd[static_cast<size_t>(s.qkv.value(0))]);

      Array squares = y[0];
      const auto g = run_kernel(
          {sums, dy, Array::zeros(DType::f32, s.query_cols, 1), Array::zeros(DType::f32, s.key_cols, 1)},
          [&](kernels::Context& c, Vec<Array>& out) {
            norm.dots(c, s, dy, x, squares.f32(), q_gamma, k_gamma, out[0].f32());
            norm.backward(c, s, out[1], x, squares.f32(), out[0].f32(), q_gamma, k_gamma, out[1].out(),
                          out[2].f32(), out[3].f32());
          });
      for (const bool keys : {false, true}) {
        const auto gamma = keys ? k_gamma.rounded() : q_gamma.rounded();
        const auto upstream = columns_of(s.qkv, wd, keys);
        auto expected = reference::complex_step(gamma, [&](const auto& z) {
          return reference::contract(formula(reference::convert<Complex>(xd), keys, z), upstream);
        });
        for (double& v : expected) v += 1;
        CHECK(error(g[keys ? 3 : 2].rounded(), expected) < tolerance(DType::f32) * 5);
        if (rows > 10) continue;
        const auto dx = reference::complex_step(xd, [&](const auto& z) {
          return reference::contract(formula(z, keys, reference::convert<Complex>(gamma)), upstream);
        });
        CHECK(error(columns_of(s.qkv, g[1].rounded(), keys), columns_of(s.qkv, dx, keys)) < tolerance(type));
      }
      CHECK(g[1].rounded()[static_cast<size_t>(s.qkv.value(0))] == wd[static_cast<size_t>(s.qkv.value(0))]);

      // Two shares of the heads, and ranks that share keys: sums and gradients add up to those of all heads.
      s.counts_keys = false;
      const auto other = run_kernel({sums, sums, zeros, Array::zeros(DType::f32, s.key_cols)},
                                    [&](kernels::Context& c, Vec<Array>& out) {
                                      norm.squares(c, s, x, out[0].f32());
                                      norm.dots(c, s, dy, x, squares.f32(), q_gamma, k_gamma, out[1].f32());
                                      Array full = g[0];
                                      norm.backward(c, s, dy, x, squares.f32(), full.f32(), q_gamma, k_gamma,
                                                    out[2].out(), nullptr, out[3].f32());
                                    });
      CHECK(other[0].rounded()[0] == y[0].rounded()[0]);
      CHECK(other[0].rounded()[1] == 0);
      CHECK(other[1].rounded() == g[0].rounded());
      CHECK(columns_of(s.qkv, other[2].rounded(), false) == columns_of(s.qkv, g[1].rounded(), false));
    }
}
