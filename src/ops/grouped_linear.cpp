#include "ops/grouped_linear.hpp"

#include <algorithm>

#include "kernels/table.hpp"
#include "ops/expert_permutation.hpp"
#include "ops/linear_weight.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

using kernels::GemmGroups;
using kernels::GemmShape;

struct Factors {
  float alpha = 1, beta = 0;
};

void launch_grouped(const GemmShape& shape, GemmGroups groups, const Tensor& sizes, const GemmOperand& a,
                    const GemmOperand& b, const Tensor& c, const Factors& factors, const Tensor& bias) {
  Device& device = c.device();
  const kernels::Gemm& gemm = *device.table().gemm;
  const int64_t count = sizes.elements();
  const kernels::GemmTypes types{a.values.dtype(), b.values.dtype(), c.dtype(), a.layout, b.layout};
  launch(device, gemm.run_grouped_workspace(shape, groups, count, types, factors.alpha, factors.beta),
         gemm.run_grouped, shape, groups, sizes, count, a, b, c, factors.alpha, factors.beta, bias);
}

// c[rows, n] = alpha a[rows, k] B[e]^T + beta c, or a[rows, k] B[e] where B is stored [experts, k, n]. The
// rows of a and c may have a stride.
void multiply_rows(const GemmOperand& a, const GemmOperand& b, bool trans_b, const Tensor& sizes,
                   const Tensor& c, const Tensor& bias = {}, const Factors& factors = {}) {
  const int64_t k = a.has_scales() ? a.k : a.values.size(1), n = c.size(1);
  launch_grouped({.trans_b = trans_b,
                  .m = a.values.size(0),
                  .n = n,
                  .k = k,
                  .lda = a.has_scales() ? k : a.values.stride(0),
                  .ldb = trans_b ? k : n,
                  .ldc = c.stride(0),
                  .stride_b = n * k},
                 GemmGroups::m, sizes, a, b, c, factors, bias);
}

// gradient[e] += alpha dy[rows of e]^T x[rows of e]. The rows of dy may have a stride; with scales both are
// stored as columns, [out, rows] and [in, rows].
void add_weight_gradient(const GemmOperand& dy, const GemmOperand& x, const Tensor& sizes,
                         const Tensor& gradient, float alpha = 1) {
  const bool columns = dy.has_scales();
  const int64_t out = gradient.size(1), in = gradient.size(2), rows = columns ? dy.k : x.values.size(0);
  launch_grouped({.trans_a = !columns,
                  .trans_b = columns,
                  .m = out,
                  .n = in,
                  .k = rows,
                  .lda = columns ? rows : dy.values.stride(0),
                  .ldb = columns ? rows : in,
                  .ldc = in,
                  .stride_c = out * in},
                 GemmGroups::k, sizes, dy, x, gradient, {.alpha = alpha, .beta = 1}, {});
}

// x with the rows in use as the GEMMs of a weight in 8 bits read it. A scale of the tensor comes from the
// largest value, so that the other rows have to be 0.
QuantizedMatrix quantize_rows(const LayerScaling& scaling, LayerTensor kind, const Tensor& x,
                              const Tensor& sizes, const QuantizeRequest& request) {
  launch(x.device(), x.device().table().expert_permutation->clear_unused, x, sizes, sizes.elements(),
         x.size(0), x.size(1));
  return quantize(scaling, kind, x, request);
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
  CAPSTAN_ASSERT(!bias || bias->shape().elements() == shape[0] * shape[1],
                 "grouped_linear: `" + (bias ? bias->name() : "") + "` for " + shape.text());
  const int64_t rows = x.size(0), out = shape[1], in = shape[2];
  ParamStore& store = tape.context().store;
  const bool trainable = store.is_trainable(weight);
  const LayerScaling* const scaling = store.scaling(weight);
  const bool by_columns = scaling && scaling->format->weight_gradient && trainable;
  const Tensor y = tensor_of_rows(tape.context(), {rows, out}, x.dtype());
  Record record{.name = "grouped_linear", .inputs = {x}, .outputs = {y}, .parameters = {&weight}};
  GemmOperand kept = x.value;
  {
    const OperandPin w(store, weight, WeightRole::forward);
    const auto b = tape.pin(adds_bias ? bias : nullptr);
    GemmOperand used = x.value;
    if (scaling) {
      const bool records = tape.recording();
      QuantizedMatrix quantized =
          quantize_rows(*scaling, LayerTensor::input, x.value, sizes,
                        {.rows = true, .columns = by_columns && records, .record_amax = records});
      used = std::move(quantized.rows);
      if (by_columns) kept = std::move(quantized.columns);
    }
    multiply_rows(used, *w, true, sizes, y, *b);
  }
  if (bias) record.parameters.push_back(bias);
  if (trainable) record.saved = saved_tensors(kept);
  record.saved.push_back(sizes);
  const Cost cost = grouped_cost(rows, expected_rows, shape[0], out, in, x.dtype());
  record.cost = record.backward_cost = cost;
  record.backward = [&weight, bias, adds_bias, trainable, scaling, by_columns, cost, in,
                     kept_layout = kept.layout, sizes_at = record.saved.size() - 1](BackwardContext& ctx) {
    const Tensor dy = std::move(ctx.output_gradient());
    const Tensor of_experts = ctx.saved(sizes_at);
    GemmOperand rows_of_dy = dy, columns_of_dy = dy;
    if (scaling && (ctx.needs(0) || by_columns)) {
      QuantizedMatrix quantized =
          quantize_rows(*scaling, LayerTensor::output_gradient, dy, of_experts,
                        {.rows = ctx.needs(0), .columns = by_columns, .record_amax = true});
      rows_of_dy = std::move(quantized.rows);
      if (by_columns) columns_of_dy = std::move(quantized.columns);
    }
    if (ctx.needs(0)) {
      const OperandPin w(ctx.context().store, weight, WeightRole::input_gradient);
      const Tensor dx = tensor_of_rows(ctx.context(), {dy.size(0), in}, dy.dtype());
      // In 8 bits the operand is W^T.
      multiply_rows(rows_of_dy, *w, scaling != nullptr, of_experts, dx);
      ctx.accumulate_gradient(0, dx);
    }
    if (trainable) {
      const GemmOperand x_kept = saved_operand(ctx, kept_layout, dy.size(0));
      ctx.weight_gradient(
          weight, cost, {of_experts, columns_of_dy.values, columns_of_dy.scale, x_kept.values, x_kept.scale},
          [kept_layout, k = dy.size(0)](const Tensor& gradient, std::span<const Tensor> t) {
            const auto operand = [&](size_t i) { return GemmOperand(t[i], t[i + 1], {}, kept_layout, k); };
            add_weight_gradient(operand(1), operand(3), t[0], gradient);
          });
    }
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
