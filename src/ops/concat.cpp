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

Var concat_rows(Tape& tape, std::span<const Var> parts) {
  const Shape part = parts[0].shape();
  const auto count = static_cast<int64_t>(parts.size());
  const Tensor y = Tensor::empty(tape.device(), {count * part[0], part[1]}, parts[0].dtype());
  for (int64_t i = 0; i < count; ++i) {
    const Var& from = parts[static_cast<size_t>(i)];
    CAPSTAN_ASSERT(from.shape() == part && from.dtype() == y.dtype(),
                   "concat_rows: " + parts[0].value.text() + " and " + from.value.text());
    copy_columns(from.value, y.slice(0, i * part[0], part[0]));
  }
  return tape.record({.name = "concat_rows",
                      .inputs = {parts.begin(), parts.end()},
                      .outputs = {y},
                      .cost = {0, 2.0 * static_cast<double>(y.bytes())},
                      .backward = [rows = part[0], count](BackwardContext& ctx) {
                        const Tensor dy = ctx.output_gradient();
                        for (int64_t i = 0; i < count; ++i)
                          ctx.accumulate_gradient(static_cast<size_t>(i), dy.slice(0, i * rows, rows));
                      }})[0];
}

std::vector<Var> split_rows(Tape& tape, const Var& x, int64_t count) {
  CAPSTAN_ASSERT(x.shape().rank() == 2 && x.size(0) % count == 0,
                 "split_rows: " + x.value.text() + " in " + std::to_string(count));
  const int64_t rows = x.size(0) / count;
  std::vector<Tensor> parts;
  for (int64_t i = 0; i < count; ++i) parts.push_back(x.value.slice(0, i * rows, rows));
  return tape.record({.name = "split_rows",
                      .inputs = {x},
                      .outputs = std::move(parts),
                      .backward_cost = {0, 2.0 * static_cast<double>(x.value.bytes())},
                      .backward = [shape = x.shape(), dtype = x.dtype(), rows, count](BackwardContext& ctx) {
                        const Tensor dx = Tensor::empty(ctx.device(), shape, dtype);
                        for (int64_t i = 0; i < count; ++i) {
                          const Tensor dy = ctx.output_gradient(static_cast<size_t>(i)),
                                       to = dx.slice(0, i * rows, rows);
                          // No gradient: nothing depends on the part.
                          if (dy.defined())
                            copy_columns(dy, to);
                          else
                            ctx.device().zero(to.address(), to.bytes());
                        }
                        ctx.accumulate_gradient(0, dx);
                      }});
}

}  // namespace capstan::ops
