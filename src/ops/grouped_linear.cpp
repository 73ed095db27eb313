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

void launch_grouped(const GemmShape& shape, GemmGroups groups, const Tensor& sizes, const Tensor& a,
                    const Tensor& b, const Tensor& c, float beta, const Tensor& bias) {
  Device& device = c.device();
  const kernels::Gemm& gemm = *device.table().gemm;
  const int64_t count = sizes.elements();
  launch(device, gemm.run_grouped_workspace(shape, groups, count, c.dtype()), gemm.run_grouped, shape, groups,
         sizes, count, a, b, c, 1.0f, beta, bias);
}

// c[rows, n] = a[rows, k] B[e]^T, or a[rows, k] B[e] where B is stored [experts, k, n].
void multiply_rows(const Tensor& a, const Tensor& b, bool trans_b, const Tensor& sizes, const Tensor& c,
                   const Tensor& bias = {}) {
  const int64_t k = a.size(1), n = c.size(1);
  launch_grouped({.trans_b = trans_b,
                  .m = a.size(0),
                  .n = n,
                  .k = k,
                  .lda = k,
                  .ldb = trans_b ? k : n,
                  .ldc = n,
                  .stride_b = n * k},
                 GemmGroups::m, sizes, a, b, c, 0, bias);
}

// gradient[e] += dy[rows of e]^T x[rows of e].
void add_weight_gradient(const Tensor& dy, const Tensor& x, const Tensor& sizes, const Tensor& gradient) {
  const int64_t out = dy.size(1), in = x.size(1);
  launch_grouped({.trans_a = true,
                  .m = out,
                  .n = in,
                  .k = x.size(0),
                  .lda = out,
                  .ldb = in,
                  .ldc = in,
                  .stride_c = out * in},
                 GemmGroups::k, sizes, dy, x, gradient, 1, {});
}

void add_bias_gradient(const Tensor& dy, const Tensor& sizes, const Tensor& gradient) {
  Device& device = dy.device();
  launch(device, device.table().expert_permutation->sum_rows, dy, sizes, sizes.elements(), dy.size(1),
         gradient);
}

}  // namespace

Var grouped_linear(Tape& tape, const Var& x, const Tensor& sizes, const Parameter& weight,
                   const Parameter* bias, int64_t expected_rows) {
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
    const auto w = tape.pin(weight), b = tape.pin(bias);
    multiply_rows(x.value, *w, true, sizes, y, *b);
  }
  if (bias) record.parameters.push_back(bias);
  record.saved = {sizes};
  if (trainable) record.saved.push_back(x.value);
  Cost cost = matmul_cost(expected_rows > 0 ? std::min(rows, expected_rows) : rows, out, in, x.dtype());
  // The weights of the other experts.
  cost.bytes += static_cast<double>((shape[0] - 1) * out * in * size_of(x.dtype()));
  record.cost = record.backward_cost = cost;
  record.backward = [&weight, bias, trainable, cost, in](BackwardContext& ctx) {
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
    if (bias)
      ctx.weight_gradient(
          *bias, {0, static_cast<double>(dy.bytes())}, {dy, of_experts},
          [](const Tensor& gradient, std::span<const Tensor> t) { add_bias_gradient(t[0], t[1], gradient); });
  };
  return tape.record(std::move(record))[0];
}

}  // namespace capstan::ops
