// GEMMs of the CUDA backend on simulated GPUs: codes with scales, the bias that cuBLASLt adds, algorithms
// that are found once, and refusals by name. The simulated cuBLASLt itself: cublaslt_misuse.cpp.
#include "base/checked.hpp"
#include "kernels/block_scales.hpp"
#include "kernels/simulated/cublaslt.hpp"
#include "tensor/float8.hpp"
#include "tests/kernels/gemm_check.hpp"
#include "tests/support/simulated_gpu.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::BlockScales;
using kernels::GemmGroups;
using kernels::GemmShape;
using kernels::ScaleLayout;
using kernels::ScaleOrder;

namespace {

// Random codes and scales of a matrix [rows, k], and the values that they stand for.
class Codes {
 public:
  Codes(DType type, ScaleLayout layout, int64_t rows, int64_t k, uint64_t seed, size_t shift = 0)
      : type_(type), layout_(layout), scales_{layout, ScaleOrder::tensor_core, rows, k}, shift_(shift) {
    const bool pairs = type == DType::f4e2m1x2;
    const int64_t row_bytes = pairs ? ceil_div(k, int64_t{2}) : k;
    const Vec<double> random = random_values(rows * k, seed, 4);
    codes_.resize(static_cast<size_t>(rows * row_bytes) + shift);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < k; ++i) {
        const auto value = static_cast<float>(random[static_cast<size_t>(r * k + i)]);
        const uint32_t code = type == DType::f8e4m3   ? encode<kE4m3>(value)
                              : type == DType::f8e5m2 ? encode<kE5m2>(value)
                                                      : encode<kE2m1>(value);
        uint8_t& byte = codes_[static_cast<size_t>(r * row_bytes + (pairs ? i / 2 : i)) + shift];
        byte = static_cast<uint8_t>(pairs && i % 2 == 1 ? byte | code << 4 : code);
        values_.push_back(static_cast<double>(type == DType::f8e4m3   ? decode<kE4m3>(code)
                                              : type == DType::f8e5m2 ? decode<kE5m2>(code)
                                                                      : decode<kE2m1>(code)));
      }
    if (layout == ScaleLayout::tensor)
      tensor_scale_ = 0.37f;
    else
      add_block_scales(seed);
    if (layout == ScaleLayout::block_1x16 || layout == ScaleLayout::tensor)
      for (double& v : values_) v *= static_cast<double>(tensor_scale_);
  }

  kernels::Operand operand() const {
    kernels::Operand x;
    x.data = codes_.data() + shift_;
    x.dtype = type_;
    x.layout = layout_;
    x.scale = layout_ == ScaleLayout::tensor ? static_cast<const void*>(&tensor_scale_) : scale_.data();
    x.tensor_scale = &tensor_scale_;
    return x;
  }
  const Vec<double>& values() const { return values_; }

 private:
  void add_block_scales(uint64_t seed) {
    const auto random = random_ints(scales_.scale_rows() * scales_.blocks(), seed + 100, 7);
    const bool wide = kernels::block_scale_type(layout_) == DType::f32;
    scale_.resize(static_cast<size_t>(scales_.elements()) * (wide ? 4 : 1));
    Vec<double> of_block(random.size());
    for (int64_t r = 0; r < scales_.scale_rows(); ++r)
      for (int64_t b = 0; b < scales_.blocks(); ++b) {
        const auto at = static_cast<size_t>(scales_.index(r, b)),
                   i = static_cast<size_t>(r * scales_.blocks() + b);
        const int exponent = random[i] - 3;
        if (wide) {
          const float scale = std::ldexp(1.0f, exponent);
          std::memcpy(scale_.data() + at * 4, &scale, 4);
          of_block[i] = static_cast<double>(scale);
        } else if (layout_ == ScaleLayout::block_1x32) {
          scale_[at] = static_cast<uint8_t>(127 + exponent);
          of_block[i] = std::ldexp(1.0, exponent);
        } else {
          scale_[at] = static_cast<uint8_t>(0x38 + 3 * exponent);
          of_block[i] = static_cast<double>(decode<kE4m3>(scale_[at]));
        }
      }
    const int64_t block = kernels::block_of(layout_);
    for (int64_t r = 0; r < scales_.rows; ++r)
      for (int64_t i = 0; i < scales_.cols; ++i) {
        const int64_t row = layout_ == ScaleLayout::block_128x128 ? r / 128 : r;
        values_[static_cast<size_t>(r * scales_.cols + i)] *=
            of_block[static_cast<size_t>(row * scales_.blocks() + i / block)];
      }
  }

  DType type_;
  ScaleLayout layout_;
  BlockScales scales_;
  size_t shift_;
  std::vector<uint8_t, CacheLines<uint8_t>> codes_, scale_;
  float tensor_scale_ = 0.25f;
  Vec<double> values_;
};

struct ScaledCase {
  DType a, b;
  ScaleLayout a_scales, b_scales;
  int capability;
};
const ScaledCase kScaledCases[] = {
    {DType::f8e4m3, DType::f8e4m3, ScaleLayout::tensor, ScaleLayout::tensor, 89},
    {DType::f8e5m2, DType::f8e4m3, ScaleLayout::tensor, ScaleLayout::tensor, 90},
    {DType::f8e4m3, DType::f8e4m3, ScaleLayout::block_1x128, ScaleLayout::block_128x128, 90},
    {DType::f8e4m3, DType::f8e5m2, ScaleLayout::block_1x128, ScaleLayout::block_1x128, 90},
    {DType::f8e5m2, DType::f8e4m3, ScaleLayout::block_1x32, ScaleLayout::block_1x32, 100},
    {DType::f4e2m1x2, DType::f4e2m1x2, ScaleLayout::block_1x16, ScaleLayout::block_1x16, 100}};

GemmShape scaled_shape(int64_t m, int64_t n, int64_t k) {
  GemmShape s{.trans_b = true, .m = m, .n = n, .k = k};
  s.lda = s.ldb = k, s.ldc = n;
  return s;
}

void check_scaled(const ScaledCase& scaled, int64_t m, int64_t n, int64_t k, DType out, float beta,
                  size_t shift = 0) {
  INFO("m=", m, " n=", n, " k=", k, ", ", text(out), ", scales ", static_cast<int>(scaled.a_scales), " and ",
       static_cast<int>(scaled.b_scales));
  const test::SimulatedGpu gpu(scaled.capability);
  const GemmShape s = scaled_shape(m, n, k);
  const Codes a(scaled.a, scaled.a_scales, m, k, 1, shift), b(scaled.b, scaled.b_scales, n, k, 2);
  const Array c(out, random_values(m * n, 3)), bias(DType::bf16, random_values(n, 4));
  const auto y = run_kernel({c}, [&](kernels::Context& context, Vec<Array>& result) {
    testing::table().gemm->run(context, s, a.operand(), b.operand(), result[0].out(), 0.5f, beta, bias);
  });
  const double wide_beta = static_cast<double>(beta);
  Vec<double> expected = reference::gemm<double>(s, a.values(), b.values(), c.rounded(), 0.5, wide_beta);
  const Vec<double> shifts = bias.rounded();
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += shifts[i % shifts.size()];
  CHECK(error(y[0].rounded(), expected) < tolerance(out));
}

// The launch's refusal.
std::string refusal_of(const ScaledCase& scaled, int capability) {
  const test::SimulatedGpu gpu(capability);
  const GemmShape s = scaled_shape(16, 16, 128);
  const Codes a(scaled.a, scaled.a_scales, 16, 128, 1), b(scaled.b, scaled.b_scales, 16, 128, 2);
  Array c = Array::zeros(DType::bf16, 16 * 16);
  Launch launch(1);
  testing::table().gemm->run(launch.context(), s, a.operand(), b.operand(), c.out(), 1, 0, {});
  const kernels::KernelError error = launch.take_error();
  return error.reason ? error.reason : "";
}

}  // namespace

TEST_CASE("scales of blocks lie where cuBLASLt reads them") {
  // Each scale has a place of its own within the array.
  for (const auto layout : {ScaleLayout::block_1x128, ScaleLayout::block_128x128, ScaleLayout::block_1x32,
                            ScaleLayout::block_1x16})
    for (const auto order : {ScaleOrder::row_major, ScaleOrder::tensor_core})
      for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {130, 700}, {257, 96}}) {
        const BlockScales scales{layout, order, rows, cols};
        std::vector<int> used(static_cast<size_t>(scales.elements()));
        for (int64_t r = 0; r < scales.scale_rows(); ++r)
          for (int64_t b = 0; b < scales.blocks(); ++b) ++used.at(static_cast<size_t>(scales.index(r, b)));
        CHECK(std::count(used.begin(), used.end(), 1) == scales.scale_rows() * scales.blocks());
      }
  // Row 70 and block 6 of tile (1, 1), of three tiles in a row.
  const BlockScales tiles{ScaleLayout::block_1x32, ScaleOrder::tensor_core, 300, 320};
  CHECK(tiles.elements() == 3 * 3 * 512);
  CHECK(tiles.index(128 + 70, 4 + 2) == (1 * 3 + 1) * 512 + 6 * 16 + 2 * 4 + 2);
  const BlockScales rows{ScaleLayout::block_1x128, ScaleOrder::tensor_core, 30, 300};
  CHECK(rows.elements() == 3 * 32);
  CHECK(rows.index(7, 2) == 2 * 32 + 7);
  const BlockScales squares{ScaleLayout::block_128x128, ScaleOrder::tensor_core, 300, 600};
  CHECK(squares.elements() == 3 * 8);
  CHECK(squares.index(2, 3) == 2 * 8 + 3);
}

TEST_CASE("GEMMs of codes with scales, on tensor cores and where sizes are odd on tiles") {
  for (const ScaledCase& scaled : kScaledCases)
    for (const DType out : kTypes) {
      const int64_t before = kernels::simulated::cublaslt_calls().gemms;
      check_scaled(scaled, 24, 48, 288, out, 1.0f);
      CHECK(kernels::simulated::cublaslt_calls().gemms > before);
      const int64_t then = kernels::simulated::cublaslt_calls().gemms;
      check_scaled(scaled, 5, 33, 147, out, 0.0f);
      CHECK(kernels::simulated::cublaslt_calls().gemms == then);
    }
  // More rows than a tile, and codes that do not begin at 16 bytes.
  check_scaled(kScaledCases[2], 131, 136, 200, DType::f32, 1.0f);
  check_scaled(kScaledCases[0], 16, 32, 64, DType::bf16, 1.0f, 3);
}

TEST_CASE("batches and groups of codes with scales") {
  for (const ScaledCase& scaled : kScaledCases) {
    const test::SimulatedGpu gpu(scaled.capability);
    GemmShape s = scaled_shape(128, 20, 40);
    s.batch = 2, s.stride_a = s.m * s.k, s.stride_c = s.m * s.n;
    const Codes a(scaled.a, scaled.a_scales, s.batch * s.m, s.k, 1),
        b(scaled.b, scaled.b_scales, s.n, s.k, 2);
    const Array c = Array::zeros(DType::f32, s.batch * s.stride_c);
    const auto y = run_kernel({c}, [&](kernels::Context& context, Vec<Array>& result) {
      testing::table().gemm->run(context, s, a.operand(), b.operand(), result[0].out(), 1, 0, {});
    });
    GemmShape all = s;
    all.batch = 1, all.m *= s.batch;
    CHECK(error(y[0].rounded(), reference::gemm<double>(all, a.values(), b.values(), c.rounded(), 1, 0)) <
          1e-5);
  }
  // Each group its own C; the blocks of k begin anew with a group.
  const GemmShape s = [] {
    GemmShape shape = scaled_shape(10, 12, 384);
    shape.stride_c = shape.m * shape.n;
    return shape;
  }();
  const Codes a(DType::f8e4m3, ScaleLayout::block_1x128, s.m, s.k, 5),
      b(DType::f8e4m3, ScaleLayout::block_1x128, s.n, s.k, 6);
  const int64_t sizes[] = {128, 0, 256};
  const auto y =
      run_kernel({Array(DType::f32, random_values(3 * s.stride_c, 7))},
                 [&](kernels::Context& context, Vec<Array>& result) {
                   testing::table().gemm->run_grouped(context, s, GemmGroups::k, sizes, 3, a.operand(),
                                                      b.operand(), result[0].out(), 1, 0, {});
                 });
  const Vec<double> result = y[0].rounded();
  int64_t first = 0;
  for (size_t g = 0; g < 3; first += sizes[g++])
    for (int64_t i = 0; i < s.m; ++i)
      for (int64_t j = 0; j < s.n; ++j) {
        double sum = 0;
        for (int64_t k = first; k < first + sizes[g]; ++k)
          sum += a.values()[static_cast<size_t>(i * s.k + k)] * b.values()[static_cast<size_t>(j * s.k + k)];
        CHECK(result[static_cast<size_t>(static_cast<int64_t>(g) * s.stride_c + i * s.n + j)] ==
              doctest::Approx(sum).epsilon(1e-4));
      }
}

TEST_CASE("operands that a GPU's tensor cores do not multiply are refused by name") {
  const auto contains = [](const std::string& text, const char* part) {
    INFO(text, " / ", part);
    CHECK(text.find(part) != std::string::npos);
  };
  for (const ScaledCase& scaled : kScaledCases) CHECK(refusal_of(scaled, scaled.capability).empty());
  contains(refusal_of(kScaledCases[0], 80), "need a GPU of compute capability 8.9");
  contains(refusal_of(kScaledCases[2], 100), "need a GPU of compute capability 9.0");
  contains(refusal_of(kScaledCases[4], 90), "MXFP8 needs a GPU of compute capability 10.0");
  contains(refusal_of(kScaledCases[5], 90), "NVFP4 needs a GPU of compute capability 10.0");
  CHECK(refusal_of(kScaledCases[5], 120).empty());
  constexpr auto e4m3 = DType::f8e4m3, e5m2 = DType::f8e5m2;
  constexpr auto tensor = ScaleLayout::tensor, square = ScaleLayout::block_128x128;
  contains(refusal_of({e5m2, e5m2, tensor, tensor, 0}, 90), "do not multiply e5m2 by e5m2");
  contains(refusal_of({e4m3, e4m3, square, square, 0}, 90), "for one of the two operands");
  contains(refusal_of({e4m3, e4m3, tensor, square, 0}, 90), "different layouts");
  contains(refusal_of({DType::f4e2m1x2, e4m3, tensor, tensor, 0}, 100), "codes of 4 bits");
}

TEST_CASE("cuBLASLt adds a bias of its type that begins at 16 bytes, a pass adds others") {
  const auto last = [] { return kernels::simulated::cublaslt_calls().epilogue; };
  GemmShape s{.m = 9, .n = 40, .k = 16};
  s.lda = s.k, s.ldb = s.n, s.ldc = s.n;
  using namespace kernels::simulated;
  for (const DType type : kTypes) {
    const Array a(type, random_values(s.m * s.k, 1)), b(type, random_values(s.k * s.n, 2)),
        c = Array::zeros(type, s.m * s.n);
    const auto run = [&](kernels::In bias) {
      return run_kernel({c}, [&](kernels::Context& context, Vec<Array>& y) {
        testing::table().gemm->run(context, s, kernels::In(a), kernels::In(b), y[0].out(), 1, 0, bias);
      })[0];
    };
    const Array bias(type, random_values(s.n, 3));
    const Array by_library = run(bias);
    CHECK(last() == CUBLASLT_EPILOGUE_BIAS);
    // The same values at another address.
    const int64_t size = size_of(type);
    Vec<std::byte> shifted(static_cast<size_t>((s.n + 1) * size));
    std::memcpy(shifted.data() + size, kernels::In(bias).data, static_cast<size_t>(s.n * size));
    const Array by_pass = run({shifted.data() + size, type});
    CHECK(last() == CUBLASLT_EPILOGUE_DEFAULT);
    CHECK(error(by_pass.rounded(), by_library.rounded()) < tolerance(type));
    run(Array(type == DType::bf16 ? DType::f32 : DType::bf16, random_values(s.n, 3)));
    CHECK(last() == CUBLASLT_EPILOGUE_DEFAULT);
  }
}

TEST_CASE("where cuBLASLt has no algorithm: without the bias, on tiles, or refused by name") {
  using namespace kernels::simulated;
  struct Without {
    explicit Without(WithoutAlgorithm what) { set_without_algorithm(what); }
    ~Without() { set_without_algorithm(WithoutAlgorithm::nothing); }
  };
  const auto gemms = [] { return cublaslt_calls().gemms; };
  // Sizes that no other test has, because what a search has found is kept.
  GemmShape s{.m = 11, .n = 56, .k = 24};
  s.lda = s.k, s.ldb = s.n, s.ldc = s.n;
  const Array a(DType::bf16, random_values(s.m * s.k, 1)), b(DType::bf16, random_values(s.k * s.n, 2)),
      bias(DType::bf16, random_values(s.n, 3));
  const auto run_on = [&](const kernels::Table& device) {
    return run_kernel({Array::zeros(DType::bf16, s.m * s.n)}, [&](kernels::Context& context, Vec<Array>& y) {
      device.gemm->run(context, s, kernels::In(a), kernels::In(b), y[0].out(), 1, 0, bias);
    })[0];
  };
  {
    const Without without(WithoutAlgorithm::bias);
    CHECK(error(run_on(testing::table()).rounded(), run_on(kernels::cpu_table()).rounded()) < 1e-2);
    CHECK(cublaslt_calls().epilogue == CUBLASLT_EPILOGUE_DEFAULT);
  }
  const Without without(WithoutAlgorithm::everything);
  const int64_t before = gemms();
  for (const ScaledCase& scaled : kScaledCases) {
    check_scaled(scaled, 24, 48, 256, DType::f32, 0.5f);
    check_scaled(scaled, 40, 16, 128, DType::bf16, 0);
  }
  CHECK(gemms() == before);
  std::vector<std::string> notes;
  while (const char* const note = testing::table().next_note()) notes.emplace_back(note);
  CHECK(std::ranges::count(notes,
                           "cuBLASLt has no algorithm for C [24, 48] fp32 = A [24, 256] fp8 e4m3 times B "
                           "[256, 48] fp8 e4m3, stored transposed: CUBLAS_STATUS_NOT_SUPPORTED: the search "
                           "has found none; a slower kernel computes it") == 1);
  s.m = 7;
  Array y = Array::zeros(DType::f32, s.m * s.n);
  Launch launch(1);
  testing::table().gemm->run(launch.context(), s, kernels::In(a), kernels::In(b), y.out(), 1, 0, {});
  const kernels::KernelError refused = launch.take_error();
  CHECK(std::string(refused.reason ? refused.reason : "").find("cuBLASLt has no algorithm for C [7, 56]") ==
        0);
}

TEST_CASE("an algorithm is searched for once for each kind of call") {
  const auto searches = [] { return kernels::simulated::cublaslt_calls().searches; };
  const int64_t before = searches();
  for (int i = 0; i < 3; ++i) check_gemm({false, false, 61, 67, 71}, DType::bf16, DType::f32, 1.0, 1.0, 1);
  CHECK(searches() == before + 1);
  check_gemm({false, false, 61, 67, 71}, DType::bf16, DType::bf16, 1.0, 1.0, 1);
  CHECK(searches() == before + 2);
  check_gemm({false, false, 61, 67, 71}, DType::bf16, DType::f32, 1.0, 1.0, 1, 8);
  CHECK(searches() == before + 3);
}

TEST_CASE("results of a type that cuBLASLt does not offer are converted some rows at a time") {
  const int64_t before = kernels::simulated::cublaslt_calls().gemms;
  check_gemm({true, false, 150, 2500, 9}, DType::f32, DType::bf16, 0.5, 1.0, 1, 3);
  // 1 MiB of fp32 results at a time.
  CHECK(kernels::simulated::cublaslt_calls().gemms ==
        before + 2 * static_cast<int64_t>(test::kSanitized ? 1 : std::size(kTestLaunches)));
}

TEST_CASE("results of every type, of batches and with a bias, are those of the CPU's kernels") {
  GemmShape s{.trans_a = true, .m = 37, .n = 71, .k = 19, .batch = 2};
  s.lda = s.m, s.ldb = s.n, s.ldc = s.n + 2;
  s.stride_a = s.m * s.k, s.stride_c = s.m * s.ldc;
  for (const DType in : kTypes)
    for (const DType out : kTypes) {
      INFO(text(in), " -> ", text(out));
      const Array a(in, random_values(s.batch * s.stride_a, 1)), b(in, random_values(s.n * s.k, 2)),
          bias(DType::bf16, random_values(s.n, 3)), c(out, random_values(s.batch * s.stride_c, 4));
      const auto run_on = [&](const kernels::Table& device) {
        return run_kernel({c}, [&](kernels::Context& context, Vec<Array>& y) {
          device.gemm->run(context, s, kernels::In(a), kernels::In(b), y[0].out(), 0.5f, 1.0f, bias);
        })[0];
      };
      CHECK(error(run_on(testing::table()).rounded(), run_on(kernels::cpu_table()).rounded()) <
            tolerance(out));
    }
}

TEST_CASE("fast accumulation is a choice of GEMMs of FP8 with scales of tensors") {
  for (const ScaledCase& scaled : kScaledCases) {
    INFO("scales ", static_cast<int>(scaled.a_scales));
    const test::SimulatedGpu gpu(scaled.capability);
    GemmShape s = scaled_shape(32, 48, 256);
    const Codes a(scaled.a, scaled.a_scales, s.m, s.k, 1), b(scaled.b, scaled.b_scales, s.n, s.k, 2);
    for (const kernels::Accumulation accumulation :
         {kernels::Accumulation::fast, kernels::Accumulation::fp32}) {
      s.accumulation = accumulation;
      run_kernel({Array::zeros(DType::f32, s.m * s.n)}, [&](kernels::Context& context, Vec<Array>& result) {
        testing::table().gemm->run(context, s, a.operand(), b.operand(), result[0].out(), 1.0f, 0.0f, {});
      });
      const bool fast = accumulation == kernels::Accumulation::fast && scaled.a_scales == ScaleLayout::tensor;
      CHECK(kernels::simulated::cublaslt_calls().fast_accumulation == fast);
    }
  }
}

// fp32 with 10 of its 23 bits of mantissa, to nearest, ties away from zero.
double rounded_to_tf32(double value) {
  int exponent = 0;
  const double mantissa = std::frexp(static_cast<double>(static_cast<float>(value)), &exponent);
  return std::ldexp(std::round(std::ldexp(mantissa, 11)), exponent - 11);
}

TEST_CASE("TF32 is a choice: operands with 10 bits of mantissa, for fp32 alone") {
  using namespace kernels::simulated;
  const kernels::Gemm& gemm = *testing::table().gemm;
  struct UseTf32 {
    explicit UseTf32(bool on) { testing::table().gemm->use_tf32(on); }
    ~UseTf32() { testing::table().gemm->use_tf32(false); }
  };
  GemmShape s{.trans_b = true, .m = 37, .n = 71, .k = 19, .batch = 2};
  s.lda = s.k + 3, s.ldb = s.k, s.ldc = s.n;
  s.stride_a = s.m * s.lda, s.stride_c = s.m * s.ldc;
  const auto product = [&](const kernels::Gemm& of, DType type, const Vec<double>& a, const Vec<double>& b) {
    const Array left(type, a), right(type, b);
    return run_kernel({Array::zeros(type, s.batch * s.stride_c)},
                      [&](kernels::Context& context, Vec<Array>& y) {
                        of.run(context, s, kernels::In(left), kernels::In(right), y[0].out(), 1.0f, 0.0f, {});
                      })[0]
        .rounded();
  };
  Vec<double> a = random_values(s.batch * s.stride_a, 1), b = random_values(s.n * s.k, 2);
  const auto exact = product(gemm, DType::f32, a, b);
  CHECK(cublaslt_calls().compute == CUBLAS_COMPUTE_32F);
  const UseTf32 on(true);
  const auto rounded = product(gemm, DType::f32, a, b);
  CHECK(cublaslt_calls().compute == CUBLAS_COMPUTE_32F_FAST_TF32);
  product(gemm, DType::bf16, a, b);
  CHECK(cublaslt_calls().compute == CUBLAS_COMPUTE_32F);
  for (auto* values : {&a, &b})
    for (double& value : *values) value = rounded_to_tf32(value);
  CHECK(error(rounded, product(*kernels::cpu_table().gemm, DType::f32, a, b)) < tolerance(DType::f32));
  CHECK(error(rounded, exact) > 10 * tolerance(DType::f32));
}
