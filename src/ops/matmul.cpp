#include "ops/matmul.hpp"

#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

bool has_rows(const Tensor& t) {
  return t.rank() == 2 && (t.stride(1) == 1 || t.size(1) <= 1);
}

void check(bool fits, const GemmOperand& a, const GemmOperand& b, const Tensor& c) {
  CAPSTAN_ASSERT(fits, "matmul: shapes, types or strides do not match: " + a.values.text() + " x " +
                           b.values.text() + " -> " + c.text());
}

void launch_gemm(const kernels::GemmShape& shape, const GemmOperand& a, const GemmOperand& b, const Tensor& c,
                 float alpha, float beta, const Tensor& bias) {
  const kernels::Gemm& gemm = *c.device().table().gemm;
  const kernels::GemmTypes types{a.values.dtype(), b.values.dtype(), c.dtype(), a.layout, b.layout};
  launch(c.device(), gemm.run_workspace(shape, types, alpha, beta), gemm.run, shape, a, b, c, alpha, beta,
         bias);
}

}  // namespace

void matmul(Transpose trans_a, Transpose trans_b, const Tensor& a, const Tensor& b, const Tensor& c,
            float beta, float alpha, const Tensor& bias) {
  const bool ta = trans_a == Transpose::yes, tb = trans_b == Transpose::yes;
  check(has_rows(a) && has_rows(b) && has_rows(c), a, b, c);
  kernels::GemmShape shape{ta, tb};
  shape.m = a.size(ta ? 1 : 0);
  shape.k = a.size(ta ? 0 : 1);
  shape.n = b.size(tb ? 0 : 1);
  check(
      b.size(tb ? 1 : 0) == shape.k && c.size(0) == shape.m && c.size(1) == shape.n && a.dtype() == b.dtype(),
      a, b, c);
  shape.lda = a.stride(0);
  shape.ldb = b.stride(0);
  shape.ldc = c.stride(0);
  launch_gemm(shape, a, b, c, alpha, beta, bias);
}

void scaled_matmul(const GemmOperand& a, const GemmOperand& b, const Tensor& c, float beta,
                   const Tensor& bias, kernels::Accumulation accumulation) {
  check(a.has_scales() && b.has_scales() && a.k == b.k && a.values.is_contiguous() &&
            b.values.is_contiguous() && has_rows(c) && c.size(0) == a.values.size(0) &&
            c.size(1) == b.values.size(0),
        a, b, c);
  kernels::GemmShape shape{.trans_b = true, .m = c.size(0), .n = c.size(1), .k = a.k};
  shape.lda = shape.ldb = a.k;
  shape.ldc = c.stride(0);
  shape.accumulation = accumulation;
  launch_gemm(shape, a, b, c, 1, beta, bias);
}

Cost matmul_cost(int64_t m, int64_t n, int64_t k, DType type) {
  const auto dm = static_cast<double>(m), dn = static_cast<double>(n), dk = static_cast<double>(k);
  return {2 * dm * dn * dk, (dm * dk + dk * dn + dm * dn) * static_cast<double>(size_of(type))};
}

void add_column_sum(const Tensor& x, const Tensor& gradient) {
  CAPSTAN_ASSERT(x.rank() == 2 && gradient.elements() == x.size(1),
                 "column sum of " + x.text() + " into " + gradient.text());
  const kernels::Gemm& gemm = *x.device().table().gemm;
  launch(x.device(), gemm.column_sum_workspace(x.size(0), x.size(1)), gemm.column_sum, x, gradient, x.size(0),
         x.size(1), x.stride(0), true);
}

void add_into(const Tensor& partial, const Tensor& gradient) {
  CAPSTAN_ASSERT(partial.elements() == gradient.elements(),
                 "adding " + partial.text() + " to " + gradient.text());
  launch(gradient.device(), gradient.device().table().elementwise->axpy, 1.0f, partial, gradient,
         gradient.elements());
}

void copy_matrix(const Tensor& from, const Tensor& to) {
  CAPSTAN_ASSERT(from.rank() == 2 && from.shape() == to.shape(),
                 "copy of a matrix " + from.text() + " to " + to.text());
  launch(to.device(), to.device().table().elementwise->copy_rows, from, from.stride(0), to, to.stride(0),
         from.size(0), from.size(1));
}

Tensor rows_of(const Tensor& x, const FlatRange& rows) {
  return x.slice(0, rows.begin, rows.count);
}

Tensor copy_of(const Tensor& tensor) {
  Tensor copy = Tensor::empty(tensor.device(), tensor.shape(), tensor.dtype());
  launch(tensor.device(), tensor.device().table().elementwise->cast, tensor, copy, tensor.elements());
  return copy;
}

Tensor reuse_or_empty(const Tensor& tensor) {
  return tensor.unique() ? tensor : Tensor::empty(tensor.device(), tensor.shape(), tensor.dtype());
}

}  // namespace capstan::ops
