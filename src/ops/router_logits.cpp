#include "ops/router_logits.hpp"

#include "ops/cast.hpp"
#include "ops/matmul.hpp"

namespace capstan::ops {

Var router_logits(Tape& tape, const Var& x, const Parameter& weight) {
  const int64_t rows = x.size(0), hidden = x.size(1), experts = weight.shape()[0];
  CAPSTAN_ASSERT(weight.shape().rank() == 2 && weight.shape()[1] == hidden,
                 "router: `" + weight.name() + "` is " + weight.shape().text() + ", x is " + x.value.text());
  const Tensor logits = Tensor::empty(tape.device(), {rows, experts});
  {
    const auto w = tape.pin(weight);
    matmul(Transpose::no, Transpose::yes, x.value, *w, logits);
  }
  const bool trainable = tape.context().store.is_trainable(weight);
  const Cost cost = matmul_cost(rows, experts, hidden, x.dtype());
  Record record{.name = "router_logits",
                .inputs = {x},
                .outputs = {logits},
                .parameters = {&weight},
                .cost = cost,
                .backward_cost = cost};
  if (trainable) record.saved = {x.value};
  record.backward = [&weight, trainable, cost, type = x.dtype()](BackwardContext& ctx) {
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
  };
  return tape.record(std::move(record))[0];
}

}  // namespace capstan::ops
