#include "ops/concat.hpp"

#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {
// Copies the columns of `from` into those of `to`; either may be a slice of wider rows.
void copy_columns(const Tensor& from, const Tensor& to) {
  Device& device = to.device();
  launch(device, device.table().elementwise->copy_rows, from, from.stride(0), to, to.stride(0), to.size(0),
         to.size(1));
}
}  // namespace

Var concat_columns(Tape& tape, const Var& a, const Var& b) {
  CAPSTAN_ASSERT(
      a.shape().rank() == 2 && b.shape().rank() == 2 && a.size(0) == b.size(0) && a.dtype() == b.dtype(),
      "concat_columns: " + a.value.text() + " and " + b.value.text());
  Device& device = tape.device();
  const int64_t rows = a.size(0), first = a.size(1), second = b.size(1);
  const Tensor y = Tensor::empty(device, {rows, first + second}, a.dtype());
  copy_columns(a.value, y.slice(1, 0, first));
  copy_columns(b.value, y.slice(1, first, second));
  const Cost cost{0, 2.0 * static_cast<double>(y.bytes())};
  return tape.record({.name = "concat_columns",
                      .inputs = {a, b},
                      .outputs = {y},
                      .cost = cost,
                      .backward_cost = cost,
                      .backward = [first, second](BackwardContext& ctx) {
                        const Tensor dy = ctx.output_gradient();
                        const auto pass_on = [&](size_t input, int64_t begin, int64_t count) {
                          if (!ctx.needs(input)) return;
                          const Tensor dx = Tensor::empty(ctx.device(), {dy.size(0), count}, dy.dtype());
                          copy_columns(dy.slice(1, begin, count), dx);
                          ctx.accumulate_gradient(input, dx);
                        };
                        pass_on(0, 0, first);
                        pass_on(1, first, second);
                      }})[0];
}

}  // namespace capstan::ops
