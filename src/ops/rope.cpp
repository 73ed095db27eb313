#include "ops/rope.hpp"

#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

Var rope(Tape& tape, Var qkv, kernels::QkvLayout layout, const RopeTable& table, const Tensor& positions,
         bool interleaved) {
  const int64_t rows = qkv.size(0);
  CAPSTAN_ASSERT(
      qkv.value.is_contiguous() && qkv.size(1) == layout.row() && positions.elements() == rows &&
          table.rotary_dim() <= layout.head_dim,
      "rope: qkv " + qkv.value.text() + ", positions " + positions.text() + ", table " + table.cos.text());
  const auto turn = [=](const Tensor& t, bool inverse) {
    Device& device = t.device();
    launch(device, device.table().attention->rope, layout, t, table.cos, table.sin, positions, rows,
           table.rotary_dim(), interleaved, inverse);
  };
  const Tensor y = qkv.value.unique() ? qkv.value : copy_of(qkv.value);
  turn(y, false);
  qkv.value = y;
  const Cost cost{0, 2.0 * static_cast<double>(y.bytes())};
  return tape.record({.name = "rope",
                      .inputs = {qkv},
                      .outputs = {y},
                      .cost = cost,
                      .backward_cost = cost,
                      .backward = [turn](BackwardStep& step) {
                        Tensor dy = std::move(step.output_gradient());
                        const Tensor dx = dy.unique() ? dy : copy_of(dy);
                        dy = Tensor();
                        turn(dx, true);
                        step.give(0, dx);
                      }})[0];
}

}  // namespace capstan::ops
