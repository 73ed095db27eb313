// GEMMs of every device.
#include "tests/kernels/gemm_check.hpp"

using namespace capstan;
using namespace capstan::testing;

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
          seed += 3;
          if (!runs_case(seed / 3, 1)) continue;
          check_gemm({(t & 1) != 0, (t & 2) != 0, m, n, k}, in, out, 1.0, 0.0, seed);
          check_gemm({(t & 1) != 0, (t & 2) != 0, m, n, k}, in, out, 0.5, 1.0, seed + 1, 7);
        }
}

TEST_CASE("a GEMM over nothing scales C") {
  check_gemm({false, false, 7, 9, 0}, DType::f32, DType::f32, 1.0, 0.5, 80);
  check_gemm({false, true, 7, 9, 0}, DType::bf16, DType::bf16, 1.0, 0.0, 81);
}

TEST_CASE("column sums") {
  for (DType type : kTypes)
    for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {3, 5}, {17, 257}, {1000, 37}, {5000, 64}})
      for (bool accumulate : {false, true}) {
        const int64_t stride = cols + 3;
        const Array x(type, random_values(rows * stride, static_cast<uint64_t>(rows)));
        const Array start(DType::f32, random_values(cols, 5));
        const auto y = run_kernel({start}, [&](kernels::Context& c, Vec<Array>& out) {
          testing::table().gemm->column_sum(c, x, out[0].f32(), rows, cols, stride, accumulate);
        });
        Vec<double> expected = accumulate ? start.rounded() : Vec<double>(static_cast<size_t>(cols));
        const auto values = x.rounded();
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < cols; ++i)
            expected[static_cast<size_t>(i)] += values[static_cast<size_t>(r * stride + i)];
        CHECK(error(y[0].rounded(), expected) < 1e-5);
      }
}
