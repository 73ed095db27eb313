// RoPE and QK norm against the scalar references: values, and gradients by complex step.
#include "kernels/rope.hpp"

#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::QkNorm;
using kernels::QkvLayout;
using kernels::RopeShape;
using reference::Complex;

namespace {
const kernels::Rope& rope() {
  return *table().rope;
}

struct Tables {
  Vec<int32_t> positions;
  Array cos, sin;
  Tables(int64_t rows, int64_t rotary, uint64_t seed) : positions(random_ints(rows, seed, 50)) {
    Vec<double> c, s;
    for (int64_t p = 0; p < 50; ++p)
      for (int64_t i = 0; i < rotary / 2; ++i) {
        const double angle = static_cast<double>(p) *
                             std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rotary));
        c.push_back(std::cos(angle));
        s.push_back(std::sin(angle));
      }
    cos = Array(DType::f32, c);
    sin = Array(DType::f32, s);
  }
  kernels::RopeAngles angles() { return {cos.f32(), sin.f32(), positions.data()}; }
};

struct RopeCase {
  RopeShape shape;
  QkvLayout layout;
  // q_gamma, q_beta, k_gamma, k_beta; empty: not there.
  Array weights[4];
  RopeCase(int64_t rows, QkvLayout qkv, int64_t rotary, bool interleaved, QkNorm norm, DType type,
           uint64_t seed)
      : layout(qkv) {
    shape.rows = rows;
    shape.groups = qkv.groups;
    shape.heads_per_group = qkv.heads_per_group;
    shape.head_dim = qkv.head_dim;
    shape.rotary_dim = rotary;
    shape.interleaved = interleaved;
    shape.norm = norm;
    shape.gamma_offset = norm == QkNorm::rms ? 1.0f : 0.0f;
    shape.eps = 1e-3f;
    for (uint64_t i = 0; i < 4; ++i)
      if (norm == QkNorm::layer || (norm == QkNorm::rms && i % 2 == 0))
        weights[i] = Array(type, random_values(qkv.head_dim, seed + i));
  }
  kernels::QkNormWeights norm_weights() const { return {weights[0], weights[1], weights[2], weights[3]}; }
  // Of packed QKV and the four weights, [rows * row()].
  template <class S>
  Vec<S> reference(const Vec<S>& qkv, const std::array<Vec<S>, 4>& w, const Tables& tables) const {
    Vec<S> y = qkv;
    const int64_t d = layout.head_dim, per_group = layout.heads_per_group + 2;
    for (int64_t head = 0; head * d < static_cast<int64_t>(y.size()) && shape.norm != QkNorm::none; ++head) {
      const int64_t kind = head % per_group;
      if (kind == per_group - 1) continue;
      const size_t which = kind == per_group - 2 ? 2 : 0;
      const Vec<S> part(y.begin() + head * d, y.begin() + (head + 1) * d);
      const auto n =
          reference::norm(shape.norm == QkNorm::rms, part, w[which], static_cast<double>(shape.gamma_offset),
                          w[which + 1], static_cast<double>(shape.eps), d);
      std::copy(n.begin(), n.end(), y.begin() + head * d);
    }
    return reference::rope(layout, y, tables.cos.rounded(), tables.sin.rounded(), tables.positions,
                           shape.rotary_dim, shape.interleaved, false);
  }
};

// Rotated queries and keys concatenated, as [rows][groups][heads_per_group + 1][head_dim].
Vec<double> queries_and_keys(const Vec<double>& qkv, const QkvLayout& l) {
  Vec<double> result;
  for (size_t at = 0; at < qkv.size(); at += static_cast<size_t>((l.heads_per_group + 2) * l.head_dim)) {
    const auto begin = qkv.begin() + static_cast<int64_t>(at);
    result.insert(result.end(), begin, begin + (l.heads_per_group + 1) * l.head_dim);
  }
  return result;
}
// The strides of that array; keys begin at element heads_per_group * head_dim.
kernels::HeadStrides compact(const QkvLayout& l) {
  return {l.groups * (l.heads_per_group + 1) * l.head_dim, (l.heads_per_group + 1) * l.head_dim, l.head_dim};
}

void check_forward(const RopeCase& c, DType type, uint64_t seed) {
  const QkvLayout& l = c.layout;
  INFO("groups=", l.groups, " heads/group=", l.heads_per_group, " d=", l.head_dim,
       " rotary=", c.shape.rotary_dim, " interleaved=", c.shape.interleaved, " rows=", c.shape.rows,
       " norm=", static_cast<int>(c.shape.norm), " ", text(type));
  Tables tables(c.shape.rows, c.shape.rotary_dim, seed);
  const Array x(type, random_values(c.shape.rows * l.row(), seed + 1));
  std::array<Vec<double>, 4> w;
  for (size_t i = 0; i < 4; ++i) w[i] = c.weights[i].rounded();
  const auto expected = c.reference(x.rounded(), w, tables);
  const auto separate = run_kernel(
      {Array::zeros(type, c.shape.rows * compact(l).token, NAN)},
      [&](kernels::Context& context, Vec<Array>& o) {
        const PackedViews in(x, l);
        rope().forward(context, c.shape, in.q, in.k, tables.angles(), c.norm_weights(),
                       view_of(o[0], compact(l)), view_of(o[0], compact(l), l.heads_per_group * l.head_dim));
      });
  CHECK(error(separate[0].rounded(), queries_and_keys(expected, l)) < tolerance(type));
  const auto in_place = run_kernel({x}, [&](kernels::Context& context, Vec<Array>& o) {
    const PackedViews in(o[0], l);
    rope().forward(context, c.shape, in.q, in.k, tables.angles(), c.norm_weights(), in.q, in.k);
  });
  CHECK(queries_and_keys(in_place[0].rounded(), l) == separate[0].rounded());
  for (int64_t g = 0; g < l.groups; ++g)  // values are not touched
    CHECK(in_place[0].rounded()[static_cast<size_t>(l.value(g))] ==
          x.rounded()[static_cast<size_t>(l.value(g))]);
}

// Also with dx in place of dy, and without the gradients of the weights.
void check_backward(const RopeCase& c, DType type, uint64_t seed) {
  const QkvLayout& l = c.layout;
  INFO("groups=", l.groups, " heads/group=", l.heads_per_group, " d=", l.head_dim,
       " rotary=", c.shape.rotary_dim, " interleaved=", c.shape.interleaved, " rows=", c.shape.rows,
       " norm=", static_cast<int>(c.shape.norm), " ", text(type));
  Tables tables(c.shape.rows, c.shape.rotary_dim, seed);
  const Array x(type, random_values(c.shape.rows * l.row(), seed + 1)),
      dy(type, random_values(c.shape.rows * l.row(), seed + 2));
  std::array<Vec<double>, 4> w;
  std::array<Vec<Complex>, 4> complex_w;
  for (size_t i = 0; i < 4; ++i) {
    w[i] = c.weights[i].rounded();
    complex_w[i] = reference::convert<Complex>(w[i]);
  }
  const auto dx = reference::complex_step(x.rounded(), [&](const Vec<Complex>& z) {
    return reference::contract(c.reference(z, complex_w, tables), dy.rounded());
  });
  const bool norm = c.shape.norm != QkNorm::none;
  const int64_t d = l.head_dim;
  const auto run = [&](bool in_place, bool weight_gradients) {
    Vec<Array> outputs{in_place ? dy : Array::zeros(type, c.shape.rows * l.row(), NAN)};
    for (int i = 0; i < 4; ++i) outputs.push_back(Array::zeros(DType::f32, d, 0.25));
    return run_kernel(outputs, [&](kernels::Context& context, Vec<Array>& o) {
      const PackedViews in(x, l);
      const PackedViews to(o[0], l);
      const kernels::HeadsIn dq = in_place ? kernels::HeadsIn(to.q) : view_of(dy, l.strides()),
                             dk = in_place ? kernels::HeadsIn(to.k) : view_of(dy, l.strides(), l.key(0));
      kernels::QkNormGradients gradients;
      if (norm && weight_gradients) gradients = {o[1].f32(), o[2].f32(), o[3].f32(), o[4].f32()};
      rope().backward(context, c.shape, dq, dk, in.q, in.k, tables.angles(), c.norm_weights(), to.q, to.k,
                      gradients);
    });
  };
  const auto separate = run(false, true), in_place = run(true, false);
  const auto got = queries_and_keys(separate[0].rounded(), l);
  CHECK(error(got, queries_and_keys(dx, l)) < 2 * tolerance(type));
  CHECK(queries_and_keys(in_place[0].rounded(), l) == got);
  for (size_t i = 0; i < 4; ++i) {
    if (w[i].empty()) continue;
    auto expected = reference::complex_step(w[i], [&](const Vec<Complex>& z) {
      auto all = complex_w;
      all[i] = z;
      return reference::contract(c.reference(reference::convert<Complex>(x.rounded()), all, tables),
                                 dy.rounded());
    });
    for (double& v : expected) v += 0.25;
    CHECK(error(separate[i + 1].rounded(), expected) < 2 * tolerance(type));
    CHECK(in_place[i + 1].rounded() == Vec<double>(static_cast<size_t>(d), 0.25));
  }
}
}  // namespace

TEST_CASE("rope and qk norm: both pairings, part of a head, in place and into another array") {
  uint64_t seed = 10;
  for (DType type : kTypes)
    for (const QkNorm norm : {QkNorm::none, QkNorm::rms, QkNorm::layer})
      for (bool interleaved : {false, true})
        for (const auto [d, rotary] : {std::array<int64_t, 2>{64, 64},
                                       {16, 16},
                                       {24, 10},
                                       {80, 32},
                                       {48, 32},
                                       {128, 6},
                                       {5, 4},
                                       {33, 0}}) {
          check_forward(RopeCase(19, {2, 3, d}, rotary, interleaved, norm, type, seed), type, seed);
          ++seed;
        }
}

TEST_CASE("rope of heads that lie at aligned vectors or not, and of more heads than a block has at once") {
  uint64_t seed = 60;
  for (DType type : kTypes)
    for (const QkvLayout& l : {QkvLayout{3, 60, 64}, {2, 3, 24}, {2, 3, 32}, {2, 3, 20}})
      for (const int64_t rotary : {0, 8, 16})
        for (const int64_t offset : {0, 1, 8}) {
          INFO(text(type), " d=", l.head_dim, " rotary=", rotary, " offset=", offset);
          const RopeCase c(2, l, rotary, false, QkNorm::none, type, ++seed);
          Tables tables(2, rotary, seed);
          const int64_t n = 2 * l.row();
          const Vec<double> values = random_values(n + offset, seed);
          const Array x(type, values);
          const Vec<double> first = x.rounded(), inputs(first.begin() + offset, first.end());
          const auto expected = c.reference(inputs, {}, tables);
          const auto y =
              run_kernel({Array::zeros(type, n + offset), Array::zeros(type, n + offset)},
                         [&](kernels::Context& context, Vec<Array>& o) {
                           const auto heads = [&](auto& array, int64_t at) {
                             return view_of(array, l.strides(), offset + at);
                           };
                           rope().forward(context, c.shape, heads(x, 0), heads(x, l.key(0)), tables.angles(),
                                          {}, heads(o[0], 0), heads(o[0], l.key(0)));
                           rope().backward(context, c.shape, heads(o[0], 0), heads(o[0], l.key(0)), {}, {},
                                           tables.angles(), {}, heads(o[1], 0), heads(o[1], l.key(0)), {});
                         });
          const auto from = [&](const Array& array) {
            const Vec<double> all = array.rounded();
            return queries_and_keys(Vec<double>(all.begin() + offset, all.end()), l);
          };
          CHECK(error(from(y[0]), queries_and_keys(expected, l)) < tolerance(type));
          CHECK(error(from(y[1]), queries_and_keys(inputs, l)) < 2 * tolerance(type));
        }
}

TEST_CASE("rope and qk norm: gradients of heads and weights") {
  uint64_t seed = 100;
  for (DType type : kTypes)
    for (const QkNorm norm : {QkNorm::none, QkNorm::rms, QkNorm::layer})
      for (bool interleaved : {false, true})
        for (const auto [d, rotary] :
             {std::array<int64_t, 2>{16, 16}, {48, 32}, {64, 64}, {19, 10}, {5, 4}, {7, 0}}) {
          check_backward(RopeCase(5, {2, 2, d}, rotary, interleaved, norm, type, seed), type, seed);
          ++seed;
        }
}

TEST_CASE("gradients of qk norm's weights over many blocks of rows") {
  // 64 blocks of several rows: against the sum of gradients of single rows.
  for (const auto& [norm, rotary] : {std::pair{QkNorm::layer, int64_t{6}}, {QkNorm::rms, 8}}) {
    const QkvLayout l{1, 2, 8};
    RopeCase all(3000, l, rotary, false, norm, DType::f32, 7);
    RopeCase one = all;
    one.shape.rows = 1;
    Tables tables(3000, rotary, 8);
    const Array x(DType::f32, random_values(3000 * l.row(), 9)),
        dy(DType::f32, random_values(3000 * l.row(), 10));
    const auto add = [&](kernels::Context& context, const RopeCase& c, int64_t first, Vec<Array>& o) {
      Array to = Array::zeros(DType::f32, c.shape.rows * l.row());
      auto angles = tables.angles();
      angles.positions += first;
      const int64_t at = first * l.row();
      rope().backward(context, c.shape, view_of(dy, l.strides(), at), view_of(dy, l.strides(), at + l.key(0)),
                      view_of(x, l.strides(), at), view_of(x, l.strides(), at + l.key(0)), angles,
                      c.norm_weights(), view_of(to, l.strides()), view_of(to, l.strides(), l.key(0)),
                      {o[0].f32(), o[1].f32(), o[2].f32(), o[3].f32()});
    };
    const auto zero = Vec<Array>(4, Array::zeros(DType::f32, 8));
    const auto together =
        run_kernel(zero, [&](kernels::Context& context, Vec<Array>& o) { add(context, all, 0, o); });
    Vec<Vec<double>> sums(4, Vec<double>(8));
    Launch launch(1, rope().backward_workspace(one.shape, true).total(1));
    for (int64_t r = 0; r < 3000; ++r) {
      auto row = zero;
      launch.reset();
      add(launch.context(), one, r, row);
      for (size_t i = 0; i < 4; ++i)
        for (size_t j = 0; j < 8; ++j) sums[i][j] += row[i].rounded()[j];
    }
    for (size_t i = 0; i < 4; ++i) CHECK(error(together[i].rounded(), sums[i]) < 1e-4);
  }
}
