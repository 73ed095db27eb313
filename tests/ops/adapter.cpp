// Adapters' operations against scalar references: LoRA on all or on some columns, DoRA's magnitudes, dropout
// of a sharded input.
#include "ops/adapter.hpp"

#include <cmath>

#include "kernels/common/dropout.hpp"
#include "ops/linear.hpp"
#include "support/sanitized.hpp"
#include "tests/ops/op_check.hpp"

namespace capstan::test {
namespace {

double real_part(double v) {
  return v;
}
double real_part(const Complex& v) {
  return v.real();
}

// y[rows, out] = x[rows, in] w[out, in]^T
template <class S>
Vec<S> product(const Vec<S>& x, const Vec<S>& w, size_t rows, size_t in, size_t out) {
  Vec<S> y(rows * out);
  for (size_t r = 0; r < rows; ++r)
    for (size_t j = 0; j < out; ++j)
      for (size_t i = 0; i < in; ++i) y[r * out + j] += x[r * in + i] * w[j * in + i];
  return y;
}

}  // namespace

TEST_CASE("low_rank_add: all columns, and segments of columns in groups") {
  struct Case {
    int64_t rows, in, columns, rank;
    ops::ColumnSegments segments;
  };
  const std::vector<Case> cases = {{5, 7, 9, 3, {}},
                                   {3, 4, 10, 1, {1, 5, 5}},
                                   {6, 5, 24, 2, {3, 0, 4}},   // queries of three groups
                                   {6, 5, 24, 4, {3, 6, 2}}};  // values of three groups
  for (const DType type : {DType::f32, DType::bf16, DType::f16})
    for (const Case& k : cases) {
      const auto [groups, begin, count] =
          k.segments.count ? k.segments : ops::ColumnSegments{1, 0, k.columns};
      const float scale = 0.5f;
      const OpCase c{
          .inputs = {random_value({k.rows, k.columns}, 1), random_value({k.rows, k.in}, 2)},
          .parameters = {random_value({k.rank, k.in}, 3), random_value({groups * count, k.rank}, 4)},
          .type = type,
          .tolerance = type == DType::f32    ? 1e-5
                       : type == DType::bf16 ? 2e-2
                                             : 2.5e-3};
      check_op(
          "low_rank_add", c,
          [&](Tape& t, Vars x, const Handles& h) {
            const Var low = ops::linear(t, x[1], *h[0]);
            return Vars{ops::low_rank_add(t, std::move(x[0]), low, *h[1], scale, k.segments)};
          },
          [&, groups = groups, begin = begin, count = count](const auto& x, const auto& h) {
            const auto rows = static_cast<size_t>(k.rows), rank = static_cast<size_t>(k.rank);
            const auto low = product(x[1], h[0], rows, static_cast<size_t>(k.in), rank);
            const auto update = product(low, h[1], rows, rank, static_cast<size_t>(groups * count));
            auto y = x[0];
            const int64_t width = k.columns / groups;
            for (int64_t r = 0; r < k.rows; ++r)
              for (int64_t g = 0; g < groups; ++g)
                for (int64_t j = 0; j < count; ++j)
                  y[static_cast<size_t>(r * k.columns + g * width + begin + j)] +=
                      update[static_cast<size_t>((r * groups + g) * count + j)] * static_cast<double>(scale);
            using L = std::decay_t<decltype(x)>;
            return L{y};
          });
    }
}

TEST_CASE("magnitude: rows of W + s B A scaled to given lengths, which count as constants") {
  struct Case {
    int64_t rows, in, out, rank;
    ops::ColumnSegments segments;
  };
  const std::vector<Case> cases = {{5, 7, 9, 3, {}},
                                   {70, 3, 300, 1, {}},
                                   {3, 4, 10, 1, {1, 5, 5}},
                                   {6, 5, 24, 2, {3, 0, 4}},   // queries of three groups
                                   {6, 5, 24, 4, {3, 6, 2}}};  // values of three groups
  for (const DType type : {DType::f32, DType::bf16, DType::f16})
    for (const Case& k : cases) {
      if (test::kSanitized && k.rows > 60 && type != DType::f32) continue;
      const auto [rows, in, out, rank, segments] = k;
      const auto [groups, begin, count] = segments.count ? segments : ops::ColumnSegments{1, 0, out};
      const float scale = 2;
      OpCase c{.inputs = {random_value({rows, in}, 1)},
               .parameters = {random_value({out, in}, 2), random_value({rank, in}, 3),
                              random_value({groups * count, rank}, 4), random_value({groups * count}, 5)},
               .type = type,
               .tolerance = type == DType::f32    ? 2e-5
                            : type == DType::bf16 ? 3e-2
                                                  : 4e-3};
      check_op(
          "magnitude", c,
          [&](Tape& t, Vars x, const Handles& h) {
            Var u = ops::linear(t, x[0], *h[0]);
            u = ops::low_rank_add(t, std::move(u), ops::linear(t, x[0], *h[1]), *h[2], scale, k.segments);
            return Vars{
                ops::magnitude(t, std::move(u), *h[0], *h[1], *h[2], *h[3], scale, nullptr, k.segments)};
          },
          [&, groups = groups, begin = begin, count = count](const auto& x, const auto& h) {
            const auto n = static_cast<size_t>(k.rows), d = static_cast<size_t>(k.in),
                       o = static_cast<size_t>(k.out), low = static_cast<size_t>(k.rank),
                       of_group = static_cast<size_t>(count),
                       changed = static_cast<size_t>(groups) * of_group,
                       width = o / static_cast<size_t>(groups);
            auto y = product(x[0], h[0], n, d, o);
            const auto update = product(product(x[0], h[1], n, d, low), h[2], n, low, changed);
            for (size_t row = 0; row < changed; ++row) {
              const size_t j = row / of_group * width + static_cast<size_t>(begin) + row % of_group;
              double length = 0;
              for (size_t i = 0; i < d; ++i) {
                double w = real_part(h[0][j * d + i]);
                for (size_t l = 0; l < low; ++l)
                  w += static_cast<double>(scale) * real_part(h[2][row * low + l]) *
                       real_part(h[1][l * d + i]);
                length += w * w;
              }
              for (size_t r = 0; r < n; ++r)
                y[r * o + j] = (y[r * o + j] + update[r * changed + row] * static_cast<double>(scale)) *
                               h[3][row] / std::sqrt(length);
            }
            using L = std::decay_t<decltype(x)>;
            return L{y};
          });
    }
}

TEST_CASE("dropout_columns: the mask is that of the global columns") {
  const Vec<int64_t> ids = testing::dropout_rows(4);
  const PhiloxKey key = philox_key(3, purpose::adapter_dropout, 7);
  for (const int64_t first : {int64_t{0}, int64_t{12}, int64_t{5}}) {
    CAPTURE(first);
    const float p = 0.4f;
    check_op(
        "dropout_columns", {.inputs = {random_value({4, 37}, 1)}},
        [&](Tape& t, Vars x, const Handles&) {
          const ops::Dropout dropout{p, key, Tensor::from_host<int64_t>(t.device(), {4}, ids)};
          return Vars{ops::dropout_columns(t, std::move(x[0]), dropout, first)};
        },
        [&](const auto& x, const auto&) {
          auto y = x[0];
          for (size_t i = 0; i < y.size(); ++i)
            y[i] *= kernels::keep_hidden(key, ids[i / 37], first + static_cast<int64_t>(i % 37),
                                         kernels::dropout_threshold(p))
                        ? 1 / (1 - static_cast<double>(p))
                        : 0.0;
          using L = std::decay_t<decltype(x)>;
          return L{y};
        });
  }
}

}  // namespace capstan::test
