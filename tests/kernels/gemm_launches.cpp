// Batches, groups and biases of GEMMs whose operands are tensors of a device. The kernels themselves:
// gemm_operands.cpp.
#include "kernels/gemm_arguments.hpp"
#include "tests/kernels/support.hpp"
#include "tests/support/devices.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::GemmGroups;
using kernels::GemmShape;

namespace {

// Values that the type represents exactly enough, with a seed of their own.
Tensor random_tensor(Device& device, DType type, const Shape& shape, uint64_t seed) {
  const Vec<double> values = random_values(shape.elements(), seed);
  std::vector<float> floats(values.begin(), values.end());
  if (type == DType::f32) return Tensor::from_host<float>(device, shape, floats);
  std::vector<bf16> narrow(floats.begin(), floats.end());
  return Tensor::from_host<bf16>(device, shape, narrow);
}
Vec<double> values_of(const Tensor& t) {
  const std::vector<float> floats = t.to_floats();
  return {floats.begin(), floats.end()};
}
Vec<double> part_of(const Vec<double>& values, int64_t begin, int64_t count) {
  return {values.begin() + begin, values.begin() + begin + count};
}

void launch_run(Device& device, const GemmShape& s, const Tensor& a, const Tensor& b, const Tensor& c,
                float beta, const Tensor& bias) {
  const kernels::Gemm& gemm = *device.table().gemm;
  launch(device, gemm.run_workspace(s, {a.dtype(), b.dtype(), c.dtype()}, 1.0f, beta), gemm.run, s, a, b, c,
         1.0f, beta, bias);
}

void check_bias(Device& device, DType type) {
  GemmShape s{.trans_b = true, .m = 35, .n = 70, .k = 33};
  s.lda = s.ldb = s.k, s.ldc = s.n;
  const Tensor a = random_tensor(device, type, {s.m, s.k}, 41),
               b = random_tensor(device, type, {s.n, s.k}, 42), bias = random_tensor(device, type, {s.n}, 43);
  const Tensor c = Tensor::empty(device, {s.m, s.n}, type);
  launch_run(device, s, a, b, c, 0.0f, bias);
  Vec<double> expected = reference::gemm<double>(s, values_of(a), values_of(b),
                                                 Vec<double>(static_cast<size_t>(s.m * s.n)), 1, 0);
  const Vec<double> shift = values_of(bias);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += shift[i % shift.size()];
  CHECK(error(values_of(c), expected) < tolerance(type));
}

void check_batches(Device& device, DType type, bool repeats_b) {
  GemmShape s{.trans_a = true, .m = 13, .n = 33, .k = 20, .batch = 3};
  s.lda = s.m, s.ldb = s.n, s.ldc = s.n;
  // Between the matrices of A lie 7 elements that are not read.
  s.stride_a = s.m * s.k + 7, s.stride_b = repeats_b ? 0 : s.k * s.n, s.stride_c = s.m * s.n;
  const Tensor a = random_tensor(device, type, {s.batch * s.stride_a}, 61),
               b = random_tensor(device, type, {repeats_b ? 1 : s.batch, s.k, s.n}, 62),
               c = random_tensor(device, type, {s.batch, s.m, s.n}, 63);
  const Vec<double> first = values_of(c), values_a = values_of(a), values_b = values_of(b);
  launch_run(device, s, a, b, c, 1.0f, {});
  const Vec<double> result = values_of(c);
  for (int64_t i = 0; i < s.batch; ++i)
    CHECK(error(part_of(result, i * s.stride_c, s.stride_c),
                reference::gemm<double>(s, part_of(values_a, i * s.stride_a, s.m * s.k),
                                        part_of(values_b, i * s.stride_b, s.k * s.n),
                                        part_of(first, i * s.stride_c, s.stride_c), 1, 1)) < tolerance(type));
}

// Groups of rows of A and C, each with its matrix of B and its bias.
void check_groups(Device& device, DType type) {
  const std::vector<int64_t> sizes{5, 0, 30, 2};
  const auto count = static_cast<int64_t>(sizes.size());
  GemmShape s{.m = 37, .n = 29, .k = 18};
  s.lda = s.k, s.ldb = s.ldc = s.n, s.stride_b = s.k * s.n, s.stride_c = s.m * s.n;
  const Tensor a = random_tensor(device, type, {s.m, s.k}, 71),
               b = random_tensor(device, type, {count, s.k, s.n}, 72),
               c = random_tensor(device, type, {s.m, s.n}, 73),
               bias = random_tensor(device, type, {count, s.n}, 74);
  const Vec<double> first = values_of(c), values_a = values_of(a), values_b = values_of(b),
                    values_bias = values_of(bias);
  const kernels::Gemm& gemm = *device.table().gemm;
  launch(device, gemm.run_grouped_workspace(s, GemmGroups::m, count, {type, type, type}, 1, 1),
         gemm.run_grouped, s, GemmGroups::m, Tensor::from_host<int64_t>(device, {count}, sizes), count, a, b,
         c, 1.0f, 1.0f, bias);
  const Vec<double> result = values_of(c);
  for (int64_t g = 0, row = 0; g < count; row += sizes[static_cast<size_t>(g++)]) {
    GemmShape own = s;
    own.m = sizes[static_cast<size_t>(g)];
    Vec<double> expected = reference::gemm<double>(own, part_of(values_a, row * s.k, own.m * s.k),
                                                   part_of(values_b, g * s.stride_b, s.stride_b),
                                                   part_of(first, row * s.n, own.m * s.n), 1, 1);
    for (int64_t i = 0; i < own.m * s.n; ++i)
      expected[static_cast<size_t>(i)] += values_bias[static_cast<size_t>(g * s.n + i % s.n)];
    CHECK(error(part_of(result, row * s.n, own.m * s.n), expected) < tolerance(type));
  }
}

}  // namespace

TEST_CASE_TEMPLATE("a GEMM on tensors adds the bias", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  for (const DType type : {DType::f32, DType::bf16}) {
    CAPTURE(text(type));
    check_bias(*device, type);
  }
}

TEST_CASE_TEMPLATE("GEMMs of batches and of groups on tensors", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  for (const DType type : {DType::f32, DType::bf16}) {
    CAPTURE(text(type));
    for (const bool repeats : {false, true}) check_batches(*device, type, repeats);
    check_groups(*device, type);
  }
}
