// The GEMMs of linear layers in 8 and 4 bits: against the products of the decoded operands in double, and
// against those of the original values within what the formats can hold.
#include "parallel/low_precision.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <numeric>

#include "kernels/table.hpp"
#include "ops/activation.hpp"
#include "ops/grouped_linear.hpp"
#include "ops/linear.hpp"
#include "ops/matmul.hpp"
#include "parallel/flat_store.hpp"
#include "support/devices.hpp"
#include "support/simulated_gpu.hpp"
#include "tensor/float8.hpp"
#include "tensor/launch.hpp"

using namespace capstan;
using kernels::ScaleLayout;

namespace {

constexpr ScalingRecipe kRecipes[] = {ScalingRecipe::delayed, ScalingRecipe::tensorwise,
                                      ScalingRecipe::blockwise, ScalingRecipe::mxfp8, ScalingRecipe::nvfp4};
const char* name_of(ScalingRecipe recipe) {
  const char* const names[] = {"delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"};
  return names[static_cast<size_t>(recipe)];
}
LowPrecision format_of(ScalingRecipe recipe, bool hybrid) {
  LowPrecision format;
  format.recipe = recipe;
  format.forward = recipe == ScalingRecipe::nvfp4 ? DType::f4e2m1x2 : DType::f8e4m3;
  format.gradient = hybrid && recipe != ScalingRecipe::nvfp4 ? DType::f8e5m2 : format.forward;
  return format;
}

struct Matrix {
  int64_t rows, cols;
  std::vector<double> values;
  double at(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * cols + c)]; }
  Matrix transposed() const {
    Matrix t{cols, rows, std::vector<double>(values.size())};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) t.values[static_cast<size_t>(c * rows + r)] = at(r, c);
    return t;
  }
  // this [m, k] times other [n, k]^T
  Matrix times(const Matrix& other) const {
    Matrix y{rows, other.rows, std::vector<double>(static_cast<size_t>(rows * other.rows))};
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < other.rows; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < cols; ++k) sum += at(i, k) * other.at(j, k);
        y.values[static_cast<size_t>(i * other.rows + j)] = sum;
      }
    return y;
  }
};

// bf16 values.
Matrix random_matrix(int64_t rows, int64_t cols, uint32_t seed, double scale) {
  Matrix m{rows, cols, {}};
  uint32_t state = seed * 2654435761u + 12345u;
  for (int64_t i = 0; i < rows * cols; ++i) {
    double sum = 0;
    for (int n = 0; n < 4; ++n) {
      state = state * 1664525u + 1013904223u;
      sum += static_cast<double>(state >> 8) * 0x1p-24 - 0.5;
    }
    m.values.push_back(static_cast<double>(static_cast<float>(bf16(static_cast<float>(sum * scale)))));
  }
  return m;
}
Tensor on(Device& device, const Matrix& m) {
  std::vector<bf16> values;
  for (const double v : m.values) values.emplace_back(static_cast<float>(v));
  return Tensor::from_host<bf16>(device, {m.rows, m.cols}, values);
}
Matrix from(const Tensor& t) {
  const auto values = t.to_floats();
  return {t.size(0), t.size(1), {values.begin(), values.end()}};
}

std::vector<uint8_t> raw_bytes(const Tensor& t) {
  return t.as_type(DType::u8).to_host<uint8_t>();
}

// By the definition of ScaleLayout.
Matrix decoded(const GemmOperand& x) {
  const int64_t rows = x.values.size(0), k = x.k, block = kernels::block_of(x.layout),
                row_bytes = x.values.size(1);
  const kernels::BlockScales scales{x.layout, x.values.device().table().scale_order, rows, k};
  const auto codes = raw_bytes(x.values);
  std::vector<float> wide;
  std::vector<uint8_t> narrow;
  if (x.scale.dtype() == DType::f32)
    wide = x.scale.to_host<float>();
  else
    narrow = raw_bytes(x.scale);
  const double tensor_scale =
      x.layout == ScaleLayout::block_1x16 ? static_cast<double>(x.tensor_scale.to_host<float>()[0]) : 1;
  Matrix m{rows, k, {}};
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < k; ++i) {
      double value, scale = 1;
      if (x.values.dtype() == DType::f4e2m1x2)
        value = decode<kE2m1>((codes[static_cast<size_t>(r * row_bytes + i / 2)] >> (i % 2 * 4)) & 15u);
      else if (x.values.dtype() == DType::f8e4m3)
        value = decode<kE4m3>(codes[static_cast<size_t>(r * row_bytes + i)]);
      else
        value = decode<kE5m2>(codes[static_cast<size_t>(r * row_bytes + i)]);
      const int64_t scale_row = x.layout == ScaleLayout::block_128x128 ? r / 128 : r;
      const auto at = static_cast<size_t>(block > 0 ? scales.index(scale_row, i / block) : 0);
      if (x.layout == ScaleLayout::tensor) scale = wide[0];
      if (x.layout == ScaleLayout::block_1x128 || x.layout == ScaleLayout::block_128x128) scale = wide[at];
      if (x.layout == ScaleLayout::block_1x32) scale = decode_e8m0(narrow[at]);
      if (x.layout == ScaleLayout::block_1x16)
        scale = static_cast<double>(decode<kE4m3>(narrow[at])) * tensor_scale;
      m.values.push_back(value * scale);
    }
  return m;
}

// The largest difference over the root mean square of the expected values.
double error(const Matrix& got, const Matrix& expected) {
  REQUIRE(got.values.size() == expected.values.size());
  double squares = 0, worst = 0;
  for (size_t i = 0; i < got.values.size(); ++i) {
    squares += expected.values[i] * expected.values[i];
    const double apart = std::abs(got.values[i] - expected.values[i]);
    if (!(apart <= worst)) worst = apart;
  }
  return worst / std::sqrt(squares / static_cast<double>(got.values.size()) + 1e-30);
}

// The root mean square of the difference over that of the expected values.
double mean_error(const Matrix& got, const Matrix& expected) {
  double squares = 0, apart = 0;
  for (size_t i = 0; i < got.values.size(); ++i) {
    squares += expected.values[i] * expected.values[i];
    apart += std::pow(got.values[i] - expected.values[i], 2);
  }
  return std::sqrt(apart / squares);
}

// A store of one weight [out, in], or of experts [experts, out, in] below one another in `w`, in bf16 on one
// rank.
struct Layer {
  std::vector<std::unique_ptr<Parameter>> parameters;
  std::unique_ptr<parallel::FlatStore> store;
  Layer(Device& device, const Matrix& w, const LowPrecision& format, int64_t history = 1,
        bool trainable = true, int64_t experts = 0) {
    ParamSpec spec;
    spec.name = "layer.weight";
    spec.shape = {w.rows, w.cols};
    if (experts > 0) spec.shape = {experts, w.rows / experts, w.cols};
    if (experts > 0) spec.sharding = {ShardingAxis::expert, 0};
    spec.block = "layer 0";
    spec.linear = true;
    parameters.push_back(std::make_unique<Parameter>(std::move(spec), 0));
    parallel::FlatStore::Options options;
    options.compute = DType::bf16;
    options.trainable = [trainable](const Parameter&) { return trainable; };
    options.low_precision.format = format;
    options.low_precision.history_length = history;
    options.low_precision.covers = [](const Parameter& parameter) { return parameter.spec().linear; };
    store = std::make_unique<parallel::FlatStore>(device, parameters, parallel::StoreGroups{}, options);
    store->before_load();
    // Main parameters, or bf16 where there are none.
    const Tensor values = store->parameter_shards()[0].values();
    const std::vector<float> numbers(w.values.begin(), w.values.end());
    launch(device, device.table().elementwise->cast,
           Tensor::from_host<float>(device, {w.rows * w.cols}, numbers), values, values.elements());
    store->after_load();
  }
  const Parameter& weight() const { return *parameters[0]; }
};

struct GemmResults {
  Matrix y, dx, dw;
};
// The backward pass from y on; a frozen weight leaves dw empty.
GemmResults backward(Tape& tape, Layer& layer, const Var& y, const Matrix& dy) {
  GemmResults result;
  result.y = from(y.value);
  tape.output("y", y);
  tape.backward({{"y", on(tape.device(), dy)}});
  result.dx = from(tape.input_gradient("x"));
  layer.store->finish_gradients();
  const Shape& shape = layer.weight().shape();
  if (layer.store->is_trainable(layer.weight()))
    result.dw = from(layer.store->flat_buffers()[0].gradients.flat_range(
        0, shape.elements(), {shape.elements() / shape[shape.rank() - 1], shape[shape.rank() - 1]}));
  return result;
}
GemmResults run(Device& device, Layer& layer, const Matrix& x, const Matrix& dy) {
  StepContext context{device, *layer.store};
  layer.store->zero_gradients();
  layer.store->begin_last_micro_batch();
  Tape tape(context);
  const Var input = tape.input("x", on(device, x), true);
  const Var y = ops::linear(tape, input, layer.weight());
  return backward(tape, layer, y, dy);
}

// Of experts with sizes[e] rows each.
GemmResults run_experts(Device& device, Layer& layer, const Matrix& x, const Matrix& dy,
                        const std::vector<int64_t>& sizes) {
  StepContext context{device, *layer.store};
  layer.store->zero_gradients();
  layer.store->begin_last_micro_batch();
  Tape tape(context);
  const Var input = tape.input("x", on(device, x), true);
  const Tensor of_experts = Tensor::from_host<int64_t>(device, {static_cast<int64_t>(sizes.size())}, sizes);
  return backward(tape, layer, ops::grouped_linear(tape, input, of_experts, layer.weight()), dy);
}

Matrix rows_of(const Matrix& m, int64_t first, int64_t count) {
  const auto begin = m.values.begin() + first * m.cols;
  return {count, m.cols, {begin, begin + count * m.cols}};
}

}  // namespace

TEST_CASE_TEMPLATE("GEMMs with scales are those of the decoded operands", D, EVERY_DEVICE) {
  for (const int threads : {1, 3}) {
    const auto device = D::make(threads);
    uint32_t seed = 1;
    for (const ScalingRecipe recipe : kRecipes)
      for (const bool hybrid : {false, true})
        for (const auto [m, n, k] : {std::array<int64_t, 3>{1, 1, 1},
                                     {5, 300, 40},
                                     {37, 65, 131},
                                     {37, 65, 144},
                                     {130, 9, 1030},
                                     {48, 80, 256}}) {
          INFO(name_of(recipe), ": ", m, " x ", n, " x ", k);
          if (!test::multiplies<D>(name_of(recipe))) continue;
          const test::SimulatedGpu gpu(test::capability_for(name_of(recipe)));
          const LowPrecision format = format_of(recipe, hybrid);
          const Matrix a = random_matrix(m, k, seed++, 3), b = random_matrix(n, k, seed++, 0.02);
          const Tensor ones = Tensor::from_host<float>(*device, {3, 2}, std::vector<float>(6, 1.0f));
          LayerScaling scaling{&format, ones, Tensor::zeros(*device, {3})};
          // As a gradient, whose scale is its own, except with delayed scaling.
          const auto kind = LayerTensor::output_gradient;
          const auto x =
              ops::quantize(scaling, LayerTensor::input, on(*device, a), {.rows = true, .columns = true});
          const auto w = ops::quantize(scaling, kind, on(*device, b.transposed()), {.columns = true});
          // The columns of NVFP4 are transformed: tests/kernels/quantize.cpp.
          const bool four_bits = recipe == ScalingRecipe::nvfp4;
          CHECK(error(decoded(x.rows), a) < (four_bits ? 1.2 : 0.3));
          if (!four_bits) CHECK(error(decoded(x.columns).transposed(), a) < 0.3);
          const Tensor y =
              Tensor::from_host<float>(*device, {m, n}, std::vector<float>(static_cast<size_t>(m * n), 2));
          ops::scaled_matmul(x.rows, w.columns, y, 1.0f);
          Matrix expected = decoded(x.rows).times(decoded(w.columns));
          for (double& v : expected.values) v += 2;
          // The tensor cores of a GPU, which read the last size, add fewer bits of each product.
          const bool on_tensor_cores = D::type == DeviceType::cuda && k % 16 == 0;
          CHECK(error(from(y), expected) < (on_tensor_cores ? 5e-3 : 1e-5));
          ops::scaled_matmul(x.rows, w.columns, y, 0, {}, kernels::Accumulation::fast);
          for (double& v : expected.values) v -= 2;
          CHECK(error(from(y), expected) < (on_tensor_cores ? 3e-2 : 1e-5));
        }
  }
}

TEST_CASE_TEMPLATE("a linear layer in every recipe", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  for (const ScalingRecipe recipe : kRecipes)
    for (const bool weight_gradient : {true, false}) {
      INFO(name_of(recipe), weight_gradient ? "" : ", weight gradient in bf16");
      if (!test::multiplies<D>(name_of(recipe))) continue;
      const test::SimulatedGpu gpu(test::capability_for(name_of(recipe)));
      LowPrecision format = format_of(recipe, true);
      format.weight_gradient = weight_gradient;
      const Matrix w = random_matrix(72, 136, 5, 0.3), x = random_matrix(50, 136, 6, 2),
                   dy = random_matrix(50, 72, 7, 3);
      Layer layer(*device, w, format);
      const GemmResults got = run(*device, layer, x, dy);
      // About the error of one product: two roundings to 3, to 2 or to 1 bits behind the first.
      const bool four_bits = recipe == ScalingRecipe::nvfp4;
      const double forward = four_bits ? 0.2 : 0.05, backward = four_bits ? 0.3 : 0.08;
      const Matrix y = x.times(w), dx = dy.times(w.transposed()), dw = dy.transposed().times(x.transposed());
      CHECK(mean_error(got.y, y) < forward);
      CHECK(mean_error(got.dx, dx) < backward);
      CHECK(mean_error(got.dw, dw) < (weight_gradient ? backward : 1e-5));
      CHECK(error(got.y, y) > 1e-3);
      // A weight that is kept has the same codes in the next micro-batch.
      const GemmResults again = run(*device, layer, x, dy);
      if (recipe != ScalingRecipe::delayed) CHECK(again.y.values == got.y.values);
    }
}

namespace {

// A code of 8 bits at an element of a matrix.
struct CodeAt {
  int64_t row, k;
  uint8_t code;
};
// Random codes of FP8 of less than `magnitude`, with a scale of the tensor.
GemmOperand random_codes(Device& device, DType type, int64_t rows, int64_t k, uint32_t magnitude,
                         uint32_t seed, float scale, const std::vector<CodeAt>& others) {
  std::vector<uint8_t> codes;
  uint32_t state = seed;
  for (int64_t i = 0; i < rows * k; ++i) {
    state = state * 1664525u + 1013904223u;
    codes.push_back(static_cast<uint8_t>((state >> 16) % magnitude | (state >> 24 & 0x80)));
  }
  for (const CodeAt& x : others) codes[static_cast<size_t>(x.row * k + x.k)] = x.code;
  return {Tensor::from_host<uint8_t>(device, {rows, k}, codes).as_type(type),
          Tensor::from_host<float>(device, {1}, std::vector<float>{scale}),
          {},
          ScaleLayout::tensor,
          k};
}

// NaN, and an infinity of e5m2, which is another NaN in e4m3.
constexpr uint8_t kNanCode = 0x7F, kInfinityCode = 0x7C;
// C of FP8 operands in groups of m or k; k: of the operands, that is, of all groups. exact: with codes so
// small that fp32 has all sums.
void check_groups_of_codes(Device& device, DType a_type, DType b_type, kernels::GemmGroups groups,
                           const std::vector<int64_t>& sizes, int64_t m, int64_t n, int64_t k, bool exact) {
  const bool of_rows = groups == kernels::GemmGroups::m;
  const auto count = static_cast<int64_t>(sizes.size());
  const int64_t used = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  // Rows or elements of k beyond those of the groups are NaN. So are some of the last and of the first
  // elements of k of the groups, which are no elements of their neighbors.
  std::vector<CodeAt> in_a, in_b;
  for (int64_t row = of_rows ? used : 0; row < m; ++row)
    for (int64_t i = of_rows ? 0 : used; i < k; ++i) in_a.push_back({row, i, kNanCode});
  if (!of_rows)
    for (int64_t row = 0; row < n; ++row)
      for (int64_t i = used; i < k; ++i) in_b.push_back({row, i, kNanCode});
  if (!exact) {
    const int64_t last = (of_rows ? k : sizes[0]) - 1;
    in_a.insert(in_a.end(),
                {{1, last, kNanCode}, {2, last, kInfinityCode}, {3, of_rows ? 0 : last + 1, 0xFF}});
    in_b.insert(in_b.end(), {{4, last, 0xFF}, {5, of_rows ? 0 : last + 1, kInfinityCode}});
  }
  const uint32_t magnitude = exact ? 16 : 0x48;
  const GemmOperand a = random_codes(device, a_type, m, k, magnitude, 3, 0.5f, in_a),
                    b = random_codes(device, b_type, of_rows ? count * n : n, k, magnitude, 4, 0.25f, in_b);
  const int64_t c_rows = of_rows ? m : count * m;
  const Tensor c =
      Tensor::from_host<float>(device, {c_rows, n}, std::vector<float>(static_cast<size_t>(c_rows * n), 2));
  const kernels::GemmShape shape{.trans_b = true,
                                 .m = m,
                                 .n = n,
                                 .k = k,
                                 .lda = k,
                                 .ldb = k,
                                 .ldc = n,
                                 .stride_b = of_rows ? n * k : 0,
                                 .stride_c = of_rows ? 0 : m * n};
  const kernels::Gemm& gemm = *device.table().gemm;
  launch(device,
         gemm.run_grouped_workspace(shape, groups, count, {a_type, b_type, DType::f32, a.layout, b.layout}, 1,
                                    0),
         gemm.run_grouped, shape, groups, Tensor::from_host<int64_t>(device, {count}, sizes), count, a, b, c,
         1.0f, 0.0f, Tensor());
  const Matrix left = decoded(a), right = decoded(b), got = from(c);
  int64_t wrong = 0;
  for (int64_t g = 0, first = 0; g < count; first += sizes[static_cast<size_t>(g++)]) {
    const int64_t size = sizes[static_cast<size_t>(g)], row_begin = of_rows ? first : 0,
                  k_begin = of_rows ? 0 : first;
    for (int64_t row = row_begin; row < (of_rows ? first + size : m); ++row)
      for (int64_t column = 0; column < n; ++column) {
        double expected = 0;
        for (int64_t i = k_begin; i < (of_rows ? k : first + size); ++i)
          expected += left.at(row, i) * right.at(of_rows ? g * n + column : column, i);
        const double value = got.at(of_rows ? row : g * m + row, column);
        if (!std::isfinite(expected))
          wrong += std::isnan(expected) ? !std::isnan(value) : value != expected;
        else
          wrong += !(std::abs(value - expected) <= (exact ? 0 : 1e-3 * (1 + std::abs(expected))));
      }
  }
  CHECK(wrong == 0);
  if (of_rows)
    CHECK(std::all_of(got.values.begin() + used * n, got.values.end(), [](double v) { return v == 2; }));
}

}  // namespace

TEST_CASE_TEMPLATE("grouped GEMMs of codes are those of the values, special and subnormal ones too", D,
                   EVERY_DEVICE) {
  if (!test::multiplies<D>("tensorwise")) return;
  const auto device = D::make(2);
  constexpr DType kE4 = DType::f8e4m3, kE5 = DType::f8e5m2;
  for (const auto& [a_type, b_type] : {std::pair{kE4, kE4}, {kE4, kE5}, {kE5, kE4}})
    for (const bool exact : {false, true}) {
      INFO(name_of(a_type), " times ", name_of(b_type), exact ? ", exact" : "");
      // Rows of aligned and of other sizes.
      for (const int64_t k : {16, 50, 64, 208})
        check_groups_of_codes(*device, a_type, b_type, kernels::GemmGroups::m, {17, 0, 150, 5}, 180, 37, k,
                              exact);
      for (const int64_t k : {400, 397})
        check_groups_of_codes(*device, a_type, b_type, kernels::GemmGroups::k, {17, 0, 33, 5, 260, 16, 64},
                              70, 37, k, exact);
      check_groups_of_codes(*device, a_type, b_type, kernels::GemmGroups::k, {64, 16, 256, 9}, 150, 20, 352,
                            exact);
    }
}

TEST_CASE_TEMPLATE("experts in the recipes with a scale of the tensor", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  constexpr int64_t kOut = 72, kIn = 56, kRows = 61;
  const auto nan_behind = [](Matrix m, int64_t used) {
    std::fill(m.values.begin() + used * m.cols, m.values.end(), std::nan(""));
    return m;
  };
  for (const ScalingRecipe recipe : {ScalingRecipe::delayed, ScalingRecipe::tensorwise})
    for (const bool weight_gradient : {true, false}) {
      INFO(name_of(recipe), weight_gradient ? "" : ", weight gradient in bf16");
      if (!test::multiplies<D>(name_of(recipe))) continue;
      const test::SimulatedGpu gpu(test::capability_for(name_of(recipe)));
      LowPrecision format = format_of(recipe, true);
      format.weight_gradient = weight_gradient;
      const std::vector<int64_t> sizes = {17, 0, 33, 5};
      const int64_t experts = 4, used = 55;
      const Matrix w = random_matrix(experts * kOut, kIn, 15, 0.3), x = random_matrix(kRows, kIn, 16, 2),
                   dy = random_matrix(kRows, kOut, 17, 3);
      Layer layer(*device, w, format, 1, true, experts);
      const GemmResults got = run_experts(*device, layer, nan_behind(x, used), nan_behind(dy, used), sizes);
      for (int64_t e = 0, first = 0; e < experts; first += sizes[static_cast<size_t>(e++)]) {
        const int64_t count = sizes[static_cast<size_t>(e)];
        const Matrix own = rows_of(w, e * kOut, kOut), own_x = rows_of(x, first, count),
                     own_dy = rows_of(dy, first, count), dw = rows_of(got.dw, e * kOut, kOut);
        if (count == 0) {
          CHECK(std::all_of(dw.values.begin(), dw.values.end(), [](double v) { return v == 0; }));
          continue;
        }
        CHECK(mean_error(rows_of(got.y, first, count), own_x.times(own)) < 0.05);
        CHECK(mean_error(rows_of(got.dx, first, count), own_dy.times(own.transposed())) < 0.08);
        CHECK(mean_error(dw, own_dy.transposed().times(own_x.transposed())) <
              (weight_gradient ? 0.08 : 1e-5));
      }
      // One expert with all rows is a linear layer.
      const Matrix one = rows_of(w, 0, kOut);
      Layer alone(*device, one, format, 1, true, 1), dense(*device, one, format);
      const GemmResults grouped = run_experts(*device, alone, x, dy, {kRows}),
                        linear = run(*device, dense, x, dy);
      CHECK(error(grouped.y, linear.y) < 1e-2);
      CHECK(error(grouped.dx, linear.dx) < 1e-2);
      CHECK(error(grouped.dw, linear.dw) < 1e-4);
    }
}

TEST_CASE_TEMPLATE("a weight is quantized once until the parameters change", D, EVERY_DEVICE) {
  if (!test::multiplies<D>("tensorwise")) return;
  const auto device = D::make(1);
  Layer layer(*device, random_matrix(40, 24, 9, 1), format_of(ScalingRecipe::tensorwise, true));
  ParamStore& store = *layer.store;
  const auto codes_of = [&](WeightRole role) {
    const OperandPin pin(store, layer.weight(), role);
    return pin->values;
  };
  const Tensor forward = codes_of(WeightRole::forward), transposed = codes_of(WeightRole::input_gradient);
  CHECK(forward.shape() == Shape{40, 24});
  CHECK(transposed.shape() == Shape{24, 40});
  CHECK(codes_of(WeightRole::forward).shares_storage_with(forward));
  CHECK(codes_of(WeightRole::input_gradient).shares_storage_with(transposed));
  layer.store->after_update();
  CHECK(!codes_of(WeightRole::forward).shares_storage_with(forward));
}

TEST_CASE_TEMPLATE("a frozen weight is quantized again only after it is loaded", D, EVERY_DEVICE) {
  if (!test::multiplies<D>("tensorwise")) return;
  const auto device = D::make(1);
  Layer layer(*device, random_matrix(40, 24, 9, 1), format_of(ScalingRecipe::tensorwise, true), 1, false);
  const auto codes = [&] {
    const OperandPin pin(*layer.store, layer.weight(), WeightRole::forward);
    return pin->values;
  };
  const Tensor first = codes();
  const auto scale_of = [&] {
    return layer.store->low_precision()->scaling(layer.weight())->scale.template to_host<float>();
  };
  const auto scale = scale_of();
  layer.store->after_update();
  CHECK(codes().shares_storage_with(first));
  CHECK(scale_of() == scale);
  layer.store->after_load();
  CHECK(!codes().shares_storage_with(first));
}

TEST_CASE_TEMPLATE("a frozen weight has its values after an update of the scales, before the next step", D,
                   EVERY_DEVICE) {
  const auto device = D::make(2);
  const Matrix w = random_matrix(72, 136, 5, 0.3), x = random_matrix(50, 136, 6, 2),
               dy = random_matrix(50, 72, 7, 3);
  for (const ScalingRecipe recipe : kRecipes) {
    INFO(name_of(recipe));
    if (!test::multiplies<D>(name_of(recipe))) continue;
    const test::SimulatedGpu gpu(test::capability_for(name_of(recipe)));
    Layer layer(*device, w, format_of(recipe, true), 1, false);
    layer.store->zero_gradients();
    StepContext context{*device, *layer.store};
    const auto output = [&](Tape::Mode mode) {
      Tape tape(context, mode);
      return from(ops::linear(tape, tape.input("x", on(*device, x)), layer.weight()).value);
    };
    output(Tape::Mode::train);
    layer.store->after_update();
    // An evaluation.
    CHECK(mean_error(output(Tape::Mode::inference), x.times(w)) <
          (recipe == ScalingRecipe::nvfp4 ? 0.2 : 0.05));
  }
}

TEST_CASE_TEMPLATE("delayed scaling: the maxima of a step make the scales of the next", D, EVERY_DEVICE) {
  if (!test::multiplies<D>("tensorwise")) return;
  const auto device = D::make(2);
  Layer layer(*device, random_matrix(40, 24, 1, 0.1), format_of(ScalingRecipe::delayed, true), 3);
  const Matrix x = random_matrix(30, 24, 2, 50), dy = random_matrix(30, 40, 3, 1e-3);
  const auto largest = [](const Matrix& m) {
    double most = 0;
    for (const double v : m.values) most = std::max(most, std::abs(v));
    return static_cast<float>(most);
  };
  run(*device, layer, x, dy);
  const auto* state = layer.store->low_precision();
  CHECK(state->scale(layer.weight()).to_host<float>() == std::vector<float>(6, 1.0f));
  layer.store->after_update();
  const auto scale = state->scale(layer.weight()).to_host<float>(),
             history = state->history(layer.weight()).to_host<float>();
  CHECK(scale[0] == 448 / largest(x));
  CHECK(scale[2] == 448 / largest(random_matrix(40, 24, 1, 0.1)));
  CHECK(scale[4] == 57344 / largest(dy));
  CHECK(history[0] == largest(x));
  CHECK(history[6] == largest(dy));
  CHECK(history[1] == 0);
  // The second step rounds to the formats' steps.
  const GemmResults second = run(*device, layer, x, dy);
  CHECK(error(second.dx, dy.times(random_matrix(40, 24, 1, 0.1).transposed())) < 0.5);
  // Steps whose update is skipped, and passes that do not record, leave no maxima behind.
  const Matrix huge = random_matrix(30, 24, 4, 1e6);
  run(*device, layer, huge, dy);
  layer.store->zero_gradients();
  {
    StepContext context{*device, *layer.store};
    Tape tape(context, Tape::Mode::inference);
    ops::linear(tape, tape.input("x", on(*device, huge)), layer.weight());
  }
  run(*device, layer, x, dy);
  layer.store->after_update();
  CHECK(state->scale(layer.weight()).to_host<float>() == scale);
}

namespace {

struct ActivatedGemmResults : GemmResults {
  std::vector<float> amax;
  // Of the forward pass.
  int64_t launches;
};
// linear(silu(x)); `fused`: the activation quantizes for the layer.
ActivatedGemmResults run_activated(Device& device, Layer& layer, const Matrix& x, const Matrix& dy,
                                   bool fused) {
  StepContext context{device, *layer.store};
  layer.store->zero_gradients();
  layer.store->begin_last_micro_batch();
  // Quantizes the weight.
  { const OperandPin pin(*layer.store, layer.weight(), WeightRole::forward); }
  Tape tape(context);
  const Var input = tape.input("x", on(device, x), true);
  const int64_t before = device.launches();
  const Var active = ops::bias_activation(tape, input, nullptr, kernels::ActivationKind::silu, false,
                                          fused ? &layer.weight() : nullptr);
  const Var y = ops::linear(tape, active, layer.weight());
  const int64_t launches = device.launches() - before;
  // A second layer that reads the same value quantizes it again.
  CHECK(from(ops::linear(tape, active, layer.weight()).value).values == from(y.value).values);
  ActivatedGemmResults result{backward(tape, layer, y, dy), {}, launches};
  const LayerScaling& scaling = *layer.store->scaling(layer.weight());
  if (scaling.amax.defined()) result.amax = scaling.amax.to_host<float>();
  return result;
}

}  // namespace

TEST_CASE_TEMPLATE("an input that its activation quantizes has the bits of one quantized by itself", D,
                   EVERY_DEVICE) {
  const auto device = D::make(2);
  uint32_t seed = 1;
  for (const ScalingRecipe recipe : kRecipes)
    for (const bool weight_gradient : {true, false})
      for (const bool trains : {true, false})
        for (const auto [m, n, k] : {std::array<int64_t, 3>{1, 3, 5}, {37, 65, 131}, {261, 40, 72}}) {
          INFO(name_of(recipe), ": ", m, " x ", n, " x ", k, " ", weight_gradient, trains);
          if (!test::multiplies<D>(name_of(recipe))) continue;
          const test::SimulatedGpu gpu(test::capability_for(name_of(recipe)));
          LowPrecision format = format_of(recipe, true);
          format.weight_gradient = weight_gradient;
          const Matrix w = random_matrix(n, k, seed++, 0.3), x = random_matrix(m, k, seed++, 2),
                       dy = random_matrix(m, n, seed++, 3);
          Layer fused(*device, w, format, 3, trains), separate(*device, w, format, 3, trains);
          // The second step has scales of delayed scaling.
          for (int step = 0; step < 2; ++step) {
            const ActivatedGemmResults got = run_activated(*device, fused, x, dy, true),
                                       expected = run_activated(*device, separate, x, dy, false);
            CHECK(got.y.values == expected.y.values);
            CHECK(got.dx.values == expected.dx.values);
            CHECK(got.dw.values == expected.dw.values);
            CHECK(got.amax == expected.amax);
            // The launch of the codes, or of the maximum.
            CHECK(expected.launches - got.launches == 1);
            fused.store->after_update(), separate.store->after_update();
          }
        }
}
