// Batches, groups and biases of GEMMs. Operands with scales: tests/parallel/low_precision.cpp.
#include <cfloat>
#include <cmath>
#include <numeric>

#include "base/division.hpp"
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::GemmGroups;
using kernels::GemmShape;

namespace {

const kernels::Gemm& gemm() {
  return *testing::table().gemm;
}

Vec<double> part(const Vec<double>& values, int64_t begin, int64_t count) {
  return {values.begin() + begin, values.begin() + begin + count};
}
void put(Vec<double>& values, int64_t begin, const Vec<double>& from) {
  std::copy(from.begin(), from.end(), values.begin() + begin);
}

void check_batch(GemmShape s, DType type, bool repeats_b, int64_t gap) {
  const int64_t rows_a = s.trans_a ? s.k : s.m, rows_b = s.trans_b ? s.n : s.k;
  s.lda = s.trans_a ? s.m : s.k, s.ldb = s.trans_b ? s.k : s.n, s.ldc = s.n + 2;
  const int64_t a_size = rows_a * s.lda, b_size = rows_b * s.ldb, c_size = s.m * s.ldc;
  s.stride_a = a_size + gap, s.stride_b = repeats_b ? 0 : b_size + gap, s.stride_c = c_size + gap;
  const Array a(type, random_values(s.batch * s.stride_a, 1)),
      b(type, random_values(s.batch * (b_size + gap), 2)), c(type, random_values(s.batch * s.stride_c, 3));
  const auto y = run_kernel({c}, [&](kernels::Context& context, Vec<Array>& out) {
    gemm().run(context, s, kernels::In(a), kernels::In(b), out[0].out(), 1.0f, 1.0f, {});
  });
  Vec<double> expected = c.rounded();
  for (int64_t i = 0; i < s.batch; ++i)
    put(expected, i * s.stride_c,
        reference::gemm<double>(s, part(a.rounded(), i * s.stride_a, a_size),
                                part(b.rounded(), i * s.stride_b, b_size),
                                part(expected, i * s.stride_c, c_size), 1, 1));
  INFO("batch of ", s.batch, ", ", text(type));
  CHECK(error(y[0].rounded(), expected) < tolerance(type));
}

// The reference of one group: its rows of A (or of k), its matrix of B or C.
struct Group {
  GemmShape shape;
  int64_t a, b, c;
};
Group group_of(const GemmShape& s, GemmGroups kind, int64_t index, int64_t first, int64_t size) {
  Group g{s, 0, 0, 0};
  if (kind == GemmGroups::m) {
    g.shape.m = size;
    g.a = first * (s.trans_a ? 1 : s.lda), g.b = index * s.stride_b, g.c = first * s.ldc;
  } else {
    g.shape.k = size;
    g.a = first * (s.trans_a ? s.lda : 1), g.b = first * (s.trans_b ? 1 : s.ldb), g.c = index * s.stride_c;
  }
  return g;
}

// aligned: rows begin at multiples of 8 elements, those of C at multiples of 2.
void check_groups(GemmShape s, GemmGroups kind, const std::vector<int64_t>& sizes, DType type, bool biased,
                  bool aligned = false) {
  const auto count = static_cast<int64_t>(sizes.size()),
             used = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  (kind == GemmGroups::m ? s.m : s.k) = used + 5;  // more than there are
  s.lda = (s.trans_a ? s.m : s.k) + 3, s.ldb = s.trans_b ? s.k : s.n, s.ldc = s.n + 1;
  if (aligned) s.lda = round_up(s.lda, 8), s.ldb = round_up(s.ldb, 8), s.ldc = round_up(s.ldc, 2);
  const int64_t copies_b = kind == GemmGroups::m ? count : 1, copies_c = kind == GemmGroups::k ? count : 1;
  s.stride_b = (s.trans_b ? s.n : s.k) * s.ldb, s.stride_c = s.m * s.ldc;
  const Array a(type, random_values((s.trans_a ? s.k : s.m) * s.lda, 11)),
      b(type, random_values(copies_b * s.stride_b, 12)), c(type, random_values(copies_c * s.stride_c, 13)),
      bias(type, random_values(count * s.n, 14));
  const auto y = run_kernel({c}, [&](kernels::Context& context, Vec<Array>& out) {
    gemm().run_grouped(context, s, kind, sizes.data(), count, kernels::In(a), kernels::In(b), out[0].out(),
                       1.0f, 1.0f, biased ? kernels::In(bias) : kernels::In{});
  });
  Vec<double> expected = c.rounded();
  const auto values_a = a.rounded(), values_b = b.rounded(), values_bias = bias.rounded();
  for (int64_t g = 0, first = 0; g < count; first += sizes[static_cast<size_t>(g++)]) {
    const Group own = group_of(s, kind, g, first, sizes[static_cast<size_t>(g)]);
    const int64_t extent = own.shape.m * s.ldc;
    Vec<double> result = reference::gemm<double>(
        own.shape, part(values_a, own.a, static_cast<int64_t>(values_a.size()) - own.a),
        part(values_b, own.b, static_cast<int64_t>(values_b.size()) - own.b), part(expected, own.c, extent),
        1, 1);
    if (biased)
      for (int64_t r = 0; r < own.shape.m; ++r)
        for (int64_t j = 0; j < s.n; ++j)
          result[static_cast<size_t>(r * s.ldc + j)] += values_bias[static_cast<size_t>(g * s.n + j)];
    put(expected, own.c, result);
  }
  INFO("groups of ", kind == GemmGroups::m ? "m" : "k", ", ta=", s.trans_a, " tb=", s.trans_b, ", ",
       text(type));
  CHECK(error(y[0].rounded(), expected) < tolerance(type));
}

}  // namespace

TEST_CASE("batches with strides") {
  for (const DType type : kTypes)
    for (int t = 0; t < 4; ++t)
      for (const bool repeats : {false, true}) {
        check_batch({.trans_a = (t & 1) != 0, .trans_b = (t & 2) != 0, .m = 5, .n = 33, .k = 40, .batch = 3},
                    type, repeats, 7);
        check_batch(
            {.trans_a = (t & 1) != 0, .trans_b = (t & 2) != 0, .m = 70, .n = 60, .k = 130, .batch = 2}, type,
            repeats, 0);
      }
}

TEST_CASE("groups of rows and of the summed dimension, empty ones too") {
  for (const DType type : kTypes)
    for (int t = 0; t < 4; ++t) {
      const GemmShape s{.trans_a = (t & 1) != 0, .trans_b = (t & 2) != 0, .m = 37, .n = 53, .k = 45};
      for (const auto& sizes : {std::vector<int64_t>{1, 0, 130, 7}, {0, 3}, {64, 64, 65}}) {
        check_groups(s, GemmGroups::m, sizes, type, t % 2 == 0);
        check_groups(s, GemmGroups::k, sizes, type, false);
      }
      // Groups of several tiles.
      const GemmShape wide{.trans_a = s.trans_a, .trans_b = s.trans_b, .m = 150, .n = 330, .k = 100};
      check_groups(wide, GemmGroups::m, {300, 1, 217}, type, true);
      check_groups(wide, GemmGroups::k, {300, 1, 217}, type, false);
    }
}

TEST_CASE("groups of aligned rows, with complete and incomplete tiles") {
  for (const DType type : kTypes)
    for (int t = 0; t < 4; ++t) {
      GemmShape s{.trans_a = (t & 1) != 0, .trans_b = (t & 2) != 0, .m = 72, .n = 136};
      check_groups(s, GemmGroups::k, {136, 0, 7, 192}, type, false, true);
      for (const int64_t k : {160, 150}) {
        s.k = k;
        check_groups(s, GemmGroups::m, {136, 0, 16, 192}, type, t % 2 == 0, true);
      }
    }
}

TEST_CASE("more groups than a warp has lanes") {
  std::vector<int64_t> sizes(1100);
  for (const size_t i : {0, 31, 32, 33, 500, 1023, 1024, 1098}) sizes[i] = static_cast<int64_t>(i % 7 + 1);
  sizes[700] = 150;
  for (const GemmGroups kind : {GemmGroups::m, GemmGroups::k})
    check_groups({.trans_a = kind == GemmGroups::k, .m = 3, .n = 4, .k = 5}, kind, sizes, DType::bf16, false);
}

TEST_CASE("infinite, undefined and largest operands of a group give what they give in double") {
  for (int t = 0; t < 4; ++t)
    for (const GemmGroups kind : {GemmGroups::m, GemmGroups::k}) {
      GemmShape s{.trans_a = (t & 1) != 0, .trans_b = (t & 2) != 0, .m = 6, .n = 21, .k = 45};
      s.lda = s.trans_a ? s.m : s.k, s.ldb = s.trans_b ? s.k : s.n, s.ldc = s.n;
      s.stride_b = s.n * s.k, s.stride_c = s.m * s.n;
      Vec<double> values_a = random_values(s.m * s.k, 31), values_b = random_values(s.n * s.k, 32);
      const auto a_at = [&](int64_t row, int64_t k) -> double& {
        return values_a[static_cast<size_t>(s.trans_a ? k * s.lda + row : row * s.lda + k)];
      };
      const auto b_at = [&](int64_t k, int64_t column) -> double& {
        return values_b[static_cast<size_t>(s.trans_b ? column * s.ldb + k : k * s.ldb + column)];
      };
      a_at(0, 3) = a_at(2, 3) = INFINITY;
      a_at(1, 3) = a_at(2, 4) = -INFINITY;
      a_at(3, 7) = NAN;
      a_at(4, 9) = FLT_MAX;
      // 1 has no bits beyond the first bf16 term.
      b_at(3, 0) = 1, b_at(3, 1) = 0, b_at(3, 2) = INFINITY, b_at(3, 3) = -INFINITY;
      b_at(8, 5) = -FLT_MAX, b_at(9, 5) = 0;
      const Array a(DType::f32, values_a), b(DType::f32, values_b), c = Array::zeros(DType::f32, s.m * s.n);
      const int64_t size = kind == GemmGroups::m ? s.m : s.k;
      const auto y = run_kernel({c}, [&](kernels::Context& context, Vec<Array>& out) {
        gemm().run_grouped(context, s, kind, &size, 1, kernels::In(a), kernels::In(b), out[0].out(), 1.0f,
                           0.0f, {});
      });
      INFO("groups of ", kind == GemmGroups::m ? "m" : "k", ", ta=", s.trans_a, " tb=", s.trans_b);
      check_extreme(y[0].rounded(), reference::gemm<double>(s, a.rounded(), b.rounded(), c.rounded(), 1, 0),
                    1e-5);
    }
}

TEST_CASE("the bias is added to each row") {
  for (const DType type : kTypes)
    for (const DType bias_type : kTypes)
      for (const int64_t gap : {0, 3}) {
        GemmShape s{.trans_b = true, .m = 35, .n = 70, .k = 90, .batch = 2};
        s.lda = s.ldb = s.k, s.ldc = s.n + gap;
        s.stride_a = s.m * s.lda, s.stride_b = s.n * s.ldb, s.stride_c = s.m * s.ldc;
        const Array a(type, random_values(s.batch * s.stride_a, 21, 0.3)),
            b(type, random_values(s.batch * s.stride_b, 22, 0.3)), bias(bias_type, random_values(s.n, 23)),
            c(type, random_values(s.batch * s.stride_c, 24));
        const auto y = run_kernel({c}, [&](kernels::Context& context, Vec<Array>& out) {
          gemm().run(context, s, kernels::In(a), kernels::In(b), out[0].out(), 1.0f, 1.0f, bias);
        });
        Vec<double> expected = c.rounded();
        const auto shift = bias.rounded();
        for (int64_t i = 0; i < s.batch; ++i) {
          Vec<double> one = reference::gemm<double>(s, part(a.rounded(), i * s.stride_a, s.stride_a),
                                                    part(b.rounded(), i * s.stride_b, s.stride_b),
                                                    part(expected, i * s.stride_c, s.stride_c), 1, 1);
          for (int64_t r = 0; r < s.m; ++r)
            for (int64_t j = 0; j < s.n; ++j)
              one[static_cast<size_t>(r * s.ldc + j)] += shift[static_cast<size_t>(j)];
          put(expected, i * s.stride_c, one);
        }
        INFO(text(type), ", bias in ", text(bias_type), ", gap ", gap);
        CHECK(error(y[0].rounded(), expected) < tolerance(type));
      }
}
