#include "ops/linear.hpp"

#include "ops/linear_weight.hpp"
#include "ops/matmul.hpp"

namespace capstan::ops {

Var linear(Tape& tape, const Var& x, const Parameter& weight, const Parameter* bias) {
  const int64_t rows = x.size(0), in = x.size(1), out = weight.shape()[0];
  Record record{.name = "linear", .inputs = {x}, .parameters = {&weight}};
  CAPSTAN_ASSERT(weight.shape().rank() == 2 && weight.shape()[1] == in,
                 "linear: `" + weight.name() + "` is " + weight.shape().text() + ", x is " + x.value.text());
  const bool trainable = tape.context().store.is_trainable(weight);
  const Tensor y = Tensor::empty(tape.device(), {rows, out}, x.dtype());
  GemmOperand kept;
  {
    const LinearWeight w(tape, weight);
    const auto b = tape.pin(bias);
    CAPSTAN_ASSERT(!bias || b->elements() == out, "linear: `" + bias->name() + "` is " + b->text() + " for " +
                                                      std::to_string(out) + " columns");
    kept = w.multiply(x.value, y, trainable, *b, x.quantized.get());
  }
  if (bias) record.parameters.push_back(bias);
  record.outputs = {y};
  if (trainable) record.saved = saved_tensors(kept);
  const Cost cost = matmul_cost(rows, out, in, x.dtype());
  record.cost = record.backward_cost = cost;
  record.backward = [&weight, bias, trainable, cost, layout = kept.layout](BackwardContext& ctx) {
    const Tensor dy = std::move(ctx.output_gradient());
    GemmOperand dy_of_weight;
    if (ctx.needs(0)) {
      const LinearWeight w(ctx, weight);
      const Tensor dx = Tensor::empty(ctx.device(), {dy.size(0), w.inputs()}, dy.dtype());
      dy_of_weight = w.multiply(dy, dx, trainable);
      ctx.accumulate_gradient(0, dx);
    } else if (trainable) {
      dy_of_weight = weight_gradient_operand(ctx.context(), weight, LayerTensor::output_gradient, dy);
    }
    if (trainable)
      ctx.weight_gradient_gemm(weight, cost, saved_operand(ctx, layout, dy.size(0)), std::move(dy_of_weight));
    if (bias)
      ctx.weight_gradient(
          *bias, {0, static_cast<double>(dy.bytes())}, {dy},
          [](const Tensor& gradient, std::span<const Tensor> t) { add_column_sum(t[0], gradient); });
  };
  return tape.record(std::move(record))[0];
}

}  // namespace capstan::ops
