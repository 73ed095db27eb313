#include "kernels/cpu/onednn.hpp"
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;

namespace {
const kernels::Gemm& gemm() {
  return *kernels::cpu_table().gemm;
}

void check_gemm(kernels::GemmShape s, DType in, DType out, double alpha, double beta, uint64_t seed,
                int64_t pad = 0, bool aligned = false) {
  s.lda = (s.trans_a ? s.m : s.k) + pad;
  s.ldb = (s.trans_b ? s.k : s.n) + pad;
  s.ldc = s.n + pad;
  const Array a(in, random_values((s.trans_a ? s.k : s.m) * s.lda, seed));
  const Array b(in, random_values((s.trans_b ? s.n : s.k) * s.ldb, seed + 1));
  Vec<double> start = random_values(s.m * s.ldc, seed + 2);
  if (beta == 0)
    for (int64_t i = 0; i < s.m; ++i)  // beta = 0 overwrites whatever is there
      for (int64_t j = 0; j < s.n; ++j) start[static_cast<size_t>(i * s.ldc + j)] = NAN;
  const Array c(out, start, aligned);
  INFO("m=", s.m, " n=", s.n, " k=", s.k, " ta=", s.trans_a, " tb=", s.trans_b, " ", text(in), "->",
       text(out), " beta=", beta);
  const auto result = run_kernel({c}, [&](kernels::Context& context, Vec<Array>& y) {
    gemm().run(context, s, kernels::In(a), kernels::In(b), y[0].out(), static_cast<float>(alpha),
               static_cast<float>(beta), {});
  });
  const auto expected = reference::gemm<double>(s, a.rounded(), b.rounded(), c.rounded(), alpha, beta);
  CHECK(error(result[0].rounded(), expected) < tolerance(out));
}
}  // namespace

TEST_CASE("GEMMs of odd shapes, all transpositions, in every type") {
  uint64_t seed = 1;
  for (const auto [m, n, k] : {std::array<int64_t, 3>{1, 1, 1},
                               {1, 5, 37},
                               {3, 17, 5},
                               {17, 257, 3},
                               {37, 1, 257},
                               {64, 96, 64},
                               {129, 65, 131},
                               {5, 300, 40},
                               {2, 700, 600},
                               {176, 8, 300},
                               {8, 176, 300},
                               {264, 3, 1100},
                               {5, 264, 1100}})
    for (int t = 0; t < 4; ++t)
      for (DType in : kTypes)
        for (DType out : kTypes) {
          check_gemm({(t & 1) != 0, (t & 2) != 0, m, n, k}, in, out, 1.0, 0.0, seed += 3);
          check_gemm({(t & 1) != 0, (t & 2) != 0, m, n, k}, in, out, 0.5, 1.0, seed += 3, 7);
        }
}

TEST_CASE("GEMMs of several tiles and k panels keep their bits for any number of threads") {
  for (int t = 0; t < 4; ++t)
    for (DType in : kTypes) {
      check_gemm({(t & 1) != 0, (t & 2) != 0, 530, 790, 600}, in, DType::f32, 1.0, 1.0, 50, t);
      check_gemm({(t & 1) != 0, (t & 2) != 0, 70, 60, 2100}, in, DType::f32, 1.0, 1.0, 60, t);
      check_gemm({(t & 1) != 0, (t & 2) != 0, 1, 1700, 520}, in, in, 1.0, 0.0, 70, t);
    }
}

TEST_CASE("large GEMMs in 16 bits: chunks of k and of columns, and results that go past the caches") {
  for (DType out : kTypes) {
    check_gemm({true, false, 9, 2010, 4200}, DType::bf16, out, 1.0, 1.0, 84, 3);
    check_gemm({false, true, 9, 2010, 4200}, DType::bf16, out, 1.0, 0.0, 86);
    check_gemm({true, false, 70, 40, 9000}, DType::bf16, out, 1.0, 0.0, 88);
    check_gemm({true, false, 9, 2010, 4200}, DType::f16, out, 1.0, 1.0, 84, 3);
  }
  check_gemm({false, true, 33, 100, 3100}, DType::bf16, DType::bf16, 1.0, 0.0, 90);
  check_gemm({true, false, 33, 100, 3100}, DType::bf16, DType::f32, 1.0, 1.0, 93, 3);
  check_gemm({true, false, 2800, 5, 3072}, DType::bf16, DType::bf16, 1.0, 1.0, 96);  // many blocks of rows
  check_gemm({false, true, 17, 4300, 1000}, DType::bf16, DType::f32, 1.0, 0.0, 98);
  for (DType out : kTypes) check_gemm({false, false, 1030, 2112, 5}, DType::bf16, out, 1.0, 0.0, 99, 0, true);
}

TEST_CASE("a GEMM over nothing scales C") {
  check_gemm({false, false, 7, 9, 0}, DType::f32, DType::f32, 1.0, 0.5, 80);
  check_gemm({false, true, 7, 9, 0}, DType::bf16, DType::bf16, 1.0, 0.0, 81);
}

TEST_CASE("oneDNN's GEMM on the calling thread, where it has one") {
  for (DType in : kTypes) {
    if (in == DType::f16) continue;                               // these are widened
    if (in == DType::bf16 && !*kernels::native_bf16()) continue;  // fp32 takes the same path
    for (int t = 0; t < 4; ++t)
      for (float beta : {0.0f, 1.0f}) {
        kernels::GemmShape s{(t & 1) != 0, (t & 2) != 0, 37, 65, 130};
        s.lda = (s.trans_a ? s.m : s.k) + 3;
        s.ldb = (s.trans_b ? s.k : s.n) + 5;
        s.ldc = s.n + 7;
        const Array a(in, random_values((s.trans_a ? s.k : s.m) * s.lda, 1)),
            b(in, random_values((s.trans_b ? s.n : s.k) * s.ldb, 2)),
            c(DType::f32, random_values(s.m * s.ldc, 3));
        const size_t workspace = kernels::onednn_workspace(s, in, DType::f32, beta);
        const auto y = run_kernel({c}, [&](kernels::Context&, Vec<Array>& out) {
          std::vector<float, CacheLines<float>> scratchpad(workspace / sizeof(float) + 1);
          CHECK(kernels::onednn_gemm(s, a, b, out[0].out(), beta, scratchpad.data()));
        });
        CHECK(error(y[0].rounded(),
                    reference::gemm<double>(s, a.rounded(), b.rounded(), c.rounded(), 1.0, beta)) < 1e-5);
      }
  }
}

TEST_CASE("column sums") {
  for (DType type : kTypes)
    for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {3, 5}, {17, 257}, {1000, 37}, {5000, 64}})
      for (bool accumulate : {false, true}) {
        const int64_t stride = cols + 3;
        const Array x(type, random_values(rows * stride, static_cast<uint64_t>(rows)));
        const Array start(DType::f32, random_values(cols, 5));
        const auto y = run_kernel({start}, [&](kernels::Context& c, Vec<Array>& out) {
          gemm().column_sum(c, x, out[0].f32(), rows, cols, stride, accumulate);
        });
        Vec<double> expected = accumulate ? start.rounded() : Vec<double>(static_cast<size_t>(cols));
        const auto values = x.rounded();
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < cols; ++i)
            expected[static_cast<size_t>(i)] += values[static_cast<size_t>(r * stride + i)];
        CHECK(error(y[0].rounded(), expected) < 1e-5);
      }
}
