// Quantization against tests/kernels/make_quantize.py, and the scales of delayed and current scaling against
// their formulas.
#include "kernels/quantize.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>

#include "base/checked.hpp"
#include "kernels/block_scales.hpp"
#include "kernels/gemm_arguments.hpp"
#include "kernels/table.hpp"
#include "support/devices.hpp"
#include "support/fixture_file.hpp"
#include "tensor/float8.hpp"
#include "tensor/launch.hpp"

using namespace capstan;
using kernels::QuantizeFormat;
using kernels::QuantizeShape;
using kernels::ScaleLayout;

namespace {

const test::FixtureFile& quantized_fixture() {
  static const test::FixtureFile file("tests/kernels/quantize.safetensors");
  return file;
}

struct Recipe {
  const char* name;
  QuantizeFormat format;
};
const Recipe kFixtureRecipes[] = {
    {"tensor.e4m3", {DType::f8e4m3, ScaleLayout::tensor}},
    {"tensor.e5m2", {DType::f8e5m2, ScaleLayout::tensor}},
    {"block_1x128.e4m3", {DType::f8e4m3, ScaleLayout::block_1x128}},
    {"block_1x128.e5m2", {DType::f8e5m2, ScaleLayout::block_1x128}},
    {"block_128x128.e4m3", {DType::f8e4m3, ScaleLayout::block_128x128}},
    {"mxfp8.e4m3", {DType::f8e4m3, ScaleLayout::block_1x32}},
    {"mxfp8.e5m2", {DType::f8e5m2, ScaleLayout::block_1x32}},
    {"nvfp4.e2m1", {DType::f4e2m1x2, ScaleLayout::block_1x16}},
    {"nvfp4_square.e2m1", {DType::f4e2m1x2, ScaleLayout::block_1x16, true}},
};

std::vector<uint8_t> bytes_of(const Tensor& tensor) {
  return tensor.view({tensor.elements()}).as_type(DType::u8).to_host<uint8_t>();
}

Tensor bytes_like(Device& device, const std::vector<uint8_t>& expected) {
  return Tensor::zeros(device, {static_cast<int64_t>(expected.size())}, DType::u8);
}

// Where a device writes the scales of a matrix.
kernels::BlockScales scales_on(Device& device, ScaleLayout layout, int64_t rows, int64_t cols) {
  const bool of_cpu = device.table().quantize == kernels::cpu_table().quantize;
  return {layout, of_cpu ? kernels::ScaleOrder::row_major : kernels::ScaleOrder::tensor_core, rows, cols};
}
// Memory for these scales, filled with other bytes.
Tensor allocate_scales(Device& device, const kernels::BlockScales& scales) {
  const auto bytes =
      static_cast<size_t>(scales.elements() * size_of(kernels::block_scale_type(scales.layout)));
  return Tensor::from_host<uint8_t>(device, {static_cast<int64_t>(bytes)}, std::vector<uint8_t>(bytes, 0xAB));
}
// The bytes of the scales in the order of rows. Checks that gaps between them are 0.
std::vector<uint8_t> row_major(const Tensor& scale, const kernels::BlockScales& scales) {
  auto bytes = bytes_of(scale);
  const auto size = static_cast<size_t>(size_of(kernels::block_scale_type(scales.layout)));
  REQUIRE(bytes.size() == static_cast<size_t>(scales.elements()) * size);
  std::vector<uint8_t> result;
  for (int64_t row = 0; row < scales.scale_rows(); ++row)
    for (int64_t block = 0; block < scales.blocks(); ++block)
      for (size_t i = 0; i < size; ++i) {
        uint8_t& byte = bytes[static_cast<size_t>(scales.index(row, block)) * size + i];
        result.push_back(byte);
        byte = 0;
      }
  CHECK(bytes == std::vector<uint8_t>(bytes.size()));
  return result;
}

// Memory for the codes and scales of `name`; no scales: a layout without them.
GemmOperand allocate_operand(Device& device, const std::string& name, ScaleLayout layout, int64_t rows,
                             int64_t cols) {
  GemmOperand x;
  x.layout = layout;
  x.values = bytes_like(device, quantized_fixture().values<uint8_t>(name + ".codes"));
  if (quantized_fixture().has(name + ".scale"))
    x.scale = allocate_scales(device, scales_on(device, layout, rows, cols));
  return x;
}

void check_same(const GemmOperand& got, const std::string& name, int64_t rows, int64_t cols) {
  INFO(name);
  CHECK(bytes_of(got.values) == quantized_fixture().values<uint8_t>(name + ".codes"));
  if (got.scale.defined())
    CHECK(row_major(got.scale, scales_on(got.scale.device(), got.layout, rows, cols)) ==
          quantized_fixture().values<uint8_t>(name + ".scale"));
}

void check_case(Device& device, const Recipe& recipe, const QuantizeShape& shape, int64_t padding) {
  const std::string size = std::to_string(shape.rows) + "x" + std::to_string(shape.cols),
                    name = std::string(recipe.name) + "." + size;
  const auto values = quantized_fixture().values<float>(size + ".values");
  // Rows with something else between them.
  std::vector<float> padded;
  for (int64_t r = 0; r < shape.rows; ++r) {
    padded.insert(padded.end(), values.begin() + r * shape.cols, values.begin() + (r + 1) * shape.cols);
    padded.insert(padded.end(), static_cast<size_t>(padding), 1e9f);
  }
  const Tensor x = Tensor::from_host<float>(device, {static_cast<int64_t>(padded.size())}, padded);
  Tensor tensor_scale;
  if (quantized_fixture().has(name + ".tensor_scale"))
    tensor_scale =
        Tensor::from_host<float>(device, {2}, quantized_fixture().values<float>(name + ".tensor_scale"));
  const ScaleLayout layout = recipe.format.layout;
  const GemmOperand rows = allocate_operand(device, name + ".rows", layout, shape.rows, shape.cols),
                    columns = allocate_operand(device, name + ".columns", layout, shape.cols, shape.rows);
  const Tensor amax = Tensor::zeros(device, {1});
  launch(device, device.table().quantize->quantize, recipe.format,
         QuantizeShape{shape.rows, shape.cols, shape.cols + padding}, x, tensor_scale, rows, tensor_scale,
         columns, amax, kernels::RoundingPosition{});
  check_same(rows, name + ".rows", shape.rows, shape.cols);
  check_same(columns, name + ".columns", shape.cols, shape.rows);
  float largest = 0;
  for (const float v : values) largest = std::max(largest, std::abs(v));
  CHECK(amax.to_host<float>()[0] == largest);

  // One of the two alone.
  const GemmOperand again = allocate_operand(device, name + ".columns", layout, shape.cols, shape.rows);
  launch(device, device.table().quantize->quantize, recipe.format,
         QuantizeShape{shape.rows, shape.cols, shape.cols + padding}, x, tensor_scale, GemmOperand(),
         tensor_scale, again, Tensor(), kernels::RoundingPosition{});
  check_same(again, name + ".columns", shape.cols, shape.rows);
}

}  // namespace

TEST_CASE_TEMPLATE("codes and scales of every recipe, along rows and columns", D, EVERY_DEVICE) {
  for (const int threads : {1, 3}) {
    const auto device = D::make(threads);
    for (const Recipe& recipe : kFixtureRecipes)
      for (const QuantizeShape& shape : {QuantizeShape{1, 1}, {3, 37}, {50, 130}})
        for (const int64_t padding : {0, 5}) check_case(*device, recipe, shape, padding);
  }
}

template <class T>
void check_codes_of_half(Device& device) {
  constexpr int64_t kRows = 301, kCols = 263;
  std::vector<float> values(kRows * kCols);
  std::vector<T> narrow(values.size());
  uint32_t state = 1;
  for (size_t i = 0; i < values.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    narrow[i] = T(static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f);
    values[i] = static_cast<float>(narrow[i]);
  }
  const Tensor wide = Tensor::from_host<float>(device, {kRows, kCols}, values),
               half = Tensor::from_host<T>(device, {kRows, kCols}, narrow);
  const QuantizeFormat format{DType::f8e4m3, ScaleLayout::block_1x32};
  const auto quantized = [&](const Tensor& x) {
    GemmOperand columns;
    columns.layout = format.layout;
    columns.values = Tensor::zeros(device, {kCols, kRows}, DType::f8e4m3);
    columns.scale = allocate_scales(device, scales_on(device, format.layout, kCols, kRows));
    launch(device, device.table().quantize->quantize, format, QuantizeShape{kRows, kCols, kCols}, x, Tensor(),
           GemmOperand(), Tensor(), columns, Tensor(), kernels::RoundingPosition{});
    return columns;
  };
  const GemmOperand first = quantized(wide), second = quantized(half);
  CHECK(bytes_of(first.values) == bytes_of(second.values));
  CHECK(bytes_of(first.scale) == bytes_of(second.scale));
  const auto codes = bytes_of(first.values),
             scales = row_major(first.scale, scales_on(device, format.layout, kCols, kRows));
  for (int64_t c = 0; c < kCols; c += 7)
    for (int64_t r = 0; r < kRows; ++r) {
      const float scale = decode_e8m0(scales[static_cast<size_t>(c * 10 + r / 32)]),
                  value = decode<kE4m3>(codes[static_cast<size_t>(c * kRows + r)]) * scale;
      // Half a step of the largest binade, at most.
      REQUIRE(std::abs(value - values[static_cast<size_t>(r * kCols + c)]) <= 16.01f * scale);
    }
}

TEST_CASE_TEMPLATE("bf16 and fp16 have the codes of their fp32 values; a matrix of several tiles", D,
                   EVERY_DEVICE) {
  const auto device = D::make(2);
  check_codes_of_half<bf16>(*device);
  check_codes_of_half<f16>(*device);
}

namespace {

// Memory for the codes and scales of a matrix [rows, cols], not the scale of the tensor.
GemmOperand allocate_operand(Device& device, const QuantizeFormat& format, int64_t rows, int64_t cols) {
  GemmOperand x;
  x.layout = format.layout;
  x.k = cols;
  x.values = Tensor::zeros(device, {rows, cols}, DType::u8);
  if (format.layout != ScaleLayout::tensor)
    x.scale = allocate_scales(device, scales_on(device, format.layout, rows, cols));
  return x;
}

// Codes and scales along rows and columns of values that depend on the seed, as bytes.
std::vector<std::vector<uint8_t>> quantized_bytes(Device& device, const QuantizeFormat& format,
                                                  const QuantizeShape& shape, DType type) {
  std::vector<float> values(static_cast<size_t>(shape.rows * shape.stride));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = 3 * std::sin(static_cast<float>(i * i % 10007)) * (i % 97 == 0 ? 40.0f : 1.0f);
  const Tensor wide = Tensor::from_host<float>(device, {shape.rows, shape.stride}, values),
               x = Tensor::zeros(device, {shape.rows, shape.stride}, type),
               scale = Tensor::from_host<float>(device, {2}, std::vector<float>{20.3f, 1 / 20.3f});
  launch(device, device.table().elementwise->cast, wide, x, shape.rows * shape.stride);
  const bool of_tensor = format.layout == ScaleLayout::tensor || format.layout == ScaleLayout::block_1x16;
  const bool has_blocks = format.layout != ScaleLayout::tensor;
  const GemmOperand rows = allocate_operand(device, format, shape.rows, shape.cols),
                    columns = allocate_operand(device, format, shape.cols, shape.rows);
  const Tensor amax = Tensor::zeros(device, {1}), tensor_scale = of_tensor ? scale : Tensor();
  launch(device, device.table().quantize->quantize, format, shape, x, tensor_scale, rows, tensor_scale,
         columns, amax, kernels::RoundingPosition{philox_key(1, purpose::test, 3), 7});
  std::vector<std::vector<uint8_t>> result{bytes_of(rows.values), bytes_of(columns.values), bytes_of(amax)};
  if (has_blocks) {
    result.push_back(row_major(rows.scale, scales_on(device, format.layout, shape.rows, shape.cols)));
    result.push_back(row_major(columns.scale, scales_on(device, format.layout, shape.cols, shape.rows)));
  }
  return result;
}

}  // namespace

TEST_CASE_TEMPLATE("matrices of several tiles have the codes of the CPU", D, EVERY_DEVICE) {
  std::vector<Recipe> recipes(std::begin(kFixtureRecipes), std::end(kFixtureRecipes));
  for (const bool stochastic : {false, true})
    for (const bool hadamard : {false, true})
      recipes.push_back({"nvfp4", {DType::f4e2m1x2, ScaleLayout::block_1x16, false, hadamard, stochastic}});
  const auto cpu = test::Cpu::make(2), device = D::make(2);
  for (const Recipe& recipe : recipes)
    // Rows that begin at vectors, and rows that do not.
    for (const QuantizeShape& shape : {QuantizeShape{150, 259, 261}, {256, 136, 144}})
      for (const DType type : {DType::f32, DType::bf16}) {
        INFO(recipe.name, " ", shape.rows, "x", shape.cols, " ", name_of(type));
        CHECK(quantized_bytes(*device, recipe.format, shape, type) ==
              quantized_bytes(*cpu, recipe.format, shape, type));
      }
}

TEST_CASE_TEMPLATE("the maximum counts NaN as the largest, and keeps what was there", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  const std::vector<float> values = {0.5f, -3.0f, 2.0f, 100.0f, 1.0f, -0.25f};
  const auto amax_of = [&](std::vector<float> x, float before) {
    const Tensor tensor = Tensor::from_host<float>(*device, {6}, x),
                 amax = Tensor::from_host<float>(*device, {1}, std::vector{before});
    launch(*device, device->table().quantize->absolute_maximum, tensor, QuantizeShape{2, 2, 3}, false, amax);
    return amax.to_host<float>()[0];
  };
  CHECK(amax_of(values, 0) == 100.0f);
  CHECK(amax_of(values, 200) == 200.0f);
  auto broken = values;
  broken[1] = -INFINITY;
  CHECK(amax_of(broken, 0) == INFINITY);
  broken[1] = -std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(amax_of(broken, 0)));
  broken = values;
  // Between the rows.
  broken[2] = NAN;
  CHECK(amax_of(broken, 0) == 100.0f);
}

TEST_CASE_TEMPLATE("stochastic rounding has the right expected value and keeps values of the format", D,
                   EVERY_DEVICE) {
  const auto device = D::make(3);
  constexpr int64_t kRows = 8, kCols = 48, kCalls = 600;
  std::vector<float> values;
  for (int64_t i = 0; i < kRows * kCols; ++i)
    values.push_back(i % 16 == 0 ? 6.0f : 6.0f * std::sin(0.37f * static_cast<float>(i)));
  values[1] = 0.5f, values[2] = -3.0f, values[3] = 0.0f;  // of the format
  const Tensor x = Tensor::from_host<float>(*device, {kRows, kCols}, values);
  // Every block has the maximum 6 and so the scale 448 of its codes.
  const Tensor tensor_scale = Tensor::from_host<float>(*device, {2}, std::vector{448.0f, 1.0f / 448.0f});
  const QuantizeFormat format{
      .codes = DType::f4e2m1x2, .layout = ScaleLayout::block_1x16, .stochastic = true};
  const auto codes_of = [&](uint64_t call) {
    GemmOperand rows;
    rows.layout = format.layout;
    rows.values = Tensor::zeros(*device, {kRows, kCols / 2}, DType::f4e2m1x2);
    rows.scale = allocate_scales(*device, scales_on(*device, format.layout, kRows, kCols));
    launch(*device, device->table().quantize->quantize, format, QuantizeShape{kRows, kCols, kCols}, x,
           tensor_scale, rows, Tensor(), GemmOperand(), Tensor(),
           kernels::RoundingPosition{philox_key(1, purpose::test, 2), call});
    return bytes_of(rows.values);
  };
  CHECK(codes_of(5) == codes_of(5));
  CHECK(codes_of(5) != codes_of(6));
  std::vector<double> sums(values.size());
  for (uint64_t call = 0; call < kCalls; ++call) {
    const auto codes = codes_of(call);
    for (size_t i = 0; i < values.size(); ++i) {
      const float value = decode<kE2m1>(codes[i / 2] >> (i % 2 * 4) & 15u);
      REQUIRE(std::abs(value - values[i]) <= (std::abs(values[i]) < 2   ? 0.5f
                                              : std::abs(values[i]) < 4 ? 1.0f
                                                                        : 2.0f));
      if (i % 16 == 0 || i < 4) REQUIRE(value == values[i]);
      sums[i] += value;
    }
  }
  // Steps are at most 2, the standard deviation of a mean at most 1 / sqrt(calls).
  for (size_t i = 0; i < values.size(); ++i)
    CHECK(std::abs(sums[i] / kCalls - values[i]) < 4.5 / std::sqrt(static_cast<double>(kCalls)));
}

TEST_CASE_TEMPLATE("columns are transformed in blocks of 16 by the signed Hadamard matrix", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  // Nine blocks and six more rows.
  constexpr int64_t kRows = 150, kCols = 21;
  const int signs[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  std::vector<float> values;
  for (int64_t i = 0; i < kRows * kCols; ++i)
    values.push_back(std::sin(1.3f * static_cast<float>(i * i % 1009)));
  std::vector<double> expected(values.size());  // [cols, rows]
  double largest = 0;
  for (int64_t c = 0; c < kCols; ++c)
    for (int64_t r = 0; r < kRows; ++r) {
      double sum = 0;
      const int64_t first = r / 16 * 16;
      if (first + 16 > kRows)
        sum = values[static_cast<size_t>(r * kCols + c)];
      else
        for (int64_t i = 0; i < 16; ++i) {
          const int parity = __builtin_popcountll(static_cast<uint64_t>(i & (r - first))) % 2;
          sum += (parity ? -0.25 : 0.25) * signs[i] *
                 static_cast<double>(values[static_cast<size_t>((first + i) * kCols + c)]);
        }
      expected[static_cast<size_t>(c * kRows + r)] = sum;
      largest = std::max(largest, std::abs(sum));
    }
  const Tensor x = Tensor::from_host<float>(*device, {kRows, kCols}, values),
               amax = Tensor::zeros(*device, {1});
  launch(*device, device->table().quantize->absolute_maximum, x, QuantizeShape{kRows, kCols, kCols}, true,
         amax);
  CHECK(amax.to_host<float>()[0] == doctest::Approx(largest).epsilon(1e-5));

  const float scale = 448.0f / static_cast<float>(largest);
  const Tensor tensor_scale = Tensor::from_host<float>(*device, {2}, std::vector{scale, 1 / scale});
  GemmOperand columns;
  columns.layout = ScaleLayout::tensor;
  columns.values = Tensor::zeros(*device, {kCols, kRows}, DType::f8e4m3);
  launch(*device, device->table().quantize->quantize, QuantizeFormat{.hadamard = true},
         QuantizeShape{kRows, kCols, kCols}, x, Tensor(), GemmOperand(), tensor_scale, columns, Tensor(),
         kernels::RoundingPosition{});
  const auto codes = bytes_of(columns.values);
  for (size_t i = 0; i < codes.size(); ++i) {
    const double value = static_cast<double>(decode<kE4m3>(codes[i])) / static_cast<double>(scale);
    CHECK(std::abs(value - expected[i]) <=
          0.0626 * std::abs(expected[i]) + 0.002 / static_cast<double>(scale));
  }
}

TEST_CASE_TEMPLATE("codes are transposed", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {1, 300}, {37, 65}, {261, 130}, {0, 4}}) {
    INFO(rows, " x ", cols);
    std::vector<uint8_t> codes, expected(static_cast<size_t>(rows * cols));
    for (int64_t i = 0; i < rows * cols; ++i) codes.push_back(static_cast<uint8_t>(i * 151 + i / 256));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c)
        expected[static_cast<size_t>(c * rows + r)] = codes[static_cast<size_t>(r * cols + c)];
    const Tensor x = Tensor::from_host<uint8_t>(*device, {rows, cols}, codes).as_type(DType::f8e4m3),
                 y = Tensor::empty(*device, {cols, rows}, DType::f8e4m3);
    launch(*device, device->table().quantize->transpose_codes, x, y, rows, cols);
    CHECK(bytes_of(y) == expected);
  }
}

TEST_CASE_TEMPLATE("current scaling", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  const Tensor amax = Tensor::from_host<float>(*device, {5}, std::vector{2.0f, 0.0f, NAN, INFINITY, 1e-40f}),
               scale = Tensor::zeros(*device, {5, 2});
  launch(*device, device->table().quantize->current_scale, amax, scale, 5, 448.0f);
  const auto s = scale.to_host<float>();
  CHECK(s[0] == 224.0f);
  CHECK(s[1] == 1.0f / 224.0f);
  for (size_t i = 2; i < 8; ++i) CHECK(s[i] == 1.0f);
  CHECK(s[8] == std::numeric_limits<float>::max());
  CHECK(amax.to_host<float>() == std::vector<float>(5));
}

TEST_CASE_TEMPLATE("delayed scaling follows Transformer Engine's update", D, EVERY_DEVICE) {
  // The update in floats, after transformer_engine/pytorch/fp8.py.
  struct Slot {
    std::vector<float> history;
    float scale = 1;
    void update(float amax, float largest, bool maximum, float margin) {
      history.insert(history.begin(), std::isfinite(amax) ? amax : 0.0f);
      history.pop_back();
      const float a = maximum ? *std::max_element(history.begin(), history.end()) : history[0];
      if (a > 0) scale = largest / a / std::exp2(margin);
    }
  };
  const auto device = D::make(1);
  for (const bool maximum : {false, true})
    for (const int64_t margin : {0, 3})
      for (const int64_t length : {1, 4}) {
        constexpr int64_t kLayers = 2;
        std::vector<Slot> slots(3 * kLayers, Slot{std::vector<float>(static_cast<size_t>(length)), 1});
        const Tensor amax = Tensor::zeros(*device, {kLayers, 3}),
                     history = Tensor::zeros(*device, {kLayers, 3, length}),
                     scale = Tensor::from_host<float>(*device, {kLayers, 3, 2}, std::vector<float>(12, 1.0f));
        for (int step = 0; step < 9; ++step) {
          std::vector<float> now;
          for (int i = 0; i < 3 * kLayers; ++i)
            now.push_back(step == 4 && i == 1   ? INFINITY
                          : step == 5 && i == 2 ? NAN
                          : step == 6 && i == 3
                              ? 0.0f
                              : std::abs(std::sin(static_cast<float>(7 * step + 3 * i))) * 5);
          amax.copy_from_host_bytes(std::as_bytes(std::span(now)));
          launch(*device, device->table().quantize->delayed_scale, Tensor(), amax, history, scale, kLayers,
                 kernels::Quantize::DelayedScaling{length, maximum, margin, 448.0f, 57344.0f});
          const auto scales = scale.to_host<float>(), stored = history.to_host<float>();
          for (size_t i = 0; i < slots.size(); ++i) {
            slots[i].update(now[i], i % 3 == 2 ? 57344.0f : 448.0f, maximum, static_cast<float>(margin));
            INFO("step ", step, ", tensor ", i);
            CHECK(scales[2 * i] == slots[i].scale);
            CHECK(scales[2 * i + 1] == 1 / slots[i].scale);
            for (size_t h = 0; h < slots[i].history.size(); ++h)
              CHECK(stored[i * static_cast<size_t>(length) + h] == slots[i].history[h]);
          }
          CHECK(amax.to_host<float>() == std::vector<float>(3 * kLayers));
        }
      }
}

namespace {

// Compares the gaps between the scales too.
void check_same(const GemmOperand& got, const GemmOperand& expected) {
  CHECK(bytes_of(got.values) == bytes_of(expected.values));
  if (expected.scale.defined()) CHECK(bytes_of(got.scale) == bytes_of(expected.scale));
}

Tensor normal_values(Device& device, int64_t count, uint32_t seed, DType type) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  const Tensor wide = Tensor::from_host<float>(device, {count}, values),
               x = Tensor::zeros(device, {count}, type);
  launch(device, device.table().elementwise->cast, wide, x, count);
  return x;
}

// write(y, quantized output) launches a norm or an activation with y [rows, cols].
template <class Write>
void check_quantized_output(Device& device, const QuantizeFormat& format, int64_t rows, int64_t cols,
                            DType type, Write&& write) {
  const Tensor alone = Tensor::zeros(device, {rows, cols}, type),
               y = Tensor::zeros(device, {rows, cols}, type);
  write(alone, QuantizedOutputTensors());
  const auto plain = alone.to_floats();
  float largest = 0;
  for (const float value : plain) largest = std::max(largest, std::abs(value));
  const auto zero = [&] { return Tensor::zeros(device, {1}); };
  const Tensor none, scale = format.layout == ScaleLayout::tensor
                                 ? Tensor::from_host<float>(device, {2}, std::vector<float>{41.3f, 1 / 41.3f})
                                 : Tensor();
  // All of it; each part alone.
  for (const auto [along_rows, along_columns, maximum] : {std::array<bool, 3>{true, true, true},
                                                          {true, false, false},
                                                          {false, true, true},
                                                          {false, false, true}}) {
    QuantizedOutputTensors got{format, scale, {}, {}, maximum ? zero() : Tensor()};
    GemmOperand expected_rows, expected_columns;
    if (along_rows)
      got.rows = allocate_operand(device, format, rows, cols),
      expected_rows = allocate_operand(device, format, rows, cols);
    if (along_columns)
      got.columns = allocate_operand(device, format, cols, rows),
      expected_columns = allocate_operand(device, format, cols, rows);
    write(y, got);
    CHECK(y.to_floats() == plain);
    launch(device, device.table().quantize->quantize, format, QuantizeShape{rows, cols, cols}, alone, scale,
           expected_rows, scale, expected_columns, none, kernels::RoundingPosition{});
    if (along_rows) check_same(got.rows, expected_rows);
    if (along_columns) check_same(got.columns, expected_columns);
    if (maximum) CHECK(got.amax.template to_host<float>() == std::vector<float>{largest});
  }
}

}  // namespace

TEST_CASE_TEMPLATE("norms and activations write the codes and the maximum of a quantized output", D,
                   EVERY_DEVICE) {
  const QuantizeFormat formats[] = {
      {DType::f8e4m3, ScaleLayout::tensor},      {DType::f8e5m2, ScaleLayout::tensor},
      {DType::f8e4m3, ScaleLayout::block_1x128}, {DType::f8e5m2, ScaleLayout::block_1x128},
      {DType::f8e4m3, ScaleLayout::block_1x32},  {DType::f8e5m2, ScaleLayout::block_1x32}};
  const auto device = D::make(3);
  const kernels::Norm& norm = *device->table().norm;
  const kernels::Activation& activation = *device->table().activation;
  const Tensor none;
  uint32_t seed = 1;
  for (const QuantizeFormat& format : formats)
    for (const auto [from, type] : {std::array<DType, 2>{DType::f32, DType::f32},
                                    {DType::bf16, DType::bf16},
                                    {DType::f32, DType::bf16}})
      for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {37, 131}, {130, 300}, {257, 33}}) {
        if (from != type && rows > 100) continue;
        INFO(name_of(format.codes), " ", static_cast<int>(format.layout), " ", name_of(type), " ", rows, "x",
             cols);
        const Tensor x = normal_values(*device, 2 * rows * cols, seed++, from),
                     gamma = normal_values(*device, cols, seed++, from);
        for (const bool rms : {false, true})
          check_quantized_output(
              *device, format, rows, cols, type,
              [&](const Tensor& y, const QuantizedOutputTensors& quantized) {
                const kernels::NormRows layout{rows, cols, 1, 0, cols};
                const Tensor mean = Tensor::zeros(*device, {rows}), rstd = Tensor::zeros(*device, {rows});
                launch(*device, norm.forward_workspace(layout), norm.forward, rms, layout, x, none, none,
                       gamma, 1.0f, rms ? none : gamma, 1e-5f, y, rms ? none : mean, rstd, quantized);
              });
        for (const bool gated : {false, true})
          check_quantized_output(*device, format, rows, cols, type,
                                 [&](const Tensor& y, const QuantizedOutputTensors& quantized) {
                                   launch(*device, activation.forward_workspace(gated, false, cols),
                                          activation.forward, kernels::ActivationKind::silu, gated, x, none,
                                          y, rows, cols, quantized);
                                 });
      }
}
