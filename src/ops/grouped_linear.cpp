#include "ops/grouped_linear.hpp"

#include <algorithm>

#include "kernels/table.hpp"
#include "ops/expert_permutation.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

using kernels::GemmGroups;
using kernels::GemmShape;

struct Factors {
  float alpha = 1, beta = 0;
};

void launch_grouped(const GemmShape& shape, GemmGroups groups, const Tensor& sizes, const Tensor& a,
                    const Tensor& b, const Tensor& c, const Factors& factors, const Tensor& bias) {
  Device& device = c.device();
  const kernels::Gemm& gemm = *device.table().gemm;
  const int64_t count = sizes.elements();
  const kernels::GemmTypes types{.a = a.dtype(), .b = b.dtype(), .c = c.dtype()};
  launch(device, gemm.run_grouped_workspace(shape, groups, count, types, factors.alpha, factors.beta),
         gemm.run_grouped, shape, groups, sizes, count, a, b, c, factors.alpha, factors.beta, bias);
}

// c[rows, n] = alpha a[rows, k] B[e]^T + beta c, or a[rows, k] B[e] where B is stored [experts, k, n]. The
// rows of a and c may have a stride.
void multiply_rows(const Tensor& a, const Tensor& b, bool trans_b, const Tensor& sizes, const Tensor& c,
                   const Tensor& bias = {}, const Factors& factors = {}) {
  const int64_t k = a.size(1), n = c.size(1);
  launch_grouped({.trans_b = trans_b,
                  .m = a.size(0),
                  .n = n,
                  .k = k,
                  .lda = a.stride(0),
                  .ldb = trans_b ? k : n,
                  .ldc = c.stride(0),
                  .stride_b = n * k},
                 GemmGroups::m, sizes, a, b, c, factors, bias);
}

// gradient[e] += alpha dy[rows of e]^T x[rows of e]. The rows of dy may have a stride.
void add_weight_gradient(const Tensor& dy, const Tensor& x, const Tensor& sizes, const Tensor& gradient,
                         float alpha = 1) {
  const int64_t out = dy.size(1), in = x.size(1);
  launch_grouped({.trans_a = true,
                  .m = out,
                  .n = in,
                  .k = x.size(0),
                  .lda = dy.stride(0),
                  .ldb = in,
                  .ldc = in,
                  .stride_c = out * in},
                 GemmGroups::k, sizes, dy, x, gradient, {.alpha = alpha, .beta = 1}, {});
}

void add_bias_gradient(const Tensor& dy, const Tensor& sizes, const Tensor& gradient) {
  Device& device = dy.device();
  launch(device, device.table().expert_permutation->sum_rows, dy, sizes, sizes.elements(), dy.size(1),
         gradient);
}

// The GEMM of the rows, and the weights of the experts that they do not use.
Cost grouped_cost(int64_t rows, int64_t expected_rows, int64_t experts, int64_t out, int64_t in, DType type) {
  Cost cost = matmul_cost(expected_rows > 0 ? std::min(rows, expected_rows) : rows, out, in, type);
  cost.bytes += static_cast<double>((experts - 1) * out * in * size_of(type));
  return cost;
}

}  // namespace

Var grouped_linear(Tape& tape, const Var& x, const Tensor& sizes, const Parameter& weight,
                   const Parameter* bias, int64_t expected_rows, bool adds_bias) {
  const Shape& shape = weight.shape();
  CAPSTAN_ASSERT(shape.rank() == 3 && x.value.is_contiguous() && shape[2] == x.size(1) &&
                     shape[0] == sizes.elements() && sizes.dtype() == DType::i64,
                 "grouped_linear: `" + weight.name() + "` is " + shape.text() + ", x is " + x.value.text() +
                     ", sizes are " + sizes.text());
  CAPSTAN_ASSERT(!tape.context().store.scaling(weight),
                 "grouped_linear: the GEMMs of `" + weight.name() + "` are in 8 or 4 bits");
  CAPSTAN_ASSERT(!bias || bias->shape().elements() == shape[0] * shape[1],
                 "grouped_linear: `" + (bias ? bias->name() : "") + "` for " + shape.text());
  const int64_t rows = x.size(0), out = shape[1], in = shape[2];
  const bool trainable = tape.context().store.is_trainable(weight);
  const Tensor y = tensor_of_rows(tape.context(), {rows, out}, x.dtype());
  Record record{.name = "grouped_linear", .inputs = {x}, .outputs = {y}, .parameters = {&weight}};
  {
    const auto w = tape.pin(weight), b = tape.pin(adds_bias ? bias : nullptr);
    multiply_rows(x.value, *w, true, sizes, y, *b);
  }
  if (bias) record.parameters.push_back(bias);
  record.saved = {sizes};
  if (trainable) record.saved.push_back(x.value);
  const Cost cost = grouped_cost(rows, expected_rows, shape[0], out, in, x.dtype());
  record.cost = record.backward_cost = cost;
  record.backward = [&weight, bias, adds_bias, trainable, cost, in](BackwardContext& ctx) {
    const Tensor dy = std::move(ctx.output_gradient());
    const Tensor of_experts = ctx.saved(0);
    if (ctx.needs(0)) {
      const auto w = ctx.pin(weight);
      const Tensor dx = tensor_of_rows(ctx.context(), {dy.size(0), in}, dy.dtype());
      multiply_rows(dy, *w, false, of_experts, dx);
      ctx.accumulate_gradient(0, dx);
    }
    if (trainable)
      ctx.weight_gradient(weight, cost, {dy, ctx.saved(1), of_experts},
                          [](const Tensor& gradient, std::span<const Tensor> t) {
                            add_weight_gradient(t[0], t[1], t[2], gradient);
                          });
    if (bias && !adds_bias) ctx.weight_gradient(*bias, {}, {}, [](const Tensor&, std::span<const Tensor>) {});
    if (bias && adds_bias)
      ctx.weight_gradient(
          *bias, {0, static_cast<double>(dy.bytes())}, {dy, of_experts},
          [](const Tensor& gradient, std::span<const Tensor> t) { add_bias_gradient(t[0], t[1], gradient); });
  };
  return tape.record(std::move(record))[0];
}

Var grouped_low_rank_add(Tape& tape, Var y, const Var& h, const Tensor& sizes, const Parameter& b,
                         float scale, int64_t first_column, int64_t expected_rows) {
  const int64_t rows = h.size(0), rank = h.size(1), experts = sizes.elements(), columns = b.shape()[1];
  CAPSTAN_ASSERT(y.size(0) == rows && y.value.is_contiguous() && h.value.is_contiguous() &&
                     first_column + columns <= y.size(1) && b.shape() == (Shape{experts, columns, rank}),
                 "grouped_low_rank_add: y " + y.value.text() + ", h " + h.value.text() + ", `" + b.name() +
                     "` " + b.shape().text());
  const Tensor result = y.value.unique() ? y.value : copy_of(y.value);
  {
    const auto w = tape.pin(b);
    multiply_rows(h.value, *w, true, sizes, result.slice(1, first_column, columns), {},
                  {.alpha = scale, .beta = 1});
  }
  y.value = Tensor();
  const Cost cost = grouped_cost(rows, expected_rows, experts, columns, rank, h.dtype());
  return tape.record({.name = "grouped_low_rank_add",
                      .inputs = {Var{result, y.slot}, h},
                      .outputs = {result},
                      .parameters = {&b},
                      .cost = cost,
                      .backward_cost = cost,
                      .saved = {h.value, sizes},
                      .backward = [&b, scale, first_column, columns, cost](BackwardContext& ctx) {
                        const Tensor dy = ctx.output_gradient().slice(1, first_column, columns);
                        const Tensor &low = ctx.saved(0), &of_experts = ctx.saved(1);
                        const Tensor dh = tensor_of_rows(ctx.context(), low.shape(), low.dtype());
                        {
                          const auto w = ctx.pin(b);
                          multiply_rows(dy, *w, false, of_experts, dh, {}, {.alpha = scale});
                        }
                        ctx.weight_gradient(b, cost, {dy, low, of_experts},
                                            [scale](const Tensor& gradient, std::span<const Tensor> t) {
                                              add_weight_gradient(t[0], t[1], t[2], gradient, scale);
                                            });
                        ctx.accumulate_gradient(1, dh);
                        ctx.accumulate_gradient(0, std::move(ctx.output_gradient()));
                      }})[0];
}

}  // namespace capstan::ops
