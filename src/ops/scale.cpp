#include "ops/scale.hpp"

#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

Var scale(Tape& tape, Var x, double factor) {
  auto rounded = static_cast<float>(factor);
  if (x.dtype() == DType::bf16) rounded = static_cast<float>(bf16(rounded));
  if (x.dtype() == DType::f16) rounded = static_cast<float>(f16(rounded));
  const auto times = [rounded](const Tensor& t) {
    Device& device = t.device();
    launch(device, device.table().elementwise->scale, t, rounded, t.elements());
  };
  const Tensor y = x.value.unique() ? x.value : copy_of(x.value);
  times(y);
  x.value = y;
  const Cost cost{0, 2.0 * static_cast<double>(y.bytes())};
  return tape.record({.name = "scale",
                      .inputs = {x},
                      .outputs = {y},
                      .cost = cost,
                      .backward_cost = cost,
                      .backward = [times](BackwardContext& ctx) {
                        Tensor dy = std::move(ctx.output_gradient());
                        const Tensor dx = dy.unique() ? dy : copy_of(dy);
                        dy = Tensor();
                        times(dx);
                        ctx.accumulate_gradient(0, dx);
                      }})[0];
}

}  // namespace capstan::ops
