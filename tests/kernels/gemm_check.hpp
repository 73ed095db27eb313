// A GEMM against the reference.
#pragma once

#include "tests/kernels/support.hpp"

namespace capstan::testing {

inline void check_gemm(kernels::GemmShape s, DType in, DType out, double alpha, double beta, uint64_t seed,
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
    table().gemm->run(context, s, kernels::In(a), kernels::In(b), y[0].out(), static_cast<float>(alpha),
                      static_cast<float>(beta), {});
  });
  const auto expected = reference::gemm<double>(s, a.rounded(), b.rounded(), c.rounded(), alpha, beta);
  CHECK(error(result[0].rounded(), expected) < tolerance(out));
}

}  // namespace capstan::testing
