#include "ops/linear.hpp"

#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

Var linear(Tape& tape, const Var& x, const Parameter& weight, const Parameter* bias) {
  Device& device = tape.device();
  const int64_t rows = x.size(0), in = x.size(1);
  Record record{.name = "linear", .inputs = {x}, .parameters = {&weight}};
  int64_t out = 0;
  {
    const auto w = tape.pin(weight);
    CAPSTAN_ASSERT(w->rank() == 2 && w->size(1) == in,
                   "linear: `" + weight.name() + "` is " + w->text() + ", x is " + x.value.text());
    out = w->size(0);
    const Tensor y = Tensor::empty(device, {rows, out}, x.dtype());
    matmul(Transpose::no, Transpose::yes, x.value, *w, y);
    record.outputs = {y};
  }
  if (bias) {
    const auto b = tape.pin(*bias);
    CAPSTAN_ASSERT(b->elements() == out, "linear: `" + bias->name() + "` is " + b->text() + " for " +
                                             std::to_string(out) + " columns");
    const Tensor& y = record.outputs[0];
    const kernels::Elementwise& kernel = *device.table().elementwise;
    launch(device, kernel.bias_dropout_add_workspace(true, out), kernel.bias_dropout_add, y, *b, Tensor(), y,
           rows, out, 0.0f, PhiloxKey{}, Tensor());
    record.parameters.push_back(bias);
  }
  const bool trains = tape.context().store.trains(weight);
  if (trains) record.saved = {x.value};
  const Cost cost = matmul_cost(rows, out, in, x.dtype());
  record.cost = record.backward_cost = cost;
  record.backward = [&weight, bias, trains, cost](BackwardStep& step) {
    const Tensor dy = std::move(step.output_gradient());
    if (step.needs(0)) {
      const auto w = step.pin(weight);
      const Tensor dx = Tensor::empty(step.device(), {dy.size(0), w->size(1)}, dy.dtype());
      matmul(Transpose::no, Transpose::no, dy, *w, dx);
      step.give(0, dx);
    }
    if (trains) step.weight_gradient_gemm(weight, cost, step.saved(0), dy);
    if (bias)
      step.weight_gradient(
          *bias, {0, static_cast<double>(dy.bytes())}, {dy},
          [](const Tensor& gradient, std::span<const Tensor> t) { add_column_sum(t[0], gradient); });
  };
  return tape.record(std::move(record))[0];
}

}  // namespace capstan::ops
