#include "ops/cast.hpp"

#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

Tensor converted(const Tensor& x, DType type) {
  if (x.dtype() == type) return x;
  Tensor y = Tensor::empty(x.device(), x.shape(), type);
  launch(x.device(), x.device().table().elementwise->cast, x, y, x.elements());
  return y;
}

Var cast(Tape& tape, const Var& x, DType type) {
  if (x.dtype() == type) return x;
  CAPSTAN_ASSERT(x.value.is_contiguous(), "cast: x " + x.value.text());
  const Tensor y = converted(x.value, type);
  const Cost cost{0, static_cast<double>(x.value.bytes() + y.bytes())};
  return tape.record({.name = "cast",
                      .inputs = {x},
                      .outputs = {y},
                      .cost = cost,
                      .backward_cost = cost,
                      .backward = [from = x.dtype()](BackwardContext& ctx) {
                        ctx.accumulate_gradient(0, converted(ctx.output_gradient(), from));
                      }})[0];
}

}  // namespace capstan::ops
