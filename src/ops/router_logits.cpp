#include "ops/router_logits.hpp"

#include "kernels/table.hpp"
#include "ops/cast.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

Var jitter(Tape& tape, const Var& x, const Jitter& jitter) {
  if (jitter.epsilon == 0) return x;
  CAPSTAN_ASSERT(
      x.value.is_contiguous() && jitter.dropout_rows.defined() && jitter.dropout_rows.elements() == x.size(0),
      "jitter: x " + x.value.text() + ", dropout row indices " + jitter.dropout_rows.text());
  const auto times_noise = [jitter](const Tensor& from) {
    const Tensor to = Tensor::empty(from.device(), from.shape(), from.dtype());
    launch(from.device(), from.device().table().elementwise->jitter, from, to, from.size(0), from.size(1),
           jitter.epsilon, jitter.key, jitter.dropout_rows);
    return to;
  };
  const Cost cost{0, 2.0 * static_cast<double>(x.value.bytes())};
  return tape.record({.name = "jitter",
                      .inputs = {x},
                      .outputs = {times_noise(x.value)},
                      .cost = cost,
                      .backward_cost = cost,
                      .backward = [times_noise](BackwardContext& ctx) {
                        ctx.accumulate_gradient(0, times_noise(ctx.output_gradient()));
                      }})[0];
}

Var router_logits(Tape& tape, const Var& x, const Parameter& weight, const Parameter* bias, bool in_fp64) {
  const int64_t rows = x.size(0), hidden = x.size(1), experts = weight.shape()[0];
  CAPSTAN_ASSERT(weight.shape().rank() == 2 && weight.shape()[1] == hidden,
                 "router: `" + weight.name() + "` is " + weight.shape().text() + ", x is " + x.value.text());
  CAPSTAN_ASSERT(!bias || bias->shape() == Shape{experts},
                 "router: `" + bias->name() + "` is " + bias->shape().text());
  Device& device = tape.device();
  const Tensor logits = Tensor::empty(device, {rows, experts}, in_fp64 ? DType::f64 : DType::f32);
  {
    const auto w = tape.pin(weight), b = tape.pin(bias);
    if (!in_fp64) {
      matmul(Transpose::no, Transpose::yes, x.value, *w, logits);
      const kernels::Elementwise& kernel = *device.table().elementwise;
      if (bias)
        launch(device, kernel.bias_dropout_add_workspace(true, experts), kernel.bias_dropout_add, logits, *b,
               Tensor(), logits, rows, experts, 0.0f, PhiloxKey(), Tensor());
    } else {
      if (!device.table().router->logits)
        fail(ErrorCode::unsupported, "the device has no kernels of a router in fp64",
             "model.moe_router_dtype=fp32");
      CAPSTAN_ASSERT(x.value.is_contiguous() && w->is_contiguous(), "router: x " + x.value.text());
      launch(device, device.table().router->logits, x.value, *w, *b, rows, experts, hidden, logits);
    }
  }
  const bool trainable = tape.context().store.is_trainable(weight);
  const Cost cost = matmul_cost(rows, experts, hidden, x.dtype());
  Record record{.name = "router_logits",
                .inputs = {x},
                .outputs = {logits},
                .parameters = {&weight},
                .cost = cost,
                .backward_cost = cost};
  if (bias) record.parameters.push_back(bias);
  if (trainable) record.saved = {x.value};
  record.backward = [&weight, bias, trainable, cost, type = x.dtype()](BackwardContext& ctx) {
    const Tensor dlogits = std::move(ctx.output_gradient());
    if (ctx.needs(0)) {
      const auto w = ctx.pin(weight);
      const Tensor dx = Tensor::empty(ctx.device(), {dlogits.size(0), w->size(1)});
      matmul(Transpose::no, Transpose::no, dlogits, converted(*w, DType::f32), dx);
      ctx.accumulate_gradient(0, converted(dx, type));
    }
    if (trainable)
      ctx.weight_gradient(
          weight, cost, {dlogits, ctx.saved(0)}, [](const Tensor& gradient, std::span<const Tensor> t) {
            matmul(Transpose::yes, Transpose::no, t[0], converted(t[1], DType::f32), gradient, 1.0f);
          });
    if (bias)
      ctx.weight_gradient(
          *bias, {0, static_cast<double>(dlogits.bytes())}, {dlogits},
          [](const Tensor& gradient, std::span<const Tensor> t) { add_column_sum(t[0], gradient); });
  };
  return tape.record(std::move(record))[0];
}

}  // namespace capstan::ops
