#include "ops/activation.hpp"

#include "kernels/table.hpp"
#include "ops/linear_weight.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

Var bias_activation(Tape& tape, const Var& x, const Parameter* bias, kernels::ActivationKind kind, bool gated,
                    const Parameter* reader) {
  Device& device = tape.device();
  const int64_t rows = x.size(0), width = x.size(1);
  CAPSTAN_ASSERT(x.value.is_contiguous() && (!gated || width % 2 == 0),
                 "bias_activation: x " + x.value.text());
  const int64_t cols = gated ? width / 2 : width;
  const Tensor y = Tensor::empty(device, {rows, cols}, x.dtype());
  std::shared_ptr<QuantizedInput> quantized = prepare_linear_input(tape, reader, rows);
  Record record{.name = "bias_activation", .inputs = {x}, .outputs = {y}};
  {
    const auto b = tape.pin(bias);
    CAPSTAN_ASSERT(!bias || b->elements() == width,
                   "bias_activation: `" + bias->name() + "` is " + b->text() + ", x is " + x.value.text());
    const kernels::Activation& kernel = *device.table().activation;
    launch(device, kernel.forward_workspace(gated, bias != nullptr, cols), kernel.forward, kind, gated,
           x.value, *b, y, rows, cols, quantized ? quantized->output : QuantizedOutputTensors());
  }
  if (bias) record.parameters = {bias};
  const auto bytes = static_cast<double>(x.value.bytes() + y.bytes());
  record.cost = {0, bytes};
  record.backward_cost = {0, bytes + static_cast<double>(x.value.bytes())};
  record.saved = {x.value};
  record.backward = [bias, kind, gated, rows, cols](BackwardContext& ctx) {
    Device& dev = ctx.device();
    const Tensor dx = reuse_or_empty(ctx.saved(0));
    {
      const auto b = ctx.pin(bias);
      const kernels::Activation& kernel = *dev.table().activation;
      launch(dev, kernel.backward_workspace(gated, bias != nullptr, cols), kernel.backward, kind, gated,
             ctx.output_gradient(), ctx.saved(0), *b, dx, rows, cols);
    }
    ctx.accumulate_gradient(0, dx);
    if (bias)
      ctx.weight_gradient(
          *bias, {0, static_cast<double>(dx.bytes())}, {dx},
          [](const Tensor& gradient, std::span<const Tensor> t) { add_column_sum(t[0], gradient); });
  };
  Var result = std::move(tape.record(std::move(record))[0]);
  result.quantized = std::move(quantized);
  return result;
}

Var activation(Tape& tape, const Var& x, const kernels::ActivationFunction& function) {
  Device& device = tape.device();
  const int64_t rows = x.size(0), width = x.size(1);
  CAPSTAN_ASSERT(x.value.is_contiguous() && (!function.gated || width % 2 == 0),
                 "activation: x " + x.value.text());
  const int64_t cols = function.gated ? width / 2 : width;
  const Tensor y = Tensor::empty(device, {rows, cols}, x.dtype());
  launch(device, device.table().activation->expert_forward, function, x.value, Tensor(), Tensor(), y, rows,
         cols);
  const auto bytes = static_cast<double>(x.value.bytes() + y.bytes());
  return tape.record({.name = "activation",
                      .inputs = {x},
                      .outputs = {y},
                      .cost = {0, bytes},
                      .backward_cost = {0, bytes + static_cast<double>(x.value.bytes())},
                      .saved = {x.value},
                      .backward = [function, rows, cols](BackwardContext& ctx) {
                        const Tensor dx = reuse_or_empty(ctx.saved(0));
                        launch(ctx.device(), ctx.device().table().activation->expert_backward, function,
                               ctx.output_gradient(), ctx.saved(0), Tensor(), Tensor(), dx, Tensor(), rows,
                               cols);
                        ctx.accumulate_gradient(0, dx);
                      }})[0];
}

}  // namespace capstan::ops
