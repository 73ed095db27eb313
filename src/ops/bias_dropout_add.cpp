#include "ops/bias_dropout_add.hpp"

#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

Var bias_dropout_add(Tape& tape, Var x, const Parameter* bias, const Var& residual, const Dropout& dropout) {
  Device& device = tape.device();
  const int64_t rows = x.size(0), cols = x.size(1);
  const bool adds = residual.value.defined();
  const float p = dropout.p;
  const PhiloxKey key = dropout.key;
  const Tensor dropout_rows = p > 0 ? dropout.dropout_rows : Tensor();
  CAPSTAN_ASSERT(x.value.is_contiguous() && (!adds || residual.shape() == x.shape()),
                 "bias_dropout_add: x " + x.value.text());
  CAPSTAN_ASSERT(p == 0 || (dropout_rows.defined() && dropout_rows.elements() == rows),
                 "bias_dropout_add: dropout needs the dropout row indices, got " + dropout_rows.text());
  const Tensor y = reuse_or_empty(x.value);
  Record record{.name = "bias_dropout_add", .outputs = {y}};
  {
    const auto b = tape.pin(bias);
    CAPSTAN_ASSERT(!bias || b->elements() == cols,
                   "bias_dropout_add: `" + bias->name() + "` is " + b->text());
    const kernels::Elementwise& kernel = *device.table().elementwise;
    launch(device, kernel.bias_dropout_add_workspace(bias != nullptr, cols), kernel.bias_dropout_add, x.value,
           *b, residual.value, y, rows, cols, p, key, dropout_rows);
  }
  if (bias) record.parameters = {bias};
  record.inputs = {std::move(x)};
  if (adds) record.inputs.push_back(residual);
  const auto bytes = static_cast<double>(y.bytes());
  record.cost = {0, bytes * (adds ? 3 : 2)};
  record.backward_cost = {0, p > 0 ? 2 * bytes : 0};
  record.backward = [bias, adds, p, key, dropout_rows, rows, cols](BackwardContext& ctx) {
    Tensor dy = std::move(ctx.output_gradient());
    Tensor dx = dy;
    if (p > 0) {
      Device& dev = ctx.device();
      if (adds) dx = Tensor::empty(dev, dy.shape(), dy.dtype());
      launch(dev, dev.table().elementwise->dropout, dy, dx, rows, cols, 0, p, key, dropout_rows);
    }
    if (adds) ctx.accumulate_gradient(1, std::move(dy));
    dy = Tensor();
    if (bias)
      ctx.weight_gradient(
          *bias, {0, static_cast<double>(dx.bytes())}, {dx},
          [](const Tensor& gradient, std::span<const Tensor> t) { add_column_sum(t[0], gradient); });
    ctx.accumulate_gradient(0, std::move(dx));
  };
  return tape.record(std::move(record))[0];
}

Var add(Tape& tape, Var a, const Var& b) {
  return bias_dropout_add(tape, std::move(a), nullptr, b, {});
}

}  // namespace capstan::ops
