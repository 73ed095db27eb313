// The CPU's GEMM at sizes that choose its different paths: tiles, chunks, oneDNN.
#include "kernels/cpu/onednn.hpp"
#include "tests/kernels/gemm_check.hpp"

using namespace capstan;
using namespace capstan::testing;

TEST_CASE("GEMMs of several tiles and k panels keep their bits for any number of threads") {
  for (int t = 0; t < 4; ++t)
    for (DType in : kTypes) {
      if (test::kSanitized && static_cast<DType>(t) != in) continue;
      check_gemm({(t & 1) != 0, (t & 2) != 0, 530, 790, 600}, in, DType::f32, 1.0, 1.0, 50, t);
      check_gemm({(t & 1) != 0, (t & 2) != 0, 70, 60, 2100}, in, DType::f32, 1.0, 1.0, 60, t);
      check_gemm({(t & 1) != 0, (t & 2) != 0, 1, 1700, 520}, in, in, 1.0, 0.0, 70, t);
    }
}

TEST_CASE("large GEMMs in 16 bits: chunks of k and of columns, and results that go past the caches") {
  for (DType out : kTypes) {
    if (test::kSanitized && out == DType::f16) continue;
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
