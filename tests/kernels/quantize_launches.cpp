// The launches of the quantization kernels, and of the norms and activations that write codes, against
// scalar references of the formulas in kernels/quantize.hpp. quantize.cpp compares with other programs.
#include <cfloat>

#include "kernels/block_scales.hpp"
#include "kernels/common/hadamard.hpp"
#include "kernels/quantize.hpp"
#include "tensor/float8.hpp"
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::QuantizedOutput;
using kernels::QuantizeFormat;
using kernels::QuantizeShape;
using kernels::RoundingPosition;
using kernels::ScaleLayout;

namespace {

struct Matrix {
  int64_t rows = 0, cols = 0;
  Vec<float> values;
  float at(int64_t row, int64_t col) const { return values[static_cast<size_t>(row * cols + col)]; }
};
// `values`: rows of `stride` elements.
Matrix matrix_of(const Vec<double>& values, int64_t rows, int64_t cols, int64_t stride) {
  Matrix matrix{rows, cols, {}};
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      matrix.values.push_back(static_cast<float>(values[static_cast<size_t>(r * stride + c)]));
  return matrix;
}
Matrix transposed(const Matrix& matrix) {
  Matrix result{matrix.cols, matrix.rows, {}};
  for (int64_t c = 0; c < matrix.cols; ++c)
    for (int64_t r = 0; r < matrix.rows; ++r) result.values.push_back(matrix.at(r, c));
  return result;
}
float largest_in(const Matrix& matrix) {
  float largest = 0;
  for (const float value : matrix.values) largest = std::max(largest, std::abs(value));
  return largest;
}
// Complete blocks of 16 along the rows are transformed.
void transform_rows(Matrix& matrix) {
  for (int64_t r = 0; r < matrix.rows; ++r)
    for (int64_t c = 0; c + kernels::kHadamard <= matrix.cols; c += kernels::kHadamard)
      kernels::hadamard_transform(matrix.values.data() + r * matrix.cols + c);
}

bool has_four_bits(const QuantizeFormat& format) {
  return format.codes == DType::f4e2m1x2;
}
int64_t row_bytes(const QuantizeFormat& format, int64_t cols) {
  return has_four_bits(format) ? (cols + 1) / 2 : cols;
}
kernels::BlockScales scales_of(const QuantizeFormat& format, int64_t rows, int64_t cols) {
  return {format.layout, table().scale_order, rows, cols};
}
int64_t scale_bytes(const QuantizeFormat& format, int64_t rows, int64_t cols) {
  if (format.layout == ScaleLayout::tensor) return 0;
  return scales_of(format, rows, cols).elements() * size_of(kernels::block_scale_type(format.layout));
}

uint32_t code_of(const QuantizeFormat& format, float value, uint32_t random) {
  if (format.stochastic) return encode_stochastic<kE2m1>(value, random);
  if (format.codes == DType::f8e4m3) return encode<kE4m3>(value);
  return format.codes == DType::f8e5m2 ? encode<kE5m2>(value) : encode<kE2m1>(value);
}

// Factor of the values of a block, and its scale as it is stored.
struct Scale {
  float factor = 1;
  Vec<uint8_t> stored;
};
Scale scale_of_block(const QuantizeFormat& format, float largest, float tensor_scale) {
  const float most = largest_of(format.codes);
  if (format.layout == ScaleLayout::tensor) return {tensor_scale, {}};
  if (format.layout == ScaleLayout::block_1x32) {
    const auto code = static_cast<uint8_t>(largest == 0 ? 127 : encode_e8m0_up(largest / most));
    return {1 / decode_e8m0(code), {code}};
  }
  if (format.layout == ScaleLayout::block_1x16) {
    const uint32_t code = encode<kE4m3>(largest * (1 / 6.0f) * tensor_scale);
    const float wide = decode<kE4m3>(code);
    return {wide == 0 ? 0 : std::min(tensor_scale / wide, FLT_MAX), {static_cast<uint8_t>(code)}};
  }
  Scale scale;
  if (largest > 0)
    scale.factor = static_cast<float>(std::exp2(std::floor(std::log2(static_cast<double>(most / largest)))));
  scale.stored.resize(sizeof(float));
  const float inverse = 1 / scale.factor;
  std::memcpy(scale.stored.data(), &inverse, sizeof inverse);
  return scale;
}

// Codes and scales along the rows of a matrix, as bytes; gaps between scales are 0.
struct Encoded {
  Vec<double> codes, scales;
};
Encoded encoded_rows(const QuantizeFormat& format, const Matrix& x, float tensor_scale,
                     RoundingPosition random = {}) {
  const bool one_scale = format.layout == ScaleLayout::tensor;
  const int64_t width = one_scale ? x.cols : kernels::block_of(format.layout),
                height = format.layout == ScaleLayout::block_128x128 ? 128
                         : format.square                             ? 16
                                                                     : 1;
  Encoded result;
  result.codes.resize(static_cast<size_t>(x.rows * row_bytes(format, x.cols)));
  result.scales.resize(static_cast<size_t>(scale_bytes(format, x.rows, x.cols)));
  const auto store_code = [&](int64_t r, int64_t c, uint32_t code) {
    const int64_t i = r * row_bytes(format, x.cols) + (has_four_bits(format) ? c / 2 : c);
    result.codes[static_cast<size_t>(i)] += has_four_bits(format) && c % 2 ? code << 4 : code;
  };
  const auto encode_block = [&](int64_t first_row, int64_t first_col) {
    const int64_t end_row = std::min(first_row + height, x.rows), end = std::min(first_col + width, x.cols);
    float largest = 0;
    for (int64_t r = first_row; r < end_row; ++r)
      for (int64_t c = first_col; c < end; ++c) largest = std::max(largest, std::abs(x.at(r, c)));
    const Scale scale = scale_of_block(format, largest, tensor_scale);
    for (int64_t r = first_row; r < end_row; ++r) {
      for (int64_t c = first_col; c < end; ++c) {
        const auto i = static_cast<uint64_t>(r * x.cols + c);
        store_code(
            r, c,
            code_of(format, x.at(r, c) * scale.factor, philox4x32(random.key, i / 4, random.call)[i % 4]));
      }
      if (one_scale || (height == 128 && r % 128 != 0)) continue;
      const int64_t at =
          scales_of(format, x.rows, x.cols).index(r / (height == 128 ? 128 : 1), first_col / width);
      for (size_t byte = 0; byte < scale.stored.size(); ++byte)
        result.scales[static_cast<size_t>(at) * scale.stored.size() + byte] = scale.stored[byte];
    }
  };
  for (int64_t r = 0; r < x.rows; r += height)
    for (int64_t c = 0; c < x.cols; c += width) encode_block(r, c);
  return result;
}

// What launches write: codes and scales of the rows, those of the columns, the maximum.
Vec<Array> memory_for(const QuantizeFormat& format, int64_t rows, int64_t cols) {
  const auto bytes = [](int64_t n) { return Array::zeros(DType::u8, n, 0xEE); };
  return {bytes(rows * row_bytes(format, cols)), bytes(scale_bytes(format, rows, cols)),
          bytes(cols * row_bytes(format, rows)), bytes(scale_bytes(format, cols, rows)),
          Array::zeros(DType::f32, 1)};
}
kernels::Quantized quantized(Vec<Array>& memory, size_t first) {
  return {memory[first].memory(), memory[first + 1].memory()};
}
void check_rows(const Vec<Array>& found, size_t first, const Encoded& expected) {
  CHECK(found[first].rounded() == expected.codes);
  CHECK(found[first + 1].rounded() == expected.scales);
}

// Values of several magnitudes, some of them 0.
Vec<double> wide_values(int64_t n, uint64_t seed) {
  Vec<double> values = random_values(n, seed, 3);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] *= i % 41 == 0 ? 0 : std::exp2(static_cast<double>(i * i % 13) - 6);
  return values;
}

constexpr QuantizeFormat kFormats[] = {
    {DType::f8e4m3, ScaleLayout::tensor},
    {DType::f8e5m2, ScaleLayout::tensor},
    {DType::f8e4m3, ScaleLayout::block_1x128},
    {DType::f8e5m2, ScaleLayout::block_1x128},
    {DType::f8e4m3, ScaleLayout::block_128x128},
    {DType::f8e4m3, ScaleLayout::block_1x32},
    {DType::f8e5m2, ScaleLayout::block_1x32},
    {DType::f4e2m1x2, ScaleLayout::block_1x16},
    {DType::f4e2m1x2, ScaleLayout::block_1x16, true},
    {DType::f4e2m1x2, ScaleLayout::block_1x16, false, true, false},
    {DType::f4e2m1x2, ScaleLayout::block_1x16, false, true, true},
};
bool has_tensor_scale(const QuantizeFormat& format) {
  return format.layout == ScaleLayout::tensor || format.layout == ScaleLayout::block_1x16;
}

}  // namespace

TEST_CASE("quantization: codes and scales along rows and columns, and the maximum") {
  const auto& quantize = *table().quantize;
  uint64_t number = 0;
  for (const QuantizeFormat& format : kFormats)
    for (const DType type : kTypes)
      for (const auto [rows, cols, padding] :
           {std::array<int64_t, 3>{1, 1, 0}, {3, 37, 5}, {131, 40, 0}, {48, 144, 16}}) {
        // Each layout has several types and sizes.
        if (!runs_case(number++, 5)) continue;
        INFO(name_of(format.codes), " layout ", static_cast<int>(format.layout), " ", text(type), " ", rows,
             "x", cols, " square=", format.square, " hadamard=", format.hadamard);
        const int64_t stride = cols + padding;
        const Array x(type, wide_values(rows * stride, 11 + number));
        const Matrix values = matrix_of(x.rounded(), rows, cols, stride);
        float scale[2] = {20.3f, 1 / 20.3f};
        float* const tensor_scale = has_tensor_scale(format) ? scale : nullptr;
        const RoundingPosition random{philox_key(1, purpose::test, 3), 7};
        const auto run = [&](bool along_rows, bool along_columns) {
          return run_kernel(memory_for(format, rows, cols), [&](kernels::Context& c, Vec<Array>& out) {
            quantize.quantize(c, format, {rows, cols, stride}, x, tensor_scale,
                              along_rows ? quantized(out, 0) : kernels::Quantized(), tensor_scale,
                              along_columns ? quantized(out, 2) : kernels::Quantized(),
                              along_rows ? out[4].f32() : nullptr, random);
          });
        };
        const auto both = run(true, true), columns = run(false, true);
        check_rows(both, 0, encoded_rows(format, values, scale[0], random));
        Matrix across = transposed(values);
        if (format.hadamard) transform_rows(across);
        const Encoded expected = encoded_rows(format, across, scale[0],
                                              RoundingPosition{random.key, random.call | uint64_t{1} << 63});
        check_rows(both, 2, expected);
        check_rows(columns, 2, expected);
        CHECK(both[4].rounded()[0] == static_cast<double>(largest_in(values)));
      }
}

TEST_CASE("quantization: maxima of elements and of transformed columns") {
  const auto& quantize = *table().quantize;
  for (const DType type : kTypes)
    for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {37, 5}, {131, 150}}) {
      INFO(text(type), " ", rows, "x", cols);
      const int64_t stride = cols + 3;
      const Array x(type, wide_values(rows * stride, 5));
      const Matrix values = matrix_of(x.rounded(), rows, cols, stride);
      Matrix across = transposed(values);
      transform_rows(across);
      for (const double before : {0.0, 1e6})
        for (const bool hadamard : {false, true}) {
          const auto found =
              run_kernel({Array::zeros(DType::f32, 1, before)}, [&](kernels::Context& c, Vec<Array>& out) {
                quantize.absolute_maximum(c, x, {rows, cols, stride}, hadamard, out[0].f32());
              });
          const auto largest = static_cast<double>(largest_in(hadamard ? across : values));
          CHECK(found[0].rounded()[0] == std::max(before, largest));
        }
    }
}

TEST_CASE("quantization: codes are transposed") {
  for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {1, 300}, {37, 65}, {130, 131}}) {
    INFO(rows, "x", cols);
    Vec<double> codes, expected(static_cast<size_t>(rows * cols));
    for (int64_t i = 0; i < rows * cols; ++i) {
      codes.push_back(static_cast<double>((i * 151 + i / 256) % 256));
      expected[static_cast<size_t>(i % cols * rows + i / cols)] = codes.back();
    }
    const Array x(DType::u8, codes);
    const auto y =
        run_kernel({Array::zeros(DType::u8, rows * cols)}, [&](kernels::Context& c, Vec<Array>& out) {
          table().quantize->transpose_codes(c, x, out[0].out(), rows, cols);
        });
    CHECK(y[0].rounded() == expected);
  }
}

namespace {

// {scale, inverse} of a tensor with this maximum; `kept` where it has none.
std::array<float, 2> tensor_scale_of(float largest, float format_max, std::array<float, 2> kept) {
  if (!(largest > 0 && largest <= FLT_MAX)) return kept;
  const float scale = std::min(format_max / largest, FLT_MAX);
  return {scale, 1 / scale};
}

}  // namespace

TEST_CASE("quantization: the scales of tensors from their maxima, and from a history of these") {
  const auto& quantize = *table().quantize;
  const Vec<double> maxima = {2, 0, NAN, INFINITY, static_cast<double>(1e-40f), 0.3};
  const auto count = static_cast<int64_t>(maxima.size());
  const auto current = run_kernel({Array(DType::f32, maxima), Array::zeros(DType::f32, 2 * count)},
                                  [&](kernels::Context& c, Vec<Array>& out) {
                                    quantize.current_scale(c, out[0].f32(), out[1].f32(), count, 448.0f);
                                  });
  CHECK(current[0].rounded() == Vec<double>(maxima.size()));
  for (size_t i = 0; i < maxima.size(); ++i) {
    const auto expected = tensor_scale_of(static_cast<float>(maxima[i]), 448, {1, 1});
    CHECK(current[1].rounded()[2 * i] == static_cast<double>(expected[0]));
    CHECK(current[1].rounded()[2 * i + 1] == static_cast<double>(expected[1]));
  }

  // Two layers of three tensors. The longest history is that of several rounds of a block of threads.
  for (const int64_t length : {1, 4, 300})
    for (const bool maximum : {false, true})
      for (const bool skip : {false, true}) {
        INFO("length ", length, " maximum=", maximum, " skip=", skip);
        const Vec<double> history = random_values(6 * length, 3, 5);
        Vec<double> before(history.size());
        for (size_t i = 0; i < before.size(); ++i) before[i] = std::abs(history[i]);
        const Array scale(DType::f32, Vec<double>(12, 0.5));
        const kernels::StepControl control{.skip = skip ? 1 : 0};
        const Array words(DType::f32, {1, 0});
        Array stored = words;
        std::memcpy(stored.memory(), &control, sizeof control);
        const auto found =
            run_kernel({Array(DType::f32, maxima), Array(DType::f32, before), scale},
                       [&](kernels::Context& c, Vec<Array>& out) {
                         quantize.delayed_scale(c, stored, out[0].f32(), out[1].f32(), out[2].f32(), 2,
                                                {length, maximum, 1, 448, 57344});
                       });
        CHECK(found[0].rounded() == Vec<double>(maxima.size()));
        const Array rounded(DType::f32, before);
        for (int64_t i = 0; i < count; ++i) {
          Vec<double> expected(static_cast<size_t>(length));
          for (int64_t h = 0; h < length; ++h)
            expected[static_cast<size_t>(h)] = rounded.rounded()[static_cast<size_t>(i * length + h)];
          std::array<float, 2> scales = {0.5f, 0.5f};
          if (!skip) {
            const double newest = maxima[static_cast<size_t>(i)];
            expected.insert(expected.begin(),
                            std::isfinite(newest) ? static_cast<double>(static_cast<float>(newest)) : 0.0);
            expected.pop_back();
            const double largest = maximum ? *std::ranges::max_element(expected) : expected[0];
            scales = tensor_scale_of(static_cast<float>(largest) * 2, i % 3 == 2 ? 57344 : 448, scales);
          }
          const auto all = found[1].rounded();
          CHECK(Vec<double>(all.begin() + i * length, all.begin() + (i + 1) * length) == expected);
          for (size_t k = 0; k < 2; ++k)
            CHECK(found[2].rounded()[2 * static_cast<size_t>(i) + k] == static_cast<double>(scales[k]));
        }
      }
}

namespace {

// write(context, y, quantized output) launches a norm or an activation with y [rows, cols] of this type.
template <class Write>
void check_output(const QuantizeFormat& format, int64_t rows, int64_t cols, DType type, Write&& write) {
  float scale[2] = {41.3f, 1 / 41.3f};
  // The maximum alone is what kernels can give before the scale is known.
  const bool has_codes = format.layout != ScaleLayout::block_1x16;
  Vec<Array> memory = memory_for(format, rows, cols);
  memory.push_back(Array::zeros(type, rows * cols));
  const auto found = run_kernel(memory, [&](kernels::Context& c, Vec<Array>& out) {
    QuantizedOutput output{
        format, format.layout == ScaleLayout::tensor ? scale : nullptr, {}, {}, out[4].f32()};
    if (has_codes) output.rows = quantized(out, 0), output.columns = quantized(out, 2);
    write(c, out[5].out(), output);
  });
  const Matrix y = matrix_of(found[5].rounded(), rows, cols, cols);
  CHECK(found[4].rounded()[0] == static_cast<double>(largest_in(y)));
  if (!has_codes) return;
  check_rows(found, 0, encoded_rows(format, y, scale[0]));
  check_rows(found, 2, encoded_rows(format, transposed(y), scale[0]));
}

}  // namespace

TEST_CASE("quantization: norms and activations write the codes of their outputs") {
  const auto& norm = *table().norm;
  const auto& activation = *table().activation;
  uint64_t number = 0;
  for (const QuantizeFormat& format : {QuantizeFormat{DType::f8e4m3, ScaleLayout::tensor},
                                       {DType::f8e5m2, ScaleLayout::block_1x128},
                                       {DType::f8e4m3, ScaleLayout::block_1x32},
                                       {DType::f4e2m1x2, ScaleLayout::block_1x16}})
    for (const DType type : kTypes)
      for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {37, 131}, {130, 48}}) {
        if (!runs_case(number++, 2)) continue;
        INFO(name_of(format.codes), " layout ", static_cast<int>(format.layout), " ", text(type), " ", rows,
             "x", cols);
        const Array x(type, wide_values(2 * rows * cols, number)), gamma(type, random_values(cols, 2));
        for (const bool rms : {false, true}) {
          const kernels::NormRows layout{rows, cols, 1, 0, cols};
          Array mean = Array::zeros(DType::f32, rows), rstd = mean;
          check_output(format, rows, cols, type,
                       [&](kernels::Context& c, kernels::Out y, const QuantizedOutput& output) {
                         norm.forward(c, rms, layout, x, {}, {}, gamma, 1.0f,
                                      rms ? kernels::In{} : kernels::In(gamma), 1e-5f, y,
                                      rms ? nullptr : mean.f32(), rstd.f32(), output);
                       });
        }
        for (const bool gated : {false, true})
          check_output(format, rows, cols, type,
                       [&](kernels::Context& c, kernels::Out y, const QuantizedOutput& output) {
                         activation.forward(c, kernels::ActivationKind::silu, gated, x, {}, y, rows, cols,
                                            output);
                       });
      }
}
